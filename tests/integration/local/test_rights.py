"""The rights that `deploy/redis` and `deploy/s3` give to each role: enough for its work, and no more."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from botocore.exceptions import ClientError
from pydantic import SecretStr

from farm.artifacts import planned_orders
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import blob_key, sidecar_key
from farm.cli import main
from farm.client.storage_client import StorageClient
from farm.errors import StorageUnavailable, UsageError
from farm.extras.signing.signing_keys import new_key
from farm.extras.signing.trust import policy_of_keys
from farm.extras.signing.verifying import Trust
from farm.local import servers
from farm.settings import Settings
from tests.chaos.rig import Rig
from tests.support.helpers import wait_until
from tests.support.places import ROOT

ROLES = ("serve", "worker", "reader")
USERS = {
    name: rules
    for line in (ROOT / "deploy/redis/users.acl").read_text().splitlines()
    for _, name, *rules in [line.split()]
}
WORKER_SCRIPTS = ("claim", "finish", "heartbeat", "leave", "probed", "register", "renew", "worker_died")
"""The scripts that a worker node runs."""
BUCKET = "farm"


def policy(role: str) -> str:
    return (ROOT / f"deploy/s3/{role}.json").read_text().replace("BUCKET", BUCKET)


class Rights:
    """A farm whose roles have the rights of `deploy`, and no others; a build of it has compiled a real model."""

    def __init__(self, rig: Rig, weed: servers.Server) -> None:
        self.rig = rig
        self.weed = weed
        # Who has a key signs, which is part of a role's work.
        self.public = new_key("farm", rig.settings.data_dir)[1]
        self.admin = rig.settings.model_copy(update={"signing_key": str(self.public.with_suffix(".key"))})
        for role in ROLES:
            user = f"farm-{role}"
            rig.raw.execute_command("ACL", "SETUSER", user, "reset", *USERS[user], f">{role}-password")
        rig.settings = self.settings("serve")
        client = self.client = rig.serve()
        rig.settings = self.settings("worker")
        rig.node(1)
        self.build = rig.submit(client, 1)
        wait_until(lambda: client.build(self.build)["state"] == "reported")
        self.cells = client.cells(self.build)
        self.denied = rig.raw.execute_command("ACL", "LOG")

    def settings(self, role: str) -> Settings:
        secret = {
            "redis_url": self.rig.valkey.url.replace("//:", f"//farm-{role}:").replace(
                self._password, f"{role}-password"
            ),
            "s3_access_key": f"{role}-key",
            "s3_secret_key": f"{role}-secret",
        }
        return self.admin.model_copy(update={name: SecretStr(value) for name, value in secret.items()})

    @property
    def _password(self) -> str:
        return self.rig.valkey.url.partition("//:")[2].partition("@")[0]

    def redis(self, role: str) -> redis.Redis:
        return redis.Redis.from_url(self.settings(role).redis_url.get_secret_value(), decode_responses=True)

    def storage(self, role: str) -> S3Store:
        return S3Store.from_settings(self.settings(role)).with_patience(0)


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    folder, data = tmp_path_factory.mktemp("rights"), tmp_path_factory.mktemp("s3")
    users = {
        "identities": [
            {
                "name": f"farm-{role}",
                "credentials": [{"accessKey": f"{role}-key", "secretKey": f"{role}-secret"}],
                "policyNames": [role],
            }
            for role in ROLES
        ]
        # A public URL: who signs nothing may do what a reader may.
        + [{"name": "anonymous", "policyNames": ["reader"]}],
        "policies": [{"name": role, "content": policy(role)} for role in ROLES],
    }
    weed = servers.start_weed(data, "admin", "admin-secret", bucket=BUCKET, users=users)
    try:
        place = {
            "s3_endpoint": weed.url,
            "s3_bucket": BUCKET,
            "s3_access_key": "admin",
            "s3_secret_key": "admin-secret",
        }
        with Rig(folder, **place) as rig:
            yield Rights(rig, weed)
    finally:
        weed.stop()


def test_each_role_can_do_its_work(rights: Rights) -> None:
    assert [(cell["state"], cell["message"]) for cell in rights.cells] == [("succeeded", "")]
    key = rights.cells[0]["key"]
    text = rights.storage("reader").get_object(sidecar_key("main", key)).data
    found = rights.storage("reader").statements(["main"], key)
    judged = Trust(policy_of_keys([rights.public], "main")).judge(text, found)
    assert [check.name for check in judged.checks] == ["provenance", "test-results", "test-results"]
    # Both look at settings of the server if they may; they would hold its password.
    assert {(entry["object"], entry["reason"]) for entry in rights.denied} == {("config|get", "command")}


def test_a_role_may_run_what_its_scripts_do() -> None:
    """Also what that build did not do: an outage, a retry, a lost worker."""
    scripts = {path.stem: path.read_text() for path in (ROOT / "farm/store/lua").glob("*.lua")}
    shared = [name for name in scripts if name.startswith("_")]
    for user, names in (("farm-serve", scripts), ("farm-worker", (*shared, *WORKER_SCRIPTS))):
        used = {word.lower() for name in names for word in re.findall(r'\bcall\("([A-Z]+)"', scripts[name])}
        assert len(used) > 20
        assert used - {rule.removeprefix("+") for rule in USERS[user]} == set()
    worker = [rule.partition("~{farm}:")[2].removesuffix(":*") for rule in USERS["farm-worker"]]
    keys = {word for name in (*shared, *WORKER_SCRIPTS) for word in re.findall(r'\bkey\("([a-z]+)"', scripts[name])}
    assert keys - set(worker) == set()


FOR_NOBODY: dict[str, tuple[str, ...]] = {
    "remove everything": ("FLUSHALL",),
    "remove a database": ("FLUSHDB",),
    "read settings, and the password in them": ("CONFIG", "GET", "requirepass"),
    "write a file anywhere": ("CONFIG", "SET", "dir", "/"),
    "see all keys": ("KEYS", "*"),
    "read a foreign key": ("GET", "another"),
    "write a foreign key": ("SET", "another", "x"),
    "write a foreign key by a script": ("EVAL", "return redis.call('SET', 'another', 'x')", "0"),
    "see who may do what": ("ACL", "LIST"),
    "see other clients": ("CLIENT", "LIST"),
    "end other clients": ("CLIENT", "KILL", "TYPE", "normal"),
    "see what others send": ("MONITOR",),
    "see slow commands": ("SLOWLOG", "GET"),
    "listen": ("SUBSCRIBE", "x"),
    "send its data elsewhere": ("REPLICAOF", "127.0.0.1", "1"),
    "load code": ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() end)"),
    "write a key for another server": ("MIGRATE", "127.0.0.1", "1", "{farm}:epoch", "0", "10"),
    "stop it": ("SHUTDOWN", "NOSAVE"),
}
FOR_THE_CONTROL_PLANE_ALONE: dict[str, tuple[str, ...]] = {
    "go through all keys": ("SCAN", "0"),
    "become the control plane": ("SET", "{farm}:leader", "me"),
    "begin a new store": ("DEL", "{farm}:epoch"),
    "pause a pool": ("SADD", "{farm}:paused", "pool"),
    "name a namespace": ("SADD", "{farm}:namespaces", "other"),
    "forget builds": ("DEL", "{farm}:builds:main"),
    "do so by a script": ("EVAL", "return redis.call('DEL', '{farm}:builds:main')", "0"),
}
REFUSED = [(role, name, words) for role in ROLES for name, words in FOR_NOBODY.items()] + [
    (role, name, words) for role in ("worker", "reader") for name, words in FOR_THE_CONTROL_PLANE_ALONE.items()
]


@pytest.mark.parametrize(
    ("role", "words"), [pytest.param(role, words, id=f"{role}: {name}") for role, name, words in REFUSED]
)
def test_no_role_does_to_redis_what_is_not_its_work(rights: Rights, role: str, words: tuple[str, ...]) -> None:
    with rights.redis(role) as connection, pytest.raises(redis.ResponseError, match=r"(?i)permission"):
        connection.execute_command(*words)


def test_a_reader_reads(rights: Rights) -> None:
    with rights.redis("reader") as connection:
        assert connection.zcard("{farm}:builds:main") == 1
    assert rights.storage("reader").get_object(REF)
    assert list(rights.storage("reader").list_objects("ns/main/builds/"))


@pytest.fixture
def alone(rights: Rights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands that know object storage, and no farm's API."""
    monkeypatch.chdir(tmp_path)
    settings = rights.settings("reader")
    for name in ("s3_endpoint", "s3_access_key", "s3_secret_key"):
        value = getattr(settings, name)
        monkeypatch.setenv(f"FARM_{name.upper()}", value if isinstance(value, str) else value.get_secret_value())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("by", ["keys of a reader", "a public URL"])
def test_a_program_is_fetched_without_the_api(
    rights: Rights, alone: Path, by: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tag and by build; it is listed and inspected, too, also by another namespace, which has no ref of its own."""
    storage = f"s3://{BUCKET}" if by.startswith("keys") else f"{rights.weed.url}/{BUCKET}"
    cell = rights.cells[0]
    assert cell["facts"]
    wanted = ["-t", cell["target"], "-p", cell["precision"], "-s", cell["shape"], "--json", "--from", storage]
    for ref in ("", f"@{rights.build}"):
        assert main(["fetch", f"{cell['model']}{ref}", *wanted, "-o", "out"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["key"] == cell["facts"]["key"]
        content = (alone / found["program"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == cell["facts"]["program"]["digest"]
        assert json.loads((alone / found["sidecar"]).read_text())["key"] == cell["facts"]["key"]
    for absent in ("net@nobody", "net@b-0123456789abcdef"):
        assert main(["fetch", absent, *wanted, "-o", "out"]) == 4
    assert main(["fetch", "net@b-01", *wanted, "-o", "out"]) == 2
    assert "its whole id" in capsys.readouterr().err
    for namespace in ("main", "team"):
        monkeypatch.setenv("FARM_NAMESPACE", namespace)
        assert main(["ls", cell["model"], "--from", storage, "--json"]) == 0
        assert cell["identifier"] in {each["identifier"] for each in json.loads(capsys.readouterr().out)["items"]}
        assert main(["inspect", cell["identifier"], "--from", storage]) == 0
        assert cell["facts"]["key"][:16] in capsys.readouterr().out
    assert main(["ls", "workers", "--from", storage]) == 2
    assert "for the farm's API" in capsys.readouterr().err


def test_what_storage_alone_cannot_do_is_said(rights: Rights) -> None:
    with StorageClient.below(f"{rights.weed.url}/{BUCKET}") as client:
        with pytest.raises(UsageError, match="for the farm's API"):
            client.builds()
        with pytest.raises(UsageError, match="for the farm's API"):
            next(client.watch(rights.build))
    with pytest.raises(UsageError, match="not an address of object storage"):
        StorageClient.below("ftp://storage.example")


def test_the_documented_commands_fetch_from_a_public_url(rights: Rights, alone: Path) -> None:
    if missing := [name for name in ("bash", "curl", "jq", "sha256sum") if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    page = (ROOT / "docs/object-storage.md").read_text()
    (script,) = re.findall(r"```sh\n(.+?)```", page.partition("## Fetch an artifact")[2].partition("\n## ")[0], re.S)
    cell = rights.cells[0]
    assert cell["facts"]
    environ = {**os.environ, "URL": f"{rights.weed.url}/{BUCKET}", "CELL": cell["identifier"]}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environ, cwd=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name = cell["facts"]["program"]["path"]
    assert done.stdout.strip() == f"{name}: OK"
    content = (alone / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == cell["facts"]["program"]["digest"]
    assert main(["inspect", name, "--json"]) == 0


TOKEN = "config/tokens/" + "ab" * 32 + ".json"
REF = "ns/main/refs/latest.json"
STORAGE: dict[str, tuple[tuple[str, ...], Callable[[S3Store], Any]]] = {
    "make itself administrator": (("worker", "reader"), lambda store: store.put_object(TOKEN, b"{}")),
    "read tokens": (("worker", "reader"), lambda store: store.get_object(TOKEN)),
    "move a ref": (("worker", "reader"), lambda store: store.put_object(REF, b"{}")),
    "delete a ref": (("worker", "reader"), lambda store: store.delete_object(REF)),
    "change a build": (("worker", "reader"), lambda store: store.put_object("ns/main/builds/b-1/report.json", b"{}")),
    "delete an artifact": (("worker", "reader"), lambda store: store.delete_object("ns/main/artifacts/ab/x.json")),
    "move a head": (("worker", "reader"), lambda store: store.put_object("ns/main/tuning/p/d/m/head.json", b"{}")),
    "let a blob go": (("worker", "reader"), lambda store: store.put_object("gc/" + "ab" * 32, b"{}")),
    "write a blob": (("reader",), lambda store: store.put_blob_bytes(b"blob")),
    "write elsewhere": (ROLES, lambda store: store.put_object("another/object", b"")),
    "read elsewhere": (ROLES, lambda store: store.get_object("another/object")),
    "make a bucket": (ROLES, lambda store: store.s3.create_bucket(Bucket="another")),
    "remove the bucket": (ROLES, lambda store: store.s3.delete_bucket(Bucket=BUCKET)),
    "open the bucket to all": (
        ROLES,
        lambda store: store.s3.put_bucket_acl(Bucket=BUCKET, ACL="public-read-write"),
    ),
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for name, (roles, _) in STORAGE.items() for role in roles])
def test_no_role_does_to_storage_what_is_not_its_work(rights: Rights, role: str, name: str) -> None:
    with pytest.raises((StorageUnavailable, ClientError), match="AccessDenied"):
        STORAGE[name][1](rights.storage(role))


def test_a_worker_keeps_large_blobs_and_puts_damaged_ones_aside(rights: Rights, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"large" * (4 << 20))
    store = rights.storage("worker")
    digest, size = store.put_blob_file(tmp_path / "large")
    assert store.has_blob(digest, size)
    rights.rig.artifacts.put_object(blob_key(digest), b"damaged")
    assert not store.verify_blob(digest)
    assert not store.has_blob(digest)


def _other_spec(order: dict[str, Any]) -> dict[str, Any]:
    return {**order, "spec": {**order["spec"], "options": {**order["spec"]["options"], "level": "basic"}}}


def test_a_worker_that_was_taken_over_orders_nothing_about_others(rights: Rights) -> None:
    """Its user may write the hashes of jobs; a node that claims them compiles nothing of it."""
    (pool,) = [pool["name"] for pool in rights.client.pools.all() if pool["live_workers"]]
    rights.client.pools.pause(pool)
    build = rights.rig.submit(rights.client, 5, salt="orders")
    first, second, third, fourth, kept = (cell["job"] for cell in rights.client.cells(build))
    with rights.redis("worker") as worker:
        order = json.loads(worker.hget(f"{{farm}}:job:{first}", "order") or "")
        worker.hset(f"{{farm}}:job:{first}", "order", json.dumps(_other_spec(order)))
        worker.hset(f"{{farm}}:job:{second}", "namespace", "other")
        worker.hset(f"{{farm}}:job:{third}", "build", rights.build)
        # A list of its own, where it may write.
        elsewhere, (key, text) = "main/artifacts/x", worker.hmget(f"{{farm}}:job:{fourth}", "key", "order")
        planned_orders.keep(rights.storage("worker"), elsewhere, build, [(key, json.loads(text))])
        worker.hset(f"{{farm}}:job:{fourth}", "namespace", elsewhere)
    rights.client.pools.resume(pool)
    wait_until(lambda: rights.client.build(build)["state"] == "reported", 120)
    ended = {cell["job"]: (cell["state"], cell["kind"]) for cell in rights.client.cells(build)}
    refused = ("failed", "unplanned")
    assert ended == {first: refused, second: refused, third: refused, fourth: refused, kept: ("succeeded", None)}
    with pytest.raises(StorageUnavailable, match="AccessDenied"):
        rights.storage("worker").put_object(f"ns/main/builds/{build}/orders", b"")
