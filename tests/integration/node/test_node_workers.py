"""A real `farm worker` on a recorded node, with a stand-in for MIGraphX: what it registers, what its children get."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.cli import main
from farm.control.loops import job_loops, repeat_all
from farm.errors import ManifestError
from farm.node.gpus import Machine
from farm.node.survey import share_out, survey
from farm.settings import Settings
from farm.store import broker
from tests.support.api_farm import freeze_manifest
from tests.support.compiling import Case, Refused
from tests.support.helpers import in_a_thread, wait_until
from tests.support.places import TESTS
from tests.support.recorded import recorded, unpack

MANIFEST = """\
version: 1
name: node
targets: [{target}]
precisions: [fp32]
{more}models:
  - name: net
    source: {{path: net.onnx}}
"""


def standin(folder: Path, arch: str, *, cross: bool = False) -> str:
    """A folder with the stand-in for MIGraphX, set up for a node; returns its path."""
    folder.mkdir()
    shutil.copy(TESTS / "support" / "standin" / "migraphx.py", folder)
    shutil.copy(TESTS / "support" / "gpu_programs.py", folder)
    shutil.copytree(TESTS / "support" / "amd", folder / "amd")
    (folder / "standin.json").write_text(json.dumps({"arch": arch, "cross": cross}))
    return str(folder)


@contextmanager
def farm_worker(settings: Settings, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`farm worker` as it is, but for the root of the machine that it looks at; no health probe could pass there."""
    code = (
        "import pathlib, sys; from farm.cli import main; from farm.node import gpus, health;"
        "health._compiled_well = lambda *_: '';"
        f"gpus.HERE.root = pathlib.Path({str(root)!r}); sys.exit(main(['worker']))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROCM", "ROCR", "HSA"))}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment, **settings.environment(), "PYTHONPATH": str(TESTS.parent)},
        cwd=root,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def control(farm: Farm) -> Iterator[None]:
    """The control plane's loops in a thread."""
    app = farm.celery
    loops = job_loops(
        farm.settings,
        farm.store,
        send=partial(broker.dispatch, app),
        queued=partial(broker.queued, app),
        finish=farm.build_finisher.finish,
        resume=farm.admission.resume,
    )
    with in_a_thread(partial(repeat_all, farm.store, loops)):
        yield


def run(farm: Farm, folder: Path, target: str, more: str = "") -> dict[str, Any]:
    """Submit a manifest of one cell and return the cell when it has ended."""
    frozen = freeze_manifest(folder, MANIFEST.format(target=target, more=more))
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    build = farm.builds.submit("main", frozen.submission, by="test")
    (cell,) = wait_until(
        lambda: (
            (cells := farm.build_reader.cells("main", build["id"]))[0]["state"] in ("succeeded", "failed") and cells
        ),
        60,
    )
    return cell


def given(farm: Farm, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """What each child of a cell's attempt was given, as the stand-in printed it."""
    log = farm.artifacts.read_blob(cell["log"], 1 << 20).decode()
    return [json.loads(line.removeprefix("GIVEN ")) for line in log.splitlines() if line.startswith("GIVEN ")]


def test_a_worker_serves_a_whole_mixed_node(settings: Settings, tmp_path: Path) -> None:
    """Each GPU model and the CPU targets, from one command; a GPU's children see that GPU and stay on CPUs near it."""
    cpus = sorted(os.sched_getaffinity(0))
    root = unpack("mixed", tmp_path / "root")
    # The recorded machine has 128 CPUs; the NUMA nodes are given those that this one has.
    for node, name in enumerate(["0000:63:00.0", "0000:e3:00.0"]):
        own = str(cpus[node % len(cpus)])
        (root / f"sys/devices/system/node/node{node}/cpulist").write_text(own)
        (root / f"sys/bus/pci/devices/{name}/local_cpulist").write_text(own)
    settings = settings.model_copy(update={"migraphx_path": standin(tmp_path / "standin", "gfx1100")})
    farm = Farm(settings)
    with farm_worker(settings, root), control(farm):
        workers = wait_until(lambda: len(found := farm.store.workers.list()) == 3 and found, 60)
        kinds = {worker["kind"]: worker for worker in workers}
        assert {kind: (worker["slots"], worker["gpus"]) for kind, worker in kinds.items()} == {
            "gfx90a-104cu": (1, ["GPU-1901ead3a2ecd4a6"]),
            "gfx1100-96cu": (1, ["GPU-4162405e51bb99b0"]),
            "cpu": (2, []),
        }
        assert kinds["cpu"]["versions"].items() >= {"rocm": "7.2.4", "miopen": "3.5.1"}.items()
        wait_until(lambda: not any(worker["resting"] for worker in farm.store.workers.list()), 60, "the probes pass")
        targets = {
            pool["pool"]["target"]["device"]: pool for pool in farm.store.workers.pools() if "rocm7.2" in pool["name"]
        }
        assert targets["gfx1100"]["name"].startswith("migraphx-gfx1100-96cu.rocm7.2-migraphx2.17-")
        assert (targets["gfx1100"]["slots"], targets["gfx90a"]["slots"], targets["ref"]["slots"]) == (1, 1, 2)
        assert targets["gfx90a"]["pool"]["device"]["arch"] == "gfx90a:sramecc+:xnack-"
        cell = run(farm, tmp_path, "rx7900xtx", "env: {MIGRAPHX_NSTREAMS: 2}\n")
        assert (cell["state"], cell["message"]) == ("succeeded", "")
        children = given(farm, cell)
        assert len(children) == 2, "compile and evaluate"
        for child in children:
            assert child["ROCR_VISIBLE_DEVICES"] == "GPU-4162405e51bb99b0"
            assert child["cpus"] == [cpus[1 % len(cpus)]]
            assert child["ROCM_PATH"] == "/opt/rocm"
            assert int(child["MIGRAPHX_GPU_COMPILE_PARALLEL"]) == max(1, len(cpus) // 4)
            assert child["MIGRAPHX_NSTREAMS"] == "2", "the manifest's `env`, set when the child is sealed"


def test_a_card_that_others_use_gets_no_job_and_no_probe(settings: Settings, tmp_path: Path) -> None:
    """A node without its memory would fail good jobs. The worker says who has the card, and goes on by itself."""
    root = unpack("rx7900xtx", tmp_path / "root")
    settings = settings.model_copy(update={"migraphx_path": standin(tmp_path / "standin", "gfx1100")})
    (node,) = [path.parent for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/mem_banks")]
    (node / "gpu_id").write_text("4711\n")
    foreign = root / "sys/class/kfd/kfd/proc/99"
    foreign.mkdir(parents=True)
    (foreign / "vram_4711").write_text("3500000000\n")
    farm = Farm(settings)

    def resting() -> str:
        return next((str(one["resting"]) for one in farm.store.workers.list() if one["kind"] != "cpu"), "")

    with farm_worker(settings, root), control(farm):
        said = "GPU GPU-4162405e51bb99b0 is not free: others (process 99) hold 3.5 GB of it"
        wait_until(lambda: resting() == said, 60)
        shutil.rmtree(foreign)
        wait_until(lambda: not resting(), 60, "the card is free, and its probe passes")
        cell = run(farm, tmp_path, "rx7900xtx", "env: {MIGRAPHX_NSTREAMS: 2}\n")
        assert (cell["state"], cell["message"]) == ("succeeded", "")


def test_a_worker_compiles_for_gpus_that_it_does_not_have(settings: Settings, tmp_path: Path) -> None:
    """Only with the operator's word, and only what nobody can take for tuned or verified."""
    settings = settings.model_copy(
        update={
            "migraphx_path": standin(tmp_path / "standin", "gfx1100", cross=True),
            "cross_targets": ("mi300x", "gfx1201"),
        }
    )
    farm = Farm(settings)
    with farm_worker(settings, unpack("cpu-only", tmp_path / "root")), control(farm):
        pools = wait_until(farm.store.workers.pools, 60)
        crossed = [pool["name"].rpartition("-")[0] for pool in pools if pool["pool"].get("untuned")]
        assert crossed == [
            "migraphx-gfx1201.rocm7.2-migraphx2.17-cross",
            "migraphx-gfx942-304cu.rocm7.2-migraphx2.17-cross",
        ]
        with pytest.raises(ManifestError) as refused:
            run(farm, tmp_path, "mi300x", "tuning: quick\n")
        (problem,) = refused.value.problems
        assert "no worker has a `mi300x`" in problem.message
        assert "tuning quick, verification" in problem.message
        cell = run(farm, tmp_path, "mi300x", "verify: off\n")
        assert (cell["state"], cell["message"]) == ("succeeded", "")
        facts = cell["facts"]
        assert (facts["verified"], facts["latency"], facts["load"]) == (False, None, None)
        assert "-cross-" in facts["toolchain"]
        log = farm.artifacts.read_blob(cell["log"], 1 << 20).decode()
        target = {"name": "gpu", "gpu_arch": "gfx942", "gpu_num_cu": 304, "gpu_num_chiplets": 8}
        assert f"TARGET {json.dumps(target)}" in log
        assert [child["ROCR_VISIBLE_DEVICES"] for child in given(farm, cell)] == ["-1"]


# --- notes for the operator -----------------------------------------------------------------------------------------


def notes(settings: Settings, machine: Machine) -> dict[str, tuple[str, str, bool]]:
    return {note.subject: (note.text, note.fix, note.broken) for note in survey(settings, machine).notes}


def test_a_compile_that_leaves_kernels_for_another_card_fails(tmp_path: Path) -> None:
    """As if a variable pretended another card: the job is a gfx942's, and MIGraphX compiled for a gfx90a."""
    freeze_manifest(tmp_path, MANIFEST.format(target="mi300x", more=""))
    search = [standin(tmp_path / "standin", "gfx90a:sramecc+:xnack-")]
    inputs = {"x": {"dtype": "float32", "shape": [1, 4]}}
    case = Case(tmp_path, tmp_path / "net.onnx", inputs, compiler="migraphx", device="gfx942", search=search)
    with pytest.raises(Refused, match=r"kernels for gfx90a.*, not for gfx942") as failed:
        case.compile("fp32")
    assert failed.value.kind == "toolchain_mismatch"


def test_cross_targets_need_a_migraphx_that_can(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(
        update={"migraphx_path": standin(tmp_path / "standin", "gfx942"), "cross_targets": ("mi300x", "mi999")}
    )
    found = notes(settings, recorded("cpu-only", tmp_path / "root"))
    assert "compiles only for GPUs that are there: cross_targets is not served" in found["migraphx"][0]
    able = settings.model_copy(update={"migraphx_path": standin(tmp_path / "able", "gfx942", cross=True)})
    assert "mi999" in notes(able, recorded("cpu-only", tmp_path / "root"))["cross_targets"][0]


def test_gpus_without_migraphx_are_a_fault_of_the_node(settings: Settings, tmp_path: Path) -> None:
    """A laptop without MIGraphX is as it should be; a node with GPUs is not."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/migraphx.cpython-36m-x86_64-linux-gnu.so").touch()
    wrong = settings.model_copy(update={"migraphx_path": str(tmp_path / "lib")})
    text, fix, broken = notes(wrong, recorded("mi300x-spx", tmp_path / "gpu"))["migraphx"]
    assert broken
    assert "there is migraphx.cpython-36m-x86_64-linux-gnu.so (Python 3.6)" in text
    assert fix == "set migraphx_python (FARM_MIGRAPHX_PYTHON) to the interpreter that the module is for"
    assert not notes(wrong, recorded("cpu-only", tmp_path / "cpu"))["migraphx"][2]


def test_the_module_in_rocms_lib_is_found_without_a_setting(settings: Settings, tmp_path: Path) -> None:
    """ROCm's packages put it there; its name says which Python it is for."""
    machine = recorded("mi300x-spx", tmp_path / "root")
    lib = tmp_path / "root/opt/rocm/lib"
    lib.mkdir()
    (lib / "migraphx.cpython-36m-x86_64-linux-gnu.so").touch()
    assert "Python 3.6" in notes(settings, machine)["migraphx"][0]


def test_what_a_node_amounts_to_is_the_same_each_time(settings: Settings, tmp_path: Path) -> None:
    """Cache keys depend on it: two looks at eight partitions make one pool, with a slot for each."""
    settings = settings.model_copy(update={"migraphx_path": standin(tmp_path / "standin", "gfx942")})
    machine = recorded("mi300x-cpx", tmp_path / "root")
    one, other = survey(settings, machine), survey(settings, machine)
    assert one == other
    kind = next(kind for kind in share_out(one.pools, one.gpus, settings, machine) if kind.name == "gfx942-38cu")
    assert [pool.name.rpartition("-")[0] for pool in kind.pools] == ["migraphx-gfx942-38cu.rocm7.2-migraphx2.17"]
    assert [slot.gpu for slot in kind.slots] == list("01234567")
    assert "limit_max_iterations" in kind.pools[0].features
    assert not {"gpu_arch", "quantize_bf16", "dim_params"} & set(kind.pools[0].features)


def test_the_doctor_explains_each_finding_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which ROCm and why, every GPU with what it is pinned by, the pools, and the fix for what cannot be used."""
    root = unpack("mixed", tmp_path / "root")
    (root / "dev/dri/renderD129").unlink()
    monkeypatch.setattr("farm.node.gpus.HERE.root", root)
    monkeypatch.setenv("FARM_MIGRAPHX_PATH", standin(tmp_path / "standin", "gfx90a"))
    monkeypatch.setenv("FARM_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("ROCM_PATH", raising=False)
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["rocm"]["found"] == "ROCm 7.2.4, MIOpen 3.5.1 at /opt/rocm (the usual place)"
    assert "AMD Instinct MI210 gfx90a:sramecc+:xnack-, 104 CUs" in checks["GPU 0"]["found"]
    assert "pinned by GPU-1901ead3a2ecd4a6" in checks["GPU 0"]["found"]
    assert "migraphx 2.17.0.dev+stand-in" in checks["compilers"]["found"]
    assert "migraphx-gfx90a-104cu.rocm7.2-migraphx2.17-" in checks["pools"]["found"]
    closed = checks["GPU 1 (0000:e3:00.0)"]
    assert (closed["state"], closed["found"]) == ("broken", "/dev/dri/renderD129 is not there")
    assert closed["fix"] == "start the container with --device /dev/kfd --device /dev/dri"
    assert " slots" in checks["memory"]["found"]
