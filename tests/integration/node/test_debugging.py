"""What `debug` brings: logs, texts and timings of a compile, from the real compilers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from farm.compiling.asking import slice_request
from farm.compiling.pipeline import Children, Steps, StepSettings
from farm.jobs.state import AttemptLimits
from farm.results.speed import Comparison
from farm.targets.compilers import compilers
from farm.tuning.database import ForOneRun, Restored
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from farm.tuning.search import Search, slice_key
from farm.tuning.tuner import Tuner
from tests.support.compiling import PNET, inputs_of, needs_target


def compiled(folder: Path, compiler: str, debug: dict[str, Any], path: str = "") -> tuple[Steps, dict[str, Any], str]:
    """Compile a small net for the CPU; return the steps, what the sidecar would have of the compile, and the log."""
    steps, _ = steps_of(folder, compiler, debug, path)
    return steps, steps.compile(PNET, None), steps.children.log_path.read_text()


OUTPUTS = ["conv2d_4", "softmax"]
"""Of the model that is compiled here."""


def steps_of(
    folder: Path, compiler: str, debug: dict[str, Any], path: str = "", *, mode: str = "off"
) -> tuple[Steps, dict[str, Any]]:
    """Return the steps of a small net for the CPU, and its spec."""
    spec = {
        "compiler": {"name": compiler},
        "options": compilers()[compiler].resolved("native", {}, "cpu")[0],
        "inputs": inputs_of(PNET, input_1=[1, 24, 24, 3]),
        "batch": 1,
        "toolchain": "onnxruntime",
        "precision": "fp32",
        "verification": None,
        "quantization": {},
        "tuning": {"mode": mode},
        "calibration": None,
        "env": {},
    }
    order = {
        "identifier": "net",
        "target": f"{compiler}/cpu",
        "spec": spec,
        "model": {"format": "onnx", "names": OUTPUTS},
    }
    limits = AttemptLimits(time=120.0, memory=0)
    machine = StepSettings(migraphx_path=path)
    folder.mkdir(exist_ok=True)
    children = Children(folder, machine, limits, lambda *_: None, threading.Event())
    return Steps({**order, **({"debug": debug} if debug else {})}, children), spec


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


class Knows(ForOneRun):
    """A tuning database that knows one thing of every slice."""

    def __init__(self, records: Mapping[RecordStore, str], keys: Sequence[str]) -> None:
        found = [Record(store, "", key, value, RecordSource("")) for store, value in records.items() for key in keys]
        self.snapshot = Snapshot.of(found)

    def since(self, seen: frozenset[str]) -> Restored:
        return Restored(self.snapshot, seen)


def test_where_the_untuned_program_wins_its_texts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs are compiled by ONNX Runtime; only which of them was faster is made up."""
    untuned, _, _ = compiled(tmp_path / "untuned", "onnxruntime", {"print": True})
    steps, spec = steps_of(tmp_path / "tuned", "onnxruntime", {"print": True}, mode="quick")
    folder = tmp_path / "slices"
    found = steps.ask(slice_request(steps.order, PNET, folder), read=[PNET.parent], write=[folder])
    threads = steps.children.settings.threads_per_slot
    keys = [slice_key(spec, piece["signature"], threads) for piece in found["slices"]]
    known = {
        RecordStore.ONNXRUNTIME: '{"all/1":1.0,"basic/1":2.0}',
        RecordStore.SLICES: '{"operations":1,"seconds":1.0}',
    }
    monkeypatch.setattr("farm.tuning.tuner.compare", lambda *_: Comparison(0.5, 0.4, 0.6, "slower"))
    tuner = Tuner(Search(steps, Knows(known, keys), session="one"))
    made = tuner.compile(PNET, None)
    tuned = steps.texts["after"].read_text()
    assert tuner.choose(made, None, runs=True) == tuner.untuned_compiled
    assert tuner.report(published=False)["published"] == "untuned"
    assert steps.texts["after"].read_text() == untuned.texts["after"].read_text() != tuned
    assert steps.program.exists()


@pytest.mark.migraphx
def test_migraphx_traces_times_and_keeps_its_programs(tmp_path: Path) -> None:
    import migraphx

    needs_target("cpu")

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
