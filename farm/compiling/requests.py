"""Requests to the child, made from a work order: what `farm/runner/protocol.py` describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

from farm.jobs.state import FailureKind
from farm.runner.documents import (
    BenchProgram,
    CompileAnswer,
    ExpectedToolchain,
    ModelFile,
    Request,
    SampleSource,
    SessionChoice,
    SlicedModel,
    TuningWish,
)
from farm.targets.compilers import COMPILERS, TuningMode, default_equal_share, default_tolerance


class MadeProgram(NamedTuple):
    """A program that can be measured: its file, the names of its outputs, and how it is run best."""

    path: Path
    outputs: Sequence[str]
    session: SessionChoice | None

    @classmethod
    def of(cls, path: Path, compiled: CompileAnswer) -> MadeProgram:
        """Return a program with the answer of the child that compiled it."""
        return cls(path, [output["name"] for output in compiled["outputs"]], compiled.get("session"))


ONE_SAMPLE: SampleSource = {"generate": 1, "seed": 0, "ranges": {}}
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


def references_of(order: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the references that may compute the right outputs, in order: first the one that the manifest names.

    MIGraphX's `ref` is no reference for itself, unless the manifest names it. Empty if verification is off.
    """
    verification = order["spec"]["verification"]
    if not verification:
        return ()
    others = ["onnxruntime", "onnx"] if order["model"]["format"] == "onnx" else []
    others += ["migraphx"] if order["target"] != "migraphx/ref" else []
    return tuple(dict.fromkeys([verification["reference"], *others]))


def reference_recipe(order: Mapping[str, Any], used: str = "") -> dict[str, Any]:
    """Return what decides a work order's reference outputs; equal recipes share one blob.

    They are made by `used`, if that is not the reference that the manifest asks for.
    """
    spec = order["spec"]
    verification = spec["verification"]
    if verification:
        used = used or verification["reference"]
        verification = {**verification, "reference": used}
    recipe = {"schema": 1, **{name: spec[name] for name in ("model", "inputs", "batch")}, "verification": verification}
    if used == "migraphx":
        # It reads the original model by these options too: another layout, or fewer iterations of a loop.
        recipe["options"] = {name: spec["options"][name] for name in _READING if name in spec["options"]}
    return recipe


def reference_request(
    order: Mapping[str, Any],
    model: Path,
    samples: Path | None,
    reference: Path,
    *,
    used: str = "",
    unverified: str = "",
) -> Request:
    """Ask for sample inputs and their right outputs, written to `reference`; checks the model too.

    They are made by `used`, if that is not the reference that the manifest asks for; `unverified` is why none can run
    the model, if `used` is EXPECTED.
    """
    verification = order["spec"]["verification"] or {"samples": ONE_SAMPLE, "reference": "none"}
    used = used or verification["reference"]
    return _request(
        order,
        action="reference",
        compiler=used,
        device="ref" if used == "migraphx" else "cpu",
        unverified=unverified,
        model=_model(order, model),
        samples={"path": str(samples)} if samples else verification["samples"],
        min_samples=verification["samples"].get("generate", 1),
        reference=str(reference),
    )


def slice_request(order: Mapping[str, Any], model: Path, folder: Path) -> Request:
    """Ask for the model to be cut into slices, written to `folder`; nothing of a compiler is imported for it."""
    return _request(
        order, action="slice", compiler="onnxruntime", device="cpu", model=_model(order, model), slices=str(folder)
    )


def tune_request(order: Mapping[str, Any], piece: SlicedModel, *, database: Path, key: str) -> Request:
    """Ask for one slice to be tuned into the databases in a folder; its calibration is made up and thrown away."""
    whole = compile_request(order, Path(piece["path"]), None, database)
    ranges = (order["spec"]["calibration"] or {}).get("ranges") or {}
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


def check_request(order: Mapping[str, Any], model: Path) -> Request:
    """Ask whether a model is safe to open; nothing of a compiler is imported for it."""
    return _request(order, action="check", compiler="onnxruntime", device="cpu", model=_model(order, model))


def check_of(model: Path, format: str, outputs: Sequence[str], *, alone: bool) -> Request:
    """Ask whether a model that has no work order is safe to open; `alone`: its external data is not there yet."""
    return {
        "action": "check",
        "compiler": "onnxruntime",
        "device": "cpu",
        "model": {"path": str(model), "format": format, "outputs": list(outputs), "alone": alone},
    }


def pack_request(order: Mapping[str, Any], model: Path, packed: Path) -> Request:
    """Ask for the model with its weights as blocks of int4, written to `packed`; no compiler is imported for it."""
    quantization = order["spec"]["quantization"]
    return _request(
        order,
        action="pack",
        compiler="onnxruntime",
        device="cpu",
        model=_model(order, model),
        quantization=quantization,
        packed=str(packed),
    )


def compile_request(order: Mapping[str, Any], model: Path, calibration: Path | None, program: Path) -> Request:
    """Ask for the model to be quantized, tuned, compiled and saved to `program`."""
    spec = order["spec"]
    return _request(
        order,
        action="compile",
        model=_model(order, model),
        calibration={"path": str(calibration)} if calibration else spec["calibration"],
        program=str(program),
        cross=order.get("cross"),
        precision=spec["precision"],
        quantization=COMPILERS[spec["compiler"]["name"]].filled_quantization(spec["precision"], spec["quantization"]),
        tuning=cast("TuningWish", {**spec["tuning"], **tuning_mode(order).arguments}),
    )


def expected_of(spec: Mapping[str, Any]) -> ExpectedToolchain:
    """Return what the cache key says of the toolchain; a child with another one fails as `toolchain_mismatch`."""
    compiler, device = spec["compiler"], spec["device"]
    return {
        "toolchain": spec["toolchain"],
        "recipe": compiler["recipe"],
        "libraries": compiler["libraries"],
        "cpu_family": device["cpu_family"],
        "arch": device["arch"],
    }


def tuning_mode(order: Mapping[str, Any]) -> TuningMode:
    """Return the settings of a work order's tuning mode; none if tuning is off."""
    compiler, _, device = str(order["target"]).partition("/")
    kind = COMPILERS[compiler].device(device)
    return (kind.tuning if kind else {}).get(order["spec"]["tuning"]["mode"], TuningMode())


def evaluate_request(
    order: Mapping[str, Any],
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
    order: Mapping[str, Any],
    programs: Sequence[MadeProgram],
    samples: Path | None,
    *,
    rounds: int,
    seconds: float,
) -> Request:
    """Ask for programs of one cell to be measured in turns."""
    verification = order["spec"]["verification"] or {"samples": ONE_SAMPLE}
    whole = _request(order, action="bench", rounds=rounds, seconds=seconds, first=2)
    source: SampleSource = {"path": str(samples)} if samples else verification["samples"]
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


def _request(order: Mapping[str, Any], /, **fields: Unpack[Request]) -> Request:
    spec = order["spec"]
    compiler, _, device = str(order["target"]).partition("/")
    return {
        "compiler": compiler,
        "device": device,
        "inputs": spec["inputs"],
        "batch": spec["batch"],
        "options": COMPILERS[compiler].filled(spec["options"], device),
        **fields,
    }


def _model(order: Mapping[str, Any], path: Path) -> ModelFile:
    model = order["model"]
    file: ModelFile = {"path": str(path), "format": model["format"], "outputs": model.get("outputs", [])}
    if "names" in model:
        file["names"] = model["names"]
    return file
