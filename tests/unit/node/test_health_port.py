"""A worker's health port is open to the network, and asks nobody who he is."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from farm.local.servers import free_ports
from farm.node import health
from farm.node.health import Health, serve_health
from tests.support.helpers import wait_until

HEALTH = Health(True, {"node": "n1", "workers": [{"consuming": True}]})


@pytest.mark.parametrize("begun", [b"", b"GET /live HTTP/1.0\r\n"], ids=["nothing", "half a request"])
def test_who_says_nothing_takes_no_threads_and_stops_nobody(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(health, "PATIENCE", 1.0)
    (port,) = free_ports(1)
    with serve_health(port, lambda: HEALTH, bytes), ExitStack() as held:
        before = threading.active_count()
        for _ in range(40):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)).sendall(begun)
        assert threading.active_count() <= before + 8

        def answered() -> bool:
            try:
                with urlopen(f"http://127.0.0.1:{port}/live", timeout=30) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_until(answered)


def test_a_client_that_drips_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then is never silent for long."""
    monkeypatch.setattr(health, "PATIENCE", 1.0)
    (port,) = free_ports(1)
    with (
        serve_health(port, lambda: HEALTH, bytes),
        socket.create_connection(("127.0.0.1", port), timeout=0.2) as connection,
    ):

        def closed() -> bool:
            try:
                connection.sendall(b"x")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(closed)
