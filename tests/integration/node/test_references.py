"""Who computes the right outputs of a model that ONNX Runtime does not take; the compiler is a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from farm.app import Farm
from farm.client.freezing import freeze
from farm.compiling.attempt import Attempt, Slot
from farm.jobs.state import AttemptEnd, FailureKind, Outcome
from farm.node.executor import Executor
from farm.results.verdict import verdict_of
from farm.settings import Settings
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.integration.node.test_node_workers import standin

# Of the stand-in no library is loaded; the digest is that of none.
POOL = Pool(Target("migraphx", "gfx1100"), "rocm7.2-migraphx2.17-4f53cda1", Device("gfx1100", 96), 1)
MANIFEST = """\
version: 1
name: demo
targets: [gfx1100]
precisions: [native]
models:
  - name: net
    source: {path: net.onnx}
"""

# The stand-in makes a Relu of `x` of every model; these mean that too, each in its own way.
HALF = [
    helper.make_node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
    helper.make_node("Relu", ["h"], ["r"]),
    helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
]
"""ONNX Runtime has no such Relu; the onnx package's evaluator has."""
NEGATED = helper.make_graph(
    [helper.make_node("Neg", ["h"], ["t"])],
    "then",
    [],
    [helper.make_tensor_value_info("t", TensorProto.BFLOAT16, None)],
)
DOUBTFUL = [
    HALF[0],
    helper.make_node("Cast", ["zero"], ["c"], to=TensorProto.BOOL),
    helper.make_node("If", ["c"], ["i"], then_branch=NEGATED, else_branch=NEGATED),
    helper.make_node("Relu", ["i"], ["r"]),
    HALF[2],
]
"""As HALF, but it means something else than the stand-in makes of it, by an operator that ONNX's cases do not prove."""
OWN = [helper.make_node("FusedByNobody", ["x"], ["y"], domain="com.microsoft")]
"""Only the stand-in knows this operator."""
RANDOM = [
    helper.make_node("RandomNormalLike", ["x"], ["n"]),
    helper.make_node("Mul", ["n", "zero"], ["z"]),
    helper.make_node("Relu", ["x"], ["r"]),
    helper.make_node("Add", ["r", "z"], ["y"]),
]


def compiled(settings: Settings, folder: Path, nodes: Sequence[Any], more: str = "", **node: Any) -> tuple[Any, ...]:
    """Take a model of these nodes through an attempt; return its end, its planned cell, its sidecar and its log."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])
    graph = helper.make_graph(nodes, "net", value[:1], value[1:], [zero])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "net.onnx")
    (folder / "farm.yaml").write_text(MANIFEST + more)
    place = standin(folder / "standin", "gfx1100")
    found = json.loads((Path(place) / "standin.json").read_text())
    (Path(place) / "standin.json").write_text(json.dumps({**found, **node}))
    farm = Farm(settings.model_copy(update={"migraphx_path": place, "measure_seconds": 0.01}))
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 1, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    frozen = freeze(folder / "farm.yaml", cache=folder / "cache")
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    build = farm.builds.submit("main", frozen.submission, by="test")
    outcome = attempt(farm, farm.executor)
    found = farm.artifacts.get_object(outcome.facts["sidecar"]) if outcome.end is AttemptEnd.SUCCEEDED else None
    sidecar = json.loads(found.data) if found else None
    (cell,) = farm.build_reader.cells("main", build["id"])
    return outcome, cell, sidecar, farm.artifacts.read_blob(outcome.log, 1 << 20).decode()


def attempt(farm: Farm, executor: Executor) -> Outcome:
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    named = (claim.token, claim.order, claim.limits, claim.namespace, claim.key)
    made = Attempt(job_id, number, *named, slot=Slot(gpu="GPU-4162405e51bb99b0"))
    outcome = executor.execute(made, on_phase=lambda *_: None, cancelled=threading.Event())
    assert farm.store.jobs.finish(job_id, claim.token, outcome) == "ok"
    return outcome


def test_what_onnx_runtime_refuses_is_compared_with_the_next_reference(settings: Settings, tmp_path: Path) -> None:
    outcome, cell, sidecar, log = compiled(settings, tmp_path, HALF)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    verification = sidecar["verification"]
    assert (verification["reference"], verification["origin"]) == ("onnxruntime", {"y": "onnx"})
    assert list(verification["refused"]) == ["onnxruntime"]
    assert "Could not find an implementation for Relu" in verification["refused"]["onnxruntime"]
    assert 0 < verification["errors"]["y"] < 1e-2
    assert "reference onnxruntime cannot be had: unverifiable" in log
    assert (outcome.facts["verified"], outcome.facts["unverified"], cell["warning"]) == (True, "", "")


@pytest.mark.parametrize("unverifiable", ["publish", "fail"])
def test_a_difference_from_a_reference_that_is_not_known_to_be_right_is_no_wrong_program(
    settings: Settings, tmp_path: Path, unverifiable: str
) -> None:
    outcome, cell, sidecar, _ = compiled(settings, tmp_path, DOUBTFUL, f"verify: {{unverifiable: {unverifiable}}}\n")
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert (sidecar["verification"]["origin"], sidecar["verification"]["unverified"]) == ({"y": "onnx"}, {})
    assert sidecar["verification"]["errors"]["y"] > 0.5
    why = sidecar["verification"]["doubted"]["y"]
    assert why.startswith("the onnx package's evaluator is not known to be right for If")
    said = cell["warning"] or cell["message"]
    assert said.startswith("not verified: output `y` is off by ") and said.endswith(f", but {why}")
    assert "(1 not or only partly verified)" in verdict_of([cell])["text"] or unverifiable == "fail"
    expected = ("succeeded", None) if unverifiable == "publish" else ("failed", FailureKind.UNVERIFIABLE)
    assert (cell["state"], cell["kind"]) == expected


def test_migraphx_ref_is_the_last_reference(settings: Settings, tmp_path: Path) -> None:
    outcome, _, sidecar, _ = compiled(settings, tmp_path, OWN)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert sidecar["verification"]["origin"] == {"y": "migraphx"}
    assert list(sidecar["verification"]["refused"]) == ["onnxruntime", "onnx"]
    assert sidecar["verification"]["errors"] == {"y": 0.0}
    assert "was never compared with ONNX's own cases" in sidecar["verification"]["doubted"]["y"]


@pytest.mark.parametrize("unverifiable", ["publish", "fail"])
def test_what_no_reference_can_run_is_published_as_not_verified(
    settings: Settings, tmp_path: Path, unverifiable: str
) -> None:
    """No gate is green by it in silence: the cell warns, the verdict counts it; a manifest may ask for a failure."""
    more = f"verify: {{unverifiable: {unverifiable}}}\n"
    outcome, cell, sidecar, _ = compiled(settings, tmp_path, OWN, more, refuses=["ref"])
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert list(sidecar["verification"]["refused"]) == ["onnxruntime", "onnx", "migraphx"]
    assert sidecar["measurements"]["latency"]
    said = "not verified: no reference can run the model (onnxruntime, onnx, migraphx)"
    assert outcome.facts["unverified"].startswith(said)
    assert outcome.facts["verified"] is False
    verdict = verdict_of([cell])
    if unverifiable == "publish":
        assert cell["warning"].startswith(said)
        assert verdict["text"].startswith("1 of 1 cells succeeded (1 not or only partly verified)")
        assert verdict["exit_code"] == 0
    else:
        assert (cell["state"], cell["kind"], cell["fault"]) == ("failed", FailureKind.UNVERIFIABLE, "user")
        assert cell["message"].startswith(said)
        assert verdict["exit_code"] == 3


def test_what_depends_on_a_random_operator_is_not_compared(settings: Settings, tmp_path: Path) -> None:
    outcome, cell, sidecar, _ = compiled(settings, tmp_path, RANDOM)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert sidecar["verification"]["unverified"] == {"y": "it depends on the random operator RandomNormalLike"}
    assert sidecar["verification"]["refused"] == sidecar["verification"]["errors"] == {}
    assert cell["warning"] == "not verified: it depends on the random operator RandomNormalLike"


def test_expected_outputs_come_before_every_reference(settings: Settings, tmp_path: Path) -> None:
    """Nothing is asked to run the model; what the user expects of a random output is compared, too."""
    x = np.random.default_rng(0).standard_normal((8, 2, 4)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=x, y=np.maximum(x, 0))
    more = "    samples: {path: samples.npz}\n"
    for number, nodes in enumerate((OWN, RANDOM)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "samples.npz").write_bytes((tmp_path / "samples.npz").read_bytes())
        outcome, _, sidecar, _ = compiled(settings, folder, nodes, more)
        assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
        assert sidecar["verification"]["origin"] == {"y": "expected"}
        assert sidecar["verification"]["errors"] == {"y": 0.0}
        assert sidecar["verification"]["refused"] == {}
