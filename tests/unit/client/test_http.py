"""What farm and storage send is read to its end over kept connections, by TLS that is checked, through proxies too."""

from __future__ import annotations

import gc
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from farm.client import transport
from farm.client.large_answers import PIECE, LargeAnswers
from farm.client.transport import Transport
from farm.errors import FarmError, FarmFault, StorageUnavailable, UsageError

DROPS = 5000
DATA = bytes(range(256)) * (3 * PIECE // 256) + b"the end"


class Handler(BaseHTTPRequestHandler):
    """Answers what its path names."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Storage)
        server.asked.append((self.client_address[1], self.path))
        if [port for port, _ in server.asked].count(self.client_address[1]) > 1 and self.path == "/once":
            self.close_connection = True
            return
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path == "/refused":
            data = b"<Error>\n  <Code>AccessDenied</Code>\n</Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        if self.path.startswith("/lines"):
            frame = "{:x}\r\n{}\r\n" if self.path == "/lines/chunked" else "{1}"
            self.send_response(200)
            self.send_header(*("Transfer-Encoding", "chunked") if "{:x}" in frame else ("Connection", "close"))
            self.end_headers()
            for line in ("first\n", "second\n", ""):
                self.wfile.write(frame.format(len(line), line).encode())
                assert server.first_was_read.wait(5)
            return
        if self.path.startswith("/drops"):
            self.send_response(200 if "refused" not in self.path else 500)
            self.send_header(
                *("Content-Length", str(DROPS)) if "chunked" not in self.path else ("Transfer-Encoding", "chunked")
            )
            self.end_headers()
            with suppress(OSError):
                while server.drops < DROPS:
                    self.wfile.write(b"1\r\n1\r\n" if "chunked" in self.path else b"1")
                    server.drops += 1
                    server.over.wait(0.0001)
            self.close_connection = True
            return
        _, _, asked = self.headers.get("Range", "").partition("=")
        start, _, last = asked.partition("-")
        data = DATA[int(start) : int(last) + 1] if asked else DATA
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.path == "/half":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)
        self.close_connection = self.path == "/closed-after"  # Which the answer does not say.

    def do_POST(self) -> None:
        self.send_response(413)  # The body stays unread.
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Storage(ThreadingHTTPServer):
    """Has `DATA`, and records who asked (by port) for what."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[int, str]] = []
        self.first_was_read, self.over, self.drops = Event(), Event(), 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def storage() -> Iterator[Storage]:
    with Storage() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    made = Transport("http://farm.example", "", namespace="", timeout=5)
    yield made
    made.close()


def read(client: Transport, url: str, start: int = 0, end: int = len(DATA)) -> bytes:
    found = bytearray()
    client.read(url, "net.mxr", start, end, found.extend, whole=(start, end) == (0, len(DATA)))
    return bytes(found)


def test_parts_come_over_one_connection(client: Transport, storage: Storage) -> None:
    assert read(client, f"{storage.url}/whole?key=a%20b") == DATA
    assert read(client, f"{storage.url}/whole", 5, PIECE + 7) == DATA[5 : PIECE + 7]
    assert [path for _, path in storage.asked] == ["/whole?key=a%20b", "/whole"]
    assert len({port for port, _ in storage.asked}) == 1


def test_a_connection_that_the_server_closed_is_replaced(client: Transport, storage: Storage) -> None:
    assert read(client, f"{storage.url}/closed-after") == DATA
    assert read(client, f"{storage.url}/whole") == DATA
    assert len({port for port, _ in storage.asked}) == 2


def test_a_connection_that_the_server_closes_while_it_is_asked_is_replaced(client: Transport, storage: Storage) -> None:
    assert read(client, f"{storage.url}/once") == DATA
    assert read(client, f"{storage.url}/once") == DATA
    assert len({port for port, _ in storage.asked}) == 2


def test_an_answer_that_ends_too_early_is_no_damage_but_an_outage(client: Transport, storage: Storage) -> None:
    with pytest.raises(StorageUnavailable, match=r"cannot download net\.mxr: .*\d+ more expected"):
        read(client, f"{storage.url}/half")
    assert read(client, f"{storage.url}/whole") == DATA


def test_a_reader_that_stops_leaves_no_rest_for_the_next(client: Transport, storage: Storage) -> None:
    def stop(_: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.read(f"{storage.url}/whole", "net.mxr", 0, len(DATA), stop, whole=True)
    assert read(client, f"{storage.url}/whole") == DATA


def test_an_answer_before_the_end_of_a_body_is_read(storage: Storage, client: Transport) -> None:
    farm = Transport(storage.url, "", namespace="", timeout=5)
    with pytest.raises(UsageError, match="answers 413"):
        farm.request("POST", "/v1/plan", json="x" * (16 << 20))
    farm.close()


@pytest.mark.parametrize("path", ["/drops", "/drops/chunked", "/drops/refused"])
def test_an_answer_that_comes_in_drops_is_left(
    client: Transport, storage: Storage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one comes before the time to read is up; here a minute is over with the first."""
    monkeypatch.setattr(transport, "MINUTE", 0.0)
    monkeypatch.setattr(transport, "RETRY_DELAYS", ())
    farm = Transport(storage.url, "", namespace="", timeout=5)
    with pytest.raises(FarmFault, match="bytes in 0 s"):
        farm.request("GET", path)
    if "refused" in path:
        with pytest.raises(FarmFault, match="bytes in 0 s"), farm.lines(path, timeout=5):
            pass
    farm.close()
    with pytest.raises(StorageUnavailable, match="bytes in 0 s"):
        read(client, storage.url + path)
    assert storage.drops < DROPS


@pytest.mark.parametrize("path", ["/lines/chunked", "/lines/closed"])
def test_a_line_of_the_farm_is_read_when_it_comes(client: Transport, storage: Storage, path: str) -> None:
    farm = Transport(storage.url, "", namespace="", timeout=5)
    with farm.lines(path, timeout=2) as lines:
        assert next(lines) == "first"
        storage.first_was_read.set()
        assert list(lines) == ["second"]
    farm.close()


@pytest.mark.parametrize(
    "url", ["/moved", "/refused", "http://127.0.0.1:1/", "http://[::1/", "ftp://127.0.0.1/x", "", "x"]
)
def test_what_cannot_be_read_is_one_line(client: Transport, storage: Storage, url: str) -> None:
    with pytest.raises(FarmError, match=r"cannot download net\.mxr: ") as caught:
        read(client, storage.url + url if url.startswith("/") else url)
    assert "\n" not in caught.value.message


def test_a_port_that_there_is_not_leads_to_no_other(client: Transport, storage: Storage) -> None:
    above = storage.server_address[1] + 65536
    with pytest.raises(StorageUnavailable, match="Failed to parse"):
        read(client, f"http://127.0.0.1:{above}/whole")
    assert storage.asked == []


def test_a_proxy_of_the_environment_is_asked(
    client: Transport, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", storage.url)
    assert read(client, "http://storage.example/whole") == DATA
    assert storage.asked[0][1] == "http://storage.example/whole"
    farm = Transport("http://farm.example", "", namespace="", timeout=5)
    with pytest.raises(UsageError, match="unexpected answer"):
        farm.get("/whole", dict)
    assert storage.asked[1][1] == "http://farm.example/whole"
    farm.close()


def test_a_certificate_that_nobody_trusts_is_refused(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    pair = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {pair[0]} -keyout {pair[1]}"
    subprocess.run(command.split(), check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*pair)
    storage.socket = serving.wrap_socket(storage.socket, server_side=True)
    url = storage.url.replace("http", "https")
    trusting = ssl.create_default_context(cafile=str(pair[0]))
    with httpx.Client(transport=LargeAnswers(1, lambda: trusting)) as client:
        assert client.get(f"{url}/whole").content == DATA
    with (
        httpx.Client(transport=LargeAnswers(1, httpx.create_ssl_context)) as client,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.get(f"{url}/whole")
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", ())
    with closing(Transport(url, "", namespace="", timeout=5)) as farm, pytest.raises(FarmFault, match="VERIFY_FAILED"):
        farm.request("GET", "/whole")


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that gives each request the next of these answers, whatever it asks; yield URL and connections."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            left = iter(answers)
            with suppress(StopIteration, OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    with suppress(ConnectionError):
                        while connection.recv(1 << 16):
                            connection.sendall(next(left))
                            if not answers[-1].endswith(b"\n"):
                                connection.shutdown(socket.SHUT_RDWR)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


Ask = Callable[[str], object]


@pytest.fixture(params=["farm", "storage"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Ask a server once more, as a farm or as object storage, over the connections of one client."""
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", ())
    made: list[Transport] = []

    def get(url: str) -> object:
        if not made:
            made.append(Transport(url, "", namespace="", timeout=5))
        if request.param == "farm":
            return made[0].request("GET", "/v1/health").content
        found = bytearray()
        made[0].read(url, "net.mxr", 0, 0, found.extend, whole=True)
        return bytes(found)

    yield get
    for each in made:
        each.close()


def test_an_answer_without_a_body_keeps_its_connection(ask: Ask) -> None:
    with answering(NOTHING, NOTHING) as (url, connections):
        assert [ask(url) for _ in "ab"] == [b"", b""]
        assert len(connections) == 1


def test_what_comes_on_a_kept_connection_answers_nobody(ask: Ask) -> None:
    """A server that gives up waiting may say so."""
    with answering(NOTHING, NOTHING) as (url, connections):
        assert ask(url) == b""
        connections[0].sendall(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        assert ask(url) == b""
        assert len(connections) == 2


@pytest.mark.parametrize("cut", [b"HTTP/1.1 200", b"HTTP/1.1 302 Found\r\nLocation: http://storage.example/buck"])
def test_a_head_that_is_cut_off_is_no_answer(ask: Ask, cut: bytes) -> None:
    with answering(cut) as (url, _), pytest.raises(FarmFault):
        ask(url)


@pytest.mark.parametrize("length", ["abc", "-1"])
def test_a_length_that_is_none_is_refused(ask: Ask, length: str) -> None:
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{{}}\n".encode()
    with answering(answer) as (url, _), pytest.raises(FarmFault, match=r"[Ll]ength"):
        ask(url)


def test_a_header_may_have_any_letters() -> None:
    answer = "HTTP/1.1 200 OK\r\nX-Node: é\r\nContent-Length: 3\r\n\r\n{}\n".encode()
    with answering(answer) as (url, _):
        assert Transport(url, "", namespace="", timeout=5).request("GET", "/v1/health").json() == {}


def test_early_hints_come_before_the_answer() -> None:
    with answering(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n" + EMPTY) as (url, _):
        assert Transport(url, "", namespace="", timeout=5).request("GET", "/v1/health").status_code == 204


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://[2001:db8::1]", ("2001:db8::1", 80)),
        ("https://[2001:db8::8443]", ("2001:db8::8443", 443)),
        ("http://[2001:db8::1]:8080", ("2001:db8::1", 8080)),
    ],
)
def test_the_port_is_the_urls(ask: Ask, url: str, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def nobody(host: str, port: int, *_: object) -> list[object]:
        asked.append((host, port))
        raise socket.gaierror("nobody")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(FarmFault):
        ask(url)
    assert asked == [place]


def test_what_is_compressed_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: 0\r\n\r\n"
    with answering(twice) as (url, _), pytest.raises(UsageError, match="unexpected answer"):
        Transport(url, "", namespace="", timeout=5).request("GET", "/v1/health")


def test_no_connection_is_kept_by_a_client_that_was_closed() -> None:
    transport = LargeAnswers(1, ssl.create_default_context)
    with answering(NOTHING) as (url, connections):
        answer = transport.handle_request(httpx.Client().build_request("GET", url, timeout=5))
        transport.close()
        answer.read()
        del answer
        gc.collect()
        connections[0].settimeout(5)
        assert connections[0].recv(1) == b""


def test_a_proxy_that_needs_a_package_is_no_bug_of_the_farm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(UsageError, match="SOCKS"):
        Transport("http://farm.example", "", namespace="", timeout=5)
