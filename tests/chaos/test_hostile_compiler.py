"""A hostile compiler inside a real attempt: executor, steps and seal as they are, and a compiler that attacks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from farm.app import Farm
from farm.compiling import child_process as child
from farm.compiling.attempt import Attempt
from farm.compiling.slots import Slot
from farm.jobs.state import AttemptEnd
from farm.runner.seal import unsealable
from farm.settings import Settings
from farm.spec import Device
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


@pytest.mark.skipif(bool(unsealable()), reason="this kernel cannot seal: farm doctor says what it lacks")
@pytest.mark.fault("23")
def test_a_hostile_compiler_reaches_nothing(
    fault: Fault, settings: Settings, weed: WeedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("compiler", "home", "data")}
    for place in places.values():
        place.mkdir()
    shutil.copy(STANDIN / "hostile.py", places["compiler"] / "migraphx.py")
    shutil.copy(STANDIN / "migraphx.py", places["compiler"] / "standin_migraphx.py")
    shutil.copy(STANDIN.parent / "gpu_programs.py", places["compiler"])
    (places["compiler"] / "standin.json").write_text(json.dumps({"arch": "gfx942", "cross": False}))
    config, keys = places["home"] / "farm.toml", places["home"] / ".aws"
    config.write_text("s3_secret_key = 'canary'\n")
    keys.mkdir()
    monkeypatch.setenv("FARM_S3_SECRET_KEY", settings.s3_secret_key.get_secret_value())
    farm = Farm(settings.model_copy(update={"data_dir": places["data"], "migraphx_path": str(places["compiler"])}))
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 1, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    frozen = freeze_manifest(tmp_path, MANIFEST)
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.submit("main", frozen.submission, by="test")
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    executor = farm.executor
    other = executor._work._folder() / "j-other-1-x"
    for name in ("model", "program"):
        (other / name).mkdir(parents=True)
    (other / "model" / "net.onnx").write_bytes(b"a secret model")
    (other / "log.txt").write_bytes(b"a secret log")
    tuning = places["data"] / "tuning"
    tuning.mkdir()
    (tuning / "problems.json").write_text("[]")
    secret, _ = farm.artifacts.put_blob_bytes(b"another's model")
    cached = executor._cache.get(secret)
    # The S3 server speaks past its credentials at the port of its file system, which is one of its command line.
    filer = next(int(word.rpartition("=")[2]) for word in weed.server.command if word.startswith("-filer.port="))
    s3 = urlsplit(weed.server.url).port
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
    attempt = Attempt(
        job_id, number, claim.token, claim.order, claim.limits, "main", claim.key, slot=Slot(gpu="GPU-1"), worker="w1"
    )
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
    children = len(probes) // len(names)
    reached = [probe["name"] for probe in probes if not probe["said"].startswith("refused")]
    fault.measured(probes=len(names), children=children, succeeded=len(reached))
    assert reached == []
    assert len(names) >= fault.count.probes
    assert children == 2, "the child that compiles, and the one that loads what it made"
    after = hashes(other, places["data"] / "cache", tuning, places["compiler"], places["home"])
    assert {path: digest for path, digest in after.items() if path in before} == before
    # What it made is under its own key, and what is new in the node's cache are this attempt's inputs.
    made = {key for key in set(farm.artifacts.list_objects("ns/")) - stored if "/artifacts/" in key}
    assert [key.rpartition("/")[2] for key in made] == [f"{claim.key}.json"]
    assert all(secret not in log for secret in targets["secrets"])
    assert "canary" not in log
