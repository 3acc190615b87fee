"""A TCP proxy whose line can be made bad while it runs: between the farm and Valkey, or the farm and object storage."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) \S+ HTTP/1\.[01]\r\n")
BUSY = b"<Error><Code>SlowDown</Code><Message>as asked for</Message></Error>"
ANSWER = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


class Proxy:
    """Listens on a free loopback port while its block runs. The attributes are the faults; 0 and False are none.

    Shares count requests: of HTTP each one, of anything else what comes in one piece.
    """

    def __init__(self, host: str, port: int, *, seed: int = 1) -> None:
        self.latency = 0.0
        """Seconds before a request goes on."""
        self.errors = 0.0
        """Share of HTTP requests that are answered with 503 and go no further."""
        self.resets = 0.0
        """Share of requests whose connection is reset in place of them."""
        self.deaf = 0.0
        """Share of requests that are done, and whose answers are dropped with the connection."""
        self.hole = False
        """Swallow everything, both ways, without a word; connections that were open then stay dead."""
        self.done: Counter[str] = Counter()
        """How many requests came to what."""
        self._upstream = (host, port)
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Proxy:
        started = threading.Event()

        async def listen() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port: int = self._server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            self._loop.create_task(listen())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, name="proxy")
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def drop(self) -> None:
        """Reset every open connection."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._connections])

    def redirect(self, host: str, port: int) -> None:
        """Lead new connections elsewhere, and end the open ones."""
        self._upstream = (host, port)
        self.drop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        answers: asyncio.Task[None] | None = None
        line = _Line()
        try:
            if self.hole:
                await _swallow(reader)
            there, out = await asyncio.open_connection(*self._upstream)
            line.out = out
            answers = asyncio.create_task(self._answers(there, writer, line))
            while data := await reader.read(1 << 16):
                await self._request(data, writer, line)
                if self.hole or line.dead:
                    line.dead = True
                    await _swallow(reader)
                out.write(data)
                await out.drain()
        except (_Ended, OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            if answers:
                answers.cancel()
            for one in filter(None, (line.out, writer)):
                with suppress(OSError, RuntimeError):
                    one.close()

    async def _request(self, data: bytes, writer: asyncio.StreamWriter, line: _Line) -> None:
        is_http = REQUEST.match(data)
        if line.http and not is_http:
            return  # The rest of a body.
        line.http = bool(is_http)
        if self.latency:
            await asyncio.sleep(self.latency)
        chance = self._chance.random()
        if is_http and chance < self.errors:
            self.done["503"] += 1
            writer.write(ANSWER % len(BUSY) + (b"" if data.startswith(b"HEAD") else BUSY))
            await writer.drain()
            raise _Ended
        if chance < self.errors + self.resets:
            self.done["reset"] += 1
            _reset(writer)
            raise _Ended
        line.deaf = chance < self.errors + self.resets + self.deaf
        self.done["answer dropped" if line.deaf else "passed"] += 1

    async def _answers(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, line: _Line) -> None:
        with suppress(OSError):
            while data := await there.read(1 << 16):
                if self.hole or line.dead:
                    line.dead = True
                    continue
                if line.deaf:
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()
            writer.close()


class _Line:
    """What is known about one connection."""

    def __init__(self) -> None:
        self.out: asyncio.StreamWriter | None = None
        self.http = self.deaf = self.dead = False


class _Ended(Exception):
    """The connection was ended by a fault."""


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass
    raise _Ended


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset in place of an orderly end."""
    raw: Any = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
