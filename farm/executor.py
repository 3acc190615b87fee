"""Executor: the steps of one attempt, from claim to published artifact. Knows neither Redis nor Celery."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import farm
from farm.artifacts import ArtifactStore, readable
from farm.artifacts.sidecar import facts
from farm.cache import NodeCache
from farm.child import Limits, classify, run_child
from farm.compilers import COMPILERS, Compiler, default_equal_share, default_tolerance
from farm.errors import ArtifactGone, FarmFault
from farm.gpus import Gpus, NoSuchGpu
from farm.jobs.attempt import Attempt
from farm.jobs.state import AttemptEnd, FailureKind, Outcome, Phase
from farm.logging import get_logger
from farm.settings import Settings
from farm.spec import digest_of

log = get_logger(__name__)

OnPhase = Callable[[Phase, float | None, str], None]

_ONE_SAMPLE = {"generate": 1, "seed": 0, "ranges": {}}
"""What an unverified program is measured with."""


class Running:
    """Counts the attempts that this worker runs, so that a measurement knows whether it was alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._begun = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count one attempt while the block runs."""
        with self._lock:
            self._count += 1
            self._begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def look(self) -> tuple[int, int]:
        """Return how many run now, and how many have begun so far."""
        with self._lock:
            return self._count, self._begun


class _Ended(Exception):
    """An attempt ended before its artifact was there."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Executor:
    """Runs attempts. One serves all slots of a worker; each attempt works in a folder of its own."""

    def __init__(self, artifacts: ArtifactStore, cache: NodeCache, settings: Settings) -> None:
        self._artifacts = artifacts
        self._cache = cache
        self._settings = settings
        self._work = _own_folder(settings.data_dir.resolve() / "work")
        self._running = Running()
        self._gpus = Gpus()

    def execute(self, attempt: Attempt, *, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
        """Run the steps of one attempt and say how it ended; never raises for what a step can foresee.

        The log is uploaded whatever happens. Ends soon after `cancelled` is set.
        """
        self._work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{attempt.job_id}-{attempt.number}-", dir=self._work))
        run = _Run(attempt, folder, self._artifacts, self._cache, self._settings, on_phase, cancelled, self._running)
        try:
            with self._running.one_more(), self._gpus.one(attempt.order["spec"]["device"], cancelled) as run.gpu:
                return run.outcome()
        except NoSuchGpu as error:
            return Outcome.failure(FailureKind.TOOLCHAIN_MISMATCH, str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _own_folder(work: Path) -> Path:
    """Return the folder for this process's attempts, and remove those of processes that were killed."""
    # Under the host's name: containers that share the folder do not see each other's processes.
    ours = work / socket.gethostname()
    for folder in ours.glob("*"):
        if not Path(f"/proc/{folder.name}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return ours / str(os.getpid())


class _Run:
    """One attempt under way: lookup, fetch, reference, compile, evaluate, publish."""

    def __init__(
        self,
        attempt: Attempt,
        folder: Path,
        artifacts: ArtifactStore,
        cache: NodeCache,
        settings: Settings,
        on_phase: OnPhase,
        cancelled: threading.Event,
        running: Running,
    ) -> None:
        self.running = running
        self.gpu = ""
        self.checked = False
        self.shared = False
        self.attempt = attempt
        self.order = attempt.order
        self.spec: Mapping[str, Any] = attempt.order["spec"]
        self.compiler: Compiler = COMPILERS[self.spec["compiler"]["name"]]
        self.folder = folder
        self.log_path = folder / "log.txt"
        self.artifacts = artifacts
        self.cache = cache
        self.settings = settings
        self.on_phase = on_phase
        self.cancelled = cancelled
        self.started = time.monotonic()
        self.started_at = datetime.now(UTC)
        self.phases: dict[str, float] = {}
        self.peak_memory = 0

    def outcome(self) -> Outcome:
        """Take the steps in order; decide once how the attempt ended."""
        self.log_path.write_text(f"{self.order['identifier']} attempt {self.attempt.number}\n")
        self.attempt.tail.follow(self.log_path)
        try:
            return self._lookup() or self._make()
        except _Ended as ended:
            return self._with_log(ended.outcome)
        except ArtifactGone as error:
            return self._with_log(Outcome.failure(FailureKind.STORAGE, f"an input is damaged or gone: {error.message}"))
        except FarmFault as error:
            return self._with_log(Outcome.failure(FailureKind.STORAGE, error.message))
        except OSError as error:
            return self._with_log(Outcome.failure(FailureKind.INTERNAL, f"the worker's disk: {error}"))

    def _make(self) -> Outcome:
        with self._phase(Phase.FETCHING):
            model, calibration, samples = self._fetch()
        with self._phase(Phase.VERIFYING):
            reference = self._reference(model, samples)
        if not self.checked and self.compiler.name == "migraphx" and self.settings.migraphx_python:
            # A compiling child checks the model itself where it can; MIGraphX's own Python may lack onnx.
            self._child(check_request(self.order, model))
        extension = self.compiler.program_extension(self.spec["options"])
        program = self.folder / f"{self.order['identifier'].replace('/', '--')}{extension}"
        with self._phase(Phase.COMPILING):
            compiled = self._compile(model, calibration, program)
        with self._phase(Phase.MEASURING):
            evaluated = self._evaluate(program, compiled, reference)
        with self._phase(Phase.UPLOADING):
            return self._publish(program, compiled, evaluated)

    # --- steps --------------------------------------------------------------------------------------------------

    def _lookup(self) -> Outcome | None:
        """Another attempt, build or namespace may have made the artifact since the job was planned."""
        found = self.artifacts.lookup(readable(self.attempt.namespace), self.attempt.key)
        return Outcome.success(facts(found.sidecar), hit=True) if found else None

    def _fetch(self) -> tuple[Path, Path | None, Path | None]:
        model = self.cache.place(self.order["model"]["files"], self.folder / "model")[0]
        data = [
            self.cache.place([self.order[name]], self.folder / name)[0] if self.order.get(name) else None
            for name in ("calibration", "samples")
        ]
        return model, data[0], data[1]

    def _reference(self, model: Path, samples: Path | None) -> Path:
        """Bring the inputs and right outputs to compare with: made once for a model and its samples, then a blob.

        Making them also checks the model, in a child, before any compiler opens it.
        """
        recipe = reference_recipe(self.order)
        key = digest_of(recipe)
        record = f"ns/{self.attempt.namespace}/references/{key[:2]}/{key}.json"
        path = self.folder / "reference.npz"
        known = self.artifacts.get_object(record)
        if known:
            digest = json.loads(known.data)["digest"]
            try:
                self.cache.copy(digest, path)
                return path
            except ArtifactGone:
                log.warning("reference is gone, making it again", digest=digest)
        self._child(reference_request(self.order, model, samples, path))
        self.checked = True
        digest, size = self.artifacts.put_blob_file(path)
        self.cache.put(digest, path)
        self.artifacts.put_object(record, json.dumps({"digest": digest, "size": size, "recipe": recipe}).encode())
        return path

    def _compile(self, model: Path, calibration: Path | None, program: Path) -> dict[str, Any]:
        return self._child(compile_request(self.order, model, calibration, program))

    def _evaluate(self, program: Path, compiled: Mapping[str, Any], reference: Path) -> dict[str, Any]:
        sample = self.folder / "sample.npz"
        request = evaluate_request(self.order, program, compiled, reference, sample, self.settings.measure_seconds)
        running, begun = self.running.look()
        try:
            return self._child(request)
        finally:
            self.shared = running > 1 or self.running.look()[1] > begun

    def _child(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one request in a child; whatever is not an answer ends the attempt."""
        limits = self.attempt.limits
        left = limits["time"] - (time.monotonic() - self.started) if limits["time"] else 0.0
        migraphx = request["compiler"] == "migraphx"
        end = run_child(
            {
                **request,
                "threads": self.settings.threads_per_slot,
                "gpu": self.gpu,
                "search": [self.settings.migraphx_path] if migraphx and self.settings.migraphx_path else [],
            },
            log_path=self.log_path,
            python=self.settings.migraphx_python if migraphx else "",
            environment={**self._after_a_crash(), **self.spec["env"]},
            limits=Limits(
                time=max(left, 0.001) if limits["time"] else 0.0,
                memory=limits["memory"],
                hang=self.settings.hang_seconds,
                progress_only=request["device"].startswith("gfx"),
            ),
            folder=self.folder,
            on_message=self._told,
            cancelled=self.cancelled,
        )
        self.peak_memory = max(self.peak_memory, end.memory)
        if end.result is not None and end.ok:
            return end.result
        failure = classify(end)
        raise _Ended(
            Outcome.failure(failure.kind, failure.message, detail=failure.detail) if failure else Outcome.cancelled()
        )

    def _after_a_crash(self) -> dict[str, str]:
        """MIGraphX aborts on what a compile thread raises; without threads the same becomes an error that says why."""
        crashed = FailureKind.COMPILER_CRASH in self.attempt.previous
        return {"MIGRAPHX_GPU_COMPILE_PARALLEL": "1"} if crashed else {}

    def _told(self, message: Mapping[str, Any]) -> None:
        self.on_phase(Phase(message["phase"]), message.get("progress"), message.get("detail") or "")

    def _publish(self, program: Path, compiled: Mapping[str, Any], evaluated: Mapping[str, Any]) -> Outcome:
        blobs = {"program": self._blob(program, program.name)}
        sample = self.folder / "sample.npz"
        if sample.exists():
            blobs["sample"] = self._blob(sample, sample.name)
        reproduction = self.folder / "reproduce.json"
        reproduction.write_text(
            json.dumps({"order": self.order, "key": self.attempt.key, "farm": farm.__version__}, indent=1)
        )
        blobs["reproduction"] = self._blob(reproduction, reproduction.name)
        blobs["log"] = self._blob(self.log_path, self.log_path.name)
        if self.cancelled.is_set():
            raise _Ended(Outcome.cancelled())
        published = self.artifacts.publish(self.attempt.namespace, self._sidecar(blobs, compiled, evaluated))
        return Outcome.success(
            facts(published.sidecar), hit=published.adopted, log=blobs["log"]["digest"], phases=self.phases
        )

    def _sidecar(
        self, blobs: Mapping[str, Any], compiled: Mapping[str, Any], evaluated: Mapping[str, Any]
    ) -> dict[str, Any]:
        attempt, spec = self.attempt, self.spec
        return {
            "schema": 1,
            "key": attempt.key,
            "namespace": attempt.namespace,
            "identifier": self.order["identifier"],
            "spec": spec,
            "blobs": blobs,
            "toolchain": spec["toolchain"],
            "device": {"arch": spec["device"]["arch"], "compute_units": spec["device"]["compute_units"]},
            "inputs": compiled["inputs"],
            "outputs": _outputs(compiled),
            "weight_dtypes": sorted(compiled["weight_dtypes"]),
            "compute_dtypes": sorted(compiled["compute_dtypes"]),
            "quantized": compiled["quantized"],
            "offload_copy": compiled.get("offload_copy"),
            "tuning": {"mode": spec["tuning"]["mode"]},
            "verification": {
                "reference": spec["verification"]["reference"],
                **evaluated["verification"],
            }
            if spec["verification"]
            else None,
            "measurements": _measurements(evaluated["measurements"], shared=self.shared),
            "peak_memory": self.peak_memory,
            "phases": self.phases,
            "seconds": round(time.monotonic() - self.started, 3),
            "build": attempt.build,
            "job": attempt.job_id,
            "attempt": attempt.number,
            "worker": attempt.worker,
            "node": socket.gethostname(),
            "started": self.started_at.isoformat(timespec="seconds"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "farm_version": farm.__version__,
        }

    # --- tools --------------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        if self.cancelled.is_set():
            raise _Ended(Outcome.cancelled())
        self.on_phase(phase, None, "")
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = round(self.phases.get(phase, 0) + time.monotonic() - start, 3)

    def _blob(self, path: Path, name: str) -> dict[str, Any]:
        digest, size = self.artifacts.put_blob_file(path)
        return {"path": name, "digest": digest, "size": size}

    def _with_log(self, outcome: Outcome) -> Outcome:
        """Attach the log; an attempt's end stands, also where its log cannot be uploaded."""
        if outcome.end is AttemptEnd.CANCELLED:
            return outcome
        try:
            digest = self._blob(self.log_path, "log.txt")["digest"]
        except (FarmFault, OSError) as error:
            log.warning("log not uploaded", error=str(error))
            digest = ""
        return Outcome(outcome.end, outcome.kind, outcome.message, outcome.detail, log=digest, phases=self.phases)


# --- requests to the child: what `farm/runner/protocol.py` describes, from a work order -------------------------


def reference_recipe(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the reference outputs of a work order; equal recipes share one blob."""
    spec = order["spec"]
    verification = spec["verification"]
    return {"schema": 1, **{name: spec[name] for name in ("model", "inputs", "batch")}, "verification": verification}


def reference_request(order: Mapping[str, Any], model: Path, samples: Path | None, reference: Path) -> dict[str, Any]:
    """Ask for sample inputs and their right outputs, written to `reference`; checks the model too."""
    verification = order["spec"]["verification"] or {"samples": _ONE_SAMPLE, "reference": "none"}
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


def check_request(order: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Ask whether a model is safe to open; nothing of a compiler is imported for it."""
    return _request(order, "check", compiler="onnxruntime", device="cpu", model=_model(order, model))


def compile_request(order: Mapping[str, Any], model: Path, calibration: Path | None, program: Path) -> dict[str, Any]:
    """Ask for the model to be quantized, tuned, compiled and saved to `program`."""
    spec = order["spec"]
    return _request(
        order,
        "compile",
        model=_model(order, model),
        calibration={"path": str(calibration)} if calibration else spec["calibration"],
        program=str(program),
        **{name: spec[name] for name in ("precision", "quantization", "tuning")},
    )


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
    )


def _request(order: Mapping[str, Any], action: str, **fields: Any) -> dict[str, Any]:
    spec = order["spec"]
    compiler, _, device = str(order["target"]).partition("/")
    return {
        "action": action,
        "compiler": compiler,
        "device": device,
        **{name: spec[name] for name in ("inputs", "batch", "options")},
        **fields,
    }


def _model(order: Mapping[str, Any], path: Path) -> dict[str, Any]:
    model = order["model"]
    return {"path": str(path), "format": model["format"], "outputs": model.get("outputs", [])}


def _outputs(compiled: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Outputs with the parameter that a program without offloaded copies takes for each."""
    parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
    return [{**output, "parameter": name} for output, name in zip(compiled["outputs"], parameters, strict=True)]


def _measurements(measured: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    """Bring the child's figures into the sidecar's form."""
    median = measured.get("latency")
    return {
        "load": measured.get("load"),
        "first_run_cold": measured.get("cold_run"),
        "first_run_warm": measured.get("warm_run"),
        "latency": None
        if median is None
        else {
            "median": median,
            "p90": measured.get("p90"),
            "p99": measured.get("p99"),
            "repeats": measured.get("repeats", 1),
        },
        "throughput": measured.get("throughput"),
        "shared": shared,
    }
