"""Stands in for a collector of OpenTelemetry: takes spans over HTTP, as OTLP says, and keeps them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.helpers import in_a_thread


@dataclass
class Received:
    """Where to send spans, those that came, and what the next requests are answered with."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    status: int = 200


@contextmanager
def receiver_of_spans() -> Iterator[Received]:
    """A receiver on this machine."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    received.spans += scope.spans
            self.send_response(received.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}"
    with in_a_thread(lambda _: server.serve_forever(poll_interval=0.01)):
        try:
            yield received
        finally:
            server.shutdown()
