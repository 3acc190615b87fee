"""A stand-in for a slow network: a TCP proxy that passes every byte on some milliseconds later, in both directions.

    python -m tests.support.delaying_proxy HOST PORT MS

Prints the port of 127.0.0.1 on which it listens for PORT of HOST. A connection is made without delay. It waits out the
last millisecond by asking again and again, because the kernel counts such waits in whole ones: give it a core.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.places import ROOT


class PreciseSelector(selectors.EpollSelector):
    """Does not wait longer than asked."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait whole milliseconds, rounded down."""
        return super().select(math.floor(timeout * 1000) / 1000 if timeout and timeout > 0 else timeout)


class Side(asyncio.Protocol):
    """One of the two connections that a proxied one has; what it receives goes to the `other` after the delay."""

    def __init__(self, delay: float) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self._delay = delay
        self._late: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass bytes on later, in order."""
        self._late.append(data)
        asyncio.get_running_loop().call_later(self._delay, self._pass_on)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other connection, after what it still gets."""
        self._late.append(b"")
        asyncio.get_running_loop().call_later(self._delay, self._pass_on)

    def _pass_on(self) -> None:
        data = self._late.popleft()
        if self.other and self.other.transport:
            if data:
                self.other.transport.write(data)
            else:
                self.other.transport.close()


class Front(Side):
    """The side of who connects."""

    def __init__(self, host: str, port: int, delay: float) -> None:
        super().__init__(delay)
        self._target = (host, port)
        self._reaching: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the target; until then nothing is read."""
        super().connection_made(transport)
        assert self.transport
        self.transport.pause_reading()
        self._reaching = asyncio.create_task(self._reach())

    async def _reach(self) -> None:
        assert self.transport
        back = self.other = Side(self._delay)
        back.other = self
        try:
            await asyncio.get_running_loop().create_connection(lambda: back, *self._target)
        except OSError:
            self.transport.close()
            return
        self.transport.resume_reading()


@contextmanager
def delaying(host: str, port: int, milliseconds: float) -> Iterator[int]:
    """Run a proxy in a process of its own; return its port."""
    command = [sys.executable, "-m", "tests.support.delaying_proxy", host, str(port), str(milliseconds)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def serve(host: str, port: int, milliseconds: float) -> None:
    """Run until standard input ends: until who started it ends."""
    loop = asyncio.get_running_loop()
    loop.add_reader(0, os._exit, 0)
    server = await loop.create_server(lambda: Front(host, port, milliseconds / 1000), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PreciseSelector())) as runner:
        runner.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
