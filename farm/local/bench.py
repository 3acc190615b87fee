"""Bench: how fast programs are on this machine, each alone and in turns with others.

Everything runs in children. Programs that can live in one process take turns in one; others (another interpreter,
another environment, which compilers read once) take turns process by process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farm.compiling.asking import ONE_SAMPLE
from farm.compiling.attempt import Installation
from farm.compiling.pipeline import Children
from farm.jobs.state import Phase
from farm.results.speed import MIN_ROUNDS, MeasuredDocument, SpeedDocument, distribution
from farm.runner.documents import BenchAnswer, BenchProgram, DataRecipe, Request
from farm.runner.onnxruntime_sessions import device_of
from farm.runner.samples import points_of
from farm.targets.compilers import compilers, filled

FIRST_RUNS = 10
ROUNDS = 40
PROCESS_ROUNDS = 10  # Rounds if every turn is a process of its own, which loads its program first.
PATIENCE = 120.0
"""Seconds beyond the given time for the fewest rounds that can show something; slower programs get one round."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program, or a model as it is, that is measured; `request` has what a child needs to run it."""

    name: str
    request: BenchProgram
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    """The interpreter that runs it (empty: this one), in processes of its own; None if its compiler decides."""

    @property
    def target(self) -> str:
        """What runs it: compiler and device."""
        return f"{self.request['compiler']}/{self.request['device']}"

    @property
    def batch(self) -> int:
        """Samples of one run; of a range the largest batch, which is measured."""
        batch = self.request["batch"]
        return int(batch["max"] if isinstance(batch, Mapping) else batch or 1)

    @property
    def files(self) -> list[Path]:
        """The files and folders that a child has to read for it."""
        model = self.request["model"].get("path")
        named = [self.request["program"], Path(model).parent if model else None, self.request["samples"].get("path")]
        return [Path(file) for file in named if file]


def at_points(contestant: Contestant) -> list[Contestant]:
    """Return a contestant at each size that it is measured at: itself, or the points of its dynamic dimensions.

    There its inputs are seeded: a sample is of one size.
    """
    points = points_of(contestant.request["inputs"], contestant.request["batch"])
    if len(points) == 1:
        return [contestant]
    samples: DataRecipe = {**ONE_SAMPLE, "ranges": contestant.request["samples"].get("ranges", {})}
    return [
        replace(contestant, request={**contestant.request, "inputs": inputs, "batch": batch, "samples": samples})
        for inputs, batch in points
    ]


def program_of(sidecar: Mapping[str, Any], program: Path, name: str = "") -> Contestant:
    """Return an artifact's program as a contestant; it runs on the sample in its folder, if there is one."""
    spec = sidecar["spec"]
    arch = str(spec["device"]["arch"]).partition(":")[0]
    device = device_of(arch, str(sidecar["toolchain"])) if arch.startswith("sm_") else arch
    return Contestant(
        name or str(sidecar["identifier"]),
        {
            "compiler": spec["compiler"]["name"],
            "device": device,
            "program": str(program),
            "inputs": spec["inputs"],
            "batch": spec["batch"],
            "precision": spec["precision"],
            "options": filled(compilers()[spec["compiler"]["name"]].options_of(device), spec["options"]),
            "session": sidecar["tuning"].get("session"),
            "model": {"format": spec["model"]["format"]},
            "outputs": [output["name"] for output in sidecar["outputs"]],
            "samples": _samples(sidecar, program.parent),
        },
        spec["env"],
    )


def original_of(sidecar: Mapping[str, Any], model: Path, program: Path, name: str = "onnxruntime") -> Contestant:
    """Return the model that an artifact was made from, as ONNX Runtime runs it, on the same sample."""
    spec = sidecar["spec"]
    return Contestant(
        name,
        {
            "compiler": "onnxruntime",
            "device": "cpu",
            "program": None,
            "inputs": spec["inputs"],
            "batch": spec["batch"],
            "options": {},
            "model": {"path": str(model), "format": spec["model"]["format"]},
            "outputs": [],
            "samples": _samples(sidecar, program.parent),
        },
    )


def torch_of(sidecar: Mapping[str, Any], model: Path, program: Path, python: str) -> Contestant:
    """Return the PyTorch model that an artifact's was converted from, as the torch of an interpreter runs it."""
    conversion = sidecar["conversion"]
    original = original_of(sidecar, model, program, "torch")
    order = [value["name"] for value in conversion["inputs"]]
    request: BenchProgram = {
        **original.request,
        "compiler": "torch",
        "model": {"path": str(model), "format": conversion["kind"], "order": order},
    }
    return replace(original, request=request, python=python)


def _samples(sidecar: Mapping[str, Any], folder: Path) -> DataRecipe:
    """Return the source of the inputs: the artifact's own sample if it is complete, else seeded samples."""
    blob = sidecar["blobs"].get("sample")
    path = folder / str(blob["path"]) if blob else folder
    if blob and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == blob["digest"]:
        return {"path": str(path)}
    recipe = (sidecar["spec"]["verification"] or {}).get("samples") or {}
    return {**ONE_SAMPLE, "ranges": recipe.get("ranges", {})}


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a contestant. Seconds; `first` are the first runs of a fresh process, `memory` its peak in
    bytes, `rounds` the runs in turns with the others."""

    contestant: Contestant
    load: float
    first: Sequence[float]
    memory: int
    rounds: Sequence[Sequence[float]]

    @property
    def latency(self) -> SpeedDocument:
        """The latency distribution over all rounds."""
        return distribution([seconds for runs in self.rounds for seconds in runs], self.contestant.batch)

    def as_dict(self) -> MeasuredDocument:
        """Return it as plain JSON."""
        return {
            "name": self.contestant.name,
            "target": self.contestant.target,
            "batch": self.contestant.batch,
            "load": self.load,
            "first_runs": list(self.first),
            "peak_memory": self.memory,
            "latency": self.latency,
        }


def measure(contestants: Sequence[Contestant], children: Children, seconds: float) -> list[Measured]:
    """Measure each contestant in a fresh process, then all in turns, for about `seconds` each.

    Raises StepEnded if one does not load or run.
    """
    alone = [_ask([contestant], children, first=FIRST_RUNS, rounds=0, seconds=0.0) for contestant in contestants]
    slowest = max(answer["programs"][0]["first"][-1] for answer in alone)
    migraphx = [each for each in contestants if each.request["compiler"] == "migraphx"]
    mixed = 0 < len(migraphx) < len(contestants) and bool(children.settings.migraphx_python)
    apart = len(contestants) > 1 and any(each.python is not None for each in contestants)
    # One process can hold them all: the same interpreter, and the same environment for MIGraphX.
    if not (mixed or apart) and all(each.environment == migraphx[0].environment for each in migraphx):
        count = _rounds(slowest, seconds, ROUNDS)
        answer = _ask(contestants, children, first=2, rounds=count, seconds=seconds)
        rounds = [list(program["rounds"]) for program in answer["programs"]]
    else:
        loading = max(answer["programs"][0]["load"] for answer in alone)
        count = _rounds(loading + slowest, seconds, PROCESS_ROUNDS)
        rounds = [[] for _ in contestants]
        for number in range(count):
            turns = list(enumerate(contestants))
            for place, contestant in reversed(turns) if number % 2 else turns:
                answer = _ask([contestant], children, first=2, rounds=1, seconds=seconds / count)
                rounds[place] += answer["programs"][0]["rounds"]
    if children.shared:
        children.on_phase(Phase.MEASURING, None, "others ran on this host meanwhile, so the times are rough")
    return [
        Measured(contestant, found["programs"][0]["load"], found["programs"][0]["first"], found["peak_memory"], runs)
        for contestant, found, runs in zip(contestants, alone, rounds, strict=True)
    ]


def _ask(
    contestants: Sequence[Contestant], children: Children, *, first: int, rounds: int, seconds: float
) -> BenchAnswer:
    leading = next((each for each in contestants if each.request["compiler"] == "migraphx"), contestants[0])
    request: Request = {
        "action": "bench",
        "compiler": leading.request["compiler"],
        "device": leading.request["device"],
        "programs": [contestant.request for contestant in contestants],
        "first": first,
        "rounds": rounds,
        "seconds": seconds,
    }
    read = [file for contestant in contestants for file in contestant.files]
    own = None if leading.python is None else Installation(leading.python)
    answer: BenchAnswer = children.ask(request, read=read, environment=leading.environment, installation=own)
    return answer


def _rounds(run: float, seconds: float, most: int) -> int:
    """Return how many rounds to take: as many as fit, and enough to show something unless that takes too long."""
    if run * MIN_ROUNDS > seconds + PATIENCE:
        return 1
    return max(MIN_ROUNDS, min(most, int(seconds / run) if run else most))
