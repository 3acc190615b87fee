"""The embedded servers: they answer, they hold what they were given, they never outlive who started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from farm.artifacts.s3 import S3Store
from farm.errors import StorageUnavailable, StoreUnavailable
from farm.local import servers
from farm.local.servers import GUARD, Server, start_valkey, start_weed
from tests.support.helpers import wait_until
from tests.support.neighbours import NOBODY, needs_root

KEYS = {"access_key": "embedded", "secret_key": "secret-of-the-test"}


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder whose name is more than a name for what reads a list, a pattern or only ASCII."""
    return tmp_path / "Bücher, [ab]*? 'c' \"d\" $e"


def test_valkey_keeps_its_data_and_its_secrets(odd: Path) -> None:
    """Through a restart, which may change the port; the password is in no process list and in no open
    file."""
    with running(start_valkey(odd, "secret")) as server:
        with redis.Redis.from_url(server.url) as connection:
            connection.set("key", "value")
            config = connection.config_get("*")
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
        assert config["maxmemory-policy"] == "noeviction"
        assert config["bind"] == "127.0.0.1"
        assert server.pid is not None
        assert "secret" not in " ".join(psutil.Process(server.pid).cmdline())
        assert (odd / "valkey.conf").stat().st_mode & 0o077 == 0
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(server.url.replace("secret", "wrong")).ping()
    with running(start_valkey(odd, "secret")) as server, redis.Redis.from_url(server.url) as connection:
        assert connection.get("key") == b"value"


def test_weed_keeps_its_data(odd: Path) -> None:
    """Through SIGKILL too; a bucket that nobody asked for is not made."""
    with running(start_weed(odd, *KEYS.values(), bucket="farm")) as server:
        store = S3Store(bucket="farm", endpoint=server.url, **KEYS)
        store.check()
        digest, _ = store.put_blob_bytes(b"kept")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive)
    with running(start_weed(odd, *KEYS.values(), bucket="farm")) as server:
        store = S3Store(bucket="farm", endpoint=server.url, **KEYS)
        assert store.read_blob(digest, limit=100) == b"kept"
        listens = {each.laddr.ip for each in psutil.Process(server.pid).net_connections() if each.status == "LISTEN"}
        assert listens == {"127.0.0.1"}
        sockets = {each.laddr for each in psutil.Process(server.pid).net_connections("unix") if each.laddr}
        assert sockets and all(Path(path).exists() for path in sockets)
    assert not any(Path(path).exists() for path in sockets)


@pytest.mark.parametrize("length", [1, 120])
def test_weed_passes_objects_on_where_nobody_else_can_be_first(tmp_path: Path, length: int) -> None:
    """Its sockets in /tmp have names that can be guessed. A path of more than 107 bytes is none for a socket."""
    folder = tmp_path / ("d" * length)
    with running(start_weed(folder, *KEYS.values(), bucket="farm")) as server:
        found = {Path(each.laddr) for each in psutil.Process(server.pid).net_connections("unix") if each.laddr}
        ours = [path for path in found if "-grpc-" not in path.name]
        assert sorted({path.name for path in ours}) == ["filer.sock", "s3.sock"]
        places = {path.parent for path in ours}
        assert all(place.stat().st_mode & 0o077 == 0 for place in places)
        store = S3Store(bucket="farm", endpoint=server.url, **KEYS)
        assert store.has_blob(store.put_blob_bytes(b"blob")[0])
    assert not any(path.exists() for path in ours)
    assert places == {folder} or not any(place.exists() for place in places)


@needs_root
def test_a_socket_of_another_user_does_not_keep_a_farm_from_starting() -> None:
    """Nobody takes its connections, so one that connects would wait for ever."""
    name = f"/tmp/seaweedfs-test-{os.getpid()}.sock"
    for user in (NOBODY, os.geteuid()):
        with contextlib.ExitStack() as full:
            server = full.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(name)
            full.callback(os.unlink, name)
            server.listen(0)
            os.chown(name, user, -1)
            for _ in range(2):
                client = full.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(name)
            looking = threading.Thread(target=servers._remove_dead_sockets, daemon=True)
            looking.start()
            looking.join(30)
            assert not looking.is_alive()
            assert Path(name).exists()


def test_weed_writes_no_key_and_no_key_id_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it take the keys that its user has for another S3."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-another-storage")
    with running(start_weed(tmp_path, *KEYS.values(), bucket="farm")) as server:
        S3Store(bucket="farm", endpoint=server.url, **KEYS).put_blob_bytes(b"kept")
        keys = dict.fromkeys(KEYS, "of-another-storage")
        with pytest.raises(StorageUnavailable, match="InvalidAccessKeyId"):
            S3Store(bucket="farm", endpoint=server.url, patience=0.0, **keys).get_object("any")
    said = server.log.read_text()
    assert said
    assert not [name for name, value in KEYS.items() if value in said]


def test_weed_gives_and_takes_nothing_without_a_key(tmp_path: Path) -> None:
    """Whatever port another user of the machine, or a web page, asks: no object is read, written or deleted."""
    document = "config/tokens/intruder.json"
    with running(start_weed(tmp_path / "s3", *KEYS.values(), bucket="farm")) as server:
        store = S3Store(bucket="farm", endpoint=server.url, **KEYS)
        store.put_object("config/tokens/known.json", b"a token")
        assert server.pid is not None
        process = psutil.Process(server.pid)
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
        answers = [answer for port in sorted(ports) for answer in asked(port, document)]
        leaks = [(place, status, body) for place, status, body in answers if b"a token" in body or status in (201, 202)]
        assert leaks == []
        assert [place for place, status, _ in answers if "/buckets/" in place and status == 200] == []
        assert store.get_object(document) is None
        assert store.get_object("config/tokens/known.json") is not None
        assert [port for port in ports if speaks_http2(port)] == [], "gRPC asks for a certificate"
        sockets = [Path(each.laddr) for each in process.net_connections("unix") if each.laddr]
        open_to_others = [path for path in sockets if path.exists() and path.stat().st_mode & 0o077]
    assert open_to_others == []
    assert (tmp_path / "s3").stat().st_mode & 0o077 == 0


ASKED = [
    *((method, "") for method in ("GET", "PUT", "DELETE")),
    *(("POST", query) for query in ("?delete", "?uploads")),
    *(("PUT", query) for query in ("?acl", "?policy", "?cors")),
    ("GET", "?list-type=2"),
]


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example", "farm.evil.example", "localhost"])
def test_a_page_of_another_site_changes_nothing_whatever_origin_and_host_it_has(
    weed: Any, s3_settings: dict[str, str], host: str
) -> None:
    """Each request has to be signed, so S3 need not ask where it comes from: forms, scripts and rebound names alike."""
    bucket = s3_settings["s3_bucket"]
    client = weed.client()
    client.put_object(Bucket=bucket, Key="config/tokens/known.json", Body=b"a token")
    fields = {"key": "config/tokens/intruder.json", "acl": "public-read", "success_action_status": "201"}
    policy = {"policy": "e30=", "AWSAccessKeyId": weed.access_key, "signature": "AAAA"}
    newer = {
        "policy": "e30=", "x-amz-algorithm": "AWS4-HMAC-SHA256", "x-amz-signature": "0" * 64,
        "x-amz-date": "20260101T000000Z", "x-amz-credential": f"{weed.access_key}/20260101/us-east-1/s3/aws4_request",
    }  # fmt: skip
    file = {"file": ("x", b'{"role": "admin"}', "application/json")}
    for origin in ("http://evil.example", "null", weed.url, ""):
        headers = {"Host": host, **({"Origin": origin} if origin else {})}
        for more in ({}, policy, newer):
            for path in (f"/{bucket}", f"/{bucket}/", "/", f"/{bucket}/config/tokens/intruder.json"):
                form = httpx.post(weed.url + path, data={**fields, **more}, files=file, headers=headers, timeout=60)
                assert form.status_code >= 400, (path, form.text)
        for method, query in ASKED:
            url = f"{weed.url}/{bucket}/{query or 'config/tokens/known.json'}"
            body = None if method == "GET" else b"x"
            answer = httpx.request(method, url, content=body, headers=headers, timeout=60)
            assert answer.status_code in (400, 403, 405, 411), (method, query, answer.status_code, answer.text)
            assert b"a token" not in answer.content
    listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in listed] == ["config/tokens/known.json"]
    assert client.get_object(Bucket=bucket, Key="config/tokens/known.json")["Body"].read() == b"a token"
    client.delete_object(Bucket=bucket, Key="config/tokens/known.json")


def asked(port: int, document: str) -> Iterator[tuple[str, int, bytes]]:
    """What a port answers without a key: as a form of a web page asks it, and as curl does."""
    form = {"Origin": "http://evil.example", "Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{"role": "admin"}\r\n--b--\r\n'
    for method, path in (
        ("GET", "/buckets/farm/config/tokens/known.json"),
        ("GET", "/buckets/?pretty=y"),
        ("POST", f"/buckets/farm/{document}"),
        ("PUT", f"/buckets/farm/{document}"),
        ("DELETE", "/buckets/farm/config/tokens/known.json"),
        ("GET", "/farm/config/tokens/known.json"),
        ("POST", f"/farm/{document}"),
        ("PUT", f"/farm/{document}"),
        ("POST", "/submit"),
        ("GET", "/col/delete?collection=farm"),
        ("POST", "/1,01637037d6"),
    ):
        body = part if method in ("POST", "PUT") else None
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.request(method, f"http://127.0.0.1:{port}{path}", content=body, headers=form, timeout=5)
            yield f"{port} {method} {path}", answer.status_code, answer.content


def speaks_http2(port: int) -> bool:
    """Whether a port answers the preface of HTTP/2, as gRPC has it, in plain text or in TLS without a certificate."""
    insecure = ssl.create_default_context()
    insecure.check_hostname, insecure.verify_mode = False, ssl.CERT_NONE
    insecure.set_alpn_protocols(["h2"])
    for wrap in (lambda plain: plain, insecure.wrap_socket):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            connection = wrap(plain)
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            if connection.recv(9)[3:4] == b"\x04":  # The server's own settings frame.
                return True
    return False


def test_stopping_leaves_nothing_running_and_may_be_repeated(tmp_path: Path) -> None:
    server = start_valkey(tmp_path, "secret")
    pid = server.pid
    assert pid
    server.stop()
    server.stop()
    assert not server.alive
    assert server.pid is None
    assert not psutil.pid_exists(pid)


STARTER = """
import sys, threading
from pathlib import Path
from farm.local.servers import start_valkey, start_weed

def start():
    valkey = start_valkey(Path(sys.argv[1]) / "valkey", "secret")
    weed = start_weed(Path(sys.argv[1]) / "s3", "key", "secret", bucket="farm")
    print(valkey.pid, weed.pid, flush=True)

thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_servers_end_with_who_started_them(tmp_path: Path, number: signal.Signals) -> None:
    """Also from a thread that has ended since: the servers follow the process, neither sooner nor later."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout and starter.stdin
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    starter.send_signal(number)
    starter.wait()
    starter.stdout.close()
    starter.stdin.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def guarded(patience: float, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(GUARD), str(patience), sys.executable, "-c", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_guard_ends_what_ignores_sigterm_and_what_hides_in_a_session_of_its_own() -> None:
    script = (
        "import os, signal, subprocess, sys;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True);"
        "print(os.getpid(), child.pid, flush=True);"
        "signal.pause()"
    )
    guard = guarded(0.2, script)
    assert guard.stdout and guard.stdin
    pids = [int(pid) for pid in guard.stdout.readline().split()]
    guard.stdin.close()
    assert guard.wait(60) == 128 + signal.SIGKILL
    guard.stdout.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_guard_exits_as_its_program_did() -> None:
    with guarded(1, "raise SystemExit(7)") as guard:
        assert guard.wait(60) == 7


def test_a_guard_that_is_killed_takes_its_program_along() -> None:
    guard = guarded(1, "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    assert guard.stdout and guard.stdin
    pid = int(guard.stdout.readline())
    guard.kill()
    guard.wait()
    guard.stdout.close()
    guard.stdin.close()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="did not start") as error:
        start_valkey(tmp_path, "secret")
    assert "appendonlydir" in error.value.hint
    assert "secret" not in str(error.value)


def test_ports_differ() -> None:
    ports = servers.free_ports(20)
    assert len(set(ports)) == 20


def test_a_long_log_begins_again_and_the_server_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LONGEST_LOG", 1000)
    command = ["sh", "-c", "while echo 'a line of a log'; do sleep 0.01; done"]
    server = Server("chatty", "", command, tmp_path / "chatty.log", ready=lambda: True, patience=1)
    before = tmp_path / "chatty.log.1"

    def rotated() -> bool:
        server.rotate()
        return before.exists()

    server.spawn()
    with running(server):
        wait_until(rotated)
        seen = before.stat()
        assert set(before.read_text().splitlines()) == {"a line of a log"}
        wait_until(lambda: rotated() and before.stat().st_ino == seen.st_ino and before.stat().st_mtime > seen.st_mtime)
        assert before.stat().st_size < 10_000
        wait_until(server.log.read_text, message="it writes on")
        assert "\0" not in server.log.read_text()
