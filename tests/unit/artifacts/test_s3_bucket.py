"""The S3 bucket, as far as it needs no real server."""

from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from farm.artifacts.s3_bucket import Bucket
from farm.errors import UsageError


@pytest.mark.parametrize("setting", ["endpoint", "public_endpoint"])
@pytest.mark.parametrize("url", ["banana", "http://[::1"])
def test_an_endpoint_that_is_no_address_is_a_usage_error(setting: str, url: str) -> None:
    with pytest.raises(UsageError, match=r"object storage \(s3_endpoint, s3_public_endpoint\)"):
        Bucket(bucket="farm", **{setting: url})


WAYS = ["2026-11-23T12:34:56.000Z", "2026-11-23T13:34:56+01:00", "Mon, 23 Nov 2026 12:34:56 GMT", "1795437296"]
"""How servers write one and the same time: AWS in lists, others, AWS in headers, and seconds since 1970."""


@pytest.mark.parametrize("written", WAYS)
def test_times_are_read_however_a_server_writes_them(written: str) -> None:
    class ForeignServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            user_agents.append(self.headers["User-Agent"])
            entry = f"<Key>a</Key><Size>1</Size><ETag>e</ETag><LastModified>{written}</LastModified>"
            body = f"<ListBucketResult><Contents>{entry}</Contents></ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = print

    user_agents: list[str] = []
    with HTTPServer(("127.0.0.1", 0), ForeignServer) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        (entry,) = Bucket(bucket="farm", endpoint=endpoint, access_key="a", secret_key="b").list_entries("")
        thread.join()
    assert entry.modified == datetime(2026, 11, 23, 12, 34, 56, tzinfo=UTC)
    assert user_agents[0].startswith("migraphx-farm/")
