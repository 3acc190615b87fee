"""What `debug` brings: logs, texts and timings of a compile, from the real compilers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from farm.compilers import COMPILERS
from farm.jobs.attempt import Limits
from farm.reproduction import MachineFile
from farm.steps import Children, Steps
from tests.compiling import PNET, inputs_of


def compiled(folder: Path, compiler: str, debug: dict[str, Any], path: str = "") -> tuple[Steps, dict[str, Any], str]:
    """Compile a small net for the CPU; return the steps, what the sidecar would have of the compile, and the log."""
    spec = {
        "compiler": {"name": compiler},
        "options": COMPILERS[compiler].resolve_options({}),
        "inputs": inputs_of(PNET, input_1=[1, 24, 24, 3]),
        "batch": 1,
        "precision": "fp32",
        "quantization": {},
        "tuning": {"mode": "off"},
        "calibration": None,
        "env": {},
    }
    order = {"identifier": "net", "target": f"{compiler}/cpu", "spec": spec, "model": {"format": "onnx"}}
    limits = Limits(time=120.0, memory=0)
    machine = MachineFile(migraphx_path=path)
    children = Children(folder, machine, limits, lambda *_: None, threading.Event())
    steps = Steps({**order, **({"debug": debug} if debug else {})}, children)
    return steps, steps.compile(PNET, None), children.log_path.read_text()


def test_onnxruntime_says_more_and_keeps_its_graphs(tmp_path: Path) -> None:
    steps, _, log = compiled(tmp_path, "onnxruntime", {"log_level": "info", "print": True, "trace": ["mlir"]})
    assert "[I:onnxruntime" in log
    assert "Conv" in steps.texts["before"].read_text()
    assert "Softmax" in steps.texts["after"].read_text()


def test_without_debug_nothing_is_kept(tmp_path: Path) -> None:
    steps, found, log = compiled(tmp_path, "onnxruntime", {})
    assert "onnxruntime:" not in log
    assert "passes" not in found
    assert not any(path.exists() for path in steps.texts.values())


@pytest.mark.migraphx
def test_migraphx_traces_times_and_keeps_its_programs(tmp_path: Path) -> None:
    import migraphx

    path = str(Path(migraphx.__file__).resolve().parent)
    debug = {"log_level": "trace", "trace": ["passes"], "print": True, "timings": True}
    steps, found, log = compiled(tmp_path, "migraphx", debug, path)
    before, after = (steps.texts[when].read_text() for when in ("before", "after"))
    assert before.startswith("parameter input_1: float_type, {1, 24, 24, 3}")
    assert "output 1: float_type" in before
    assert " = convolution[" in before
    assert "dnnl::convolution" in after
    assert {"dead_code_elimination", "cpu::lowering"} <= found["passes"].keys()
    assert 0 < sum(found["passes"].values()) < 120
    # The log is whole: what MIGraphX had in its buffer when the child ended is there, too.
    assert log.count("dead_code_elimination") > 10
    assert "module: " in log
