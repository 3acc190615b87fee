"""Steps: what is done to the model of one cell, from its work order: reference, check, compile, evaluate.

Each runs in a sealed child that reads its inputs and writes to a folder of its own. The executor looks up, fetches and
publishes around them; `farm optimize` takes them for one model, here. Knows no store.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import farm
from farm.child import Limits as ChildLimits
from farm.child import Seal, run_child
from farm.compilers import COMPILERS, TuningMode, default_equal_share, default_tolerance
from farm.failures import Failure, classify
from farm.jobs.state import FailureKind, Limits, Phase
from farm.slots import ANYWHERE, Slot
from farm.spec import digest_of

OnPhase = Callable[[Phase, float | None, str], None]

ONE_SAMPLE = {"generate": 1, "seed": 0, "ranges": {}}
"""What an unverified program is measured with."""


class Machine(Protocol):
    """What the steps have to know of the machine that they run on: some of the farm's settings."""

    @property
    def threads_per_slot(self) -> int:
        """Threads that a child may use."""

    @property
    def measure_seconds(self) -> float:
        """How long a program is run again and again."""

    @property
    def hang_seconds(self) -> float:
        """How long a child may show no sign of life; 0 is no limit."""

    @property
    def migraphx_path(self) -> str:
        """Where MIGraphX's Python module is, if that is not where the interpreter looks."""

    @property
    def migraphx_python(self) -> str:
        """Interpreter for MIGraphX's children; empty: this one."""


class StepEnded(Exception):
    """A step did not get to its end: `failure` says why; None where it was cancelled."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__(f"{failure.kind}: {failure.message}" if failure else "cancelled")
        self.failure = failure


@dataclass
class Children:
    """Runs requests in children, one after the other, in one folder; the time limit holds for all of them together.

    They run in `slot`; `environment` is added to theirs. Those in other slots, at the same time, are `beside` them.
    """

    folder: Path
    settings: Machine
    limits: Limits
    on_phase: OnPhase
    cancelled: threading.Event
    slot: Slot = ANYWHERE
    environment: Mapping[str, str] = field(default_factory=dict)
    conditions: Callable[[], dict[str, Any] | None] = lambda: None
    """Tells how the slot's GPU is at the moment; asked by `look`."""
    began: float = field(default_factory=time.monotonic)
    memory: list[int] = field(default_factory=list)
    """Peaks in bytes, of every child."""

    def __post_init__(self) -> None:
        self.log_path = self.folder / "log.txt"
        self.phases: dict[str, float] = {}
        self.started_at = datetime.now(UTC)
        self.log_path.touch()

    def beside(self, slot: Slot, folder: Path) -> Children:
        """Return what runs children of the same attempt in another slot at the same time, with a log of its own.

        The time limit is that of all, the memory limit that of each.
        """
        folder.mkdir()
        return replace(self, slot=slot, folder=folder)

    @property
    def seconds(self) -> float:
        """Seconds since it all began."""
        return round(time.monotonic() - self.began, 3)

    @property
    def peak_memory(self) -> int:
        """The most memory that a child took, in bytes."""
        return max(self.memory, default=0)

    def look(self, when: str) -> dict[str, Any] | None:
        """Return how the slot's GPU is, while no child runs; the log says where others use it (`before measuring`)."""
        found = self.conditions()
        processes = (found or {}).get("processes")
        if processes and processes["count"]:
            with self.log_path.open("a") as log:
                held = f"processes: {processes['count']}, memory: {processes['memory'] / 1e6:.0f} MB"
                log.write(f"{when}: others use the GPU ({held}); times are rough, measure again when it is idle\n")
        return found

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Say that a phase begins, and time it."""
        if self.cancelled.is_set():
            raise StepEnded(None)
        self.on_phase(phase, None, "")
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = round(self.phases.get(phase, 0) + time.monotonic() - start, 3)

    def ask(
        self,
        request: Mapping[str, Any],
        *,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        seconds: float = 0.0,
        quiet: bool = False,
        python: str | None = None,
    ) -> dict[str, Any]:
        """Run one request in a sealed child, with `environment` for this one beside that of all; return its answer.

        The child may read these files and folders, and write to those folders; they are made where they are missing.
        It gets `seconds` at most (0: as long as there is); with `quiet` what it says of its progress is kept back.
        `python` is another interpreter than its compiler's. Raises StepEnded where there is no answer.
        """
        for folder in write:
            folder.mkdir(parents=True, exist_ok=True)
        left = max(self.limits["time"] - self.seconds, 0.001) if self.limits["time"] else seconds
        left = min(left, seconds) if seconds else left
        migraphx = request["compiler"] == "migraphx"
        end = run_child(
            {
                **request,
                "threads": self.settings.threads_per_slot,
                "gpu": self.slot.gpu,
                "cpus": self.slot.cpus,
                "search": [self.settings.migraphx_path] if migraphx and self.settings.migraphx_path else [],
            },
            log_path=self.log_path,
            python=(self.settings.migraphx_python if migraphx else "") if python is None else python,
            environment={**self.environment, **(environment or {})},
            limits=ChildLimits(
                time=left,
                whole=0.0 if left == seconds else self.limits["time"],
                memory=self.limits["memory"],
                hang=self.settings.hang_seconds,
                waiting=1.0 if self.slot.gpu else 0.0,
            ),
            folder=self.folder,
            on_message=None if quiet else self._told,
            cancelled=self.cancelled,
            seal=Seal(read=read, write=write),
        )
        self.memory.append(end.memory)
        if end.result is not None and end.ok:
            return end.result
        raise StepEnded(classify(end))

    def _told(self, message: Mapping[str, Any]) -> None:
        self.on_phase(Phase(message["phase"]), message["progress"], message["detail"])


class Steps:
    """One cell on its way through the children; every step raises StepEnded where its child does not answer."""

    def __init__(self, order: Mapping[str, Any], children: Children) -> None:
        self.order = order
        self.children = children
        self.sample = children.folder / "sample" / "sample.npz"
        """One sample with its right outputs; `evaluate` leaves it."""
        spec = order["spec"]
        extension = COMPILERS[spec["compiler"]["name"]].program_extension(spec["options"])
        self.program = children.folder / "program" / program_name(order["identifier"], extension)
        """The compiled program; `compile` leaves it."""
        self.texts = texts_beside(self.program)
        """The program's text before and after compilation; `compile` leaves it where `debug` asks for it."""
        self.env_files: dict[str, str] = {}
        """Where the files are that environment variables of the spec name."""
        self.conditions: list[dict[str, Any]] = []
        """How the GPU was before and after the program was measured, where its driver tells."""
        self._checked = False

    @property
    def environment(self) -> dict[str, str]:
        """What the spec sets for its compiler: not for the reference, whose recipe does not name it."""
        return {**self.order["spec"]["env"], **self.env_files}

    def beside(self, slot: Slot, folder: Path) -> Steps:
        """Return the steps of the same cell in another slot, to be taken at the same time; see `Children.beside`."""
        steps = copy(self)
        steps.children = self.children.beside(slot, folder)
        return steps

    def reference(self, model: Path, samples: Path | None, path: Path) -> None:
        """Make the inputs and right outputs to compare with; checks the model, before any compiler opens it."""
        request = reference_request(self.order, model, samples, path)
        inputs = [model.parent, *([samples] if samples else [])]
        self.children.ask(request, read=inputs, write=[path.parent])
        self._checked = True

    def prepare(self, model: Path) -> Path:
        """Check the model, where no compiling child does, and return it in the form that compilers take."""
        if (
            not self._checked
            and self.order["spec"]["compiler"]["name"] == "migraphx"
            and self.children.settings.migraphx_python
        ):
            # A compiling child checks the model itself where it can; MIGraphX's own Python may lack onnx.
            self.children.ask(check_request(self.order, model), read=[model.parent])
        spec = self.order["spec"]
        if not COMPILERS[spec["compiler"]["name"]].packs(spec["precision"]):
            return model
        packed = self.children.folder / "packed" / "packed.onnx"
        self.children.ask(pack_request(self.order, model, packed), read=[model.parent], write=[packed.parent])
        return packed

    def compile(self, model: Path, calibration: Path | None) -> dict[str, Any]:
        """Quantize, compile and save the program."""
        model = self.prepare(model)
        request = compile_request(self.order, model, calibration, self.program)
        return self.ask(request, read=inputs_of(model, calibration), write=[self.program.parent])

    def evaluate(
        self,
        compiled: Mapping[str, Any],
        reference: Path,
        environment: Mapping[str, str] | None = None,
        *,
        write: Sequence[Path] = (),
    ) -> dict[str, Any]:
        """Load the program from its file, compare it with the reference, and measure it."""
        seconds = self.children.settings.measure_seconds
        request = evaluate_request(self.order, self.program, compiled, reference, self.sample, seconds)
        before = self.children.look("before measuring")
        answer = self.ask(request, environment, read=[self.program, reference], write=[self.sample.parent, *write])
        after = self.children.look("after measuring")
        self.conditions = [found for found in (before, after) if found]
        return answer

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
        """Ask a child of this cell's compiler, with the cell's environment: see `Children.ask`.

        Where it compiles the whole model, it also says what `debug` wants to know.
        """
        debug = self.order.get("debug", {}) if request["action"] == "compile" else {}
        if debug:
            texts = texts_beside(Path(request["program"])) if debug.get("print") else {}
            kept = {when: str(path) for when, path in texts.items()}
            request = {**request, "debug": {"level": debug.get("log_level", ""), **kept}}
        start = self.children.log_path.stat().st_size if debug else 0
        debugging = COMPILERS[self.order["spec"]["compiler"]["name"]].debugging.environment(debug)
        answer = self.children.ask(
            request,
            read=[*read, *map(Path, self.env_files.values())],
            write=write,
            environment={**debugging, **self.environment, **(environment or {})},
            seconds=seconds,
            quiet=quiet,
        )
        return {**answer, "passes": pass_seconds(self.children.log_path, start)} if debug.get("timings") else answer

    def record(self, compiled: Mapping[str, Any], evaluated: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
        """Return what the sidecar says of the program and of how it was made; `shared`: beside another attempt."""
        spec = self.order["spec"]
        shared = shared or any(map(is_shared, self.conditions))
        return {
            "schema": 1,
            "identifier": self.order["identifier"],
            "spec": spec,
            "conversion": self.order["model"].get("conversion"),
            "model_size": sum(file["size"] for file in self.order["model"]["files"]),
            "toolchain": spec["toolchain"],
            "device": {
                **{name: spec["device"][name] for name in ("arch", "compute_units")},
                **self.children.slot.device,
            },
            "inputs": [
                {**port, "batch_axis": spec["inputs"].get(port["name"], {}).get("batch_axis")}
                for port in compiled["inputs"]
            ],
            "outputs": _outputs(compiled),
            "weight_dtypes": sorted(compiled["weight_dtypes"]),
            "compute_dtypes": sorted(compiled["compute_dtypes"]),
            "quantized": compiled["quantized"],
            "emulated": self.order.get("emulated", []),
            "offload_copy": compiled.get("offload_copy"),
            "tuning": {"mode": spec["tuning"]["mode"], "session": compiled.get("session")},
            "verification": {
                "reference": spec["verification"]["reference"],
                **evaluated["verification"],
            }
            if spec["verification"]
            else None,
            "measurements": {
                **measurements_of(evaluated["measurements"], shared=shared),
                "conditions": self.conditions,
            },
            "passes": compiled.get("passes", {}),
            "peak_memory": self.children.peak_memory,
            "phases": self.children.phases,
            "seconds": self.children.seconds,
            "node": socket.gethostname(),
            "started": self.children.started_at.isoformat(timespec="seconds"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "farm_version": farm.__version__,
        }


def is_shared(found: Mapping[str, Any]) -> bool:
    """Whether others held memory of the GPU at one look."""
    return bool((found["processes"] or {}).get("count"))


def texts_beside(program: Path) -> dict[str, Path]:
    """Return where a program's text is kept, by when: `before` and `after` its compilation."""
    return {when: program.parent / f"program-{when}.txt" for when in ("before", "after")}


LONGEST_NAME = 128
"""Characters of a program's file name: what clients take, and every file system."""


def program_name(identifier: str, extension: str) -> str:
    """Return the name of a cell's program file: its identifier, of a long one the beginning and a digest of it all."""
    name = identifier.replace("/", "--")
    room = LONGEST_NAME - len(extension)
    return (name if len(name) <= room else f"{name[: room - 13]}-{digest_of(identifier)[:12]}") + extension


def inputs_of(model: Path, calibration: Path | None) -> list[Path]:
    """Return what a child that compiles a model reads: the model's folder, and the calibration data."""
    return [model.parent, *([calibration] if calibration else [])]


_PASS = re.compile(r"^([\w:]+): ([0-9.e+-]+)ms$")


def pass_seconds(log: Path, start: int) -> dict[str, float]:
    """Return how long each of MIGraphX's passes took in all, as it wrote to its log, longest first."""
    seconds: dict[str, float] = {}
    with log.open("rb") as lines:
        lines.seek(start)
        for line in lines:
            if found := _PASS.match(line.decode(errors="replace").rstrip()):
                seconds[found[1]] = seconds.get(found[1], 0.0) + float(found[2]) / 1e3
    return {name: round(total, 6) for name, total in sorted(seconds.items(), key=lambda item: -item[1])}


# --- requests to the child: what `farm/runner/protocol.py` describes, from a work order -------------------------


def after_a_crash(previous: Iterable[str]) -> dict[str, str]:
    """Return what the children of an attempt get beside the clean environment, by the kinds of those before it.

    MIGraphX aborts on what a compile thread raises; without threads the same becomes an error that says why.
    """
    return {"MIGRAPHX_GPU_COMPILE_PARALLEL": "1"} if FailureKind.COMPILER_CRASH in previous else {}


_READING = ("nhwc", "max_loop_iterations", "limit_max_iterations")
"""MIGraphX's options that change what a model is read as."""


def reference_recipe(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the reference outputs of a work order; equal recipes share one blob."""
    spec = order["spec"]
    verification = spec["verification"]
    recipe = {"schema": 1, **{name: spec[name] for name in ("model", "inputs", "batch")}, "verification": verification}
    if verification and verification["reference"] == "migraphx":
        # It reads the original model by these options too: another layout, or fewer iterations of a loop.
        recipe["options"] = {name: spec["options"][name] for name in _READING if name in spec["options"]}
    return recipe


def reference_request(order: Mapping[str, Any], model: Path, samples: Path | None, reference: Path) -> dict[str, Any]:
    """Ask for sample inputs and their right outputs, written to `reference`; checks the model too."""
    verification = order["spec"]["verification"] or {"samples": ONE_SAMPLE, "reference": "none"}
    return _request(
        order,
        "reference",
        compiler=verification["reference"],
        device="ref" if verification["reference"] == "migraphx" else "cpu",
        model=_model(order, model),
        samples={"path": str(samples)} if samples else verification["samples"],
        min_samples=verification["samples"].get("generate", 1),
        reference=str(reference),
    )


def slice_request(order: Mapping[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Ask for the model to be cut into slices, written to `folder`; nothing of a compiler is imported for it."""
    return _request(
        order, "slice", compiler="onnxruntime", device="cpu", model=_model(order, model), slices=str(folder)
    )


def tune_request(order: Mapping[str, Any], piece: Mapping[str, Any], *, database: Path, key: str) -> dict[str, Any]:
    """Ask for one slice to be tuned into the databases in a folder; its calibration is made up and thrown away."""
    whole = compile_request(order, Path(piece["path"]), None, database)
    ranges = (order["spec"]["calibration"] or {}).get("ranges") or {}
    return {
        **{name: value for name, value in whole.items() if name != "program"},
        "action": "tune",
        "model": {"path": piece["path"], "format": "onnx"},
        "inputs": piece["inputs"],
        "batch": None,
        "calibration": {"generate": 2, "seed": 0, "ranges": ranges},
        "database": str(database),
        "key": key,
    }


def check_request(order: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Ask whether a model is safe to open; nothing of a compiler is imported for it."""
    return _request(order, "check", compiler="onnxruntime", device="cpu", model=_model(order, model))


def pack_request(order: Mapping[str, Any], model: Path, packed: Path) -> dict[str, Any]:
    """Ask for the model with its weights as blocks of int4, written to `packed`; no compiler is imported for it."""
    quantization = order["spec"]["quantization"]
    return _request(
        order,
        "pack",
        compiler="onnxruntime",
        device="cpu",
        model=_model(order, model),
        quantization=quantization,
        packed=str(packed),
    )


def compile_request(order: Mapping[str, Any], model: Path, calibration: Path | None, program: Path) -> dict[str, Any]:
    """Ask for the model to be quantized, tuned, compiled and saved to `program`."""
    spec = order["spec"]
    return _request(
        order,
        "compile",
        model=_model(order, model),
        calibration={"path": str(calibration)} if calibration else spec["calibration"],
        program=str(program),
        cross=order.get("cross"),
        precision=spec["precision"],
        quantization=COMPILERS[spec["compiler"]["name"]].filled_quantization(spec["precision"], spec["quantization"]),
        tuning={**spec["tuning"], **tuning_mode(order).arguments},
    )


def tuning_mode(order: Mapping[str, Any]) -> TuningMode:
    """Return what the tuning mode of a work order sets; nothing where it is off."""
    compiler, _, device = str(order["target"]).partition("/")
    kind = COMPILERS[compiler].device(device)
    return (kind.tuning if kind else {}).get(order["spec"]["tuning"]["mode"], TuningMode())


def evaluate_request(
    order: Mapping[str, Any],
    program: Path,
    compiled: Mapping[str, Any],
    reference: Path,
    sample: Path,
    measure_seconds: float,
) -> dict[str, Any]:
    """Ask for the stored program to be loaded, compared with the reference and measured."""
    precision = order["spec"]["precision"]
    return _request(
        order,
        "evaluate",
        program=str(program),
        model={"format": order["model"]["format"]},
        reference=str(reference),
        outputs=[output["name"] for output in compiled["outputs"]],
        tolerance=default_tolerance(precision),
        equal=default_equal_share(precision),
        measure_seconds=measure_seconds,
        sample=str(sample),
        session=compiled.get("session"),
    )


def bench_request(
    order: Mapping[str, Any],
    programs: Sequence[tuple[Path, Mapping[str, Any]]],
    samples: Path | None,
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Ask for programs of one cell, each with what its compile said, to be measured in turns."""
    verification = order["spec"]["verification"] or {"samples": ONE_SAMPLE}
    whole = _request(order, "bench", rounds=rounds, seconds=seconds, first=2)
    source = {"path": str(samples)} if samples else verification["samples"]
    parts = [
        {
            **{name: whole[name] for name in ("compiler", "device", "inputs", "batch", "options")},
            "program": str(path),
            "model": {"format": order["model"]["format"]},
            "outputs": [output["name"] for output in compiled["outputs"]],
            "samples": source,
            "session": compiled.get("session"),
        }
        for path, compiled in programs
    ]
    return {**whole, "programs": parts}


def _request(order: Mapping[str, Any], action: str, **fields: Any) -> dict[str, Any]:
    spec = order["spec"]
    compiler, _, device = str(order["target"]).partition("/")
    return {
        "action": action,
        "compiler": compiler,
        "device": device,
        **{name: spec[name] for name in ("inputs", "batch")},
        "options": COMPILERS[compiler].filled(spec["options"]),
        **fields,
    }


def _model(order: Mapping[str, Any], path: Path) -> dict[str, Any]:
    model = order["model"]
    return {"path": str(path), "format": model["format"], "outputs": model.get("outputs", [])}


def _outputs(compiled: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Outputs with the parameter that a program without offloaded copies takes for each."""
    parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
    return [{**output, "parameter": name} for output, name in zip(compiled["outputs"], parameters, strict=True)]


def measurements_of(measured: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    """Return what the sidecar says of the speed of a program, from what its child measured."""
    return {
        "load": measured.get("load"),
        "first_run_cold": measured.get("cold_run"),
        "first_run_warm": measured.get("warm_run"),
        "latency": _latency(measured),
        "device_latency": measured.get("device_latency"),
        "throughput": measured.get("throughput"),
        "shared": shared,
        "points": [
            {**{name: point[name] for name in ("batch", "shapes", "throughput")}, "latency": _latency(point)}
            for point in measured.get("points", ())
        ],
    }


def _latency(measured: Mapping[str, Any]) -> dict[str, Any] | None:
    if measured.get("latency") is None:
        return None
    percentiles = {name: measured.get(name) for name in ("p90", "p99")}
    return {"median": measured["latency"], **percentiles, "repeats": measured.get("repeats", 1)}
