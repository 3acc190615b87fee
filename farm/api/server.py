"""The server process: the API and the control loops, until a signal ends both."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from farm.api.application import LOOPBACK, create_app
from farm.app import Farm
from farm.control.loops import run_loops
from farm.errors import UsageError
from farm.logging import configure

DRAIN_SECONDS = 3
"""How long a stopping server waits for open requests; those who follow a build's events reconnect elsewhere."""


def serve(farm: Farm, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the API and run the control loops until SIGINT or SIGTERM; `ready` gets the URL once it answers.

    Port 0 takes a free one. Raises UsageError where the address is taken or would be open to everybody, FarmFault where
    the store or object storage is not fit for the farm.
    """
    configure(farm.settings)
    app = create_app(farm, loopback=host in LOOPBACK)
    _ = farm.store
    farm.artifacts.check()
    listener = _bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    stop = threading.Event()
    loops = threading.Thread(target=run_loops, args=(farm, stop), name="control")
    # uvicorn shuts down on a signal and then raises it again for whoever was there before: let that be us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loops.start()
    try:
        _Server(config, lambda: ready(url)).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        loops.join()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
