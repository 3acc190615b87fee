"""Optimize: one model compiled on this machine, with the farm's own steps and checks, but without a farm.

What is asked for becomes a manifest of one cell, so that shapes, options, precisions and data mean the same as in a
build. It goes through the pipeline of a worker, is compared with the original model, and its program is written to the
place that was asked for.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from farm.artifacts import sidecar as sidecars
from farm.client.authoring import title
from farm.client.fetching import sidecar_path
from farm.client.freezing import FrozenInputs, ManifestReader, converter_of
from farm.client.transfers import default_cache
from farm.compiling.pipeline import LARGEST, Children, InputFiles, OnPhase, Pipeline, Steps, StepSettings
from farm.errors import ManifestError, UsageError, suggestion
from farm.files import replacing, take
from farm.jobs.state import AttemptLimits, FailureKind, WorkOrder
from farm.local.bench import Contestant, Measured, measure, original_of, program_of
from farm.manifest.entries import Conversion, InputEntry, Limits, Manifest, ModelEntry, Tuning, Verify
from farm.manifest.parsing import unwritten, valid_name
from farm.manifest.values import Data, Source
from farm.matrix.cells import Cell, expand
from farm.matrix.combinations import combine
from farm.models.frozen import FrozenModel, lowered, read_model
from farm.models.shapes import BATCH
from farm.node.gpus import Usage, conditions, watch
from farm.node.survey import Findings, one_slot, survey
from farm.results.gates import Judgement, judge, judge_unverified, tolerance_of
from farm.results.speed import compare
from farm.runner.documents import Evidence, TensorInfo, Verification
from farm.runner.samples import write_npz
from farm.settings import Settings
from farm.spec import SpecDocument
from farm.targets.compilers import NATIVE, OFF, canonical_precision, compilers, default_equal_share
from farm.targets.pools import Pool, understand_target
from farm.tuning.database import ForOneRun
from farm.tuning.search import Search
from farm.tuning.tuner import Tuner

Array = NDArray[Any]

_FORMATS: dict[str, Literal["onnx", "tf", "torch"]] = {
    ".onnx": "onnx",
    ".pb": "tf",
    ".pt2": "torch",
    ".pt": "torch",
    ".ts": "torch",
}
_CONVERTED = ("saved-model", "torch")  # Formats that become ONNX first.
_SHORT = {"cpu": "migraphx/cpu", "ref": "migraphx/ref"}  # Targets as people know them from MIGraphX's own tools.


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of one model. Empty fields leave it to the model and to this machine.

    `inputs` are `{name: shape}` with numbers, `batch` or other names; `input_files` are arrays by input name ("" for
    the only one). Limits are in bytes, 0 means none.
    """

    model: Path
    target: str = ""
    precisions: Sequence[str] = ()
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    tuning: Literal["off", "exhaustive"] = "off"
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
        return self.found.files[str(self.model["files"][0]["digest"])]

    @property
    def extension(self) -> str:
        """Ending of the program's file."""
        spec = self.cell.order["spec"]
        return compilers()[spec["compiler"]["name"]].program_extension(spec["options"])


def plan(wanted: Wanted, settings: Settings, work: Path) -> Planned:
    """Read the model and the data, look at this machine, and work out the one cell; `work` is for files on the way.

    Raises UsageError for whatever does not go together, before anything is compiled.
    """
    model, cache = _read(wanted, settings, work)
    findings = survey(settings)
    pool, why = _choose(wanted.target, model["format"], findings)
    if wanted.gpu_memory_limit and not pool.target.kind.maker:
        hint = f"leave it out: {pool.target} uses no GPU; --memory-limit limits the machine's memory"
        raise UsageError("--gpu-memory-limit has no use here", hint=hint)
    if compilers()[pool.target.compiler].threads(wanted.options, wanted.tuning):
        # The program is for this machine, so it may use as much of it as a slot has.
        wanted = replace(wanted, options={"threads": settings.threads_per_slot, **wanted.options})
    try:
        manifest = unwritten(_manifest(wanted, model, pool, work), "optimize")
        matrix = combine(manifest)
        found = ManifestReader(matrix, Path(), cache=cache, pythons=settings.converters).read().required()
        [cell] = expand(matrix, found.models, found.data, [pool])
    except ManifestError as error:
        # Without their places, which are in a manifest that nobody wrote.
        said = [each.message + (f" ({each.hint})" if each.hint else "") for each in error.problems]
        raise UsageError("\n".join(said)) from None
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        said = [f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}" for each in wrong]
        raise UsageError("\n".join(said)) from None
    return Planned(cell, model, found, findings, pool, why)


def _format(path: Path) -> Literal["onnx", "tf", "saved-model", "torch"]:
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
    converter = converter_of(format)
    if converter.kind_of(wanted.model, format) == "torchscript" and not wanted.inputs:
        hint = "--input x=batch,3,224,224 for each in order; --input ids=batch,128:int64 if it is not float32"
        raise UsageError(f"{wanted.model}: a TorchScript archive does not describe its inputs", hint=hint)
    entry = _entry(wanted, wanted.inputs)
    if any(BATCH in shape for shape in wanted.inputs.values()):
        entry = entry.model_copy(update={"batches": (wanted.batch or 1,)})
    file, _ = converter.convert(wanted.model, entry, default_cache(), settings.converters)
    return read_model(file), default_cache()


def _entry(wanted: Wanted, shapes: Mapping[str, Sequence[int | str]]) -> ModelEntry:
    format = _format(wanted.model)
    if wanted.dtypes and format != "torch":
        raise UsageError(
            "--input with a dtype is only for TorchScript archives", hint="leave the dtype out: the model has it"
        )
    conversion = {"conversion": Conversion.model_validate({"dtypes": wanted.dtypes})} if wanted.dtypes else {}
    return ModelEntry(
        name=valid_name(title(wanted.model)) or "model",
        source=Source(path=str(wanted.model.resolve())),
        format=format,
        inputs={tensor: InputEntry(shape=tuple(shape)) for tensor, shape in shapes.items()},
    ).model_copy(update=conversion)


def _choose(target: str, format: str, findings: Findings) -> tuple[Pool, str]:
    """Return the pool of this machine to compile for, and why this one."""
    # What is only cross-compiled here cannot be run, so neither checked nor measured.
    pools = [
        pool for pool in findings.pools if format in compilers()[pool.target.compiler].formats and not pool.untuned
    ]
    here = ", ".join(dict.fromkeys(str(pool.target) for pool in findings.pools)) or "nothing"
    gpus = [pool for pool in pools if pool.target.kind.maker]
    by_name = {str(pool.target): pool for pool in pools}
    if not target:
        for pool in (*gpus, by_name.get("migraphx/cpu"), by_name.get("onnxruntime/cpu")):
            if pool:
                return pool, "the GPU of this machine" if pool in gpus else "this machine has no GPU for MIGraphX"
        raise UsageError(
            f"nothing here compiles {format} models; here is {here}", hint="; ".join(map(str, findings.notes))
        )
    if target == "gpu":
        fitting = gpus
    else:
        try:
            choice = understand_target(_SHORT.get(target, target))
        except ValueError as error:
            raise UsageError(f"--target {target}: {error}", hint="gpu, cpu, ref, or a target such as gfx942") from None
        fitting = [pool for pool in pools if choice.serves(pool)]
    if not fitting:
        hint = "; ".join([*map(str, findings.notes), "`-t onnxruntime/cpu` always works" * (format == "onnx")])
        raise UsageError(f"--target {target}: not on this machine; here is {here}", hint=hint.strip("; "))
    return fitting[0], "as asked"


def _manifest(wanted: Wanted, model: FrozenModel, pool: Pool, work: Path) -> Manifest:
    precision = _precision(wanted, model, pool)
    arrays = _input_arrays(wanted, model)
    shapes = _shapes(wanted, model, arrays)
    settings: dict[str, Data | Limits | Verify | tuple[int, ...]] = {}
    if any(BATCH in shape for shape in shapes.values()):
        settings["batches"] = (wanted.batch or 1,)
    elif wanted.batch:
        hint = f"--input {next(iter(shapes), 'NAME')}=batch,… names the batch dimension"
        raise UsageError(f"--batch {wanted.batch}: no input of the model leaves its batch open", hint=hint)
    if wanted.calibration:
        settings["calibration"] = _data(wanted.calibration)
    if wanted.samples:
        settings["samples"] = Data(path=str(wanted.samples.resolve()))
    elif arrays:
        write_npz(str(work / "inputs.npz"), dict(arrays))
        settings["samples"] = Data(path=str(work / "inputs.npz"))
    if wanted.tolerance is not None:
        settings["verify"] = Verify(tolerance={"*": {"*": wanted.tolerance}})
    if wanted.memory_limit:
        settings["limits"] = Limits().model_copy(update={"memory": wanted.memory_limit})
    entry = _entry(wanted, shapes).model_copy(update=settings)
    return Manifest(
        version=1,
        name=entry.name,
        targets=(str(pool.target),),
        precisions=(precision,),
        options=_options(wanted, model, pool),
        tuning=Tuning(mode=wanted.tuning),
        models=(entry,),
    )


def _precision(wanted: Wanted, model: FrozenModel, pool: Pool) -> str:
    compiler = compilers()[pool.target.compiler]
    flags = " ".join(f"--{name}" for name in wanted.precisions)
    if not wanted.precisions:
        precision = NATIVE if lowered(model) else "fp32"
    else:
        precision = canonical_precision("+".join(wanted.precisions))
    if precision == "fp32" and lowered(model):
        hint = "leave --fp32 out: the model is compiled as it was exported"
        raise UsageError(f"--fp32: the model is lower already ({lowered(model)})", hint=hint)
    if precision not in (known := pool.target.kind.precisions):
        hint = f"{pool.target} has {', '.join(known)}: use the flag of one, or of both halves of a pair"
        raise UsageError(f"{flags} cannot be combined" if " " in flags else f"{pool.target} has no {flags}", hint=hint)
    if compiler.needs_calibration(precision) and not wanted.calibration:
        names = ", ".join(f"`{tensor['name']}`" for tensor in model["inputs"])
        hint = f"add --calibration FILE.npz with an array for {names}: a few dozen real inputs"
        raise UsageError(f"{flags} needs calibration data", hint=hint)
    if wanted.calibration and not compiler.needs_calibration(precision):
        hint = f"only {', '.join(f'--{name}' for name in sorted(compiler.calibrated))} use it here: leave it out"
        raise UsageError(f"--calibration has no use at precision {precision}", hint=hint)
    return precision


def _options(wanted: Wanted, model: FrozenModel, pool: Pool) -> dict[str, bool | int | str | tuple[str, ...]]:
    known = compilers()[pool.target.compiler].options_of(pool.target.device)
    for name in wanted.options:
        if name not in known:
            others = ", ".join(
                name for name, compiler in compilers().items() if wanted.options.keys() <= set(compiler.options)
            )
            hint = f"leave its flag out, or choose a target of {others}"
            raise UsageError(f"{pool.target.compiler} has no option {name}", hint=hint)
    if "nhwc" in wanted.options and model["format"] != "tf":
        raise UsageError("--nchw is only for TensorFlow models", hint="leave it out: ONNX models are NCHW")
    bound = {"gpu_mem_limit": wanted.gpu_memory_limit} if wanted.gpu_memory_limit and "gpu_mem_limit" in known else {}
    return {**bound, **wanted.options}


def _data(text: str) -> Data:
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) and not Path(text).exists():
        return Data(generator=text)
    return Data(path=str(Path(text).resolve()))


# --- shapes -------------------------------------------------------------------------------------------------------


def _shapes(wanted: Wanted, model: FrozenModel, arrays: Mapping[str, Array]) -> dict[str, list[int | str]]:
    """Return every input's shape: as given, else its array's, else the model's with an open first axis as batch."""
    shapes = {tensor["name"]: tensor["shape"] for tensor in model["inputs"]}
    for name in wanted.inputs:
        if name not in shapes:
            raise UsageError(f"--input {name}: no such input", hint=suggestion(name, shapes))
    first = {shape[0] for shape in shapes.values() if shape and isinstance(shape[0], str)}
    found: dict[str, list[int | str]] = {}
    for tensor in model["inputs"]:
        name, shape = tensor["name"], tensor["shape"]
        if name in wanted.inputs:
            found[name] = list(wanted.inputs[name])
        elif name in arrays and (shape is None or not all(isinstance(size, int) for size in shape)):
            found[name] = list(arrays[name].shape)
        else:
            found[name] = _of_model(tensor, first)
    return found


def _of_model(tensor: TensorInfo, first: set[str]) -> list[int | str]:
    if tensor["shape"] is None:
        hint = f"--input {tensor['name']}=batch,3,224,224 (or whatever it is)"
        raise UsageError(f"input {tensor['name']}: the model does not give its shape", hint=hint)
    shape = [
        size if isinstance(size, int) else BATCH if axis == 0 or size in first else None
        for axis, size in enumerate(tensor["shape"])
    ]
    if None in shape:
        shown = ",".join("SIZE" if size is None else str(size) for size in shape)
        said = ",".join("?" if size is None else str(size) for size in tensor["shape"])
        raise UsageError(
            f"input {tensor['name']} is [{said}]: it needs sizes", hint=f"--input {tensor['name']}={shown}"
        )
    return [size for size in shape if size is not None]


def _input_arrays(wanted: Wanted, model: FrozenModel) -> dict[str, Array]:
    """Read the arrays of --input-file by input name."""
    if not wanted.input_files:
        return {}
    if wanted.samples:
        raise UsageError("--input-file and --samples cannot be combined", hint="use one of them")
    names = [tensor["name"] for tensor in model["inputs"]]
    arrays: dict[str, Array] = {}
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


SAVED_MODELS = Path("saved_models")  # The default folder of programs.
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
    data = (order["calibration"], order["samples"])
    inputs = InputFiles(model, *(planned.found.files[each["digest"]] if each else None for each in data))
    machine = replace(StepSettings.of(settings), migraphx_path=planned.findings.migraphx_path)
    cancelled = threading.Event()  # never set: Ctrl-C is an exception here
    with one_slot(planned.pool, planned.findings.gpus, settings) as slot:
        limits = AttemptLimits(time=0, memory=cell.limits["memory"])
        look = partial(conditions, slot)
        children = Children(work, machine, limits, on_phase, cancelled, slot, conditions=look)
        steps = Steps(order, children)
        tunes = order["spec"]["tuning"]["mode"] != OFF
        pipeline = Pipeline(steps, inputs, Tuner(Search(steps, ForOneRun(), session="optimize")) if tunes else None)
        pipeline.reference()  # Before the GPU is watched, since references do not use it.
        with watch(slot) as usage:
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


def store(made: Made, place: Path) -> Path:
    """Write the program to its place, and its sidecar next to it, each whole or not at all; return the sidecar's path.

    Raises OSError: NotPlain for what the compiler left in place of a file.
    """
    described_at = sidecar_path(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(described_at) as described, replacing(place) as program:
        digest, size = take(made.program, program, LARGEST)
        blob = {"path": place.name, "digest": digest, "size": size}
        described.write_bytes(sidecars.text(sidecars.validate({**made.sidecar, "blobs": {"program": blob}})))
    return described_at


def report(planned: Planned, made: Made) -> dict[str, Any]:
    """Return the report on a program: sizes in bytes, times in seconds, errors by output."""
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
        **{name: made.sidecar[name] for name in ("inputs", "outputs", "quantized", "peak_memory", "seconds")},
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
        "gpu": {**made.usage, "conditions": made.sidecar["measurements"]["conditions"]},
    }


def _tuning(sidecar: Mapping[str, Any]) -> dict[str, Any] | None:
    if sidecar["tuning"]["mode"] == OFF:
        return None
    figures = {name: sidecar["measurements"].get(name) for name in ("tuned", "baseline", "ratio", "interval")}
    work = {name: sidecar["tuning"].get(name) for name in ("mode", "published", "operations", "seconds")}
    return {**work, **figures}
