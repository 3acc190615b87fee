"""A stand-in for a Hugging Face hub: the two answers of its HTTP interface that a download of one file needs.

The real one cannot be reached by tests. It answers `/<org>/<model>/resolve/<commit>/<file>` as the hub does for files
that it keeps itself: HEAD with commit, ETag and size, GET with the bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StandInHub:
    """Has `files` by `org/model@commit/path`; `asked` are the requests that came."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.asked: list[str] = []
        self.url = ""


@contextmanager
def stand_in_hub(files: Mapping[str, bytes]) -> Iterator[StandInHub]:
    """Serve a hub on a free port."""
    hub = StandInHub(files)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, *, body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            model, _, rest = self.path.lstrip("/").partition("/resolve/")
            commit, _, name = rest.partition("/")
            content = hub.files.get(f"{model}@{commit}/{name}")
            self.send_response(200 if content is not None else 404)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
