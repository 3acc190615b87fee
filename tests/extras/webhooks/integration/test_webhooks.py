"""Webhooks: what a real receiver on this machine gets, and what the farm refuses to call."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from standardwebhooks import Webhook, WebhookVerificationError

from farm.app import Farm
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.control import loops
from farm.control.loops import settle_left
from farm.errors import Conflict, NotFound, UsageError
from farm.extras.triggers import firing
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.extras.webhooks import hooks, sending
from farm.extras.webhooks.hooks import Webhooks
from farm.extras.webhooks.sending import LEASE, PAUSES, DeliveryRounds, NoAnswer, Refused, post, why_not
from farm.settings import load_settings
from tests.support.api_farm import MANIFEST, commands, finished, succeed, work
from tests.support.helpers import wait_until

LOOPBACK = ("127.0.0.0/8",)


@dataclass
class Receiver:
    """A server on this machine: what it was sent, and what it answers next (204 by default)."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.requests]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(found.answers.pop(0) if found.answers else 204)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def open_farm(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Farm:
    """The farm, whose operator allows addresses of this machine, with a clock of its own."""
    found = Farm(farm.settings.model_copy(update={"webhook_networks": LOOPBACK}))
    found.store = farm.store
    found.clock = SimpleNamespace(now=1_800_000_000.0)
    monkeypatch.setattr(found.store, "now", lambda: found.clock.now)
    return found


def told(farm: Farm, about: str = "b-1") -> str:
    """Tell of a build that ended, and return the message's id."""
    Webhooks(farm).tell("main", "build.finished", about, {"id": about, "name": "demo"})
    return Webhooks(farm).deliveries("main", "ci", 1)[0]["id"]


def last(farm: Farm) -> Any:
    return Webhooks(farm).deliveries("main", "ci", 1)[0]


def test_a_build_is_announced_if_the_control_plane_died_after_its_report(
    farm: Farm, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.webhooks.create("ci", "https://ci.example/hook")
    build_id = client.submit(frozen)["id"]
    work(farm)

    class Died(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Webhooks, "tell", dies)
        with pytest.raises(Died):
            farm.build_finisher.finish(build_id)
    farm.admission.resume()  # As the next one does first.
    settle_left(farm.store, farm.build_finisher.finish)
    assert [each["event"] for each in client.webhooks.deliveries("ci")] == ["build.finished"]
    assert client.build(build_id)["state"] == "reported"


def test_a_finished_build_is_announced_once_and_signed(
    farm: Farm, client: FarmClient, frozen: Frozen, receiver: Receiver
) -> None:
    """The library of the standard accepts it, and so does the sum that the standard describes."""
    secret = client.webhooks.create("ci", receiver.url)
    client.webhooks.create("other", receiver.url, ["trigger.failed"])
    build_id = finished(farm, client, frozen)
    farm.build_finisher.finish(build_id)
    allowed = Farm(farm.settings.model_copy(update={"webhook_networks": LOOPBACK}))
    assert [allowed.part(DeliveryRounds).go() for _ in range(2)] == [1, 0]
    ((path, headers, body),) = receiver.requests
    assert (path, headers["content-type"]) == ("/hook", "application/json")
    document = Webhook(secret).verify(body, headers)
    assert (document["type"], document["data"]["id"]) == ("build.finished", build_id)
    assert document["data"]["verdict"]["exit_code"] == 0
    assert document["data"]["page"] == f"/ui/ns/main/builds/{build_id}"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    mac = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body + b" ", headers)
    (message,) = client.webhooks.deliveries("ci")
    assert (message["state"], [each["status"] for each in message["attempts"]]) == ("delivered", [204])
    assert "secret" not in str(client.webhooks.all())


def test_a_rotated_webhook_is_signed_with_both_secrets_for_a_while(open_farm: Farm, receiver: Receiver) -> None:
    known = Webhooks(open_farm)
    secrets_ = [known.create("main", "ci", receiver.url, ["build.finished"], by="me")["secret"]]
    open_farm.clock.now = time.time()  # The library refuses old messages.
    secrets_.append(known.rotate("main", "ci", 3600)["secret"])
    assert known.list("main")[0]["old_signs_until"] == open_farm.clock.now + 3600
    told(open_farm)
    assert open_farm.part(DeliveryRounds).go() == 1
    _, headers, body = receiver.requests[-1]
    assert len(headers["webhook-signature"].split()) == 2
    for secret in secrets_:
        assert Webhook(secret).verify(body, headers)
    open_farm.clock.now += 3601
    told(open_farm, "b-2")
    assert open_farm.part(DeliveryRounds).go() == 1
    assert " " not in receiver.requests[-1][1]["webhook-signature"]

    for _ in range(hooks.MOST_SECRETS - 1):
        known.rotate("main", "ci", 3600)
    with pytest.raises(Conflict, match="4 secrets of ci sign already"):
        known.rotate("main", "ci", 3600)
    leaked = known.rotate("main", "ci", 0)["secret"]
    assert hooks.signing_secrets(known.find("main", "ci"), open_farm.clock.now) == [leaked]
    assert known.list("main")[0]["old_signs_until"] is None
    with pytest.raises(NotFound):
        known.rotate("main", "gone", 3600)


def test_what_is_refused_is_tried_again_later_with_the_same_id(open_farm: Farm, receiver: Receiver) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    receiver.answers = [500, 302, 200]
    message = told(open_farm)
    assert [open_farm.part(DeliveryRounds).go() for _ in range(2)] == [0, 0]
    assert 0.8 * PAUSES[0] < last(open_farm)["next"] - open_farm.clock.now < 1.3 * PAUSES[0]
    for pause, delivered in ((PAUSES[0], 0), (PAUSES[1], 1)):
        open_farm.clock.now += 1.3 * pause
        assert open_farm.part(DeliveryRounds).go() == delivered
    assert receiver.ids == [message] * 3
    assert {path for path, _, _ in receiver.requests} == {"/hook"}, "no redirect was followed"
    assert len({headers["webhook-timestamp"] for _, headers, _ in receiver.requests}) == 3
    assert [each["error"] for each in last(open_farm)["attempts"]] == [
        "it answered 500",
        "it answered 302, and redirects are not followed",
        "",
    ]
    Webhooks(open_farm).replay("main", "ci", message)
    assert [open_farm.part(DeliveryRounds).go() for _ in range(2)] == [1, 0]
    assert receiver.ids == [message] * 4
    with pytest.raises(NotFound, match="no delivery"):
        Webhooks(open_farm).replay("main", "ci", "msg_" + "0" * 32)


def test_a_message_that_nobody_takes_fails_in_the_end(open_farm: Farm, receiver: Receiver) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    receiver.answers = [503] * 50
    told(open_farm)
    while last(open_farm)["state"] == "waiting":
        assert open_farm.part(DeliveryRounds).go() == 0
        open_farm.clock.now += 100_000
    assert len(receiver.requests) == len(PAUSES) + 1
    assert last(open_farm)["state"] == "failed"
    assert list(Webhooks(open_farm).due()) == []


def test_a_receiver_that_is_gone_gets_nothing_more(open_farm: Farm, receiver: Receiver) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    receiver.answers = [410]
    told(open_farm)
    assert open_farm.part(DeliveryRounds).go() == 0
    assert last(open_farm)["state"] == "failed"
    assert Webhooks(open_farm).list("main")[0]["disabled"] == "it answered 410 Gone"
    told(open_farm, "b-2")
    assert [each["body"] for each in Webhooks(open_farm).deliveries("main", "ci", 9)].count("b-2") == 0
    Webhooks(open_farm).remove("main", "ci")
    assert not list(open_farm.artifacts.list_objects("config/"))


def test_what_waits_for_a_webhook_whose_removal_was_cut_short_is_forgotten(open_farm: Farm, receiver: Receiver) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    told(open_farm)
    open_farm.artifacts.delete_object("config/webhooks/main/ci.json")  # What a removal does first.
    assert open_farm.part(DeliveryRounds).go() == 0
    assert not list(open_farm.artifacts.list_objects("config/"))


def test_many_control_planes_make_each_attempt_once_also_after_redis_was_lost(
    open_farm: Farm, receiver: Receiver, redis_url: str
) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    for number in range(5):
        told(open_farm, f"b-{number}")
    messages = [each["id"] for each in Webhooks(open_farm).deliveries("main", "ci", 9)]
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    planes = [Farm(open_farm.settings) for _ in range(3)]
    for plane in planes:
        plane.store = open_farm.store
    with ThreadPoolExecutor(len(planes)) as threads:
        assert sum(threads.map(lambda plane: plane.part(DeliveryRounds).go(), planes)) == 5
    assert sorted(receiver.ids) == sorted(messages)


def test_a_message_whose_sender_died_is_sent_by_another(open_farm: Farm, receiver: Receiver) -> None:
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    message = told(open_farm)
    assert isinstance(Webhooks(open_farm).claim("main", "ci", message, LEASE), tuple)
    assert open_farm.part(DeliveryRounds).go() == 0, "it may be at work still"
    open_farm.clock.now += LEASE + 1
    assert open_farm.part(DeliveryRounds).go() == 1
    assert receiver.ids == [message]


def test_the_log_keeps_the_newest(open_farm: Farm, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "KEPT", 3)
    Webhooks(open_farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    for number in range(5):
        told(open_farm, f"b-{number}")
        open_farm.part(DeliveryRounds).go()
        open_farm.clock.now += 1
    assert len(receiver.requests) == 5
    assert len(Webhooks(open_farm).deliveries("main", "ci", 9)) <= 4


def test_the_control_plane_builds_and_tells_by_itself(
    farm: Farm, client: FarmClient, frozen: Frozen, receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
    s3_client: Any, s3_settings: dict[str, str],
) -> None:  # fmt: skip
    """From an object that changes to the message that its build has ended; the test is only the worker."""
    for module, name in ((firing, "FIRE_SECONDS"), (sending, "DELIVER_SECONDS"), (loops, "SWEEP_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    bucket = s3_settings["s3_bucket"]
    secret = client.webhooks.create("ci", receiver.url)
    text = MANIFEST + f"triggers: [{{source: s3://{bucket}/incoming/ready}}]\n"
    s3_client.put_object(Bucket=bucket, Key="incoming/ready", Body=b"one")
    client.manifests.push(Frozen({**frozen.submission, "manifest": text}, frozen.files))
    allowed = {"webhook_networks": LOOPBACK, "s3_sources": (bucket,)}
    plane, stop = Farm(farm.settings.model_copy(update=allowed)), threading.Event()
    monkeypatch.setattr(loops.broker, "dispatch", lambda *_: None)  # Its messages are for Celery's workers.
    thread = threading.Thread(target=loops.run_loops, args=(plane, stop))
    thread.start()
    try:
        wait_until(
            lambda: dict(plane.part(StoredManifests).heads("main"))["demo"]["triggers"][0]["seen"],
            message="it has looked",
        )
        s3_client.put_object(Bucket=bucket, Key="incoming/ready", Body=b"two")
        (build,) = wait_until(client.builds, message="the trigger has fired")
        wait_until(lambda: run_handed(farm, build["id"]), message="its jobs have ended")
        wait_until(lambda: receiver.requests, message="the receiver was asked")
    finally:
        stop.set()
        thread.join()
    ((_, headers, body),) = receiver.requests
    data = Webhook(secret).verify(body, headers)["data"]
    assert (data["id"], data["labels"]) == (build["id"], {"trigger": "source", "manifest": "demo@1"})
    assert data["verdict"]["exit_code"] == 0


def run_handed(farm: Farm, build_id: str) -> bool:
    """Run what the dispatcher has handed out, as a worker does; return whether all cells have ended."""
    cells = farm.build_reader.cells("main", build_id)
    for cell in cells:
        if cell["state"] == "queued" and cell["job"]:
            claim = farm.store.jobs.claim(cell["job"], 1, nonce=secrets.token_hex(4), worker="w1", node="n1")
            if claim.answer == "run":
                made = succeed(farm)(cell["job"], claim.order, claim.key)
                assert farm.store.jobs.finish(cell["job"], claim.token, made) == "ok"
    return len(cells) == 2 and all(cell["state"] == "succeeded" for cell in cells)


# --- what is not called ---------------------------------------------------------------------------------------------


def test_an_address_of_this_machine_is_not_called_unless_the_operator_allows_it(farm: Farm, receiver: Receiver) -> None:
    Webhooks(farm).create("main", "ci", receiver.url, ["build.finished"], by="me")
    told(farm)
    assert farm.part(DeliveryRounds).go() == 0
    assert "127.0.0.1 is not a public address" in last(farm)["attempts"][0]["error"]
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("127.0.0.1", True), ("10.0.0.1", True), ("192.168.1.1", True), ("172.16.0.1", True), ("100.64.0.1", True),
        ("169.254.169.254", True), ("0.0.0.0", True), ("224.0.0.1", True), ("255.255.255.255", True), ("::1", True),
        ("::", True), ("fe80::1", True), ("fc00::1", True), ("ff02::1", True), ("::ffff:127.0.0.1", True),
        ("::127.0.0.1", True), ("64:ff9b::7f00:1", True), ("64:ff9b::a9fe:a9fe", True), ("2002:7f00:1::", True),
        ("2001:0:0:0:0:0:80ff:fffe", True), ("8.8.8.8", False), ("2606:4700::1111", False), ("64:ff9b::808:808", False),
        ("::ffff:8.8.8.8", False), ("fec0::1", True), ("3fff::1", True), ("3fff:fff:ffff::1", True),
        ("3fff:1000::1", False), ("2001:db8::1", True), ("64:ff9b:1::808:808", True),
        ("5f00::1", True), ("4000::1", True),
    ],
)  # fmt: skip
def test_only_public_addresses_are_called(address: str, refused: bool) -> None:
    assert bool(why_not(address, (), plain=False)) is refused
    assert why_not(address, (), plain=True), "never without TLS"
    assert why_not("::ffff:127.0.0.1", LOOPBACK, plain=True) == ""


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let names lead to other addresses each time they are asked for; return the names that were asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    stand_in = SimpleNamespace(getaddrinfo=getaddrinfo, SOCK_STREAM=socket.SOCK_STREAM)
    monkeypatch.setattr(sending, "socket", stand_in)
    return asked


def test_a_name_is_asked_for_once_and_the_checked_address_is_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: what the name leads to at the second question is never used."""
    port = receiver.url.rpartition(":")[2].partition("/")[0]
    # First a documentation address, which the operator allows here so that it is called; then this machine.
    asked = resolving(monkeypatch, ["192.0.2.1"], ["127.0.0.1"])
    with pytest.raises(NoAnswer):
        post(f"http://evil.example:{port}/hook", {}, b"{}", ("192.0.2.0/24",), seconds=0.5)
    assert (asked, receiver.requests) == (["evil.example"], [])
    asked = resolving(monkeypatch, ["127.0.0.1"], ["192.0.2.1"])
    assert post(f"http://good.example:{port}/hook", {"Host": f"good.example:{port}"}, b"{}", LOOPBACK) == 204
    assert len(asked) == len(receiver.requests) == 1


def test_a_name_that_leads_to_one_private_address_is_not_called_at_all(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.url.rpartition(":")[2].partition("/")[0]
    resolving(monkeypatch, ["8.8.8.8", "127.0.0.1"])
    with pytest.raises(Refused, match=r"evil\.example: 127\.0\.0\.1 is not a public address"):
        post(f"https://evil.example:{port}/", {}, b"{}", ())
    assert receiver.requests == []


@pytest.mark.parametrize("sends", [b"HTTP/1.1 200 OK\r\nx: ", b""])
def test_an_answer_that_never_ends_is_left(sends: bytes) -> None:
    """In drops that come just often enough, and in a flood of headers."""
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            try:
                connection.sendall(sends or b"HTTP/1.1 200 OK\r\n")
                while not done.is_set():
                    connection.sendall(b"a" if sends else b"x: " + b"y" * 1000 + b"\r\n")
                    done.wait(0.01 if sends else 0)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(NoAnswer):
            post(f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, b"{}", LOOPBACK, seconds=0.5)
        done.set()
        # On a busy machine the time may have been up before it was called.
        socket.create_connection(listener.getsockname()).close()
        thread.join()


def test_what_cannot_be_a_webhook_is_refused(farm: Farm) -> None:
    create: Callable[..., Any] = Webhooks(farm).create
    wrong = ("ftp://ci.example/", "https://", "https://[::1/", "https://ci.example:99999/")
    for url in (*wrong, "https://user:password@ci.example/", "https://ci.example/#x"):
        with pytest.raises(UsageError, match="is not the address of a webhook"):
            create("main", "ci", url, ["build.finished"], by="me")
    create("main", "ci", "https://ci.example/", ["build.finished"], by="me")
    with pytest.raises(Conflict, match="a webhook ci exists already"):
        create("main", "ci", "https://ci.example/", ["build.finished"], by="me")
    with pytest.raises(UsageError, match="webhook_networks"):
        load_settings({"FARM_WEBHOOK_NETWORKS": "10.0.0.0/33"})


def test_commands(
    farm: Farm, client: FarmClient, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with commands(farm, url, tmp_path, monkeypatch):

        def said(*words: str, code: int = 0) -> str:
            assert main(["webhook", *words]) == code
            return capsys.readouterr().out

        assert said("add", "ci", "https://ci.invalid/farm").startswith("whsec_")
        assert "https://ci.invalid/farm" in said("ls")
        message = told(farm)
        farm.part(DeliveryRounds).go()
        shown = said("log", "ci")
        assert message in shown
        assert "ci.invalid is not known" in shown
        assert json.loads(said("log", "ci", "--json"))["items"][0]["id"] == message
        assert said("replay", "ci", message) == f"{message} is sent again\n"
        assert said("rm", "ci") == "ci is removed\n"
        said("log", "ci", code=4)
