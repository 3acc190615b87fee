"""The same with real compilers: their children killed at random while real models are built."""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.client.freezing import freeze
from tests.chaos.conftest import Rigs
from tests.chaos.report import Fault
from tests.chaos.rig import pause, words_of

SEED = 11


def write_models(folder: Path, count: int, target: str) -> Path:
    """Write so many convolution nets, each with weights of its own, and the manifest that builds them in fp32."""
    chance = np.random.default_rng(SEED)
    lines = ["version: 1", "name: real", f"targets: [{target}]", f"salt: {secrets.token_hex(8)}", "models:"]
    for number in range(count):
        layers, shape = 2 + number % 3, [1, 4, 32, 32]
        weights = [
            numpy_helper.from_array(chance.normal(size=(4, 4, 3, 3), scale=0.2).astype(np.float32), f"w{layer}")
            for layer in range(layers)
        ]
        nodes = [
            node
            for layer in range(layers)
            for node in (
                helper.make_node("Conv", [f"x{layer}", f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]),
                helper.make_node("Relu", [f"c{layer}"], [f"x{layer + 1}"]),
            )
        ]
        ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x0", f"x{layers}")]
        graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, folder / f"net{number}.onnx")
        lines += [f"  - name: net{number}", f"    source: {{path: net{number}.onnx}}"]
    (folder / "real.yaml").write_text("\n".join(lines) + "\n")
    return folder / "real.yaml"


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("onnxruntime/cpu", marks=pytest.mark.fault("real")),
        pytest.param("migraphx/cpu", marks=[pytest.mark.migraphx, pytest.mark.fault("real-migraphx")]),
    ],
)
def test_killed_compilers(fault: Fault, rig: Rigs, tmp_path: Path, target: str) -> None:
    """Guards and inner halves alike, by SIGKILL and SIGSEGV; each job once, since a second crash of a job is final.

    Half of the jobs are hit at once, where a reference is made: the next reference takes its place. The others are hit
    when that is over: they are tried again.
    """
    farm, chance = rig(**_found(target)), random.Random(SEED)
    client = farm.serve()
    farm.node()
    build = client.submit(freeze(write_models(tmp_path, fault.count.models, target)))
    farm.builds.append(build["id"])
    killed = 0
    hit: set[str] = set()
    late: dict[str, bool] = {}
    while killed < fault.count.kills:
        assert not farm.ended(build["id"]), f"the build ended after {killed} of the kills"
        children = [one for one in farm.processes() if any("runner/child.py" in word for word in words_of(one))]
        compile_now = {cell["job"] for cell in farm.running(build["id"]) if cell["phase"] in ("compiling", "measuring")}
        fresh = [
            one
            for one in children
            if (job := job_of(one)) and job not in hit
            if not late.setdefault(job, chance.random() < 0.5) or job in compile_now
        ]
        if not fresh:
            pause(0.02)
            continue
        victim = chance.choice(fresh)
        job = job_of(victim)
        with suppress(ProcessLookupError):
            os.kill(victim.pid, chance.choice([signal.SIGKILL, signal.SIGSEGV]))
            hit.add(job)
            killed += 1
    cells = farm.wait(build["id"], timeout=600)
    ends: Counter[str] = Counter()
    for cell in cells:
        ends.update(one["kind"] or one["end"] for one in farm.attempts(cell))
    verdict = client.report(build["id"])["build"]["verdict"]
    hit_late = sum(late[job] for job in hit)
    fault.measured(
        killed=killed, when_compiling=hit_late, attempts=dict(ends), exit_code=verdict["exit_code"], **farm.ledger()
    )
    assert fault.figures["succeeded"] == fault.count.models
    assert verdict["exit_code"] == 0, verdict
    assert ends["compiler_crash"] + ends["internal"] >= 1


def _found(target: str) -> dict[str, str]:
    """Return the settings of a worker that has the compiler of a target."""
    if not target.startswith("migraphx/"):
        return {}
    import migraphx

    return {"migraphx_path": str(Path(migraphx.__file__).parent)}


def job_of(process: psutil.Process) -> str:
    """The job of a compiler's process, out of the folder that it works in."""
    found = [part for word in words_of(process) for part in word.split("/") if part.startswith("j-")]
    return found[0].rsplit("-", 2)[0] if found else ""
