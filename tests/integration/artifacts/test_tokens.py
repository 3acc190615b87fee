"""Tokens: what each role may do, in which namespace, and how much at once."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from securesystemslib.signer import CryptoSigner

from farm.app import Farm
from farm.artifacts import tokens as tokens_room
from farm.artifacts.storage import WORKERS_WRITE
from farm.builds.known_failures import today
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, new_build_id
from farm.errors import Conflict, NotAllowed, NotFound, QuotaExceeded, UsageError
from farm.extras.signing.signed_refs import issue, lasts
from farm.extras.signing.signing_keys import clock
from farm.extras.webhooks.hooks import Webhooks
from farm.jobs.state import FailureKind, Outcome
from farm.local.servers import write_private
from farm.settings import load_settings
from farm.tuning import exchange
from farm.tuning.database import TuningDatabase, device_name
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from tests.support.api_farm import ADMINS_ONLY, OPEN_TO_ALL, POOL, freeze_manifest, succeed, work
from tests.support.places import ROOT

OTHER = """\
version: 1
name: other
targets: [onnxruntime/cpu]
precisions: [fp32, bf16]
models: [{name: two, source: {path: net.onnx}, options: {level: tuned}}]
"""


def routes(url: str) -> Iterator[tuple[str, str, str]]:
    """Yield method, pattern and a path that fits it, of every route."""
    for pattern, methods in httpx.get(f"{url}/v1/openapi.json", timeout=60).json()["paths"].items():
        path = pattern.replace("{build_id}", "@latest").replace("{job_id}", "j-1").replace("{tag}", "latest")
        path = path.replace("{key}", "ab" * 32).replace("{digest}", "ab" * 32).replace("{name}", "nobody")
        for method in methods:
            yield method, pattern, path


@pytest.mark.parametrize("role", ["reader", "submitter", "admin"])
def test_no_role_does_what_only_a_higher_one_may(url: str, client: FarmClient, role: str) -> None:
    secret = client.tokens.create("somebody", role, "team")
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, timeout=30) as somebody:
        for method, pattern, path in routes(url):
            needed = "admin" if pattern in ADMINS_ONLY else "reader" if method == "get" else "submitter"
            enough = ["reader", "submitter", "admin"].index(role) >= ["reader", "submitter", "admin"].index(needed)
            answer = somebody.request(method, path)
            allowed = answer.status_code != 403
            assert allowed is (enough or pattern in OPEN_TO_ALL), (method, pattern, answer.status_code)
            assert answer.status_code < 500, (method, pattern)


ONE_TOOLCHAIN = {"/v1/toolchains/shadows", "/v1/toolchains/promote", "/v1/toolchains/rollback"}
"""Routes that need another toolchain, which is not here: they refuse for that reason, and not for the role."""


def roles() -> bytes:
    """The first roles of some farm."""
    signers = [CryptoSigner.generate_ed25519() for _ in range(3)]
    keys = {name: [signer.public_key] for name, signer in zip(("root", "targets", "server"), signers, strict=True)}
    return issue(None, signers, keys, {}, lasts(730, clock())).text()


@dataclass
class Team:
    """Builds that ended and are under way, in `main` and in `team`, and a token of each role for `team`."""

    url: str
    frozen: Frozen
    ended: dict[str, str]
    running: dict[str, str]
    tokens: dict[str, str]
    database: str
    packed: bytes
    messages: dict[str, str]

    def requests(self, namespace: str) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
        """A real request for each route that changes something, on what is the namespace's: its path, and its body."""
        submission = {**self.frozen.submission, "build_id": new_build_id()}
        content = {name: value for name, value in submission.items() if name != "build_id"}
        ended, running = f"/v1/builds/{self.ended[namespace]}", f"/v1/builds/{self.running[namespace]}"
        blob = {"digest": hashlib.sha256(secrets.token_bytes(4)).hexdigest(), "size": 4}
        token = {"name": f"made-{secrets.token_hex(4)}", "role": "reader", "namespace": namespace}
        of = "/v1/builds/{build_id}"
        database = "/v1/tuning/{pool}/{device}/{mode}"
        there = f"/v1/tuning/{self.database}"
        return {
            ("post", "/v1/plan"): ("/v1/plan", {"json": submission}),
            ("post", of): (
                f"/v1/builds/{submission['build_id']}",
                {"params": {"kept": "0" * 64}},
            ),
            ("post", "/v1/builds"): ("/v1/builds", {"json": submission}),
            ("post", f"{of}/pause"): (f"{running}/pause", {}),
            ("post", f"{of}/resume"): (f"{running}/resume", {}),
            ("post", f"{of}/retry/plan"): (f"{ended}/retry/plan", {"json": {"build_id": new_build_id()}}),
            ("post", f"{of}/retry"): (f"{ended}/retry", {"json": {"build_id": new_build_id()}}),
            ("put", "/v1/manifests/{name}"): ("/v1/manifests/demo", {"json": content}),
            ("post", "/v1/manifests/{name}/plan"): ("/v1/manifests/demo/plan", {"json": {}}),
            ("post", "/v1/manifests/{name}/builds"): ("/v1/manifests/demo/builds", {"json": {}}),
            ("delete", "/v1/manifests/{name}"): ("/v1/manifests/demo", {}),
            ("put", "/v1/refs/{tag}"): ("/v1/refs/stable", {"json": {"source": "latest"}}),
            ("delete", "/v1/refs/{tag}"): ("/v1/refs/stable", {}),
            ("post", "/v1/blobs"): ("/v1/blobs", {"json": {"blobs": [blob]}}),
            ("post", "/v1/blobs/{digest}/finish"): (f"/v1/blobs/{self.known}/finish", {"json": {"size": self.size}}),
            ("post", f"{database}/import"): (f"{there}/import", {"content": self.packed}),
            ("post", f"{database}/merge"): (f"{there}/merge", {}),
            ("post", f"{database}/prune"): (f"{there}/prune", {"params": {"everything": True}}),
            ("post", "/v1/webhooks"): (
                "/v1/webhooks",
                {"json": {"name": f"made-{secrets.token_hex(4)}", "url": "https://ci.invalid/"}},
            ),
            ("post", "/v1/webhooks/{name}/deliveries/{message}/replay"): (
                f"/v1/webhooks/spare/deliveries/{self.messages[namespace]}/replay",
                {},
            ),
            ("post", "/v1/webhooks/{name}/rotate"): ("/v1/webhooks/spare/rotate", {"json": {"overlap": 60.0}}),
            ("delete", "/v1/webhooks/{name}"): ("/v1/webhooks/spare", {}),
            ("post", "/v1/tokens"): ("/v1/tokens", {"json": token}),
            ("delete", "/v1/tokens/{name}"): (f"/v1/tokens/spare-{namespace}", {}),
            ("put", "/v1/acknowledged"): (
                "/v1/acknowledged",
                {"params": {"cell": "net"}, "json": {"kind": "time_limit", "reason": "known", "until": str(today())}},
            ),
            ("delete", "/v1/acknowledged"): ("/v1/acknowledged", {"params": {"cell": "net"}}),
            ("post", "/v1/toolchains/shadows"): (
                "/v1/toolchains/shadows",
                {"json": {"build_id": new_build_id(), "ref": "latest"}},
            ),
            ("post", "/v1/toolchains/promote"): (
                "/v1/toolchains/promote",
                {"json": {"build_id": self.ended[namespace]}},
            ),
            ("post", "/v1/toolchains/rollback"): ("/v1/toolchains/rollback", {"json": {"ref": "latest"}}),
            ("post", "/v1/roles/publish"): ("/v1/roles/publish", {"json": json.loads(roles())}),
            ("post", "/v1/roles/withdraw"): ("/v1/roles/withdraw", {}),
            ("post", "/v1/gc"): ("/v1/gc", {"params": {"dry_run": True}}),
            ("post", "/v1/history/rebuild"): ("/v1/history/rebuild", {}),
            ("post", "/v1/pools/{name}/pause"): (f"/v1/pools/{POOL.name}/pause", {}),
            ("post", "/v1/pools/{name}/resume"): (f"/v1/pools/{POOL.name}/resume", {}),
            ("post", "/v1/workers/{name}/drain"): ("/v1/workers/w1/drain", {}),
            ("post", "/v1/nodes/{name}/unfence"): ("/v1/nodes/n1/unfence", {}),
            # Last, since nothing is under way after it.
            ("post", f"{of}/cancel"): (f"{running}/cancel", {}),
        }

    @property
    def known(self) -> str:
        """A blob that is there."""
        return str(self.frozen.submission["models"]["net"]["files"][0]["digest"])

    @property
    def size(self) -> int:
        """Its size."""
        return int(self.frozen.submission["models"]["net"]["files"][0]["size"])


@pytest.fixture
def team(farm: Farm, url: str, client: FarmClient, frozen: Frozen, tmp_path: Path) -> Team:
    admin = farm.settings.api_token.get_secret_value()
    ended: dict[str, str] = {}
    messages: dict[str, str] = {}
    second = tmp_path / "second"
    second.mkdir()
    other = freeze_manifest(second, OTHER)
    device = device_name(POOL.device)
    learnt = Record(RecordStore.ONNXRUNTIME, "", "ab" * 32, '{"all/1":0.1}', RecordSource("2026-01-01T00:00:00+00:00"))

    def submit(namespace: str, what: Frozen) -> str:
        with FarmClient(url, admin, namespace=namespace) as somebody:
            return str(somebody.submit(Frozen({**what.submission, "build_id": new_build_id()}, what.files))["id"])

    for namespace in ("main", "team"):
        ended[namespace] = submit(namespace, frozen)
        work(farm, succeed(farm, namespace=namespace))
        farm.build_finisher.finish(ended[namespace])
        client.tokens.create(f"spare-{namespace}", "reader", namespace)
        Webhooks(farm).create(namespace, "spare", "https://ci.invalid/", ["build.finished"], by="admin")
        Webhooks(farm).tell(namespace, "build.finished", "b-1", {})
        (message,) = Webhooks(farm).deliveries(namespace, "spare", 1)
        messages[namespace] = message["id"]
        TuningDatabase(farm.artifacts, namespace, POOL.stem, device, "quick").commit(Snapshot.of([learnt]))
    running = {namespace: submit(namespace, other) for namespace in ended}
    tokens = {role: client.tokens.create(f"a-{role}", role, "team") for role in ("reader", "submitter", "admin")}
    farm.store.workers.probed("w1", node="n1", wrong="as a test wants it", row=0)
    empty = exchange.pack(Snapshot())
    return Team(url, frozen, ended, running, tokens, f"{POOL.stem}/{device}/quick", empty, messages)


@pytest.mark.parametrize("role", ["reader", "submitter", "admin"])
def test_no_role_does_with_a_real_body_what_only_a_higher_one_may(team: Team, role: str) -> None:
    """What is refused is refused before anything is done; what a role may do, it can."""
    requests = team.requests("team")
    changing = {(method, pattern) for method, pattern, _ in routes(team.url) if method != "get"}
    assert set(requests) == changing, "a new route needs a real request here"
    headers = {"Authorization": f"Bearer {team.tokens[role]}"}
    with httpx.Client(base_url=team.url, headers=headers, timeout=60) as somebody:
        for (method, pattern), (path, body) in requests.items():
            needed = "admin" if pattern in ADMINS_ONLY else "submitter"
            enough = ["reader", "submitter", "admin"].index(role) >= ["reader", "submitter", "admin"].index(needed)
            answer = somebody.request(method, path, **body)
            if pattern == "/v1/plan" and enough:
                accept = ("post", "/v1/builds/{build_id}")
                requests[accept] = (requests[accept][0], {"params": {"kept": answer.json()["kept"]}})
            done = answer.status_code < 300 or (pattern in ONE_TOOLCHAIN and answer.status_code in (404, 409, 422))
            assert done is enough, (method, pattern, answer.status_code, answer.text)
            assert enough or answer.status_code == 403, (method, pattern, answer.status_code)


@pytest.mark.parametrize("role", ["reader", "submitter"])
def test_no_role_does_with_a_real_body_anything_in_another_namespace(
    farm: Farm, client: FarmClient, team: Team, role: str
) -> None:
    """Neither by naming that namespace, nor by the ids of what is there."""
    before = {key: farm.artifacts.get_object(key).data for key in farm.artifacts.list_objects("ns/main/")}
    builds = {build_id: client.cells(build_id) for build_id in (team.ended["main"], team.running["main"])}
    with httpx.Client(
        base_url=team.url, headers={"Authorization": f"Bearer {team.tokens[role]}"}, timeout=60
    ) as somebody:
        for (method, pattern), (path, body) in team.requests("main").items():
            named = somebody.request(method, path, headers={"Farm-Namespace": "main"}, **body)
            assert named.status_code == 403, (method, pattern, named.status_code)
            if "{build_id}" in pattern:
                meant = somebody.request(method, path, **body)
                assert meant.status_code == (404 if role == "submitter" else 403), (method, pattern, meant.status_code)
        for method, pattern, path in routes(team.url):
            if method == "get" and "{build_id}" in pattern:
                read = somebody.get(path.replace("@latest", team.ended["main"]), params={"cell": "any"})
                assert read.status_code == 404, (pattern, read.status_code)
    assert {key: farm.artifacts.get_object(key).data for key in farm.artifacts.list_objects("ns/main/")} == before
    assert {build_id: client.cells(build_id) for build_id in builds} == builds


def test_jobs_of_other_namespaces_are_counted_and_not_named(farm: Farm, client: FarmClient, team: Team) -> None:
    assert farm.store.workers.unfence("n1")
    handed = farm.store.jobs.hand_out(POOL.name, 10)
    for job_id, attempt in handed:
        assert farm.store.jobs.claim(job_id, attempt, nonce=job_id, worker="w1", node="n1").answer == "run"
    ours = [cell["job"] for cell in client.cells(team.running["main"])]
    (worker,) = client.workers.all()
    assert sorted(worker["running"]) == sorted(job for job, _ in handed)
    assert worker["running_others"] == 0
    with FarmClient(team.url, team.tokens["reader"]) as reader:
        (worker,) = reader.workers.all()
        theirs = [cell["job"] for cell in reader.cells(team.running["team"])]
        assert sorted(worker["running"]) == sorted(theirs)
        assert worker["running_others"] == len(handed) - len(theirs) > 0
        assert not [job for job in ours if job in str(reader.workers.all())]


def test_a_token_is_for_its_namespace_alone(url: str, client: FarmClient, frozen: Frozen) -> None:
    client.submit(frozen)
    secret = client.tokens.create("pull-requests", "submitter", "pr")
    with FarmClient(url, secret) as fork:
        assert fork.builds() == []
    with (
        FarmClient(url, secret, namespace="main") as fork,
        pytest.raises(NotAllowed, match="namespace pr, not for main"),
    ):
        fork.submit(frozen)


def test_no_namespace_is_called_like_a_folder_in_which_workers_write(farm: Farm, url: str, client: FarmClient) -> None:
    """Their rights are patterns (`ns/*/artifacts/*`): all of such a namespace would be theirs where `//` is one `/`."""
    (rights,) = (
        each["Resource"]
        for each in json.loads((ROOT / "deploy/s3/worker.json").read_text())["Statement"]
        if each["Action"] == ["s3:PutObject"]
    )
    folders = {path.split("/")[3] for path in rights if "/ns/*/" in path}
    assert folders == WORKERS_WRITE
    for name in folders:
        with pytest.raises(UsageError, match=f"{name} is the name of a folder of the farm"):
            client.tokens.create("stranger", "submitter", name)
        # The administrator's own, and one of a release before.
        with (
            FarmClient(url, farm.settings.api_token.get_secret_value(), namespace=name) as admin,
            pytest.raises(UsageError, match="choose another name"),
        ):
            admin.builds()
    assert client.tokens.all() == []


def test_a_token_of_the_settings_counts_also_for_the_farm_that_runs_here(
    url: str, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tries a role on his own `farm up` has that role, in its namespace, and not the administrator's."""
    written = {"api_url": url, "api_token": "the administrator's"}
    write_private(tmp_path / "farm.json", json.dumps(written))
    monkeypatch.setenv("FARM_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("FARM_API_TOKEN", client.tokens.create("reader", "reader", "team"))
    with FarmClient.from_settings(load_settings()) as reader:
        assert reader.builds() == []
        with pytest.raises(NotAllowed, match="needs the role admin"):
            reader.tokens.all()


def test_a_revoked_token_is_refused(url: str, client: FarmClient) -> None:
    secret = client.tokens.create("leaver", "reader", "team")
    with FarmClient(url, secret, namespace="team") as leaver:
        assert leaver.builds() == []
        client.tokens.revoke("leaver")
        with pytest.raises(NotAllowed, match="does not know this token"):
            leaver.builds()
    with pytest.raises(NotFound, match="no token leaver"):
        client.tokens.revoke("leaver")


def test_a_token_that_another_server_revoked_is_refused_within_seconds(
    farm: Farm, url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_room, "REMEMBERED", 0.0)
    secret = client.tokens.create("leaver", "reader", "team")
    with FarmClient(url, secret, namespace="team") as leaver:
        assert leaver.builds() == []
        tokens_room.Tokens(farm.artifacts).revoke("leaver")
        with pytest.raises(NotAllowed, match="does not know this token"):
            leaver.builds()


def test_no_secret_is_kept(farm: Farm, client: FarmClient) -> None:
    secret = client.tokens.create("ci", "submitter", "main", max_cells=7)
    kept = [farm.artifacts.get_object(key) for key in farm.artifacts.list_objects("config/")]
    assert kept
    assert all(secret not in str(document) for document in kept)
    assert client.tokens.all() == [
        {
            "name": "ci",
            "role": "submitter",
            "namespace": "main",
            "max_cells": 7,
            "created": client.tokens.all()[0]["created"],
        }
    ]
    with pytest.raises(Conflict, match="a token ci exists already"):
        client.tokens.create("ci", "reader", "main")
    with pytest.raises(Conflict, match="a token admin exists already"):  # Its triggers would build without bounds.
        client.tokens.create("admin", "submitter", "main")


def test_a_token_has_a_bound_and_what_has_ended_counts_no_more(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    secret = client.tokens.create("ci", "submitter", "main", max_cells=2)
    (tmp_path / "other").mkdir()
    other = freeze_manifest(tmp_path / "other", OTHER)
    with FarmClient(url, secret) as ci:
        ci.submit(frozen)
        with pytest.raises(QuotaExceeded, match="the token ci may have 2 unfinished cells; 2 are under way"):
            ci.submit(other)
        assert len(ci.builds()) == 1, "nothing was made"
        work(farm)
        ci.submit(other)


def test_a_retry_is_within_the_bound_too(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    work(farm, lambda *_: Outcome.failure(FailureKind.TIME_LIMIT, "too long"))
    farm.build_finisher.finish(build_id)
    with FarmClient(url, client.tokens.create("ci", "submitter", "main", max_cells=1)) as ci:
        with pytest.raises(QuotaExceeded, match="the token ci may have 1 unfinished cells"):
            ci.retry(build_id, failed=True, new_id=new_build_id())
        assert len(ci.builds()) == 1, "nothing was made"


def test_a_namespace_has_a_bound(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    farm.builds._admission._settings = farm.settings.model_copy(update={"namespace_cells": 1})
    with pytest.raises(QuotaExceeded, match="the namespace main may have 1 unfinished cells") as refused:
        client.submit(frozen)
    assert "submit fewer cells at once" in refused.value.hint, "waiting would not help"


def test_the_command_line_makes_lists_and_revokes(
    farm: Farm, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", url)
    monkeypatch.setenv("FARM_API_TOKEN", farm.settings.api_token.get_secret_value())
    assert main(["token", "create", "ci", "--namespace", "pr", "--role", "reader", "--json"]) == 0
    # The API in this process logs the change, to the same place.
    assert '"secret": "farm_' in capsys.readouterr().out
    assert main(["token", "ls"]) == 0
    assert "reader" in capsys.readouterr().out
    assert main(["token", "revoke", "ci"]) == 0
    assert main(["token", "create", "ci", "--namespace", "My Team"]) == 2
    assert "'My Team' is not a namespace, which has to match ^[a-z0-9]" in capsys.readouterr().err
    assert main(["token", "revoke", "ci"]) == 4
