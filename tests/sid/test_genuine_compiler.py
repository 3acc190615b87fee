"""The farm's real worker with MIGraphX 2.14 and MIOpen of Debian sid, on a recorded node with two AMD cards.

Compiling, tuning, its databases, programs, packs and refusals are genuine. Launches do nothing: no test here says
anything of accuracy or speed, and a health probe cannot pass.
"""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.app import Farm
from farm.client.client import FarmClient
from farm.client.freezing import freeze
from farm.client.inspection import disagreements, faults, inspect_program, wrong_card
from farm.errors import UsageError
from farm.node.gpus import Machine
from farm.node.survey import survey
from farm.runner.migraphx_compiler import load
from farm.runner.protocol import RequestFailed
from farm.settings import Settings, load_settings
from tests.integration.node.test_node_workers import control, farm_worker
from tests.support.helpers import wait_until

pytestmark = pytest.mark.skipif("FARM_SID" not in os.environ, reason="runs in a tree of Debian sid: make test-amd")

MANIFEST = """\
version: 1
name: genuine
targets: [{target}]
precisions: [{precision}]
verify: off
{more}models:
  - name: net
    source: {{path: net.onnx}}
"""
CARDS = {"mi210": "gfx90a:sramecc+:xnack-", "rx7900xtx": "gfx1100"}
PATIENCE = 900


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings of a node that imports the binding over Debian's libraries."""
    return settings.model_copy(update={"migraphx_path": "/usr/local/lib/farm-sid"})


def write_net(folder: Path, seed: int = 0, channels: int = 16) -> None:
    """A convolution that MIOpen does on a MI210, a pool and a matrix product; all weights by the seed."""
    chance = np.random.default_rng(seed)
    weights = {
        "w": chance.standard_normal((channels, 3, 3, 3)),
        "b": chance.standard_normal(channels),
        "m": chance.standard_normal((channels, 10)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "m"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in _PORTS.items()]
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "cnn", ports[:1], ports[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, folder / "net.onnx")


_PORTS = {"x": [1, 3, 32, 32], "y": [1, 10]}


def submit(farm: Farm, folder: Path, target: str, precision: str = "fp16", more: str = "", seed: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    write_net(folder, seed)
    (folder / "farm.yaml").write_text(MANIFEST.format(target=target, precision=precision, more=more))
    frozen = freeze(folder / "farm.yaml", cache=folder / "cache")
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    return str(farm.builds.submit("main", frozen.submission, by="test")["id"])


def ended(farm: Farm, build: str) -> list[dict[str, Any]]:
    """The cells of a build, once all have ended."""

    def cells() -> list[Any]:
        found = farm.build_reader.cells("main", build)
        return found if all(cell["state"] in ("succeeded", "failed") for cell in found) else []

    return wait_until(cells, PATIENCE, f"{build} ends")


def sidecar_of(farm: Farm, cell: dict[str, Any]) -> dict[str, Any]:
    log = farm.artifacts.read_blob(cell["log"], 1 << 24).decode(errors="replace") if cell.get("log") else ""
    assert (cell["state"], cell["message"]) == ("succeeded", ""), log[:5000]
    stored = farm.artifacts.lookup(["main"], cell["key"])
    assert stored
    return dict(stored)


@contextmanager
def node(farm: Farm, name: str) -> Iterator[psutil.Process]:
    """A worker with a data folder of its own, as another machine has it, once it takes jobs."""
    own = farm.settings.data_dir / name
    own.mkdir()
    with farm_worker(farm.settings.model_copy(update={"data_dir": own}), Path("/")) as process:

        def ready() -> bool:
            kinds = [worker for worker in farm.store.workers.list() if worker["pid"] == process.pid]
            return len(kinds) == 3 and not any(worker["resting"] for worker in kinds)

        wait_until(ready, PATIENCE, f"node {name} takes jobs")
        yield psutil.Process(process.pid)


def test_the_node_and_its_compiler_are_surveyed(settings: Settings) -> None:
    found = survey(settings, Machine())
    assert {gpu.arch for gpu in found.gpus} == set(CARDS.values())
    assert found.versions["migraphx"] == "2.14.0"
    names = {pool.name.rpartition("-")[0] for pool in found.pools if pool.target.compiler == "migraphx"}
    assert {"migraphx-gfx90a-104cu.rocm7.1-migraphx2.14", "migraphx-gfx1100-96cu.rocm7.1-migraphx2.14"} <= names


def test_programs_for_both_cards_and_packs_each_for_its_own_card_alone(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    """Their kernels are for the card of their sidecar, which no stand-in decided."""
    kept = tmp_path / "programs"
    with node(farm, "one"), control(farm):
        builds = {
            card: submit(farm, tmp_path / card, card, precision, "packs: [onnxruntime, onnxruntime-cache]\n")
            for card, precision in (("rx7900xtx", "fp32"), ("mi210", "fp16"))
        }
        for card, build in builds.items():
            for cell in ended(farm, build):
                sidecar = sidecar_of(farm, cell)
                assert (sidecar["device"]["arch"], sidecar["verification"]) == (CARDS[card], None)
            farm.build_finisher.finish(build)
    for card, precision in (("rx7900xtx", "fp32"), ("mi210", "fp16")):
        fetched = client.fetch("net", card, precision, folder=kept / card)
        content = inspect_program(fetched.program)
        assert [code["arches"] for code in content["code_objects"]] == [[CARDS[card]]]
        assert (disagreements(fetched.artifact, content, fetched.program), faults(content)) == ([], [])
        pack = client.fetch("net", card, precision, folder=tmp_path / f"pack-{card}", layout="onnxruntime")
        inside = inspect_program(pack.program)
        assert (inside["offload_copy"], inside["output_parameters"]) == (False, ["main:#output_0"])
        assert (tmp_path / f"pack-{card}" / "model_ctx.onnx").is_file()
    for card, other in (("mi210", "rx7900xtx"), ("rx7900xtx", "mi210")):
        [program] = (kept / card).glob("*.mxr")
        assert CARDS[card] in wrong_card(inspect_program(program), [CARDS[other]])
        with pytest.raises(RequestFailed, match="the program has kernels for"):
            load({"program": str(program), "device": CARDS[other].partition(":")[0]})
    [program] = (kept / "mi210").glob("*.mxr")
    assert "not for gfx90a:sramecc-:xnack+" in wrong_card(inspect_program(program), ["gfx90a:sramecc-:xnack+"])
    program.write_bytes(program.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cut"):
        inspect_program(program)
    if not (python := os.environ.get("FARM_TEST_ORT_MIGRAPHX")):
        pytest.skip("all but the last: onnxruntime-migraphx is not to be had for this Python")
    pack, model = tmp_path / "cache-pack", tmp_path / "mi210" / "net.onnx"
    client.fetch("net", "mi210", "fp16", folder=pack, layout="onnxruntime-cache", python=python)
    assert "Model Compile" not in opened_by_the_provider(python, pack, model)
    [program] = (pack / "cache").iterdir()
    program.unlink()
    assert "Model Compile" in opened_by_the_provider(python, pack, model)


def opened_by_the_provider(python: str, pack: Path, model: Path) -> str:
    """Open a pack with ONNX Runtime's genuine provider and run it; return what the provider said of it.

    It links HIP's runtime, so the stand-in has to be there before.
    """
    card = next(gpu.pin for gpu in survey(load_settings(), Machine()).gpus if gpu.arch == CARDS["mi210"])
    variables = {"LD_PRELOAD": "/usr/local/lib/farm-sid/libhip_standin.so", "ROCR_VISIBLE_DEVICES": card}
    command = [python, "tests/gpu/card_child.py", "use", str(pack), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stderr


def kernels(farm: Farm, sidecar: dict[str, Any], folder: Path) -> int:
    """How many kernels are in MIOpen's published cache. It is SQLite in WAL mode: without its journal some may lack."""
    packed = farm.artifacts.read_blob(sidecar["blobs"]["kernel_cache"]["digest"], 1 << 28)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        [name] = archive.namelist()
        archive.extract(name, folder)
    assert name == "gfx90a68.ukdb"
    with closing(sqlite3.connect(folder / name)) as database:
        return int(database.execute("SELECT count(*) FROM kern_db").fetchone()[0])


def test_what_miopen_tuned_on_one_node_is_found_by_another(farm: Farm, tmp_path: Path) -> None:
    """By problem, whatever the weights: the second node, with nothing of its own, searches for none again."""
    with control(farm):
        with node(farm, "one"):
            [cell] = ended(farm, submit(farm, tmp_path / "a", "mi210", more="tuning: quick\n"))
            first = sidecar_of(farm, cell)
        assert first["tuning"]["tuned"] > 0
        assert first["tuning"]["known"] == 0
        if first["blobs"]["kernel_cache"]:  # Of invented times it is chance whether the tuned program is published.
            assert kernels(farm, first, tmp_path) > 0
        with node(farm, "two"):
            [cell] = ended(farm, submit(farm, tmp_path / "b", "mi210", more="tuning: quick\n", seed=1))
            second = sidecar_of(farm, cell)
    assert second["key"] != first["key"]
    assert (second["tuning"]["known"], second["tuning"]["tuned"]) == (first["tuning"]["tuned"], 0)
    log = farm.artifacts.read_blob(second["blobs"]["log"]["digest"], 1 << 24).decode(errors="replace")
    assert "Searching the best solution" not in log


def name_of(process: psutil.Process) -> str:
    """The name of a process; of one that has ended meanwhile, nothing."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def test_a_node_that_dies_in_the_middle_of_a_compile_loses_nothing(farm: Farm, tmp_path: Path) -> None:
    with control(farm):
        with node(farm, "one") as worker:
            build = submit(farm, tmp_path / "a", "rx7900xtx", "fp32")

            def compiles() -> bool:
                return any(name_of(process).startswith("clang") for process in worker.children(recursive=True))

            wait_until(compiles, PATIENCE, "MIOpen's compiler runs")
            everything = [*worker.children(recursive=True), worker]
            for process in everything:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(everything, 60)
        with node(farm, "two"):
            [cell] = ended(farm, build)
            sidecar_of(farm, cell)
    assert cell["attempt"] == 2
