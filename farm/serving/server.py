"""The server process: the API and the control loops, until a signal ends both."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from farm.api.sites import is_loopback
from farm.app import Farm
from farm.control.loops import run_loops
from farm.errors import UsageError
from farm.logging import configure
from farm.serving.application import create_app
from farm.serving.connections import BoundedConnection, bounded

DRAIN_SECONDS = 3
"""Seconds that a stopping server waits for open requests; clients that follow events reconnect elsewhere."""


class Listening(NamedTuple):
    """Where a server listens, and how its callers' words are kept from others.

    `certificate` and `key` are PEM files. `proxy`: another program ends TLS in front of this one.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    proxy: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Refuse to send tokens through a network as they are. Raises UsageError."""
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--certificate and --key are needed together", hint="name both files, in PEM form")
        for path in (self.certificate, self.key):
            if path and not path.is_file():
                raise UsageError(f"there is no file {path}")
        if not (self.is_loopback or self.certificate or self.proxy):
            raise UsageError(
                f"{self.host} is not a loopback address, and there is no TLS: the network could read the tokens",
                hint="add --certificate and --key, or --behind-proxy if a proxy in front of it has TLS",
            )


def serve(farm: Farm, listening: Listening, *, ready: Callable[[str], None]) -> None:
    """Serve the API and run the control loops until SIGINT or SIGTERM; `ready` gets the URL once it answers.

    Port 0 takes a free one. Raises UsageError if the address is taken or would be open to everybody, or the signing key
    or the trust policy is wrong, FarmFault if the store or object storage is not fit for the farm.
    """
    configure(farm.settings)
    # A proxy passes on requests from anywhere, under its own name.
    app = create_app(farm, loopback=listening.is_loopback and not listening.proxy)
    listening.check()
    config = server_config(app, bounded(), listening)
    farm.start()
    _ = farm.store
    farm.artifacts.check()
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    listener = _bind(listening.host, listening.port)
    url = f"{'https' if config.is_ssl else 'http'}://{host}:{listener.getsockname()[1]}"
    stop = threading.Event()
    loops = threading.Thread(target=run_loops, args=(farm, stop), name="control")
    # uvicorn shuts down on a signal, and then raises it again for the handler from before: ours.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loops.start()
    try:
        _Server(config, lambda: ready(url)).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        loops.join()


def server_config(app: FastAPI, connection: type[BoundedConnection], listening: Listening) -> uvicorn.Config:
    """Return the configuration of the server. Raises UsageError if the certificate cannot be used."""
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # Whose word would a header like X-Forwarded-For be? Nothing here asks where a caller is.
        proxy_headers=False,
        lifespan="off",
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.key,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"the certificate cannot be used: {error}", hint="both files have to be PEM, and have to match"
        ) from None
    return config


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # Until then a connection is not ours, and asyncio would wait a minute.
            seconds = BoundedConnection.handshake_seconds
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=seconds)  # type: ignore[method-assign]
        await super().startup(sockets)
        self._ready()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot serve on {host}:{port}: {error.strerror}", hint="choose another --port") from None
    return listener
