"""Pipeline: takes one cell from its model to a measured program, and returns what is known about that program.

The executor of a worker, `farm optimize`, the health probe and `farm reproduce` all use it. They differ in where the
inputs come from and in what happens to the program; both stay outside. `Pipeline` calls `Steps` in order; each step
runs in a sealed child (`Children`) that reads its inputs and writes to a folder of its own. Knows no store.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import farm
from farm.compiling import asking
from farm.compiling.alone import Clock, host_at
from farm.compiling.attempt import ANYWHERE, Installation, Slot
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, Failure, classify
from farm.compiling.templates import Templates
from farm.files import tree_size
from farm.jobs.state import AttemptLimits, FailureKind, Phase, WorkOrder
from farm.runner.documents import CompileAnswer, EvaluateAnswer, PhaseMessage, Request, TimedProgram, Verification
from farm.runner.protocol import text_of
from farm.spec import program_name
from farm.targets.compilers import compilers
from farm.wire.program import Conditions, Measurements, ProgramRecord

OnPhase = Callable[[Phase, float | None, str], None]
"""Hears what an attempt does: its phase, its progress as a share of 1 (None if unknown), and a detail."""

LARGEST = 1 << 62  # Largest size of a file without a limit.


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a machine that steps use; the farm's settings have the same names. 0 means no limit."""

    threads_per_slot: int = 1
    measure_seconds: float = 3.0  # How long a program is run again and again.
    lock_dir: str = ""
    """Folder of the lock files by which what measures on a host is alone; empty: the system's temporary one."""
    hang_seconds: float = 0.0  # How long a child may show no sign of life.
    disk_limit: int = 0  # Bytes that the children of an attempt may write together.
    process_limit: int = 0  # Processes and threads of a child.
    migraphx_path: str = ""  # Where MIGraphX's Python module is, if that is not where the interpreter looks.
    migraphx_python: str = ""  # Interpreter for MIGraphX's children; empty: this one.

    @classmethod
    def of(cls, settings: object) -> StepSettings:
        """Return those of the farm's settings."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


class StepEnded(Exception):
    """A step did not finish: `failure` says why; None if it was cancelled."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__(f"{failure.kind}: {failure.message}" if failure else "cancelled")
        self.failure = failure


@dataclass
class Children:
    """Runs requests in children, one after the other, in one folder; the time limit holds for all of them together.

    They run in `slot`; `environment` is added to theirs. `in_slot` returns children that run in another slot.
    """

    folder: Path
    settings: StepSettings
    limits: AttemptLimits
    on_phase: OnPhase
    cancelled: threading.Event
    slot: Slot = ANYWHERE
    environment: Mapping[str, str] = field(default_factory=dict)
    conditions: Callable[[], Conditions | None] = lambda: None  # Returns the state of the slot's GPU; `look` calls it.
    began: float = field(default_factory=time.monotonic)
    """When it all began; later by the time for which it waited for object storage."""
    clock: Clock = field(default_factory=Clock)  # Stands still while its child is paused.
    shared: bool = False  # Whether something was measured in this slot while others ran on the host, or may have.
    memory: list[int] = field(default_factory=list)  # Peaks in bytes, of every child.
    written: set[Path] = field(default_factory=set)  # The folders in which children wrote.
    within: Path | None = None  # The folder in which all children of the attempt write; None: `folder`.
    templates: Templates | None = None  # What children are forked from; None: they start cold.

    def __post_init__(self) -> None:
        self.within = self.within or self.folder
        self.log_path = self.folder / "log.txt"
        self.largest = self.settings.disk_limit or LARGEST
        """Bytes of a file that a child may have made."""
        self.phases: dict[str, float] = {}
        self.started_at = datetime.now(UTC)
        self.log_path.touch()

    def in_slot(self, slot: Slot, folder: Path) -> Children:
        """Return children of the same attempt that run in another slot at the same time, with a log of their own.

        The time limit holds for all of them together, the memory limit for each.
        """
        folder.mkdir()
        return replace(self, slot=slot, folder=folder, clock=Clock(self.clock.lost))

    @property
    def seconds(self) -> float:
        """Seconds since it all began, without those in which its children were paused."""
        return round(time.monotonic() - self.began - self.clock.lost, 3)

    def look(self, when: str) -> Conditions | None:
        """Return the state of the slot's GPU while no child runs; log that others use it, at the moment `when`."""
        found = self.conditions()
        processes = found["processes"] if found else None
        if processes and processes["count"]:
            with self.log_path.open("a") as log:
                held = f"processes: {processes['count']}, memory: {processes['memory'] / 1e6:.0f} MB"
                log.write(f"{when}: others use the GPU ({held}); times are rough, measure again when it is idle\n")
        return found

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Report that a phase begins, and measure its time."""
        if self.cancelled.is_set():
            raise StepEnded(None)
        self.on_phase(phase, None, "")
        with self.log_path.open("a") as log:
            log.write(f"== {phase} ==\n")
        start = self.seconds
        try:
            yield
        finally:
            with self.log_path.open("a") as log:
                log.write(f"-- {phase}: {self.seconds - start:.2f} s --\n")
            self.phases[phase] = round(self.phases.get(phase, 0) + self.seconds - start, 3)

    def ask(
        self,
        request: Request,
        *,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        seconds: float = 0.0,
        quiet: bool = False,
        threads: int = 0,
        installation: Installation | None = None,
    ) -> Any:
        """Run one request in a sealed child; return its answer: the document of the request's action, checked.

        The child may read the files and folders in `read` and write to those in `write`, which are made if they are
        missing. `environment` is added to that of all children. The child gets `seconds` at most (0: what is left) and
        `threads` (0: those of a slot). With `quiet` its progress is not reported. `installation` is used
        instead of the compiler's own. Raises StepEnded if there is no answer.
        """
        for folder in write:
            folder.mkdir(parents=True, exist_ok=True)
        others = sum(map(tree_size, self.written.difference(write)))
        self.written.update(write)
        left = max(self.limits["time"] - self.seconds, 0.001) if self.limits["time"] else seconds
        left = min(left, seconds) if seconds else left
        settings = self.settings
        own = (settings.migraphx_python, settings.migraphx_path) if request["compiler"] == "migraphx" else ("", "")
        chosen = installation or Installation(*own)
        whole: Request = {
            **request,
            "threads": threads or settings.threads_per_slot,
            "gpu": self.slot.gpu,
            "maker": self.slot.maker,
            "cpus": self.slot.cpus,
            "search": [chosen.folder] if chosen.folder else [],
        }
        end = run_child(
            whole,
            log_path=self.log_path,
            python=chosen.python,
            environment={**self.environment, **(environment or {})},
            limits=ChildLimits(
                time=left,
                whole=0.0 if left == seconds else self.limits["time"],
                memory=self.limits["memory"],
                hang=settings.hang_seconds,
                waiting=1.0 if self.slot.gpu else 0.0,
                disk=settings.disk_limit,
                written=others,
                processes=settings.process_limit,
            ),
            folder=self.folder,
            on_message=None if quiet else self._report,
            cancelled=self.cancelled,
            seal=Seal(read=read, write=write, within=self.within),
            host=host_at(settings.lock_dir),
            clock=self.clock,
            templates=self.templates,
        )
        self.shared = self.shared or end.shared
        self.memory.append(end.memory)
        if end.result is not None and end.ok:
            return end.result
        raise StepEnded(classify(end))

    def _report(self, message: PhaseMessage) -> None:
        self.on_phase(Phase(message["phase"]), message["progress"], message["detail"])


FALLBACK_SECONDS = 600.0
"""Time limit of a reference that the manifest does not name; it also gets at most half of the time that is left."""

_REFERENCE_FAILED = {FailureKind.UNVERIFIABLE, FailureKind.COMPILER_CRASH, FailureKind.HANG}
"""Failures of a reference that are not the fault of the compiler, the limits or the samples."""


class Databases(NamedTuple):
    """The tuning databases of a child that measures: the variables that lead to them, and their folders."""

    environment: Mapping[str, str]
    folders: Sequence[Path]


NO_DATABASES = Databases({}, ())


class ReferenceCache(Protocol):
    """Keeps reference outputs for attempts that need the same ones."""

    def bring(self, used: str, path: Path) -> bool:
        """Write to `path` what the reference named `used` made before; return whether there was something."""

    def keep(self, used: str, path: Path) -> None:
        """Keep what the reference named `used` has just made."""


REF_DOUBTED = "MIGraphX's ref was never compared with ONNX's own cases"
"""Why a difference from it proves nothing if the manifest does not name it."""


class Steps:
    """The steps of one cell. Every step raises StepEnded if its child gives no answer."""

    def __init__(
        self, order: WorkOrder, children: Children, *, keyed: bool = False, installation: Installation | None = None
    ) -> None:
        """`keyed`: the program is published under the order's cache key, so only the toolchain in that key compiles.

        `installation` has that toolchain, if it is not the node's own; references are always made by the node's own.
        """
        self.order = order
        self.children = children
        self.keyed = keyed
        self.installation = installation
        self.sample = children.folder / "sample" / "sample.npz"
        """One sample with its right outputs; `evaluate` leaves it."""
        spec = order["spec"]
        self.compiler = compilers()[spec["compiler"]["name"]]
        extension = self.compiler.program_extension(spec["options"])
        self.program = children.folder / "program" / program_name(order["identifier"], extension)
        """The compiled program; `compile` leaves it."""
        self.texts = {when: text_of(self.program, when) for when in ("before", "after")}
        """The program's text before and after compilation; `compile` writes it if `debug` asks for it."""
        self.env_files: dict[str, str] = {}
        """Paths of the files that environment variables of the spec name."""
        self.refused: dict[str, str] = {}
        """Why references could not run the model, by name, in the order in which they were asked."""
        self.conditions: list[Conditions] = []
        """State of the GPU before and after the program was measured, if its driver reports it."""
        self._checked = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the spec, for the compiler only: the recipe of the reference does not name them.

        Raises StepEnded for one that no manifest may set: a work order may come from a farm that nobody trusts.
        """
        given = self.order["spec"]["env"]
        problems = {name: self.compiler.env_problem(name, value) for name, value in given.items()}
        problems |= {name: "is not a file" for name in self.env_files if not self.compiler.is_file(name)}
        for name, problem in problems.items():
            if problem:
                raise StepEnded(Failure(FailureKind.INTERNAL, f"the work order's variable `{name}` {problem}"))
        return {**given, **self.env_files}

    @property
    def threads(self) -> int:
        """Threads of a child of this cell: those of the slot, or those of the spec if they change the program."""
        spec = self.order["spec"]
        threads = self.compiler.threads(spec["options"], spec["tuning"]["mode"])
        return threads or self.children.settings.threads_per_slot

    def in_slot(self, slot: Slot, folder: Path) -> Steps:
        """Return the steps of the same cell in another slot, for work at the same time; see `Children.in_slot`."""
        steps = copy(self)
        steps.children = self.children.in_slot(slot, folder)
        return steps

    def under(self, installation: Installation | None) -> Steps:
        """Return the steps of the same cell under another toolchain's installation (None: the node's own)."""
        steps = copy(self)
        steps.installation = installation
        return steps

    def reference(self, model: Path, samples: Path | None, cache: ReferenceCache | None = None) -> Path:
        """Make the inputs and right outputs to compare with; check the model before any compiler opens it.

        References are asked in order, until one can run the model. If none can, only the samples' own expected outputs
        are compared (EXPECTED). `cache` may have what a reference made before.
        """
        path = self.children.folder / "reference" / "reference.npz"
        path.parent.mkdir(exist_ok=True)
        references = asking.references_of(self.order)
        limit, patience = self.children.limits["time"], 0.0
        for used in references or ("none",):
            try:
                if not (cache and cache.bring(used, path)):
                    self._ask_reference(model, samples, path, used, seconds=patience)
                    if cache:
                        cache.keep(used, path)
            except StepEnded as ended:
                if ended.failure is None or not self._may_ask_next(ended.failure):
                    raise
                self.refused[used] = ended.failure.message
                # Compiling needs time, too.
                half = max((limit - self.children.seconds) / 2, 0.001) if limit else FALLBACK_SECONDS
                patience = min(FALLBACK_SECONDS, half)
                with self.children.log_path.open("a") as log:
                    log.write(f"reference {used} cannot be had: {ended.failure.kind}: {ended.failure.message}\n")
            else:
                return path
        first = self.refused[references[0]]
        why = f"no reference can run the model ({', '.join(references)}): {first}"
        self._ask_reference(model, samples, path, asking.EXPECTED, unverified=why)
        return path

    def _ask_reference(
        self, model: Path, samples: Path | None, path: Path, used: str, *, unverified: str = "", seconds: float = 0.0
    ) -> None:
        request = asking.reference_request(self.order, model, samples, path, used, unverified=unverified)
        if used == "migraphx":
            self._let_check(model, None)
        self.children.ask(request, read=inputs_of(model, samples), write=[path.parent], seconds=seconds)
        self._checked = True

    def _may_ask_next(self, failure: Failure) -> bool:
        others_may = bool(self.refused) and failure.kind is not FailureKind.STORAGE
        return not failure.fences and (failure.kind in _REFERENCE_FAILED or others_may)

    def prepare(self, model: Path) -> Path:
        """Check the model if the compiling child cannot, and return it in the form that the compiler reads."""
        if self.compiler.name == "migraphx":
            self._let_check(model, self.installation)
        if not self.compiler.packs(self.order["spec"]["precision"]):
            return model
        packed = self.children.folder / "packed" / "packed.onnx"
        self.children.ask(asking.pack_request(self.order, model, packed), read=[model.parent], write=[packed.parent])
        return packed

    def _let_check(self, model: Path, installation: Installation | None) -> None:
        """Let a child of the farm's own Python check the model: one of MIGraphX's may lack onnx, and opens it next."""
        if not self._checked and (installation or self.children.settings.migraphx_python):
            self.children.ask(asking.model_request(self.order, model, "check"), read=[model.parent])
            self._checked = True

    def compile(self, model: Path, calibration: Path | None) -> CompileAnswer:
        """Quantize, compile and save the program."""
        model = self.prepare(model)
        request = asking.compile_request(self.order, model, calibration, self.program)
        return cast("CompileAnswer", self.ask(request, read=inputs_of(model, calibration), write=[self.program.parent]))

    def evaluate(self, compiled: CompileAnswer, reference: Path, databases: Databases = NO_DATABASES) -> EvaluateAnswer:
        """Load the program from its file, compare it with the reference, and measure it."""
        made, seconds = asking.MadeProgram.of(self.program, compiled), self.children.settings.measure_seconds
        request = asking.evaluate_request(self.order, made, reference, self.sample, seconds)
        before = self.children.look("before measuring")
        write = [self.sample.parent, *databases.folders]
        answer: EvaluateAnswer = self.ask(request, databases.environment, read=[self.program, reference], write=write)
        after = self.children.look("after measuring")
        self.conditions = [found for found in (before, after) if found]
        return answer

    def bench(
        self,
        programs: Sequence[asking.MadeProgram],
        samples: Path | None,
        *,
        rounds: int,
        seconds: float,
        toolchain: str = "",
        databases: Databases = NO_DATABASES,
    ) -> Sequence[TimedProgram]:
        """Let programs of this cell take turns in one child; with `toolchain` in one that has it, and no other."""
        request = asking.bench_request(self.order, programs, samples, toolchain)
        read = [*(program.path for program in programs), *([samples] if samples else [])]
        request |= {"rounds": rounds, "seconds": seconds}
        answer = self.ask(request, databases.environment, read=read, write=databases.folders)
        timed: Sequence[TimedProgram] = answer["programs"]
        return timed

    def ask(
        self,
        request: Request,
        environment: Mapping[str, str] | None = None,
        *,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        seconds: float = 0.0,
        quiet: bool = False,
    ) -> Any:
        """Ask a child of this cell's compiler, with the cell's environment: see `Children.ask`.

        A child that compiles the whole model also gets the work order's `debug` settings.
        """
        if self.keyed and request["action"] in ("compile", "tune"):
            request = {**request, "expected": asking.expected_of(self.order["spec"])}
        debug = self.order.get("debug", {}) if request["action"] == "compile" else {}
        if debug:
            request = {**request, "debug": debug}
        start = self.children.log_path.stat().st_size if debug else 0
        debugging = self.compiler.debugging.environment(debug)
        answer = self.children.ask(
            {**request, "environment": self.environment},
            read=[*read, *map(Path, self.env_files.values())],
            write=write,
            environment={**debugging, **(environment or {})},
            seconds=seconds,
            quiet=quiet,
            threads=self.threads,
            installation=self.installation,
        )
        if debug.get("timings"):
            answer["passes"] = pass_seconds(self.children.log_path, start)
        return answer

    def record(self, compiled: CompileAnswer, evaluated: EvaluateAnswer | None) -> ProgramRecord:
        """Return what the sidecar says about the program and about how it was made.

        `evaluated` is None if nothing here can run the program.
        """
        spec = self.order["spec"]
        # If the caller copies, a program has a parameter for each output.
        parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
        axes = {name: each.get("batch_axis") for name, each in spec["inputs"].items()}
        shared = self.children.shared or any(map(is_shared, self.conditions))
        speed = cast("Measurements", dict(evaluated["measurements"]) if evaluated else {})
        speed |= {"shared": shared, "conditions": self.conditions}
        evidence: Verification | None = None
        if spec["verification"] and evaluated:
            asked = spec["verification"]["reference"]
            evidence = {**evaluated["verification"], "reference": asked, "refused": self.refused}
            if self.refused:
                by_ref = [name for name, who in evidence["origin"].items() if who == "migraphx"]
                evidence["doubted"] = {**evidence.get("doubted", {}), **dict.fromkeys(by_ref, REF_DOUBTED)}
        return {
            "schema": 1,
            "identifier": self.order["identifier"],
            "spec": spec,
            "conversion": self.order["model"].get("conversion"),
            "model_size": sum(file["size"] for file in self.order["model"]["files"]),
            "toolchain": spec["toolchain"],
            "device": {
                "arch": spec["device"]["arch"],
                "compute_units": spec["device"]["compute_units"],
                **self.children.slot.device,
            },
            "inputs": [{**port, "batch_axis": axes.get(port["name"]), "parameter": ""} for port in compiled["inputs"]],
            "outputs": [
                {**output, "batch_axis": None, "parameter": name}
                for output, name in zip(compiled["outputs"], parameters, strict=True)
            ],
            "weight_dtypes": sorted(compiled["weight_dtypes"]),
            "compute_dtypes": sorted(compiled["compute_dtypes"]),
            "quantized": compiled["quantized"],
            "emulated": self.order.get("emulated", []),
            "offload_copy": compiled.get("offload_copy"),
            "symbolic_shapes": compiled.get("symbolic_shapes", ""),
            "placement": compiled.get("placement"),
            "tuning": {"mode": spec["tuning"]["mode"], "session": compiled.get("session")},
            "verification": evidence,
            "measurements": speed,
            "passes": compiled.get("passes", {}),
            "peak_memory": max(self.children.memory, default=0),
            "phases": self.children.phases,
            "seconds": self.children.seconds,
            "node": socket.gethostname(),
            "started": self.children.started_at.isoformat(timespec="seconds"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "farm_version": farm.__version__,
        }


def inputs_of(model: Path, data: Path | None) -> list[Path]:
    """Return what a child reads that opens a model: the model's folder, and its calibration data or samples."""
    return [model.parent, *([data] if data else [])]


_PASS = re.compile(rb"^([A-Za-z0-9_:]{1,128}): ([0-9]{1,12}(?:[.][0-9]{1,12})?(?:e[+-]?[0-9]{1,2})?)ms\n?$")
_LONGEST_LINE = 1024
_MOST_PASSES = 1000  # MIGraphX has about a hundred.


def pass_seconds(log: Path, start: int) -> dict[str, float]:
    """Return how long each of MIGraphX's passes took, longest first, by a child's log: it may name only so many."""
    seconds: dict[str, float] = {}
    with log.open("rb") as lines:
        lines.seek(start)
        while line := lines.readline(_LONGEST_LINE):
            if (found := _PASS.match(line)) and ((name := found[1].decode()) in seconds or len(seconds) < _MOST_PASSES):
                seconds[name] = seconds.get(name, 0.0) + float(found[2]) / 1e3
    return {name: round(total, 6) for name, total in sorted(seconds.items(), key=lambda item: -item[1])}


def is_shared(found: Conditions) -> bool:
    """Whether others held memory of the GPU at one look."""
    processes = found["processes"]
    return bool(processes and processes["count"])


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files of a cell where its children read them; `reference` has outputs that were made before."""

    model: Path
    calibration: Path | None = None
    samples: Path | None = None
    reference: Path | None = None


class ProgramTuner(Protocol):
    """Searches for a faster program: `farm.tuning.tuner.Tuner`. The pipeline calls it; it never calls back."""

    @property
    def measuring(self) -> Databases:
        """The databases of the child that measures the tuned program."""

    def compile(self, model: Path, calibration: Path | None) -> CompileAnswer:
        """Tune, compile with what was found, and return the child's answer."""

    def choose(self, compiled: CompileAnswer, samples: Path | None, *, runs: bool) -> CompileAnswer | None:
        """Put the untuned program in the place of the tuned one if it is faster; return its child's answer, or None."""

    def describe(self, record: ProgramRecord) -> None:
        """Add to a program's record what the tuning found."""


@dataclass
class Pipeline:
    """One cell on its way from the model to a program. Every method raises StepEnded if a child gives no answer."""

    steps: Steps
    inputs: InputFiles
    tuner: ProgramTuner | None = None
    references: ReferenceCache | None = None  # Reference outputs of earlier attempts.
    measuring: Callable[[], AbstractContextManager[object]] = nullcontext  # Opened around each measurement.
    _reference: Path | None = field(default=None, init=False)

    def run(self) -> ProgramRecord:
        """Make and measure the program; return what its sidecar says about it. The program is at `steps.program`."""
        if self.steps.order.get("cross"):
            # The GPU is not here: nothing can load the program, so nothing is measured or compared.
            return self.steps.record(self.compile(), None)
        reference = self.reference()
        if self.tuner:
            return self._tune(self.tuner, reference)
        return self._measure(self.compile(), reference)

    def reference(self) -> Path:
        """Return the sample inputs with their right outputs; make them once if they are not among the inputs."""
        path = self._reference or self.inputs.reference
        if path is None:
            with self.steps.children.phase(Phase.VERIFYING):
                path = self.steps.reference(self.inputs.model, self.inputs.samples, self.references)
        self._reference = path
        return path

    def compile(self) -> CompileAnswer:
        """Compile the model without tuning it first, and return the child's answer."""
        with self.steps.children.phase(Phase.COMPILING):
            return self.steps.compile(self.inputs.model, self.inputs.calibration)

    def _tune(self, tuner: ProgramTuner, reference: Path) -> ProgramRecord:
        compiled = tuner.compile(self.inputs.model, self.inputs.calibration)
        record = self._measure(compiled, reference, tuner.measuring)
        runs = record["measurements"].get("latency") is not None
        untuned = tuner.choose(compiled, self.inputs.samples, runs=runs)
        if untuned:
            record = self._measure(untuned, reference)
        tuner.describe(record)
        return record

    def _measure(self, compiled: CompileAnswer, reference: Path, databases: Databases = NO_DATABASES) -> ProgramRecord:
        with self.measuring(), self.steps.children.phase(Phase.MEASURING):
            evaluated = self.steps.evaluate(compiled, reference, databases)
        return self.steps.record(compiled, evaluated)
