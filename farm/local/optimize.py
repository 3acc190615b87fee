"""Optimize: one model compiled on this machine, with the farm's own steps and checks, but without a farm.

`single_cell.py` makes the work order. Here it goes through the pipeline of a worker, is compared with the original
model, and its program is written to the place that was asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from farm.client.freezing import FrozenInputs
from farm.compiling.pipeline import LARGEST, Children, InputFiles, OnPhase, Pipeline, Steps, StepSettings
from farm.errors import UsageError
from farm.files import replacing, take
from farm.jobs.order import WorkOrder
from farm.jobs.state import AttemptLimits, FailureKind
from farm.local.bench import Contestant, Measured, measure, original_of, program_of
from farm.local.single_cell import Planned, Wanted, title
from farm.node.gpus import Usage, conditions, watch
from farm.node.survey import one_slot
from farm.results.gates import Judgement, judge, judge_unverified, tolerance_of
from farm.results.speed import compare
from farm.runner.documents import Evidence, Verification
from farm.settings import Settings
from farm.spec import FileReference, SpecDocument
from farm.targets.compilers import NATIVE, OFF, default_equal_share
from farm.tuning.database import ForOneRun
from farm.tuning.search import Search
from farm.tuning.tuner import Tuner
from farm.wire.program import Sidecar

SAVED_MODELS = Path("saved_models")
"""The default folder of programs."""
UNLIMITED = AttemptLimits(time=0, memory=0)


class Made(NamedTuple):
    """A finished program, still in the work folder, and its results.

    `judgement` says why it is not accurate or small enough (None if it is); `usage` is that of the GPU. `before` has
    the figures of the original model, or of its fp32 program, if they were measured.
    """

    program: Path
    sidecar: dict[str, Any]
    judgement: Judgement | None
    usage: Usage
    after: Measured
    before: Measured | None


# --- the program --------------------------------------------------------------------------------------------------


def make(wanted: Wanted, planned: Planned, settings: Settings, work: Path, on_phase: OnPhase) -> Made:
    """Take the cell through the pipeline, then measure the program against the original model.

    Waits for a GPU that others use. Raises StepEnded if a step fails.
    """
    cell, order, model = planned.cell, planned.cell.order, planned.file
    inputs = InputFiles(model, _blob(planned.found, order["calibration"]), _blob(planned.found, order["samples"]))
    machine = replace(StepSettings.of(settings), migraphx_path=planned.findings.migraphx_path)
    cancelled = threading.Event()  # never set: Ctrl-C is an exception here
    with one_slot(planned.pool, planned.findings.gpus, settings) as (slot, gpu):
        limits = AttemptLimits(time=0, memory=cell.limits["memory"])
        look = partial(conditions, slot)
        children = Children(work, machine, limits, on_phase, cancelled, slot, conditions=look)
        steps = Steps(order, children)
        tunes = order["spec"]["tuning"]["mode"] != OFF
        pipeline = Pipeline(steps, inputs, Tuner(Search(steps, ForOneRun(), session="optimize")) if tunes else None)
        pipeline.reference()  # Before the GPU is watched, since references do not use it.
        with watch(gpu) as usage:
            record = pipeline.run()
        sidecar: dict[str, Any] = {**record, "key": cell.key, "namespace": settings.namespace or "main"}
        sidecar["blobs"] = {"program": {"path": steps.program.name}}
        free = Children(work, machine, UNLIMITED, on_phase, cancelled, slot)
        before = _before(order, model, sidecar, steps.program, free)
        contestants = [program_of(sidecar, steps.program, "after"), *([before] if before else [])]
        after, *others = measure(contestants, free, settings.measure_seconds)
    compared: Evidence | None = sidecar["verification"]
    equal_share = default_equal_share(cell.precision)
    judgement = judge(compared, cell.gates["tolerance"], equal_share=equal_share) if compared else None
    judgement = judgement or _over_memory(usage, wanted.gpu_memory_limit)
    return Made(steps.program, sidecar, judgement, usage, after, next(iter(others), None))


def _over_memory(usage: Usage, limit: int) -> Judgement | None:
    """Return why a program needs too much of the GPU's memory, or None. On an AMD GPU nothing bounds it while it runs;
    on NVIDIA's ONNX Runtime's own memory is bounded, and libraries take some more.
    """
    if not limit:
        return None
    if usage["memory"] is None:
        return Judgement(FailureKind.BUDGET, "the driver does not report how much GPU memory was used")
    if usage["memory"] <= limit:
        return None
    return Judgement(FailureKind.BUDGET, f"it used {usage['memory']} bytes of the GPU's memory, the limit is {limit}")


def _before(
    order: WorkOrder, model: Path, sidecar: Mapping[str, Any], program: Path, children: Children
) -> Contestant | None:
    """Return the original model in ONNX Runtime; of another format its fp32 program, which is compiled for it."""
    if order["model"]["format"] == "onnx":
        return original_of(sidecar, model, program, "before")
    if order["spec"]["precision"] in ("fp32", NATIVE):
        return None
    spec: SpecDocument = {
        **order["spec"],
        "precision": "fp32",
        "quantization": {},
        "calibration": None,
        "tuning": {"mode": OFF},
    }
    steps = Steps({**order, "spec": spec, "identifier": f"{order['identifier']}/before"}, children)
    Pipeline(steps, InputFiles(model)).compile()
    return program_of({**sidecar, "spec": spec, "tuning": {}}, steps.program, "before")


def _blob(found: FrozenInputs, reference: FileReference | None) -> Path | None:
    return found.files[reference["digest"]] if reference else None


# --- output --------------------------------------------------------------------------------------------------------


def destination(wanted: Wanted, extension: str) -> Path:
    """Return the file to write: `--output-path` is a file, a folder, or a bare name for the folder of saved models.

    Raises UsageError if it cannot be written, or is the model itself.
    """
    given = wanted.output
    if not given:
        place = SAVED_MODELS / f"{title(wanted.model)}{extension}"
    elif given.endswith(os.sep) or Path(given).is_dir():
        place = Path(given) / f"{title(wanted.model)}{extension}"
    else:
        place = Path(given) if os.sep in given else SAVED_MODELS / given
        if place.suffix != extension:
            place = place.with_name(place.name + extension)
    if place.is_dir():
        raise UsageError(f"{place} is a folder", hint=f"--output-path {place}{os.sep} writes into it")
    if place.exists() and wanted.model.exists() and place.samefile(wanted.model):
        raise UsageError(f"{place} is the model itself", hint="--output-path names another file")
    parent = next(folder for folder in place.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"cannot write into {parent}", hint="--output-path names another place")
    return place


def store(made: Made, place: Path) -> tuple[Path, Sidecar]:
    """Write the program to its place, and its sidecar next to it; each is written whole or not at all.

    Returns the sidecar's path and the sidecar. Raises OSError: NotPlain for what the compiler left in place of a file.
    """
    from farm.artifacts import sidecar as sidecars
    from farm.client.fetching import sidecar_path

    described_at = sidecar_path(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(described_at) as described, replacing(place) as program:
        digest, size = take(made.program, program, LARGEST)
        blob = {"path": place.name, "digest": digest, "size": size}
        document = sidecars.validate({**made.sidecar, "blobs": {"program": blob}})
        described.write_bytes(sidecars.text(document))
    return described_at, document


def report(planned: Planned, made: Made) -> dict[str, Any]:
    """Return the report on a program: sizes in bytes, times in seconds, errors by output."""
    from farm.artifacts import sidecar as sidecars

    cell = planned.cell
    checked = cast(Verification, made.sidecar["verification"] or {})
    errors = {
        name: {"error": error, "tolerance": tolerance_of(name, cell.gates["tolerance"])}
        for name, error in checked.get("errors", {}).items()
    }
    share = default_equal_share(cell.precision)
    unverified = sidecars.unverified_of(checked) if checked else ""
    unknown = judge_unverified(unverified, cast(Evidence, checked), cell.gates["tolerance"], equal_share=share)
    equal = {name: {"equal": value, "needed": share} for name, value in checked.get("equal", {}).items()}
    return {
        "identifier": cell.identifier,
        "key": cell.key,
        "target": str(cell.order["target"]),
        "why": planned.why,
        "toolchain": cell.spec["toolchain"],
        "precision": cell.precision,
        "inputs": made.sidecar["inputs"],
        "outputs": made.sidecar["outputs"],
        "quantized": made.sidecar["quantized"],
        "size": {"before": planned.model["size"], "after": made.program.stat().st_size},
        "accuracy": {
            "reference": ", ".join(dict.fromkeys(checked.get("origin", {}).values())) or checked.get("reference", ""),
            "unverified": unknown.message if unknown else "",
            "samples": checked.get("samples", 0),
            "outputs": {**errors, **equal},
            "weak": checked.get("weak", False),
            "passed": made.judgement is None,
            "message": made.judgement.message if made.judgement else "",
        },
        "after": made.after.as_dict(),
        "before": {**made.before.as_dict(), "comparison": compare(made.after.rounds, made.before.rounds).as_dict()}
        if made.before
        else None,
        "tuning": _tuning(made.sidecar),
        "peak_memory": made.sidecar["peak_memory"],
        "gpu": {**made.usage, "conditions": made.sidecar["measurements"]["conditions"]},
        "seconds": made.sidecar["seconds"],
    }


def _tuning(sidecar: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figures of the tuned and the untuned program, and which one this is; None without tuning."""
    if sidecar["tuning"]["mode"] == OFF:
        return None
    figures = {name: sidecar["measurements"].get(name) for name in ("tuned", "baseline", "ratio", "interval")}
    work = {name: sidecar["tuning"].get(name) for name in ("mode", "published", "operations", "seconds")}
    return {**work, **figures}
