"""A server that has nothing to do."""

import asyncio
import os
import signal
import threading
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from farm.serving import server
from farm.serving.server import BoundedConnection, Listening, server_config


@pytest.mark.timeout(60)
def test_a_server_sleeps_until_a_request_or_a_signal_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 3600.0)
    slept, slept_before = list[float](), list[float]()
    sleep = asyncio.sleep

    async def noted(seconds: float, *rest: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # Servers of other tests may still end in theirs.
            slept.append(seconds)
        return await sleep(seconds, *rest)

    class Noting(server._Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            slept_before.extend(slept)
            super().handle_exit(sig, frame)

    def ask_and_end() -> None:
        port = asked.servers[0].sockets[0].getsockname()[1]
        assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 404
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(asyncio, "sleep", noted)
    config = server_config(FastAPI(), BoundedConnection, Listening("127.0.0.1", 0))
    config.port = 0
    thread = threading.Thread(target=ask_and_end)
    asked = Noting(config, thread.start)
    with pytest.raises(KeyboardInterrupt):
        asked.run()
    thread.join()
    assert slept_before == []
