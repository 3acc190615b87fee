"""A hostile compiler inside a real attempt: executor, steps and seal as they are, and a compiler that attacks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from farm.app import Farm
from farm.compiling import child_process as child
from farm.compiling.attempt import Attempt, Slot
from farm.jobs.state import AttemptEnd, AttemptLimits, FailureKind
from farm.node.disk import NodeCache
from farm.runner.seal import unsealable
from farm.settings import Settings
from farm.spec import Device, FileReference
from farm.targets.pools import Pool, Target
from tests.chaos.report import Fault
from tests.conftest import WeedServer
from tests.support.api_farm import freeze_manifest

STANDIN = Path(__file__).parents[1] / "support" / "standin"
POOL = Pool(
    Target("migraphx", "gfx942"), "rocm7.2-migraphx2.17-4f53cda1", Device("gfx942:sramecc+:xnack-", 304, 8), recipe=1
)
MANIFEST = """\
version: 1
name: hostile
targets: [migraphx/gfx942]
models: [{name: net, source: {path: net.onnx}}]
"""


def hashes(*folders: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


def install(name: str, folder: Path) -> None:
    """Make a folder in which `import migraphx` gives this stand-in."""
    shutil.copy(STANDIN / name, folder / "migraphx.py")
    shutil.copy(STANDIN / "migraphx.py", folder / "standin_migraphx.py")
    shutil.copy(STANDIN.parent / "gpu_programs.py", folder)
    shutil.copytree(STANDIN.parent / "amd", folder / "amd")
    (folder / "standin.json").write_text(json.dumps({"arch": "gfx942", "cross": False}))


def claimed(farm: Farm, folder: Path) -> Attempt:
    """An attempt of a cell for the stand-in, on a GPU's slot."""
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 1, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    frozen = freeze_manifest(folder, MANIFEST)
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.submit("main", frozen.submission, by="test")
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    named = (claim.token, claim.order, claim.limits, "main", claim.key)
    return Attempt(job_id, number, *named, slot=Slot(gpu="GPU-1"), worker="w1")


@pytest.mark.skipif(bool(unsealable()), reason="this kernel cannot seal: farm doctor says what it lacks")
@pytest.mark.fault("23")
def test_a_hostile_compiler_reaches_nothing(
    fault: Fault, settings: Settings, weed: WeedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("compiler", "home", "data")}
    for place in places.values():
        place.mkdir()
    install("hostile.py", places["compiler"])
    config, keys = places["home"] / "farm.toml", places["home"] / ".aws"
    config.write_text("s3_secret_key = 'canary'\n")
    keys.mkdir()
    monkeypatch.setenv("FARM_S3_SECRET_KEY", settings.s3_secret_key.get_secret_value())
    farm = Farm(settings.model_copy(update={"data_dir": places["data"], "migraphx_path": str(places["compiler"])}))
    attempt = claimed(farm, tmp_path)
    executor = farm.executor
    other = executor.work._folder() / "j-other-1-x"
    for name in ("model", "program"):
        (other / name).mkdir(parents=True)
    (other / "model" / "net.onnx").write_bytes(b"a secret model")
    (other / "log.txt").write_bytes(b"a secret log")
    tuning = places["data"] / "tuning"
    tuning.mkdir()
    (tuning / "problems.json").write_text("[]")
    secret, size = farm.artifacts.put_blob_bytes(b"another's model")
    file: FileReference = {"path": "net.onnx", "digest": secret, "size": size}
    cached = NodeCache(executor.settings, farm.artifacts.get_blob).get(file)
    # The S3 server speaks past its credentials at the port of its file system.
    filer = weed.ports["filer.port"]
    s3 = urlsplit(weed.url).port
    neighbour = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    targets = {
        "worker": os.getpid(),
        "other_model": str(other / "model" / "net.onnx"),
        "other_log": str(other / "log.txt"),
        "other_compiler": neighbour.pid,
        "cached": str(cached),
        "tuning": str(tuning),
        "config": str(config),
        "home": str(keys),
        "runner": str(child.RUNNER),
        "private": [str(tmp_path)],
        "secrets": [settings.s3_secret_key.get_secret_value(), settings.redis_url.get_secret_value()],
        "redis": urlsplit(settings.redis_url.get_secret_value()).port,
        "s3": s3,
        "filer": filer,
    }
    (places["compiler"] / "targets.json").write_text(json.dumps(targets))
    before = hashes(other, places["data"] / "cache", tuning, places["compiler"], places["home"])
    stored = set(farm.artifacts.list_objects("ns/"))
    try:
        outcome = executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()
    log = farm.artifacts.read_blob(outcome.log, 1 << 24).decode()
    assert outcome.end is AttemptEnd.SUCCEEDED, log[-3000:]
    probes = [json.loads(line.removeprefix("PROBE ")) for line in log.splitlines() if line.startswith("PROBE ")]
    names = {probe["name"] for probe in probes}
    children = len(probes) // max(1, len(names))
    reached = [probe["name"] for probe in probes if not probe["said"].startswith("refused")]
    fault.measured(probes=len(names), children=children, succeeded=len(reached))
    assert reached == []
    assert len(names) >= fault.count.probes
    # The child that compiles, and the one that loads what it made; each has what was said as they were imported, too.
    assert children == 4
    after = hashes(other, places["data"] / "cache", tuning, places["compiler"], places["home"])
    assert {path: digest for path, digest in after.items() if path in before} == before
    # What it made is under its own key, and what is new in the node's cache are this attempt's inputs.
    made = {key for key in set(farm.artifacts.list_objects("ns/")) - stored if "/artifacts/" in key}
    assert [key.rpartition("/")[2] for key in made] == [f"{attempt.key}.json"]
    assert all(secret not in log for secret in targets["secrets"])
    assert "canary" not in log


STRAY = FailureKind.COMPILER_ERROR
ATTACKS = {
    "program is a link": STRAY,
    "text is a pipe": STRAY,
    "folders without end": STRAY,
    "disk": FailureKind.DISK_LIMIT,
    "processes": FailureKind.PROCESS_LIMIT,
    "IPC": FailureKind.COMPILER_CRASH,
    "text is a link": STRAY,
    # The runner reads what was saved: it waits at the pipe, and trips over the folder, inside the child.
    "program is a pipe": FailureKind.TIME_LIMIT,
    "link to everything": STRAY,
    "second name": STRAY,
    "program is a folder": FailureKind.INTERNAL,
    "disk without a name": FailureKind.DISK_LIMIT,
    "answer without end": STRAY,
}
"""What the stand-in does (`tests/support/standin/leaving.py`), and as what it ends."""

IN_TIME = {"folders without end": FailureKind.DISK_LIMIT}
"""As what it ends if the guard looks before the child is done: a process that hides from it has too much."""


def kept_by_the_kernel() -> list[str]:
    """System V segments, semaphores and queues, which outlive their processes."""
    return [line for name in ("shm", "sem", "msg") for line in Path(f"/proc/sysvipc/{name}").read_text().splitlines()]


@pytest.mark.skipif(bool(unsealable()), reason="this kernel cannot seal: farm doctor says what it lacks")
@pytest.mark.fault("23-leaves")
def test_a_hostile_compiler_leaves_nothing_and_takes_no_slot_with_it(
    fault: Fault, settings: Settings, tmp_path: Path
) -> None:
    compiler, data, secret = tmp_path / "compiler", tmp_path / "data", tmp_path / "secret"
    compiler.mkdir()
    secret.write_text("FARM_S3_SECRET_KEY=canary")
    install("leaving.py", compiler)
    bounds = {"disk_limit": 64 << 20, "process_limit": 200, "migraphx_path": str(compiler), "data_dir": data}
    farm = Farm(settings.model_copy(update=bounds))
    limits = AttemptLimits(time=90.0, memory=0)
    attempt = replace(claimed(farm, tmp_path), limits=limits)
    processes, kernel = set(psutil.Process().children(recursive=True)), kept_by_the_kernel()
    before = set(farm.artifacts.list_objects("blobs/"))
    ended: dict[str, FailureKind | None] = {}
    chosen = list(ATTACKS)[: fault.count.attacks]
    for name in (*chosen, "none"):
        (compiler / "targets.json").write_text(json.dumps({"attack": name, "secret": str(secret), "key": os.getpid()}))
        outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
        ended[name] = ATTACKS[name] if outcome.kind and outcome.kind is IN_TIME.get(name) else outcome.kind
        if name == "none":
            assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    fault.measured(attacks=len(chosen), succeeded=sum(ended[name] is not ATTACKS[name] for name in chosen))
    assert ended == {**{name: ATTACKS[name] for name in chosen}, "none": None}
    farm.executor.templates.close()
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert kept_by_the_kernel() == kernel
    assert [path.name for path in data.glob("work/*/*/*")] == []
    made = {key.rpartition("/")[2] for key in set(farm.artifacts.list_objects("blobs/")) - before}
    read = [farm.artifacts.read_blob(digest, 1 << 27) for digest in made]
    assert not [data for data in read if b"canary" in data]
