"""Requests to the child, made from a work order: what `farm/runner/protocol.py` describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, Unpack, cast

from typing_extensions import TypedDict

from farm.jobs.order import WorkOrder
from farm.jobs.state import FailureKind
from farm.runner.documents import (
    BenchProgram,
    CompileAnswer,
    DataRecipe,
    ExpectedToolchain,
    InputSpec,
    ModelFile,
    Request,
    SessionChoice,
    SlicedModel,
    TuningWish,
)
from farm.spec import KeyedModel, KeyedVerification, OptionValue, PlainSize, SpecDocument
from farm.targets.compilers import TuningMode, compilers, default_equal_share, default_tolerance, filled


class MadeProgram(NamedTuple):
    """A program that can be measured: its file, the names of its outputs, and how it is run best.

    One that was published before has a cache key, and a toolchain that made it.
    """

    path: Path
    outputs: Sequence[str]
    session: SessionChoice | None
    key: str = ""
    toolchain: str = ""

    @classmethod
    def of(cls, path: Path, compiled: CompileAnswer) -> MadeProgram:
        """Return a program with the answer of the child that compiled it."""
        return cls(path, [output["name"] for output in compiled["outputs"]], compiled.get("session"))


ONE_SAMPLE: DataRecipe = {"generate": 1, "seed": 0, "ranges": {}}
"""What an unverified program is measured with."""


def after_a_crash(previous: Iterable[str]) -> dict[str, str]:
    """Return further environment variables for an attempt, by the failure kinds of the attempts before it.

    MIGraphX aborts if a compile thread raises. Without threads, the same error comes with its reason.
    """
    return {"MIGRAPHX_GPU_COMPILE_PARALLEL": "1"} if FailureKind.COMPILER_CRASH in previous else {}


_READING = ("nhwc", "max_loop_iterations", "limit_max_iterations")
"""MIGraphX's options that change what a model is read as."""


EXPECTED = "expected"
"""The reference that computes nothing: outputs that the samples do not bring are not verified."""


def references_of(order: WorkOrder) -> tuple[str, ...]:
    """Return the references that may compute the right outputs, in order: first the one that the manifest names.

    MIGraphX's `ref` is not a reference for itself, unless the manifest names it. Empty if verification is off.
    """
    verification = order["spec"]["verification"]
    if not verification:
        return ()
    others = ["onnxruntime", "onnx"] if order["model"]["format"] == "onnx" else []
    others += ["migraphx"] if order["target"] != "migraphx/ref" else []
    return tuple(dict.fromkeys([verification["reference"], *others]))


class ReferenceRecipe(TypedDict):
    """What decides reference outputs; its digest names them in object storage."""

    schema: int
    model: KeyedModel
    inputs: Mapping[str, InputSpec]
    batch: PlainSize | None
    verification: KeyedVerification | None
    options: NotRequired[Mapping[str, OptionValue]]


def reference_recipe(order: WorkOrder, used: str = "") -> ReferenceRecipe:
    """Return what decides a work order's reference outputs; equal recipes share one blob.

    They are made by `used`, if that is not the reference that the manifest asks for.
    """
    spec = order["spec"]
    verification = spec["verification"]
    if verification:
        used = used or verification["reference"]
        verification = {**verification, "reference": used}
    recipe: ReferenceRecipe = {
        "schema": 1,
        "model": spec["model"],
        "inputs": spec["inputs"],
        "batch": spec["batch"],
        "verification": verification,
    }
    if used == "migraphx":
        # It reads the original model by these options too: another layout, or fewer iterations of a loop.
        recipe["options"] = {name: spec["options"][name] for name in _READING if name in spec["options"]}
    return recipe


def reference_request(
    order: WorkOrder, model: Path, samples: Path | None, reference: Path, *, used: str = "", unverified: str = ""
) -> Request:
    """Ask for sample inputs and their right outputs, written to `reference`; checks the model too.

    They are made by `used`, if that is not the reference that the manifest asks for; `unverified` is why none can run
    the model, if `used` is EXPECTED.
    """
    verification = order["spec"]["verification"]
    used = used or (verification["reference"] if verification else "none")
    return _request(
        order,
        action="reference",
        compiler=used,
        device="ref" if used == "migraphx" else "cpu",
        unverified=unverified,
        model=_model(order, model),
        samples={"path": str(samples)} if samples else _generated(order),
        min_samples=_generated(order).get("generate", 1),
        reference=str(reference),
    )


def _generated(order: WorkOrder) -> DataRecipe:
    """Return the recipe of the samples to verify with; of one sample if verification is off."""
    verification = order["spec"]["verification"]
    return (verification["samples"] if verification else None) or ONE_SAMPLE


def slice_request(order: WorkOrder, model: Path, folder: Path) -> Request:
    """Ask for the model to be cut into slices, written to `folder`; nothing of a compiler is imported for it."""
    return {**_plain(order, model, "slice"), "slices": str(folder)}


def tune_request(order: WorkOrder, piece: SlicedModel, *, database: Path, key: str) -> Request:
    """Ask for one slice to be tuned into the databases in a folder; its calibration is made up and thrown away."""
    whole = compile_request(order, Path(piece["path"]), None, database)
    recipe = order["spec"]["calibration"]
    ranges = recipe.get("ranges", {}) if recipe else {}
    del whole["program"]
    return {
        **whole,
        "action": "tune",
        "model": {"path": piece["path"], "format": "onnx"},
        "inputs": piece["inputs"],
        "batch": None,
        "calibration": {"generate": 2, "seed": 0, "ranges": ranges},
        "database": str(database),
        "key": key,
    }


def check_request(order: WorkOrder, model: Path) -> Request:
    """Ask whether a model is safe to open; nothing of a compiler is imported for it."""
    return _plain(order, model, "check")


def check_of(model: Path, format: str, outputs: Sequence[str], *, alone: bool) -> Request:
    """Ask whether a model that has no work order is safe to open; `alone`: its external data is not there yet."""
    return {
        "action": "check",
        "compiler": "onnxruntime",
        "device": "cpu",
        "model": {"path": str(model), "format": format, "outputs": list(outputs), "alone": alone},
    }


def pack_request(order: WorkOrder, model: Path, packed: Path) -> Request:
    """Ask for the model with its weights as blocks of int4, written to `packed`; no compiler is imported for it."""
    return {**_plain(order, model, "pack"), "quantization": order["spec"]["quantization"], "packed": str(packed)}


def compile_request(order: WorkOrder, model: Path, calibration: Path | None, program: Path) -> Request:
    """Ask for the model to be quantized, tuned, compiled and saved to `program`."""
    spec = order["spec"]
    compiler, _, device = order["target"].partition("/")
    known = compilers()[compiler].quantization_options(spec["precision"], device)
    return _request(
        order,
        action="compile",
        model=_model(order, model),
        calibration={"path": str(calibration)} if calibration else spec["calibration"],
        program=str(program),
        cross=order.get("cross"),
        precision=spec["precision"],
        quantization=filled(known, spec["quantization"]),
        tuning=cast("TuningWish", {**spec["tuning"], **tuning_mode(order).arguments}),
    )


def expected_of(spec: SpecDocument) -> ExpectedToolchain:
    """Return what the cache key says about the toolchain; a child with another one fails as `toolchain_mismatch`."""
    compiler, device = spec["compiler"], spec["device"]
    return {
        "toolchain": spec["toolchain"],
        "recipe": compiler["recipe"],
        "libraries": compiler["libraries"],
        "cpu_family": device["cpu_family"],
        "arch": device["arch"],
    }


def tuning_mode(order: WorkOrder) -> TuningMode:
    """Return the settings of a work order's tuning mode; none if tuning is off."""
    compiler, _, device = order["target"].partition("/")
    kind = compilers()[compiler].device(device)
    return (kind.tuning if kind else {}).get(order["spec"]["tuning"]["mode"], TuningMode())


def evaluate_request(
    order: WorkOrder,
    program: Path,
    compiled: CompileAnswer,
    reference: Path,
    sample: Path,
    measure_seconds: float,
) -> Request:
    """Ask for the stored program to be loaded, compared with the reference and measured."""
    precision = order["spec"]["precision"]
    return _request(
        order,
        action="evaluate",
        program=str(program),
        model={"format": order["model"]["format"]},
        reference=str(reference),
        outputs=[output["name"] for output in compiled["outputs"]],
        tolerance=default_tolerance(precision),
        equal=default_equal_share(precision),
        measure_seconds=measure_seconds,
        sample=str(sample),
        session=compiled.get("session"),
        precision=precision,
    )


def bench_request(
    order: WorkOrder,
    programs: Sequence[MadeProgram],
    samples: Path | None,
    *,
    rounds: int,
    seconds: float,
    toolchain: str = "",
) -> Request:
    """Ask for programs of one cell to be measured in turns; with `toolchain` by a child that has it, and no other."""
    whole = _request(order, action="bench", rounds=rounds, seconds=seconds, first=2)
    if toolchain:
        # What the key says about the compile changes nothing now: only the libraries run.
        whole["expected"] = {
            **expected_of(order["spec"]),
            "toolchain": toolchain,
            "recipe": compilers()[whole["compiler"]].recipe,
            "libraries": {},
            "cpu_family": None,
        }
    source: DataRecipe = {"path": str(samples)} if samples else _generated(order)
    parts: list[BenchProgram] = [
        {
            "compiler": whole["compiler"],
            "device": whole["device"],
            "inputs": whole["inputs"],
            "batch": whole["batch"],
            "options": whole["options"],
            "precision": order["spec"]["precision"],
            "program": str(program.path),
            "model": {"format": order["model"]["format"]},
            "outputs": program.outputs,
            "samples": source,
            "session": program.session,
        }
        for program in programs
    ]
    return {**whole, "programs": parts}


def _plain(order: WorkOrder, model: Path, action: str) -> Request:
    """Ask for what is done to a model without any compiler."""
    return _request(order, action=action, compiler="onnxruntime", device="cpu", model=_model(order, model))


def _request(order: WorkOrder, /, **fields: Unpack[Request]) -> Request:
    spec = order["spec"]
    compiler, _, device = order["target"].partition("/")
    return {
        "compiler": compiler,
        "device": device,
        "inputs": spec["inputs"],
        "batch": spec["batch"],
        "options": filled(compilers()[compiler].options_of(device), spec["options"]),
        **fields,
    }


def _model(order: WorkOrder, path: Path) -> ModelFile:
    model = order["model"]
    return {"path": str(path), "format": model["format"], "outputs": model.get("outputs", []), "names": model["names"]}
