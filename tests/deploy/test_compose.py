"""A farm in docker compose, with images of this checkout, as its operator and its users have it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ruamel.yaml import YAML

from tests.acceptance.conftest import QUICKSTART
from tests.deploy.conftest import Composed
from tests.deploy.docker_machine import Docker
from tests.support.farm_command import Command
from tests.support.helpers import wait_until
from tests.support.places import ROOT

LOCKS = {"serve": "server", "worker": "worker"}
STOPS = int(os.environ.get("STOPS", "1"))
"""How often a worker is stopped in the middle of a build; 50 in full."""

TUNED = ROOT / "configs" / "manifests" / "tuned.yaml"


@pytest.fixture(scope="session")
def client(composed: Composed) -> Command:
    """`farm` from outside."""
    demo = ROOT / ".farm" / "demo"
    subprocess.run([sys.executable, ROOT / "configs" / "demo_data.py", demo], check=True)
    return composed.client()


@pytest.mark.parametrize("role", ["serve", "worker"])
def test_an_image_runs_as_its_own_user_and_says_what_it_is_made_of(
    docker: Docker, images: dict[str, str], role: str
) -> None:
    (found,) = json.loads(docker("image", "inspect", images[role]).stdout)
    config = found["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/opt/farm/bin/farm"], "no shell starts it"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    document = json.loads(docker("run", "--rm", "--entrypoint", "cat", images[role], "/opt/farm/sbom.json").stdout)
    parts = {component["purl"].rpartition("@")[0]: component["version"] for component in document["components"]}
    assert {"pkg:pypi/migraphx-farm", "pkg:pypi/onnx", "pkg:deb/debian/libc6"} <= parts.keys()
    lock = (ROOT / "deploy" / "locks" / f"{LOCKS[role]}.txt").read_text()
    locked = re.findall(r"^([a-z0-9._-]+)==([^ ;]+) \\$", lock, re.MULTILINE)
    assert {(name, parts[f"pkg:pypi/{name}"]) for name, _ in locked} == set(locked)


def test_the_quickstart_passes_from_outside(composed: Composed, client: Command) -> None:
    done = client("submit", str(QUICKSTART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 of 16 cells succeeded, 1 failed as expected" in done.stdout
    fetched = client("fetch", "magika", "--target", "onnxruntime/cpu", "--precision", "int8", "-o", "out")
    assert fetched.returncode == 0, fetched.stderr
    first = Path(f"/proc/{composed.state('worker', 'Pid')}/cmdline").read_text().split("\0")
    assert first[1:-1] == ["/opt/farm/bin/farm", "worker", "--only", "cpu"], "it is the container's first process"
    assert "superuser" not in composed.logs("worker")


def stop_the_worker(composed: Composed) -> str:
    """Stop it as an upgrade does; return what it said."""
    composed("stop", "worker")
    assert (composed.state("worker", "ExitCode"), composed.state("worker", "OOMKilled")) == ("0", "false")
    said = composed.logs("worker")
    composed.up("worker", "--no-deps")
    return said


def test_a_worker_that_is_stopped_in_an_attempt_keeps_what_it_learnt_and_exits_with_0(
    composed: Composed, client: Command
) -> None:
    """Fault 45."""
    build = client.json("submit", str(TUNED), "--detach")["build"]["id"]
    committed = composed.logs("worker").count('"tuning committed"')
    wait_until(lambda: composed.logs("worker").count('"tuning committed"') > committed, 300, "a first slice")
    said = stop_the_worker(composed)
    assert '"draining"' in said
    assert '"giving attempts back"' in said
    done = client("watch", build)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = {end for end, _ in attempts_of(client, build)}
    assert "released" in ends
    assert ends <= {"released", "succeeded"}, "none was lost"
    tuned = [json.loads(line) for line in said.splitlines() if '"tuning committed"' in line]
    assert any(line["records"] for line in tuned)


def test_no_attempt_is_lost_however_often_workers_are_stopped(
    composed: Composed, client: Command, tmp_path: Path
) -> None:
    """Fault 45, as often as STOPS says."""
    builds = [submit_again(client, "stop-0", tmp_path)]

    def runs() -> bool:
        counts = client.json("status", builds[-1])["build"]["counts"]
        if not counts.get("running") and not counts.get("queued"):
            builds.append(submit_again(client, f"stop-{len(builds)}", tmp_path))
        return bool(counts.get("running"))

    for _ in range(STOPS):
        wait_until(runs, 120, "a running cell")
        assert '"draining"' in stop_the_worker(composed)
    attempts = []
    for build in builds:
        done = client("watch", build)
        assert done.returncode == 0, done.stdout + done.stderr
        attempts += attempts_of(client, build)
    assert {end for end, _ in attempts} <= {"released", "succeeded", "failed"}
    failures = [kind for end, kind in attempts if end == "failed"]
    assert failures == ["compiler_error"] * len(builds), "the one of each that is expected"


def submit_again(client: Command, salt: str, folder: Path) -> str:
    """Submit four cells of the quickstart that are not hits, one of which fails as expected; return the build."""
    document = YAML(typ="safe").load(QUICKSTART.read_text().replace("../../", f"{ROOT}/"))
    document["models"] = [each for each in document["models"] if each["name"] in ("onet", "swift-f0-all-int8")]
    manifest = folder / "again.yaml"
    manifest.write_text(json.dumps({**document, "salt": salt}))
    return str(client.json("submit", str(manifest), "--detach")["build"]["id"])


def test_a_worker_on_another_machine_takes_jobs(
    docker: Docker, images: dict[str, str], composed: Composed, client: Command, tmp_path: Path
) -> None:
    """With what `setup node` prints, past all networks of compose."""
    # Docker's daemon may have a root of its own: it sees the checkout alone.
    place = ROOT / ".farm" / "deploy-node"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(client.environ["SSL_CERT_FILE"], place / "farm.pem")
    settings = composed("run", "--rm", "-T", "setup", "node").stdout.split()
    words = ["--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp:exec,mode=1777", "--network", "host"]
    words += [word for setting in settings for word in ("--env", setting)]
    words += ["--volume", f"{place}/farm.pem:/etc/farm/farm.pem:ro", "--volume", "/var/lib/farm"]
    composed("stop", "worker")
    other = docker("run", "--detach", *words, images["worker"], "worker", "--only", "cpu").stdout.strip()

    def registered() -> bool:
        said = docker("logs", other)
        return '"worker registered"' in said.stdout + said.stderr

    try:
        wait_until(registered, 120, "the worker")
        done = client("watch", submit_again(client, "node", tmp_path))
        assert "3 of 4 cells succeeded, 1 failed as expected" in done.stdout
        docker("stop", "--time", "60", other)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", other).stdout.strip() == "0"
    finally:
        docker("rm", "--force", "--volumes", other)
        composed.up("worker", "--no-deps")


def attempts_of(client: Command, build: str) -> list[tuple[str, str]]:
    """How the attempts of a build's jobs ended, or what they do, and the kinds of failures."""
    url, token, certificate = (client.environ[name] for name in ("FARM_API_URL", "FARM_API_TOKEN", "SSL_CERT_FILE"))
    with httpx.Client(
        headers={"Authorization": f"Bearer {token}"}, verify=ssl.create_default_context(cafile=certificate)
    ) as http:
        jobs = [http.get(f"{url}/v1/jobs/{cell['job']}").json() for cell in client.json("status", build)["cells"]]
    return [(attempt["end"], attempt["kind"] or "") for job in jobs for attempt in job["attempts"]]


@pytest.mark.parametrize("service", ["valkey", "s3", "serve", "worker"])
def test_a_container_that_is_killed_comes_back_and_nothing_is_lost(
    composed: Composed, client: Command, service: str, tmp_path: Path
) -> None:
    """Killed from outside, as by a crash: Docker starts it again."""
    build = submit_again(client, service, tmp_path)
    wait_until(lambda: client.json("status", build)["build"]["counts"].get("running"), 120, "a running cell")
    before = composed.state(service, "StartedAt")
    os.kill(int(composed.state(service, "Pid")), signal.SIGKILL)
    wait_until(lambda: composed.state(service, "Running") == "true" and composed.state(service, "StartedAt") != before)
    composed.up(service, "--no-deps")
    done = client("watch", build)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 4 cells succeeded, 1 failed as expected" in done.stdout
    audit = client("audit")
    assert audit.returncode == 0, audit.stdout


def test_an_autoscaler_may_ask_with_the_token_of_the_monitor(composed: Composed) -> None:
    """With the rights that the API's user of Redis has."""
    code = (
        "from urllib.request import Request, urlopen; token = open('/monitor/farm-token').read();"
        "url = 'http://serve:8080/metrics/wanted?pool=onnxruntime-cpu';"
        "print(urlopen(Request(url, headers={'Authorization': 'Bearer ' + token})).read().decode())"
    )
    words = ["run", "--rm", "-T", "--no-deps", "--entrypoint", "/opt/farm/bin/python", "monitor-token", "-c", code]
    assert json.loads(composed(*words).stdout) == {"slots": 0}


@pytest.mark.parametrize(
    ("port", "path", "status"), [(9333, "/dir/assign", 404), (8888, "/buckets/", 404), (9340, "/1,01637037d6", 401)]
)
def test_a_worker_reaches_nothing_of_object_storage_but_s3(
    composed: Composed, port: int, path: str, status: int
) -> None:
    """Master, filer and volumes know no users: who got at them would read and delete everything."""
    code = (
        "import urllib.error, urllib.request\n"
        f"try: print(urllib.request.urlopen('http://s3:{port}{path}').status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    done = composed("exec", "-T", "worker", "/opt/farm/bin/python", "-c", code)
    assert int(done.stdout) == status


def test_prometheus_reads_the_api_and_the_workers_and_knows_the_alerts(composed: Composed) -> None:
    def ask(path: str) -> dict:
        code = f"from urllib.request import urlopen; print(urlopen('http://prometheus:9090/api/v1/{path}').read().decode())"
        return json.loads(composed("exec", "-T", "serve", "/opt/farm/bin/python", "-c", code).stdout)["data"]

    def scraped() -> set[str]:
        return {each["labels"]["job"] for each in ask("targets")["activeTargets"] if each["health"] == "up"}

    wait_until(lambda: scraped() == {"farm", "farm-workers"}, 120, "both are scraped")
    assert ask("query?query=farm_store_up")["result"][0]["value"][1] == "1"
    (group,) = ask("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(group["rules"]) == (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text().count("- alert:")


def test_a_farm_that_lost_all_its_volumes_is_restored_from_its_backup(composed: Composed, client: Command) -> None:
    folder = Path(composed.environ["FARM_BACKUP"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    backup = ["run", "--rm", "-T", "backup"]
    known = {build["id"] for build in client.json("ls", "builds")["items"]}
    assert "objects" in composed(*backup, "save").stdout
    assert composed(*backup, "restore", check=False).returncode == 1, "not over what is there"
    composed("down", "--volumes", "--timeout", "5")
    composed(*backup, "restore")
    composed.up()
    other = composed.client()
    assert known <= {build["id"] for build in other.json("ls", "builds")["items"]}
    assert "16 cells, 15 hits" in other("plan", str(QUICKSTART)).stdout
    done = other("fetch", "magika", "--target", "onnxruntime/cpu", "--precision", "int8", "-o", "restored")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
