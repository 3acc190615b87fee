"""MIGraphX's tuning without a GPU: a child with its two phases and its rule of writing, and steps that use it.

A model is a file of operations, `{"operations": [name, …], "log": FILE, "slowest": seconds}`. As in MIGraphX all
candidates of all operations that the problem cache does not have are compiled first, then timed one operation after
another; the cache is written whole, not atomically, at the end, or after each operation with
MIGRAPHX_TRACE_BENCHMARKING. How long a candidate takes is random, `slowest` at most. Every candidate that was worked on
leaves a byte in the log, so work can be counted. A model with a `gate` says in that folder which slice is begun on
which GPU, and waits until the gate of that GPU, or of that slice, is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CANDIDATES = 12
"""Of each operation."""
PER_SLICE = 4


# --- the child -------------------------------------------------------------------------------------------------


def work(request: dict[str, Any], messages: Any) -> dict[str, Any]:
    """Do what a request asks for, as `farm/runner/actions.py` does it with a compiler."""
    if request["action"] == "bench":
        # The tuned one is fast, also without the databases, unless it is told to need them.
        alone = "/proof" in os.environ["MIGRAPHX_PROBLEM_CACHE"]
        tuned = 0.0015 if alone and os.environ.get("NEEDS_DATABASES") else 0.001
        speeds = (tuned, 0.002, 0.0008)[: len(request["programs"])]
        return {"programs": [{"load": 0.1, "first": [0.3], "rounds": [[speed]] * 10} for speed in speeds]}
    model = json.loads(Path(request["model"]["path"]).read_text())
    if request["action"] == "slice":
        return write_slices(model, Path(request["slices"]))
    if "refused" in model["operations"]:
        failure = sys.modules["farm.runner.protocol"].RequestFailed  # type: ignore[attr-defined]
        raise failure("compiler_error", "No solutions provided for refused")
    if request["action"] == "tune" and model["gate"]:
        wait_at(Path(model["gate"]), request["gpu"], model["operations"][0])
    tune(model["operations"], Path(model["log"]), model["slowest"])
    if request["action"] == "tune":
        return {}
    return {"inputs": [], "outputs": [], "weight_dtypes": {}, "compute_dtypes": {}, "quantized": {}}


def wait_at(gate: Path, gpu: str, slice_: str) -> None:
    """Say that a slice is begun, and wait until it or its GPU may go on."""
    with (gate / "begun").open("a") as begun:
        begun.write(f"{gpu} {slice_} {os.getpid()}\n")
    deadline = time.monotonic() + 300
    while not ((gate / gpu).exists() or (gate / slice_).exists()):
        if time.monotonic() > deadline:
            raise TimeoutError(gate / gpu)
        time.sleep(0.01)


def write_slices(model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    slices = []
    for start in range(0, len(model["operations"]), PER_SLICE):
        operations = model["operations"][start : start + PER_SLICE]
        path = folder / f"slice-{start:04}.onnx"
        path.write_text(json.dumps({**model, "operations": operations}))
        signature = hashlib.sha256("-".join(operations).encode()).hexdigest()
        slices.append(
            {"path": str(path), "signature": signature, "operations": len(operations), "count": 1, "inputs": {}}
        )
    return {"slices": slices}


def tune(operations: Sequence[str], log: Path, slowest: float) -> None:
    path = Path(os.environ["MIGRAPHX_PROBLEM_CACHE"])
    steadily = int(os.environ.get("MIGRAPHX_TRACE_BENCHMARKING", "0")) > 0
    cache = json.loads(path.read_text()) if path.exists() else []
    known = {key["problem"] for key, _ in cache}
    unknown = [name for name in dict.fromkeys(operations) if name not in known]
    chance = random.Random()
    with log.open("ab", buffering=0) as done:
        fcntl.flock(done, fcntl.LOCK_SH)  # Who counts work waits for a child that is being killed.
        for _ in unknown:
            for _ in range(CANDIDATES):
                time.sleep(chance.uniform(0, slowest))
                done.write(b".")
        for name in unknown:
            time.sleep(chance.uniform(0, slowest * CANDIDATES))
            cache.append([{"name": "gpu::mlir_op", "problem": name}, f"v4:{zlib.crc32(name.encode())}"])
            if steadily:
                write(cache, path)
    if unknown:
        write(cache, path)


def write(cache: Sequence[Any], path: Path) -> None:
    """Write the cache as MIGraphX does: over the old one, piece by piece."""
    text = json.dumps(cache)
    with path.open("w", buffering=1) as file:
        for start in range(0, len(text), 100):
            file.write(text[start : start + 100])
            file.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "farm" / "runner"))
    import child

    sys.exit(child.start(work))


# --- the worker ------------------------------------------------------------------------------------------------
from farm.artifacts.s3 import S3Store  # noqa: E402
from farm.compiling.asking import MadeProgram  # noqa: E402
from farm.compiling.attempt import ANYWHERE, Slot  # noqa: E402
from farm.compiling.child_process import run_child  # noqa: E402
from farm.compiling.failures import ChildLimits, classify  # noqa: E402
from farm.compiling.pipeline import Children, OnPhase, StepEnded, Steps, StepSettings  # noqa: E402
from farm.settings import Settings  # noqa: E402
from farm.tuning.database import TuningDatabase  # noqa: E402
from farm.tuning.search import Search  # noqa: E402
from farm.tuning.tuner import Tuner  # noqa: E402

SPEC: Mapping[str, Any] = {
    "compiler": {"name": "migraphx"},
    "model": {"digest": "0" * 64},
    "toolchain": "rocm7.2-migraphx2.15-00000000",
    "precision": "fp16",
    "options": {},
    "quantization": {},
    "env": {},
    "calibration": None,
    "verification": None,
    "inputs": {},
    "batch": None,
}


class ScriptedSteps(Steps):
    """Steps whose children follow the script above."""

    asked: list[tuple[str, dict[str, str]]]
    """Action and environment of every child."""

    def ask(
        self,
        request: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        *,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        seconds: float = 0.0,
        quiet: bool = False,
    ) -> dict[str, Any]:
        """Ask a scripted child; the same as the real one but for what runs in it."""
        for folder in write:
            folder.mkdir(parents=True, exist_ok=True)
        self.__dict__.setdefault("asked", []).append((request["action"], dict(environment or {})))
        end = run_child(
            {**request, "gpu": self.children.slot.gpu},
            log_path=self.children.log_path,
            environment={"MIGRAPHX_PROBLEM_CACHE": str(self.children.folder / "none.json"), **(environment or {})},
            limits=ChildLimits(time=seconds),
            folder=self.children.folder,
            cancelled=self.children.cancelled,
            script=Path(__file__),
        )
        if end.result is not None and end.ok:
            return end.result
        raise StepEnded(classify(end))


def save_model(folder: Path, operations: Sequence[str], slowest: float = 0.004, *, gate: Path | None = None) -> Path:
    """Write a model of these operations, with an empty log of work next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.json"
    log = folder / "work.log"
    log.touch()
    document = {"operations": list(operations), "log": str(log), "slowest": slowest, "gate": str(gate or "")}
    path.write_text(json.dumps(document))
    return path


class Begun(NamedTuple):
    """A slice that was begun: the GPU, its first operation, and the child."""

    gpu: str
    slice: str
    pid: int


def begun(gate: Path) -> list[Begun]:
    """Return the slices that were begun at a gate, in order."""
    lines = (gate / "begun").read_text().splitlines() if (gate / "begun").exists() else []
    return [Begun(gpu, name, int(pid)) for gpu, name, pid in map(str.split, lines)]


def tried(model: Path) -> int:
    """Return how many candidates were worked on so far."""
    return Path(json.loads(model.read_text())["log"]).stat().st_size


def worked(model: Path) -> int:
    """Return how many candidates were worked on for a model, once nobody works on it any more."""
    with Path(json.loads(model.read_text())["log"]).open("rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        return log.seek(0, os.SEEK_END)


def database(artifacts: S3Store, mode: str = "exhaustive") -> TuningDatabase:
    """Return the database that scripted models are tuned into."""
    return TuningDatabase(artifacts, "main", "migraphx-gfx942-304cu.rocm7.2-00000000", "gfx942-304cu-8xcc", mode)


def tuner_for(
    artifacts: S3Store,
    settings: Settings,
    folder: Path,
    name: str,
    *,
    mode: str = "exhaustive",
    slot: Slot = ANYWHERE,
    on_phase: OnPhase = lambda *_: None,
    published: MadeProgram | None = None,
    **options: Any,
) -> Tuner:
    """Return what tunes one model in a slot; `name` is the attempt's, and that of its folder."""
    place = folder / name
    place.mkdir(parents=True)
    children = Children(place, StepSettings.of(settings), {"time": 0.0, "memory": 0}, on_phase, threading.Event(), slot)
    order = {
        "identifier": f"{name}/migraphx-gfx942/fp16/b1",
        "target": "migraphx/gfx942",
        "model": {"format": "onnx", "names": ["y"]},
        "spec": {**SPEC, "tuning": {"mode": mode}},
    }
    search = Search(ScriptedSteps(order, children), database(artifacts, mode), session=name, **options)
    return Tuner(search, published=published)
