"""Who may hold a connection to the API, under which names, and from which pages."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx
import pytest

from farm.api import build_routes, gate
from farm.app import Farm
from farm.artifacts.s3 import LargeUploads
from farm.artifacts.tokens import Token, Tokens
from farm.builds.reading import BuildReader
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.errors import FarmFault, UsageError
from farm.logging import Folding
from farm.serving.server import BoundedConnection, Listening, bounded, create_app
from farm.settings import Settings
from tests.support.api_farm import serving
from tests.support.helpers import wait_until


class Hasty(BoundedConnection):
    most = 20
    header_seconds = 0.5
    body_seconds = 0.5
    answer_seconds = 0.5


class Crowded(BoundedConnection):
    most = 20


@pytest.fixture
def hasty(settings: Settings) -> Iterator[str]:
    with serving(create_app(Farm(settings), loopback=True), Hasty) as url:
        yield url


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=30)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection, which is waited for."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"G",
        b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "a byte", "a header", "a body"],
)
def test_who_does_not_come_to_the_end_of_a_request_is_closed(hasty: str, begun: bytes) -> None:
    with connected(hasty) as connection:
        connection.sendall(begun)
        assert is_closed(connection)
    assert httpx.get(f"{hasty}/v1/builds", timeout=60).status_code == 200


def test_a_request_that_came_with_another_has_its_own_time(hasty: str) -> None:
    """The second is looked at when the first is answered, and nothing more comes of it."""
    first = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    second = b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    with connected(hasty) as connection, connection.makefile("rb") as answers:
        connection.sendall(first + second)
        assert answers.readline().startswith(b"HTTP/1.1 200")
        with suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in answers.read()


def test_who_does_not_take_his_answers_is_closed(settings: Settings) -> None:
    """He holds a connection, and what is written for him lies in memory."""
    ended = threading.Event()

    class Noting(Hasty):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    request = b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(create_app(Farm(settings), loopback=True), Noting) as url, connected(url) as connection:
        connection.sendall(request * 200)
        assert ended.wait(20)


def test_a_request_after_another_has_its_own_time(hasty: str) -> None:
    """A kept connection may be silent between requests, and not within one."""
    request = b"GET /v1/schema/manifest HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty) as connection, connection.makefile("rb") as answers:
        for _ in range(2):
            connection.sendall(request)
            assert answers.readline().startswith(b"HTTP/1.1 200")
            size = next(int(line.split(b":")[1]) for line in answers if line.lower().startswith(b"content-length"))
            while answers.readline().strip():
                pass
            answers.read(size)
        connection.sendall(request[:20])
        assert is_closed(connection)


def test_idle_connections_do_not_stop_the_api(settings: Settings) -> None:
    """More of them than the server takes: each newcomer costs one of them, and one that asks is answered."""
    with serving(create_app(Farm(settings), loopback=True), Crowded) as url, ExitStack() as held:
        idle = [held.enter_context(connected(url)) for _ in range(3 * Crowded.most)]
        for _ in range(3):
            assert httpx.get(f"{url}/v1/builds", timeout=60).status_code == 200
        assert is_closed(idle[0])


def test_descriptors_are_raised_to_what_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        kind = bounded()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert 0 < kind.most < hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_token_follows_only_so_many_builds(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_routes, "STREAMS", 3)
    build_id = client.submit(frozen)["id"]
    events = f"{url}/v1/builds/{build_id}/events"

    reading: list[Iterator[bytes]] = []

    def follow(secret: str) -> httpx.Response:
        request = session.build_request("GET", events, headers={"Authorization": f"Bearer {secret}"})
        answer = session.send(request, stream=True)
        held.callback(answer.close)
        if answer.status_code == 200:
            reading.append(answer.iter_bytes())
            next(reading[-1])  # Now it is counted.
        return answer

    other = client.tokens.create("other", "reader", "main")
    mine = farm.settings.api_token.get_secret_value()
    with httpx.Client(timeout=60) as session, ExitStack() as held:
        assert [follow(mine).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert follow(other).status_code == 200


@pytest.mark.parametrize("how", ["Content-Length: 30000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("token", ["", "Authorization: Bearer wrong\r\n"])
def test_no_large_body_is_read_of_who_has_no_token(url: str, how: str, token: str) -> None:
    """The answer comes before the body does: it would lie in memory until its end."""
    head = f"POST /v1/builds HTTP/1.1\r\nHost: localhost\r\n{token}{how}\r\nContent-Type: application/json\r\n\r\n"
    with connected(url) as connection, connection.makefile("rb") as answer:
        connection.sendall(head.encode())
        assert answer.readline().startswith(b"HTTP/1.1 401")


def test_large_bodies_at_once_are_bounded(
    farm: Farm, url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token, and of all: each body lies in memory until it is answered."""
    size = 20_000
    monkeypatch.setattr(gate, "BODIES_OF_ONE", 2 * size)
    monkeypatch.setattr(gate, "BODIES_OF_ALL", 3 * size)
    mine, others = farm.settings.api_token.get_secret_value(), client.tokens.create("other", "submitter", "main")
    with ExitStack() as held:

        def begun(token: str, body: bytes = b"") -> tuple[socket.socket, BinaryIO]:
            connection = held.enter_context(connected(url))
            head = f"POST /v1/blobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            expected = f"Expect: 100-continue\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
            connection.sendall((head + expected).encode() + body)
            return connection, held.enter_context(connection.makefile("rb"))

        def status(answer: BinaryIO) -> int:
            return int(answer.readline().split()[1])

        first, second = begun(mine), begun(mine)
        assert [status(first[1]), status(second[1])] == [100, 100]  # The server waits for their bodies.
        refused = begun(mine)[1]
        assert status(refused) == 503
        assert any(line.lower() == b"retry-after: 2\r\n" for line in refused)
        third = begun(others)
        assert status(third[1]) == 100
        assert status(begun(others)[1]) == 503
        # Who has been answered, or is gone, counts no more.
        first[0].sendall(b'{"blobs": []}'.ljust(size))
        assert first[1].readline().strip() == b""
        assert status(first[1]) == 200
        assert status(begun(mine)[1]) == 100
        assert status(begun(others)[1]) == 503
        third[1].close()
        third[0].close()
        wait_until(lambda: status(begun(others)[1]) == 100)


def test_long_requests_of_one_token_keep_nobody_else_waiting(
    url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hash a large upload takes minutes; more of them than there are threads would be all that is answered."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    inside = 0

    def hash_slowly(*_: object) -> None:
        nonlocal inside
        inside += 1
        begun.release()
        assert go_on.wait(120)

    monkeypatch.setattr(LargeUploads, "finish_upload", hash_slowly)
    headers = {"Authorization": f"Bearer {client.tokens.create('busy', 'submitter', 'main')}"}
    finish = f"{url}/v1/blobs/{'ab' * 32}/finish"
    with ThreadPoolExecutor(60) as threads:
        answers = [
            threads.submit(httpx.post, finish, json={"size": 5}, headers=headers, timeout=120) for _ in range(60)
        ]
        try:
            assert all(begun.acquire(timeout=60) for _ in range(gate.TURNS))
            assert client.builds() == []
            assert inside == gate.TURNS
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert inside == 60


def test_who_shows_another_text_with_each_request_is_still_one_caller(
    url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page takes the cookie if `Authorization` is not a bearer's: so does what bounds requests."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    inside = 0

    def list_slowly(*_: object) -> list[object]:
        nonlocal inside
        inside += 1
        begun.release()
        assert go_on.wait(120)
        return []

    cookie = {"Cookie": f"farm={client.tokens.create('disguised', 'reader', 'main')}"}
    monkeypatch.setattr(BuildReader, "list", list_slowly)
    with ThreadPoolExecutor(30) as threads:
        answers = [
            threads.submit(httpx.get, f"{url}/ui/ns/main", headers={"Authorization": f"X {i}", **cookie}, timeout=120)
            for i in range(30)
        ]
        try:
            assert all(begun.acquire(timeout=60) for _ in range(gate.TURNS))
            assert client.workers.all()
            assert inside == gate.TURNS
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_silent_strangers_keep_nobody_waiting(
    farm: Farm, url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that never come, without a token and with one that the farm does not know."""
    monkeypatch.setattr(gate, "STRANGERS_BODY_SECONDS", 600)
    with ExitStack() as held:
        for token in ["", "Authorization: Bearer made-up\r\n"] * 10:
            head = f"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: 1000\r\n\r\n{{"
            held.enter_context(connected(url)).sendall(head.encode())
        for path in ("/v1/health", "/ui/static/farm.css", "/ui/sign-in", "/v1/schema/manifest"):
            assert httpx.get(f"{url}{path}", timeout=20).status_code == 200
        wrong = httpx.post(f"{url}/ui/sign-in", data={"token": "no"}, headers={"Origin": url}, timeout=20)
        assert wrong.status_code == 401
        assert httpx.get(f"{url}/v1/builds", timeout=20).status_code == 401
        assert client.builds() == []


def test_a_body_without_a_token_has_little_time(url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "STRANGERS_BODY_SECONDS", 0.2)
    known = client.tokens.create("slow", "submitter", "main")
    with ExitStack() as held:

        def sent(token: str) -> socket.socket:
            connection = held.enter_context(connected(url))
            head = f"POST /v1/blobs HTTP/1.1\r\nHost: localhost\r\n{token}Content-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 13\r\n\r\n{{".encode())
            return connection

        slow = sent(f"Authorization: Bearer {known}\r\n")
        stranger = sent("")
        assert stranger.makefile("rb").readline().startswith(b"HTTP/1.1 408")
        slow.sendall(b'"blobs": []}')
        assert slow.makefile("rb").readline().startswith(b"HTTP/1.1 200")


def test_made_up_tokens_wait_only_for_each_other(
    farm: Farm, url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage, which would know them, does not answer; a token that was seen before does not stand behind them."""
    begun, go_on, find = threading.Semaphore(0), threading.Event(), Tokens.find
    known = client.tokens.create("seen", "reader", "main")
    seen = {"Authorization": f"Bearer {known}"}
    assert httpx.get(f"{url}/v1/workers", headers=seen).status_code == 200

    def find_slowly(tokens: Tokens, secret: str) -> Token | None:
        if secret.startswith("made-up"):
            begun.release()
            assert go_on.wait(120)
        return find(tokens, secret)

    monkeypatch.setattr(Tokens, "find", find_slowly)
    with ThreadPoolExecutor(60) as threads:
        answers = [
            threads.submit(httpx.get, f"{url}/v1/builds", headers={"Authorization": f"Bearer made-up {i}"}, timeout=120)
            for i in range(60)
        ]
        try:
            assert begun.acquire(timeout=60)
            assert client.workers.all()
            assert httpx.get(f"{url}/v1/workers", headers=seen, timeout=20).status_code == 200
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in answers} == {401}


# --- names and pages ------------------------------------------------------------------------------------------------

OWN = [
    *("localhost:{port}", "127.0.0.1:{port}", "LOCALHOST:{port}", "[::1]:{port}"),
    *("localhost.:{port}", "localhost.", "127.0.1.1:{port}"),
]
FOREIGN = [
    *("evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1"),
    *("evil.example.", "localhost..:{port}", "127.0.0.1x", "[::2]:{port}"),
]


@pytest.fixture
def tokenless(settings: Settings) -> Iterator[str]:
    named = settings.model_copy(update={"api_hosts": ("farm.example",)})
    with serving(create_app(Farm(named), loopback=True)) as url:
        yield url


@pytest.mark.parametrize("host", [*OWN, "farm.example", "farm.example:{port}", "farm.example.:{port}"])
def test_a_server_answers_under_its_own_names(tokenless: str, host: str) -> None:
    host = host.format(port=urlsplit(tokenless).port)
    assert httpx.get(f"{tokenless}/v1/builds", headers={"Host": host}, timeout=60).status_code == 200
    same = {"Host": host, "Origin": f"http://{host}"}
    assert httpx.post(f"{tokenless}/v1/blobs", json={"blobs": []}, headers=same, timeout=60).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_server_answers_under_no_other_name(tokenless: str, host: str) -> None:
    """A page's owner gives this machine's address a name of his own, and the browser thinks that it is his server."""
    host = host.format(port=urlsplit(tokenless).port)
    refused = httpx.get(f"{tokenless}/v1/builds", headers={"Host": host, "Origin": f"http://{host}"}, timeout=60)
    assert refused.status_code == 403
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert "does not answer as" in refused.json()["detail"]
    assert "api_hosts" in refused.json()["hint"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "null", "http://localhost:1", "https://127.0.0.1", "file://"),
        *("http://localhost.:1", "http://127.0.1.1:1"),
    ],
)
def test_a_page_of_another_site_is_refused(tokenless: str, method: str, origin: str) -> None:
    refused = httpx.request(method, f"{tokenless}/v1/pools/any/pause", headers={"Origin": origin}, timeout=60)
    assert refused.status_code == 403
    assert "may not send requests here" in refused.json()["detail"]


def test_a_page_that_the_operator_lists_is_welcome(tokenless: str) -> None:
    page = {"Origin": "https://farm.example"}
    assert httpx.post(f"{tokenless}/v1/blobs", json={"blobs": []}, headers=page, timeout=60).status_code == 200


@pytest.mark.parametrize(("mode", "status"), [("no-cors", 403), ("navigate", 200)])
def test_pictures_of_another_site_are_refused_and_links_are_not(tokenless: str, mode: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
    assert httpx.get(f"{tokenless}/v1/builds", headers=headers, timeout=60).status_code == status


def test_a_server_with_a_token_refuses_pages_too(farm: Farm, url: str) -> None:
    headers = {"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"}
    assert httpx.get(f"{url}/v1/builds", headers=headers, timeout=60).status_code == 200
    foreign = {**headers, "Origin": "http://evil.example"}
    assert httpx.get(f"{url}/v1/builds", headers=foreign, timeout=60).status_code == 403


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "certificate.pem", folder / "key.pem"
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {pair[1]}"  # RSA's takes up to seconds to find.
    command = f"openssl req -x509 {key} -out {pair[0]} -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(command.split(), check=True, capture_output=True)
    return pair


def test_a_network_gets_no_plain_http() -> None:
    with pytest.raises(UsageError, match="no TLS") as refused:
        Listening("0.0.0.0", 0).check()
    assert "--behind-proxy" in refused.value.hint
    for host in ("127.0.0.1", "127.0.1.1", "localhost", "::1"):
        Listening(host, 0).check()
    Listening("0.0.0.0", 0, proxy=True).check()


def test_certificate_and_key_belong_together(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are needed together"):
        Listening("0.0.0.0", 0, certificate[0]).check()
    with pytest.raises(UsageError, match="no file"):
        Listening("0.0.0.0", 0, *(tmp_path / "gone", certificate[1])).check()


def test_tls(settings: Settings, certificate: tuple[Path, Path]) -> None:
    listening = Listening("127.0.0.1", 0, *certificate)
    with serving(create_app(Farm(settings), loopback=True), listening=listening) as url:
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx.get(f"{url}/v1/builds", verify=trusted, timeout=60).status_code == 200
        with FarmClient(url, "") as client, pytest.raises(FarmFault, match="cannot reach") as refused:
            client.builds()
        assert "SSL_CERT_FILE" in refused.value.hint
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http{url.removeprefix('https')}/v1/builds", timeout=60)


def test_handshakes_that_do_not_end_do_not_stop_the_api(settings: Settings, certificate: tuple[Path, Path]) -> None:
    """Each holds a descriptor, before there is a connection."""
    listening = Listening("127.0.0.1", 0, *certificate)
    with serving(create_app(Farm(settings), loopback=True), Crowded, listening) as url, ExitStack() as held:
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        begun = [held.enter_context(connected(url)) for _ in range(2 * Crowded.most)]
        assert all(is_closed(connection) for connection in begun[Crowded.most // 2 :])
        begun[0].close()
        answered = wait_until(lambda: _answer(url, trusted))
        assert answered.status_code == 200


def _answer(url: str, trusted: ssl.SSLContext) -> httpx.Response | None:
    try:
        return httpx.get(f"{url}/v1/builds", verify=trusted, timeout=60)
    except httpx.TransportError:
        return None


# --- what is said about it ------------------------------------------------------------------------------------------


def test_lines_that_come_again_and_again_are_counted() -> None:
    now = [0.0]
    folding = Folding(most=3, seconds=60, clock=lambda: now[0])

    def written(level: int, text: str) -> str:
        record = logging.LogRecord("farm", level, __file__, 1, text, ("x",), None)
        return record.getMessage() if folding.filter(record) else ""

    assert [written(logging.WARNING, "too many of %s") for _ in range(5)] == [
        "too many of x",
        "too many of x",
        "too many of x (more lines like this are left out for 60 s)",
        "",
        "",
    ]
    assert written(logging.WARNING, "other %s") == "other x"
    assert all(written(logging.INFO, "build of %s") for _ in range(10))
    now[0] = 61.0
    assert written(logging.WARNING, "too many of %s") == "too many of x (2 lines like this were left out)"
    assert written(logging.WARNING, "too many of %s") == "too many of x"
