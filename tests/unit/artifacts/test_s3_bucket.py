"""The S3 bucket, as far as it needs no real server."""

import socket
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError

from farm.artifacts import s3_bucket
from farm.artifacts.s3_bucket import Bucket, FinalStatus
from farm.errors import StorageAway, StorageUnavailable, UsageError


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


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(s3_bucket, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(s3_bucket.random, "uniform", self.share)
        self.bounds: set[tuple[float, float]] = set()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def share(self, low: float, high: float) -> float:
        self.bounds.add((low, high))
        return high


def refusing(status: int, code: str = "") -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[typeddict-item]


def asked(bucket: Bucket, error: Exception, *, times: int = 10**9, final: tuple[int, ...] = ()) -> int:
    """Ask while that fails so often, and return how often it was asked."""
    count = 0

    def request() -> int:
        nonlocal count
        count += 1
        if count <= times:
            raise error
        return count

    return bucket.ask("write", "a", request, final=final)


@pytest.mark.parametrize(
    ("error", "patience", "pauses"),
    [
        (refusing(503), 30.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]),
        (refusing(503), 0.35, [0.05, 0.1, 0.2]),
        (refusing(503), 0.0, []),
        (EndpointConnectionError(endpoint_url="u"), 30.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]),
        (EndpointConnectionError(endpoint_url="u"), 0.2, [0.05, 0.1]),
    ],
)
def test_a_request_is_repeated_with_longer_pauses_until_its_patience_ends(
    monkeypatch: pytest.MonkeyPatch, error: Exception, patience: float, pauses: list[float]
) -> None:
    """To where no connection can be made, 5 s at most."""
    clock = Clock(monkeypatch)
    with pytest.raises(StorageAway) as raised:
        asked(Bucket(bucket="farm", patience=patience), error)
    assert clock.slept == pytest.approx(pauses)
    assert raised.value.since == 1000.0
    assert clock.bounds <= {(0.5, 1.0)}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("times", [1, 3])
def test_answers_of_a_busy_server_pass(monkeypatch: pytest.MonkeyPatch, status: int, times: int) -> None:
    clock = Clock(monkeypatch)
    assert asked(Bucket(bucket="farm"), refusing(status), times=times) == times + 1
    assert len(clock.slept) == times


@pytest.mark.parametrize("error", [refusing(400), refusing(403, "AccessDenied"), refusing(501), BotoCoreError()])
def test_other_answers_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(StorageUnavailable) as raised:
        asked(Bucket(bucket="farm"), error, times=1)
    assert not isinstance(raised.value, StorageAway)
    assert clock.slept == []


def test_a_status_that_means_something_is_told_unless_it_speaks_of_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    bucket = Bucket(bucket="farm")
    with pytest.raises(FinalStatus):
        asked(bucket, refusing(412, "PreconditionFailed"), final=(404, 412))
    assert asked(bucket, refusing(409, "OperationAborted"), times=1, final=(409,)) == 2
    with pytest.raises(StorageUnavailable):
        asked(bucket, refusing(404, "NoSuchBucket"), final=(404,))


def test_a_connection_says_soon_that_its_host_is_gone_and_boto_repeats_nothing_itself() -> None:
    plain, own = Bucket(bucket="farm"), Bucket(bucket="farm", endpoint="http://127.0.0.1:9")
    for bucket, style in ((plain, "auto"), (own, "path")):
        config: Any = bucket.s3.meta.config
        assert config.s3["addressing_style"] == style
        assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (5, 60, True)
        assert config.retries["total_max_attempts"] == 1
        assert config.max_pool_connections == 32
        options = bucket.s3._endpoint.http_session._socket_options  # type: ignore[attr-defined]
        assert (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000) in options
        assert bucket.public is bucket.s3
