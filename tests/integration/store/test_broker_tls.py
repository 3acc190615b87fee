"""The broker over TLS: no password goes to a server whose certificate nobody vouches for."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from farm.errors import StoreUnavailable
from farm.local import servers
from farm.settings import load_settings
from farm.store import Store, broker
from tests.support.helpers import in_a_thread


@contextmanager
def listening(folder: Path, heard: list[bytes]) -> Iterator[int]:
    """Take connections over TLS, note what each begins with, and close it."""
    servers._make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    with socket.create_server((servers.HOST, 0)) as door:
        door.settimeout(0.1)

        def serve(over: threading.Event) -> None:
            while not over.is_set():
                with suppress(OSError), context.wrap_socket(door.accept()[0], server_side=True) as line:
                    heard.append(line.recv(1 << 16))

        with in_a_thread(serve):
            yield door.getsockname()[1]


def ask_broker(url: str) -> None:
    broker.queued(broker.make_celery(load_settings({}, redis_url=url)), "pool")


def ask_store(url: str) -> None:
    Store.connect(load_settings({}, redis_url=url)).epoch()


@pytest.mark.parametrize("ask", [ask_broker, ask_store])
@pytest.mark.parametrize("known", [True, False])
def test_only_a_server_with_a_known_certificate_learns_the_password(
    ask: Callable[[str], None], known: bool, tmp_path: Path
) -> None:
    heard: list[bytes] = []
    with listening(tmp_path, heard) as port:
        query = f"?ssl_ca_certs={tmp_path / 'certificate.pem'}" if known else ""
        with pytest.raises(StoreUnavailable):
            ask(f"rediss://farm-serve:a-secret@{servers.HOST}:{port}/0{query}")
    assert any(b"a-secret" in words for words in heard) == known
