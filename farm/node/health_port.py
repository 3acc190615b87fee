"""Health port: a worker's health over HTTP, for systemd, Kubernetes and monitoring.

    GET /live     200 while the worker looks after its slots; at 503 a restart would help
    GET /ready    200 when every kind of slot takes jobs; 503 while one starts, rests, drains, is fenced or has no store
    GET /metrics  what the node's processes count, for Prometheus

The first two carry the same document. It holds nothing secret, and nothing can be changed here.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from farm.errors import UsageError
from farm.metrics.exposition import CONTENT_TYPE

PATIENCE = 5.0
"""Seconds that a client has to send its request and to read the answer."""

MOST_CONNECTIONS = 64
"""Connections at once."""


class Health(NamedTuple):
    """Whether the worker lives, and how its kinds of slots are (`{"node", "workers": [{"consuming", …}]}`)."""

    alive: bool
    document: Mapping[str, Any]

    @property
    def ready(self) -> bool:
        """Whether every kind of slot takes jobs."""
        return self.alive and all(worker["consuming"] for worker in self.document["workers"])


class _HealthServer(ThreadingHTTPServer):
    """Closes connections that take too long, and new ones if there are too many: each has a thread."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, float] = {}
        """When each connection began."""
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Look at the open connections, every half second or so."""
        for request, began in list(self._open.items()):
            if time.monotonic() - began > PATIENCE:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # Its thread then comes to its end.

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


@contextmanager
def serve_health(port: int, look: Callable[[], Health], metrics: Callable[[], bytes]) -> Iterator[None]:
    """Answer on `port` (0: not at all) while the block runs. Raises UsageError if the port is taken."""
    if not port:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE, metrics())
                return
            health = look()
            states = {"/live": health.alive, "/ready": health.ready}
            if self.path not in states:
                self.send_error(404, "here are /live, /ready and /metrics")
                return
            body = json.dumps({"alive": health.alive, "ready": health.ready, **health.document}).encode()
            self._answer(200 if states[self.path] else 503, "application/json", body)

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: requests come every few seconds."""

    try:
        server = _HealthServer(("", port), Handler)
    except OSError as error:
        raise UsageError(f"health_port {port}: {error.strerror}", hint="choose another, or 0 for none") from None
    threading.Thread(target=server.serve_forever, name="health-port", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
