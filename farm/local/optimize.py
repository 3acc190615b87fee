"""Optimize: one model compiled on this machine, with the farm's own steps and checks, but without a farm.

What is asked for becomes a manifest of one cell, so that shapes, options, precisions and data mean the same here as in
a build; its work order then goes through the steps that a worker takes.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from farm.client.cache import default_cache
from farm.client.conversion import convert, kind_of
from farm.client.freezing import FrozenInputs, freeze
from farm.compiling.children import LARGEST, Children, OnPhase
from farm.compiling.steps import Steps
from farm.errors import ManifestError, UsageError, suggestion
from farm.files import replacing, take
from farm.jobs.state import AttemptLimits, FailureKind, Phase
from farm.local.bench import Contestant, Measured, measure, original_of, program_of
from farm.manifest import parse_manifest
from farm.matrix import Cell, expand
from farm.models.model import Dimension, FrozenModel, Tensor, read_model
from farm.models.shapes import BATCH
from farm.node.gpu_usage import Usage, conditions, watch
from farm.node.slot_shares import one_slot
from farm.node.survey import Findings, survey
from farm.results.accuracy import Judgement, judge, tolerance_of
from farm.results.speed import compare
from farm.settings import Settings
from farm.targets.compilers import COMPILERS, NATIVE, OFF, canonical_precision, default_equal_share
from farm.targets.devices import understand_target
from farm.targets.pools import Pool
from farm.tuning.database import ForOneRun
from farm.tuning.tuner import Tuner

SAVED_MODELS = Path("saved_models")
"""The default folder of programs."""
UNLIMITED = AttemptLimits(time=0, memory=0)

_FORMATS = {".onnx": "onnx", ".pb": "tf", ".pt2": "torch", ".pt": "torch", ".ts": "torch"}
_CONVERTED = ("saved-model", "torch")
"""Formats that become ONNX first."""
_SHORT = {"cpu": "migraphx/cpu", "ref": "migraphx/ref"}
"""Targets as people know them from MIGraphX's own tools."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of one model. Empty fields leave it to the model and to this machine.

    `inputs` are `{name: shape}` with numbers, `batch` or other names; `input_files` are arrays by input name ("" for
    the only one). Limits are in bytes, 0 is none.
    """

    model: Path
    target: str = ""
    precisions: Sequence[str] = ()
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    tuning: str = OFF
    inputs: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    input_files: Mapping[str, Path] = field(default_factory=dict)
    batch: int | None = None
    calibration: str = ""
    samples: Path | None = None
    tolerance: float | None = None
    memory_limit: int = 0
    gpu_memory_limit: int = 0
    output: str = ""


class Made(NamedTuple):
    """A program that was made, still in the work folder, and what is known of it.

    `judgement` says why it is not accurate or small enough (None if it is), `usage` is that of the GPU. `before` are
    the original model's figures, or those of its fp32 program, where they were measured.
    """

    program: Path
    sidecar: dict[str, Any]
    judgement: Judgement | None
    usage: Usage
    after: Measured
    before: Measured | None


# --- what is asked for, as a cell ---------------------------------------------------------------------------------


class Planned(NamedTuple):
    """The one cell, where its inputs are, which pool of this machine serves it, and why that one."""

    cell: Cell
    model: FrozenModel
    found: FrozenInputs
    findings: Findings
    pool: Pool
    why: str

    @property
    def file(self) -> Path:
        """The model's file."""
        return self.found.files[str(self.model.files[0]["digest"])]

    @property
    def extension(self) -> str:
        """Ending of the program's file."""
        spec = self.cell.order["spec"]
        return COMPILERS[spec["compiler"]["name"]].program_extension(spec["options"])


def plan(wanted: Wanted, settings: Settings, work: Path) -> Planned:
    """Read the model and the data, look at this machine, and work out the one cell; `work` is for files on the way.

    Raises UsageError for whatever does not go together, before anything is compiled.
    """
    model, cache = _read(wanted, settings, work)
    findings = survey(settings)
    pool, why = _choose(wanted.target, model.format, findings)
    if wanted.gpu_memory_limit and not pool.target.maker:
        hint = f"leave it out: {pool.target} uses no GPU; --memory-limit limits the machine's memory"
        raise UsageError("--gpu-memory-limit has no use here", hint=hint)
    if COMPILERS[pool.target.compiler].threads(wanted.options, wanted.tuning):
        # The program is for this machine, so it may use as much of it as a slot has.
        wanted = replace(wanted, options={"threads": settings.threads_per_slot, **wanted.options})
    document = _manifest(wanted, model, pool, work)
    try:
        manifest = parse_manifest(json.dumps(document, ensure_ascii=False), "optimize")
        found = freeze(manifest, Path(), cache=cache, pythons=settings.converters)
        [cell] = expand(manifest, found.models, found.data, [pool])
    except ManifestError as error:
        raise _without_places(error) from None
    return Planned(cell, model, found, findings, pool, why)


def _without_places(error: ManifestError) -> UsageError:
    """Return what is wrong without its places: they are in a manifest that nobody wrote."""
    told = [f"{problem.message}{f' ({problem.hint})' if problem.hint else ''}" for problem in error.problems]
    return UsageError("\n".join(told))


def _format(path: Path) -> str:
    if path.is_dir():
        return "saved-model"
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if path.suffix.lower() not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise UsageError(
            f"{path}: not a model that this command can compile", hint=f"it accepts {known}, and SavedModels"
        )
    return _FORMATS[path.suffix.lower()]


def _read(wanted: Wanted, settings: Settings, work: Path) -> tuple[FrozenModel, Path]:
    """Read the model as compilers get it, converted where they cannot read it; also return the folder for files made.

    What was converted is kept, so that the next run, and a build, need not do it again.
    """
    format = _format(wanted.model)
    if format not in _CONVERTED:
        return read_model(wanted.model, format), work / "cache"
    if kind_of(wanted.model, format) == "torchscript" and not wanted.inputs:
        hint = "--input x=batch,3,224,224 for each in order; --input ids=batch,128:int64 if it is not float32"
        raise UsageError(f"{wanted.model}: a TorchScript archive does not describe its inputs", hint=hint)
    batches = {"batches": [wanted.batch or 1]} if any(BATCH in shape for shape in wanted.inputs.values()) else {}
    entry = {**_source(wanted), "inputs": {name: {"shape": list(shape)} for name, shape in wanted.inputs.items()}}
    manifest = parse_manifest(
        json.dumps({"version": 1, "name": "model", "targets": ["onnxruntime/cpu"], "models": [{**entry, **batches}]}),
        "optimize",
    )
    file, _ = convert(wanted.model, manifest.models[0], default_cache(), settings.converters)
    return read_model(file), default_cache()


def _source(wanted: Wanted) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9._-]+", "-", _title(wanted.model).lower()).strip("-._")[:100] or "model"
    format = _format(wanted.model)
    if wanted.dtypes and format != "torch":
        raise UsageError(
            "--input with a dtype is only for TorchScript archives", hint="leave the dtype out: the model has it"
        )
    conversion = {"conversion": {"dtypes": dict(wanted.dtypes)}} if wanted.dtypes else {}
    return {"name": name, "source": {"path": str(wanted.model.resolve())}, "format": format, **conversion}


def _choose(target: str, format: str, findings: Findings) -> tuple[Pool, str]:
    """Return the pool of this machine to compile for, and why this one."""
    # What is only cross-compiled here cannot be run, so neither checked nor measured.
    pools = [pool for pool in findings.pools if format in COMPILERS[pool.target.compiler].formats and not pool.untuned]
    here = ", ".join(dict.fromkeys(str(pool.target) for pool in findings.pools)) or "nothing"
    gpus = [pool for pool in pools if pool.target.maker]
    by_name = {str(pool.target): pool for pool in pools}
    if not target:
        for pool in (*gpus, by_name.get("migraphx/cpu"), by_name.get("onnxruntime/cpu")):
            if pool:
                return pool, "the GPU of this machine" if pool in gpus else "this machine has no GPU for MIGraphX"
        raise UsageError(f"nothing here compiles {format} models; here is {here}", hint="; ".join(_notes(findings)))
    if target == "gpu":
        fitting = gpus
    else:
        try:
            choice = understand_target(_SHORT.get(target, target))
        except ValueError as error:
            raise UsageError(f"--target {target}: {error}", hint="gpu, cpu, ref, or a target such as gfx942") from None
        fitting = [pool for pool in pools if choice.serves(pool)]
    if not fitting:
        hint = "; ".join([*_notes(findings), "`-t onnxruntime/cpu` always works" * (format == "onnx")])
        raise UsageError(f"--target {target}: not on this machine; here is {here}", hint=hint.strip("; "))
    return fitting[0], "as asked"


def _notes(findings: Findings) -> list[str]:
    return [str(note) for note in findings.notes]


def _manifest(wanted: Wanted, model: FrozenModel, pool: Pool, work: Path) -> dict[str, Any]:
    precision = _precision(wanted, model, pool)
    arrays = _input_arrays(wanted, model)
    shapes = _shapes(wanted, model, arrays)
    entry = {**_source(wanted), "inputs": {tensor: {"shape": shape} for tensor, shape in shapes.items()}}
    if any(BATCH in shape for shape in shapes.values()):
        entry["batches"] = [wanted.batch or 1]
    elif wanted.batch:
        hint = f"--input {next(iter(shapes), 'NAME')}=batch,… names the batch dimension"
        raise UsageError(f"--batch {wanted.batch}: no input of the model leaves its batch open", hint=hint)
    if wanted.calibration:
        entry["calibration"] = _data(wanted.calibration)
    if wanted.samples:
        entry["samples"] = {"path": str(wanted.samples.resolve())}
    elif arrays:
        entry["samples"] = {"path": str(_written(arrays, work / "inputs.npz"))}
    if wanted.tolerance is not None:
        entry["verify"] = {"tolerance": wanted.tolerance}
    if wanted.memory_limit:
        entry["limits"] = {"memory": f"{-(-wanted.memory_limit // 2**20)}MiB"}
    return {
        "version": 1,
        "name": entry["name"],
        "targets": [str(pool.target)],
        "precisions": [precision],
        "options": _options(wanted, model, pool),
        "tuning": wanted.tuning,
        "models": [entry],
    }


def _title(path: Path) -> str:
    # Most exporters call every model model.onnx: then its folder says more.
    return path.resolve().parent.name if path.stem.lower() == "model" else path.stem


def _precision(wanted: Wanted, model: FrozenModel, pool: Pool) -> str:
    compiler = COMPILERS[pool.target.compiler]
    flags = " ".join(f"--{name}" for name in wanted.precisions)
    if not wanted.precisions:
        precision = NATIVE if model.lowered else "fp32"
    else:
        precision = canonical_precision("+".join(wanted.precisions))
    if precision == "fp32" and model.lowered:
        hint = "leave --fp32 out: the model is compiled as it was exported"
        raise UsageError(f"--fp32: the model is lower already ({model.lowered})", hint=hint)
    if precision not in (known := compiler.precisions(pool.target.device)):
        hint = f"{pool.target} has {', '.join(known)}: use the flag of one, or of both halves of a pair"
        raise UsageError(f"{flags} cannot be combined" if " " in flags else f"{pool.target} has no {flags}", hint=hint)
    if compiler.needs_calibration(precision) and not wanted.calibration:
        names = ", ".join(f"`{tensor.name}`" for tensor in model.inputs)
        hint = f"add --calibration FILE.npz with an array for {names}: a few dozen real inputs"
        raise UsageError(f"{flags} needs calibration data", hint=hint)
    if wanted.calibration and not compiler.needs_calibration(precision):
        hint = f"only {', '.join(f'--{name}' for name in sorted(compiler.calibrated))} use it here: leave it out"
        raise UsageError(f"--calibration has no use at precision {precision}", hint=hint)
    return precision


def _options(wanted: Wanted, model: FrozenModel, pool: Pool) -> dict[str, Any]:
    known = COMPILERS[pool.target.compiler].options_of(pool.target.device)
    for name in wanted.options:
        if name not in known:
            others = ", ".join(
                name for name, compiler in COMPILERS.items() if wanted.options.keys() <= set(compiler.options)
            )
            hint = f"leave its flag out, or choose a target of {others}"
            raise UsageError(f"{pool.target.compiler} has no option {name}", hint=hint)
    if "nhwc" in wanted.options and model.format != "tf":
        raise UsageError("--nchw is only for TensorFlow models", hint="leave it out: ONNX models are NCHW")
    return dict(wanted.options)


def _data(text: str) -> dict[str, str]:
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) and not Path(text).exists():
        return {"generator": text}
    return {"path": str(Path(text).resolve())}


# --- shapes -------------------------------------------------------------------------------------------------------


def _shapes(wanted: Wanted, model: FrozenModel, arrays: Mapping[str, Any]) -> dict[str, list[int | str]]:
    """Return every input's shape: as given, else its array's, else the model's with an open first axis as batch."""
    names = [tensor.name for tensor in model.inputs]
    for name in wanted.inputs:
        if name not in names:
            raise UsageError(f"--input {name}: no such input", hint=suggestion(name, names))
    first = {tensor.shape[0] for tensor in model.inputs if tensor.shape and isinstance(tensor.shape[0], str)}
    found: dict[str, list[int | str]] = {}
    for tensor in model.inputs:
        if tensor.name in wanted.inputs:
            found[tensor.name] = list(wanted.inputs[tensor.name])
        elif tensor.name in arrays and (
            tensor.shape is None or not all(isinstance(size, int) for size in tensor.shape)
        ):
            found[tensor.name] = list(arrays[tensor.name].shape)
        else:
            found[tensor.name] = _of_model(tensor, first)
    return found


def _of_model(tensor: Tensor, first: set[str]) -> list[int | str]:
    if tensor.shape is None:
        hint = f"--input {tensor.name}=batch,3,224,224 (or whatever it is)"
        raise UsageError(f"input {tensor.name}: the model does not give its shape", hint=hint)
    shape = [_named(size, axis, first) for axis, size in enumerate(tensor.shape)]
    if None in shape:
        shown = ",".join("SIZE" if size is None else str(size) for size in shape)
        said = ",".join("?" if size is None else str(size) for size in tensor.shape)
        raise UsageError(f"input {tensor.name} is [{said}]: it needs sizes", hint=f"--input {tensor.name}={shown}")
    return [size for size in shape if size is not None]


def _named(size: Dimension, axis: int, first: set[str]) -> int | str | None:
    if isinstance(size, int):
        return size
    return BATCH if axis == 0 or size in first else None


def _input_arrays(wanted: Wanted, model: FrozenModel) -> dict[str, Any]:
    """Read the arrays of --input-file by input name."""
    if not wanted.input_files:
        return {}
    import numpy as np

    if wanted.samples:
        raise UsageError("--input-file and --samples cannot be combined", hint="use one of them")
    names = [tensor.name for tensor in model.inputs]
    arrays: dict[str, Any] = {}
    for given, path in wanted.input_files.items():
        if not given and len(names) > 1:
            raise UsageError(
                f"--input-file {path}: which input?", hint=f"--input-file NAME={path}, of {', '.join(names)}"
            )
        name = given or names[0]
        if name not in names:
            raise UsageError(f"--input-file {name}: no such input", hint=suggestion(name, names))
        try:
            arrays[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            hint = "write it with numpy.save: one array of plain numbers"
            raise UsageError(f"--input-file {path}: not an .npy file: {error}", hint=hint) from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise UsageError(f"--input-file: none for input {missing[0]}", hint=f"add --input-file {missing[0]}=FILE.npy")
    return arrays


def _written(arrays: Mapping[str, Any], path: Path) -> Path:
    from farm.runner.samples import write_npz

    write_npz(str(path), dict(arrays))
    return path


# --- the program --------------------------------------------------------------------------------------------------


def make(wanted: Wanted, planned: Planned, settings: Settings, work: Path, on_phase: OnPhase) -> Made:
    """Take the cell through the farm's steps, then measure what came out beside what was there before.

    Waits for a GPU that others use. Raises StepEnded if a step fails.
    """
    cell, order, model = planned.cell, planned.cell.order, planned.file
    calibration, samples = (_blob(planned.found, order.get(name)) for name in ("calibration", "samples"))
    settings = settings.model_copy(update={"migraphx_path": planned.findings.migraphx_path})
    cancelled = threading.Event()  # never set: Ctrl-C is an exception here
    with one_slot(planned.pool, planned.findings.gpus, settings) as (slot, gpu):
        limits = AttemptLimits(time=0, memory=cell.limits["memory"])
        look = partial(conditions, slot)
        children = Children(work, settings, limits, on_phase, cancelled, slot, conditions=look)
        steps = Steps(order, children)
        reference = work / "reference.npz"
        with children.phase(Phase.VERIFYING):
            steps.reference(model, samples, reference)
        with watch(gpu) as usage:
            record = _compiled(steps, model, calibration, samples, reference)
        sidecar = {**record, "key": cell.key, "namespace": settings.namespace or "main"}
        sidecar["blobs"] = {"program": {"path": steps.program.name}}
        free = Children(work, settings, UNLIMITED, on_phase, cancelled, slot)
        before = _before(order, model, sidecar, steps.program, free)
        contestants = [program_of(sidecar, steps.program, "after"), *([before] if before else [])]
        after, *others = measure(contestants, free, settings.measure_seconds)
    facts = sidecar["verification"] or {}
    judgement = judge(facts, cell.gates["tolerance"], equal_share=default_equal_share(cell.precision))
    judgement = judgement or _over_memory(usage, wanted.gpu_memory_limit)
    return Made(steps.program, sidecar, judgement, usage, after, next(iter(others), None))


def _compiled(
    steps: Steps, model: Path, calibration: Path | None, samples: Path | None, reference: Path
) -> dict[str, Any]:
    """Compile and evaluate, with tuning where it was asked for; return what the sidecar says of the program."""

    def evaluate(compiled: Mapping[str, Any], tuner: Tuner | None) -> dict[str, Any]:
        with steps.children.phase(Phase.MEASURING):
            proof = (tuner.measuring, [tuner.proof]) if tuner else (None, [])
            return steps.record(compiled, steps.evaluate(compiled, reference, proof[0], write=proof[1]), shared=False)

    if steps.order["spec"]["tuning"]["mode"] == OFF:
        with steps.children.phase(Phase.COMPILING):
            compiled = steps.compile(model, calibration)
        return evaluate(compiled, None)
    return Tuner(steps, ForOneRun(), session="optimize").make(model, calibration, samples, evaluate)


def _over_memory(usage: Usage, limit: int) -> Judgement | None:
    """Return why a program needs too much of the GPU's memory, or None. Nothing bounds it while it runs."""
    if not limit:
        return None
    if usage.memory is None:
        return Judgement(FailureKind.BUDGET, "the driver does not report how much GPU memory was used")
    if usage.memory <= limit:
        return None
    return Judgement(FailureKind.BUDGET, f"it used {usage.memory} bytes of the GPU's memory, the limit is {limit}")


def _before(
    order: Mapping[str, Any], model: Path, sidecar: Mapping[str, Any], program: Path, children: Children
) -> Contestant | None:
    """Return the original model in ONNX Runtime; of another format its fp32 program, which is compiled for it."""
    if order["model"]["format"] == "onnx":
        return original_of(sidecar, model, program, "before")
    if order["spec"]["precision"] in ("fp32", NATIVE):
        return None
    plain = {"precision": "fp32", "quantization": {}, "calibration": None, "tuning": {"mode": OFF}}
    spec = {**order["spec"], **plain}
    steps = Steps({**order, "spec": spec, "identifier": f"{order['identifier']}/before"}, children)
    with children.phase(Phase.COMPILING):
        steps.compile(model, None)
    return program_of({**sidecar, "spec": spec, "tuning": {}}, steps.program, "before")


def _blob(found: FrozenInputs, reference: Mapping[str, Any] | None) -> Path | None:
    return found.files[str(reference["digest"])] if reference else None


# --- output --------------------------------------------------------------------------------------------------------


def destination(wanted: Wanted, extension: str) -> Path:
    """Return the file to write: `--output-path` is a file, a folder, or a bare name for the folder of saved models.

    Raises UsageError if it cannot be written, or is the model itself.
    """
    given = wanted.output
    if not given:
        place = SAVED_MODELS / f"{_title(wanted.model)}{extension}"
    elif given.endswith(os.sep) or Path(given).is_dir():
        place = Path(given) / f"{_title(wanted.model)}{extension}"
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


def store(made: Made, place: Path) -> tuple[Path, dict[str, Any]]:
    """Write the program to its place, and its sidecar beside it; both are whole or not there.

    Returns the sidecar's path and the sidecar. Raises OSError: NotPlain for what the compiler left in place of a file.
    """
    from farm.artifacts import sidecar as sidecars

    beside = sidecars.beside(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(beside) as described, replacing(place) as program:
        digest, size = take(made.program, program, LARGEST)
        blob = {"path": place.name, "digest": digest, "size": size}
        document = sidecars.validate({**made.sidecar, "blobs": {"program": blob}})
        described.write_bytes(sidecars.text(document))
    return beside, sidecars.document(document)


def report(planned: Planned, made: Made) -> dict[str, Any]:
    """Return what there is to say of a program: sizes in bytes, times in seconds, errors by output."""
    from farm.artifacts import sidecar as sidecars

    cell, checked = planned.cell, made.sidecar["verification"] or {}
    errors = {
        name: {"error": error, "tolerance": tolerance_of(name, cell.gates["tolerance"])}
        for name, error in checked.get("errors", {}).items()
    }
    share = default_equal_share(cell.precision)
    equal = {name: {"equal": value, "needed": share} for name, value in checked.get("equal", {}).items()}
    return {
        "identifier": cell.identifier,
        "key": cell.key,
        "target": str(cell.order["target"]),
        "why": planned.why,
        "toolchain": cell.spec.toolchain,
        "precision": cell.precision,
        "inputs": made.sidecar["inputs"],
        "outputs": made.sidecar["outputs"],
        "quantized": made.sidecar["quantized"],
        "size": {"before": planned.model.size, "after": made.program.stat().st_size},
        "accuracy": {
            "reference": ", ".join(dict.fromkeys(checked.get("origin", {}).values())) or checked.get("reference", ""),
            "unverified": sidecars.unverified_of(checked),
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
        "gpu": {**made.usage.as_dict(), "conditions": made.sidecar["measurements"]["conditions"]},
        "seconds": made.sidecar["seconds"],
    }


def _tuning(sidecar: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return both programs' figures where one was tuned, and which of them this is."""
    if sidecar["tuning"]["mode"] == OFF:
        return None
    figures = {name: sidecar["measurements"].get(name) for name in ("tuned", "baseline", "ratio", "interval")}
    work = {name: sidecar["tuning"].get(name) for name in ("mode", "published", "operations", "seconds")}
    return {**work, **figures}
