"""The systemd units, started by a real systemd: what they may do there, and that they work, come back and stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from farm.files import shipped_users
from farm.local import servers
from farm.settings import load_settings
from farm.store import Store
from tests.chaos.network import Network
from tests.deploy.systemd_machine import Machine, missing, systemd_machine
from tests.support.api_farm import MANIFEST, freeze_manifest
from tests.support.farm_command import Command, command
from tests.support.helpers import wait_until
from tests.support.places import ROOT

SERVE, WORKER = "farm-serve.service", "farm-worker@cpu.service"
TOKEN = "administrators-token"
Started = tuple[Machine, Command]
"""A machine with both units, and `farm` as its users have it."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("machine")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network("machine"))
        except OSError as error:
            pytest.skip(f"this process may not make hosts: {error}")
        stack.enter_context(network.on("machine"))
        roles = {role: (ROOT / f"deploy/s3/{role}.json").read_text() for role in ("serve", "worker")}
        users = {
            "identities": [
                {"name": role, "credentials": [{"accessKey": role, "secretKey": f"{role}s"}], "policyNames": [role]}
                for role in roles
            ],
            "policies": [{"name": role, "content": text.replace("BUCKET", "farm")} for role, text in roles.items()],
        }
        weed = servers.start_weed(folder / "weed", "admin", "admins", bucket="farm", users=users)
        stack.callback(weed.stop)
        valkey = servers.start_valkey(folder / "valkey", "admins")
        stack.callback(valkey.stop)
        store = Store.connect(load_settings({}, redis_url=valkey.url))
        passwords, _ = store.make_users(shipped_users())
        store.close()
        named = {"farm": {"FARM_S3_ENDPOINT": weed.url, "FARM_S3_BUCKET": "farm"}}
        for role in roles:
            user = f"farm-{role}"
            url = valkey.url.replace("//:admins@", f"//{user}:{passwords[user]}@")
            named[role] = {"FARM_REDIS_URL": url, "FARM_S3_ACCESS_KEY": role, "FARM_S3_SECRET_KEY": f"{role}s"}
        named["serve"]["FARM_API_TOKEN"] = TOKEN
        named["worker-cpu"] = {"WORKER_OPTIONS": "--only cpu", "FARM_CPU_SLOTS": "1"}
        etc = folder / "etc"
        servers._make_certificate(etc, servers.HOST)
        etc.chmod(0o755)
        for old, new in {"certificate.pem": "farm.pem", "key.pem": "farm.key"}.items():
            (etc / old).rename(etc / new)
        for name, values in named.items():
            servers.write_private(etc / f"{name}.env", "".join(f"{key}={value}\n" for key, value in values.items()))
        machine = stack.enter_context(systemd_machine(folder))
        machine("systemctl", "start", SERVE, WORKER)
        (folder / "user").mkdir()
        user = command(
            folder / "user",
            FARM_API_URL=f"https://{servers.HOST}:8080",
            FARM_API_TOKEN=TOKEN,
            SSL_CERT_FILE=str(etc / "farm.pem"),
        )
        try:
            wait_until(lambda: at_work(user), 120, "a worker takes jobs")
        except AssertionError:
            print(machine("journalctl", "--no-pager", "--unit", SERVE, "--unit", WORKER))
            raise
        yield machine, user


def at_work(user: Command) -> bool:
    """Whether a worker takes jobs, and none says why it does not."""
    done = user("ls", "workers", "--json")
    return done.returncode == 0 and bool(done.stdout.count('"pools"')) and '"fenced": ""' in done.stdout


def build(user: Command, name: str) -> int:
    """Submit a small model and wait for its programs; return how many there are."""
    folder = user.folder / name
    folder.mkdir()
    freeze_manifest(folder, MANIFEST.replace("demo", name))
    done = user("submit", f"{name}/farm.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.count("succeeded")


def test_a_build_passes_and_systemd_finds_little_exposed(started: Started) -> None:
    machine, user = started
    assert build(user, "first")
    for unit, most in {SERVE: 25, WORKER: 30}.items():
        machine("systemd-analyze", "security", f"--threshold={most}", "--no-pager", unit)
        assert machine.shown(unit, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_a_service_has_no_rights_and_no_keys_of_the_other(started: Started) -> None:
    machine, _ = started
    for unit, other in {SERVE: "worker", WORKER: "serve"}.items():
        service = machine.shown(unit, "MainPID", "User")
        status = machine("cat", f"/proc/{service['MainPID']}/status")
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
            assert line in status
        as_it = ("setpriv", f"--reuid={service['User']}", f"--regid={service['User']}", "--clear-groups")
        for path in (f"/etc/farm/{other}.env", "/etc/farm/farm.key", "/var/lib/farm/serve", "/var/lib/farm/worker-cpu"):
            mine = path.startswith(f"/var/lib/farm/{'serve' if unit == SERVE else 'worker'}")
            said = machine(*as_it, "ls" if path.startswith("/var") else "cat", path, check=False)
            assert ("Permission denied" in said) != mine, path


def test_a_service_that_is_killed_comes_back_and_works(started: Started) -> None:
    machine, user = started
    for unit in (SERVE, WORKER):
        machine("systemctl", "kill", "--signal=KILL", unit)
        wait_until(lambda unit=unit: machine.shown(unit, "NRestarts")["NRestarts"] == "1", message=f"{unit} is back")
    wait_until(lambda: at_work(user), 120, "a worker takes jobs")
    assert build(user, "second")


def test_a_service_that_is_stopped_ends_by_itself(started: Started) -> None:
    machine, _ = started
    for unit in (WORKER, SERVE):
        machine("systemctl", "stop", unit)
        found = machine.shown(unit, "ActiveState", "Result", "ExecMainStatus")
        assert found == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}


def test_a_certificate_that_the_service_may_not_read_is_named(started: Started) -> None:
    """As where mounts are not shared, which bring systemd's credentials: it was called a bug of the farm."""
    machine, _ = started
    closed = "/var/lib/farm/worker-cpu/farm.pem"
    serve = f"/opt/farm/bin/farm serve --host 0.0.0.0 --certificate {closed} --key {closed}"
    as_it = "HOME=/tmp FARM_DATA_DIR=/tmp/serve setpriv --reuid=farm-serve --regid=farm-serve --clear-groups"
    said = machine("bash", "-c", f"set -a; . /etc/farm/farm.env; . /etc/farm/serve.env; {as_it} {serve}", check=False)
    assert f"there is no file {closed} that this user may read" in said
