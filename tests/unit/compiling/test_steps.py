"""What the steps make of a work order."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from farm.api.schemas import FILE_NAME
from farm.compiling.asking import reference_recipe
from farm.compiling.attempt import Slot
from farm.compiling.failures import Failure
from farm.compiling.pipeline import Children, StepEnded, Steps, StepSettings, pass_seconds
from farm.jobs.state import AttemptLimits, FailureKind, Phase
from farm.spec import program_extension, program_name


def order(reference: str, **options: Any) -> dict[str, Any]:
    verification = {"samples": {"generate": 2, "seed": 0, "ranges": {}}, "reference": reference}
    model = {"digest": "a" * 64, "format": "onnx"}
    return {"spec": {"model": model, "inputs": {}, "batch": None, "options": options, "verification": verification}}


@pytest.mark.parametrize("option", [{"nhwc": False}, {"max_loop_iterations": 3}, {"limit_max_iterations": 9}])
def test_a_reference_by_migraphx_is_of_the_model_as_it_was_read(option: dict[str, Any]) -> None:
    """ONNX Runtime knows no such options, so its reference is shared whatever they are."""
    plain, chosen = order("migraphx"), order("migraphx", **option)
    assert reference_recipe(plain, "migraphx") != reference_recipe(chosen, "migraphx")
    assert reference_recipe(plain, "onnxruntime") == reference_recipe(chosen, "onnxruntime")


def test_a_reference_by_migraphx_is_shared_by_what_compiles_otherwise() -> None:
    fast, exact = (order("migraphx", fast_math=choice) for choice in (True, False))
    assert reference_recipe(fast, "migraphx") == reference_recipe(exact, "migraphx")


def test_a_program_is_named_after_its_cell_within_what_the_api_takes_for_a_name() -> None:
    assert program_name("net/migraphx-gfx942/int8-fp16/b8", ".mxr") == "net--migraphx-gfx942--int8-fp16--b8.mxr"
    cell = f"{'a' * 100}/migraphx-gfx942.rocm7.2-migraphx2.15/int8-fp16/b8-sequence{'e' * 50}"
    names = {program_name(f"{cell}{length}", ".json") for length in (128, 256)}
    assert len(names) == 2
    assert all(re.fullmatch(FILE_NAME, name) and name.endswith(".json") for name in names)


@pytest.mark.parametrize("cell", ["net-v1.5/acme-cpu/fp32/b1", f"{'a' * 200}/acme-cpu/fp32/b1"])
def test_a_compilers_extension_is_read_whole_from_a_programs_name(cell: str) -> None:
    """A fetched file is named again after the cell that was asked for, and keeps its extension."""
    assert program_extension(program_name(cell, ".acme.onnx"), cell) == ".acme.onnx"
    assert program_extension("net.mxr", "") == ".mxr"


def test_others_on_the_gpu_make_a_measurement_shared_and_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU and no compiler here: the looks and the child's answer are made up."""
    looks = [{"processes": {"count": count, "memory": count * 3_000_000}} for count in (0, 2)]
    answers = iter(looks)
    limits: AttemptLimits = {"time": 60.0, "memory": 9}
    children = Children(
        tmp_path, StepSettings(), limits, lambda *_: None, threading.Event(), conditions=lambda: next(answers)
    )
    monkeypatch.setattr(children, "ask", lambda *_, **__: {"measurements": {"latency": 0.1}})
    spec: dict[str, Any] = {
        "compiler": {"name": "onnxruntime"},
        "precision": "fp32",
        "options": {},
        "toolchain": "ort1",
    }
    spec |= {"inputs": {}, "batch": None, "env": {}, "verification": None, "tuning": {"mode": "off"}}
    spec |= {"device": {"arch": "cpu", "compute_units": None}, "toolchain": "ort1"}
    model = {"format": "onnx", "files": []}
    steps = Steps({"identifier": "net/a/b", "spec": spec, "model": model, "target": "onnxruntime/cpu"}, children)
    compiled: dict[str, Any] = {"inputs": [], "outputs": [], "weight_dtypes": [], "compute_dtypes": [], "quantized": {}}
    record = steps.record(compiled, steps.evaluate(compiled, tmp_path / "reference.npz"))
    assert (record["measurements"]["conditions"], record["measurements"]["shared"]) == (looks, True)
    [line] = children.log_path.read_text().splitlines()
    assert line.startswith("after measuring: others use the GPU (processes: 2, memory: 6 MB)")


def test_the_log_says_how_long_each_phase_took(tmp_path: Path) -> None:
    children = Children(tmp_path, StepSettings(), {"time": 60.0, "memory": 9}, lambda *_: None, threading.Event())
    with pytest.raises(StepEnded), children.phase(Phase.COMPILING):
        raise StepEnded(None)
    begins, ends = children.log_path.read_text().splitlines()
    assert begins == "== compiling ==" and re.fullmatch(r"-- compiling: \d+\.\d\d s --", ends)


def test_children_in_two_slots_share_time_and_cancel_but_no_log(tmp_path: Path) -> None:
    """Else a log that grows in one slot would hide that a child hangs in the other."""
    children = Children(tmp_path, StepSettings(), {"time": 60.0, "memory": 9}, lambda *_: None, threading.Event())
    other = children.in_slot(Slot("GPU-1"), tmp_path / "other")
    other.memory.append(5)
    children.memory.append(3)
    assert max(children.memory) == max(other.memory) == 5
    assert (other.began, other.limits, other.cancelled) == (children.began, children.limits, children.cancelled)
    assert other.log_path != children.log_path


REFUSAL = Failure(FailureKind.UNVERIFIABLE, "has no such operator")


def asking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *ends: Failure | None, python: str = ""
) -> tuple[Steps, list[tuple[str, float]]]:
    """Steps whose children end as given, one after the other; what was asked of them, and for how many seconds."""
    settings = StepSettings(migraphx_python=python)
    children = Children(folder, settings, {"time": 60.0, "memory": 0}, lambda *_: None, threading.Event())
    asked: list[tuple[str, float]] = []

    def ask(request: dict[str, Any], *, seconds: float = 0.0, **_: Any) -> dict[str, Any]:
        asked.append((request["compiler"], seconds))
        if failure := ends[len(asked) - 1]:
            raise StepEnded(failure)
        return {}

    monkeypatch.setattr(children, "ask", ask)
    whole = order("onnxruntime")
    whole["spec"] |= {"compiler": {"name": "migraphx"}, "precision": "fp32"}
    whole["model"] = {"format": "onnx", "files": [], "names": ["y"]}
    return Steps({**whole, "identifier": "net/a/b", "target": "migraphx/cpu"}, children), asked


def test_a_reference_that_cannot_be_killed_ends_the_attempt_also_if_nobody_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is fenced for it."""
    stuck = Failure(FailureKind.GPU_FAULT, "process 7 cannot be killed", fences=True)
    steps, _ = asking(tmp_path, monkeypatch, REFUSAL, stuck, None)
    with pytest.raises(StepEnded) as ended:
        steps.reference(tmp_path / "net.onnx", None)
    assert ended.value.failure == stuck


def test_references_that_nobody_asked_for_leave_time_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Failure(FailureKind.TIME_LIMIT, "it took longer")
    steps, asked = asking(tmp_path, monkeypatch, REFUSAL, slow, None)
    steps.reference(tmp_path / "net.onnx", None)
    assert [name for name, _ in asked] == ["onnxruntime", "onnx", "migraphx"]
    assert asked[0][1] == 0, "all there is"
    assert 0 < asked[1][1] <= 30


@pytest.mark.parametrize("format", ["onnx", "tf"])
def test_no_python_of_migraphx_opens_a_model_that_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """It may lack what the check needs, also if MIGraphX makes the reference; once is enough."""
    steps, asked = asking(tmp_path, monkeypatch, None, None, python="/opt/rocm/python")
    steps.order["model"]["format"] = format
    steps.order["spec"]["verification"]["reference"] = "migraphx"
    steps.reference(tmp_path / "net", None)
    assert steps.prepare(tmp_path / "net") == tmp_path / "net"
    assert [name for name, _ in asked] == ["onnxruntime", "migraphx"], "the check, the reference"


def test_of_passes_that_a_child_makes_up_only_so_many_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    lines = [
        "before: 1000ms",
        *(f"pass{number}: 1ms" for number in range(5000)),
        "pass0: 2ms",
        "x" * 5000,
        "p: 1e999ms",
    ]
    log.write_text("\n".join(lines) + "\n")
    found = pass_seconds(log, len("before: 1000ms\n"))
    assert len(found) == 1000
    assert found["pass0"] == 0.003
    assert "before" not in found
