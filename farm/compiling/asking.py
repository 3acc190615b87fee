"""What is asked of children, made from a work order, and the check of what they answer, each answer once.

A child that a hostile model controls can answer anything, and answers go into work orders, the job store, sidecars and
paths. So the type, length and count of each field are checked, by the types of `farm.runner.documents`. Names must be
those of the model's inputs and outputs, if the request has them. Unknown fields are dropped. Pure, and only on the
standard library, since `farm reproduce` copies it.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NotRequired, Required, Union, Unpack, cast, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict

from farm.jobs.state import FailureKind, WorkOrder
from farm.runner import documents
from farm.runner.documents import ChildRequest, DataRecipe, ModelFile, Request
from farm.runner.protocol import Bound, relative
from farm.spec import KeyedModel, KeyedVerification, OptionValue, PlainSize, SpecDocument
from farm.targets.compilers import TuningMode, compilers, default_equal_share, default_tolerance, filled


@dataclass(frozen=True, slots=True)
class MadeProgram:
    """A program that can be measured: its file, the names of its outputs, and how it is run best.

    One that was published before has a cache key, and a toolchain that made it.
    """

    path: Path
    outputs: Sequence[str]
    session: documents.SessionChoice | None
    key: str = ""
    toolchain: str = ""

    @classmethod
    def of(cls, path: Path, compiled: documents.CompileAnswer) -> MadeProgram:
        """Return a program with the answer of the child that compiled it."""
        return cls(path, [output["name"] for output in compiled["outputs"]], compiled.get("session"))


ONE_SAMPLE: DataRecipe = {"generate": 1, "seed": 0, "ranges": {}}  # What an unverified program is measured with.


def after_a_crash(previous: Iterable[str]) -> dict[str, str]:
    """Return further environment variables for an attempt, by the failure kinds of the attempts before it.

    MIGraphX aborts if a compile thread raises. Without threads, the same error comes with its reason.
    """
    return {"MIGRAPHX_GPU_COMPILE_PARALLEL": "1"} if FailureKind.COMPILER_CRASH in previous else {}


_READING = ("nhwc", "max_loop_iterations", "limit_max_iterations")
"""MIGraphX's options that change what a model is read as."""

EXPECTED = "expected"  # The reference that computes nothing: outputs that the samples do not bring are not verified.


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
    inputs: Mapping[str, documents.InputSpec]
    batch: PlainSize | None
    verification: KeyedVerification | None
    options: NotRequired[Mapping[str, OptionValue]]


def reference_recipe(order: WorkOrder, used: str) -> ReferenceRecipe:
    """Return what decides the outputs of the reference `used` for a work order; equal recipes share one blob."""
    spec = order["spec"]
    verification = spec["verification"]
    recipe: ReferenceRecipe = {
        "schema": 1,
        "model": spec["model"],
        "inputs": spec["inputs"],
        "batch": spec["batch"],
        "verification": {**verification, "reference": used} if verification else None,
    }
    if used == "migraphx":
        # It reads the original model by these options too: another layout, or fewer iterations of a loop.
        recipe["options"] = {name: spec["options"][name] for name in _READING if name in spec["options"]}
    return recipe


def reference_request(
    order: WorkOrder, model: Path, samples: Path | None, reference: Path, used: str, *, unverified: str = ""
) -> Request:
    """Ask for sample inputs and their right outputs by `used`, written to `reference`; checks the model too.

    `unverified` is why no reference can run the model, if `used` is EXPECTED.
    """
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
    """Ask for the model to be cut into slices, written to `folder`."""
    return {**model_request(order, model, "slice"), "slices": str(folder)}


def tune_request(order: WorkOrder, piece: documents.SlicedModel, *, database: Path, key: str) -> Request:
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


def check_of(model: Path, format: str, outputs: Sequence[str], *, alone: bool) -> Request:
    """Ask whether a model that has no work order is safe to open; `alone`: its external data is not there yet."""
    file = ModelFile(path=str(model), format=format, outputs=list(outputs), alone=alone)
    return Request(action="check", compiler="onnxruntime", device="cpu", model=file)


def pack_request(order: WorkOrder, model: Path, packed: Path) -> Request:
    """Ask for the model with its weights as blocks of int4, written to `packed`."""
    quantization = order["spec"]["quantization"]
    return {**model_request(order, model, "pack"), "quantization": quantization, "packed": str(packed)}


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
        quantization=filled(known, spec["quantization"]),
        tuning=cast("documents.TuningWish", {**spec["tuning"], **tuning_mode(order).arguments}),
    )


def expected_of(spec: SpecDocument) -> documents.ExpectedToolchain:
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
    return compilers()[compiler].device(device).tuning.get(order["spec"]["tuning"]["mode"], TuningMode())


def evaluate_request(
    order: WorkOrder, made: MadeProgram, reference: Path, sample: Path, measure_seconds: float
) -> Request:
    """Ask for the stored program to be loaded, compared with the reference and measured."""
    precision = order["spec"]["precision"]
    return _request(
        order,
        action="evaluate",
        program=str(made.path),
        model={"format": order["model"]["format"]},
        reference=str(reference),
        outputs=made.outputs,
        tolerance=default_tolerance(precision),
        equal=default_equal_share(precision),
        measure_seconds=measure_seconds,
        sample=str(sample),
        session=made.session,
    )


def bench_request(order: WorkOrder, programs: Sequence[MadeProgram], samples: Path | None, toolchain: str) -> Request:
    """Ask for programs of one cell to be measured in turns; with `toolchain` by a child that has it, and no other.

    The caller adds `rounds`, and the `seconds` of each program in all of them.
    """
    whole = _request(
        order,
        action="bench",
        first=2,
        model={"format": order["model"]["format"]},
        samples={"path": str(samples)} if samples else _generated(order),
    )
    if toolchain:
        # What the key says about the compile changes nothing now: only the libraries run.
        whole["expected"] = {
            **expected_of(order["spec"]),
            "toolchain": toolchain,
            "recipe": compilers()[whole["compiler"]].recipe,
            "libraries": {},
            "cpu_family": None,
        }
    parts: list[documents.BenchProgram] = [
        {"program": str(program.path), "outputs": program.outputs, "session": program.session} for program in programs
    ]
    return {**whole, "programs": parts}


def model_request(order: WorkOrder, model: Path, action: str) -> Request:
    """Ask for what is done to a model without any compiler, such as to `check` whether it is safe to open."""
    return _request(order, action=action, compiler="onnxruntime", device="cpu", model=_model(order, model))


def _request(order: WorkOrder, /, **fields: Unpack[Request]) -> Request:
    spec = order["spec"]
    compiler, _, device = order["target"].partition("/")
    return {
        "compiler": compiler,
        "device": device,
        "inputs": spec["inputs"],
        "batch": spec["batch"],
        "precision": spec["precision"],
        "options": filled(compilers()[compiler].options_of(device), spec["options"]),
        **fields,
    }


def _model(order: WorkOrder, path: Path) -> ModelFile:
    model = order["model"]
    return {"path": str(path), "format": model["format"], "outputs": model.get("outputs", []), "names": model["names"]}


LONGEST_TEXT = 4000  # Characters of any text.
MOST_ITEMS = 10_000  # Entries of one list or object, as many as a submission may have.
LARGEST = 2**63 - 1  # The largest number.

_HALF = re.compile("[\ud800-\udfff]")

ANSWERS: Mapping[str, Hashable] = {
    "probe": documents.ProbeAnswer,
    "check": documents.CheckAnswer,
    "reference": documents.Answer,
    "pack": documents.Answer,
    "slice": documents.SliceAnswer,
    "tune": documents.Answer,
    "compile": documents.CompileAnswer,
    "evaluate": documents.EvaluateAnswer,
    "bench": documents.BenchAnswer,
}
"""What is answered to each of the farm's own actions."""


class WrongAnswer(Exception):
    """An answer is not valid for its request; the text continues "the compiler's answer"."""


def read_answer(request: ChildRequest, result: Mapping[str, object], kind: Hashable = None) -> Any:
    """Return a child's answer, checked: a document of the action, or of an extension's `kind`. Raises WrongAnswer."""
    kind = kind or ANSWERS.get(request["action"])
    if kind is None:
        return dict(result)
    require_sound(result)
    answer = read_as(kind, result)
    _check_against(cast(Request, request), answer)
    return answer


def _check_against(request: Request, answer: Any) -> None:
    """Refuse names that the model does not have, and what the action needs besides its type."""
    action = request["action"]
    if action == "probe" and answer["available"]:
        _require(("version", "toolchain", "libraries", "features", "targets", "cpu_family"), answer)
    elif action == "compile":
        model = request.get("model")
        known = (model.get("names") if model else ()) or ()
        _require_known("output", (output["name"] for output in answer["outputs"]), known)
        _require_known("input", (port["name"] for port in answer["inputs"]), request.get("inputs") or ())
        if answer.get("output_parameters") and len(answer["output_parameters"]) != len(answer["outputs"]):
            raise WrongAnswer("has another number of outputs than of parameters for them")
    elif action == "evaluate":
        _require(("load",), answer["measurements"])
        _require(_VERIFIED, answer["verification"])
        for field in ("errors", "rms", "equal", "nonfinite", "spread", "origin", "unverified", "doubted"):
            _require_known("output", answer["verification"].get(field, ()), request.get("outputs") or ())
    elif action == "bench":
        programs = answer["programs"]
        if len(programs) != len(request["programs"]):
            raise WrongAnswer("has another number of programs than were to be measured")
        if any(len(each["rounds"]) != request["rounds"] or not each["first"] for each in programs):
            raise WrongAnswer("has a program that was not measured in each round")
    elif action == "slice":
        _check_slices(PurePosixPath(request["slices"]), answer["slices"])


_VERIFIED = ("errors", "rms", "equal", "nonfinite", "spread", "weak", "samples", "runs", "origin", "unverified")


def _check_slices(folder: PurePosixPath, slices: Sequence[documents.SlicedModel]) -> None:
    for path in (PurePosixPath(piece["path"]) for piece in slices):
        if path.parent != folder or not _SLICE.fullmatch(path.name):
            raise WrongAnswer(f"names a slice that is not in its folder: {str(path)[:100]}")
    if any(isinstance(size, dict) for piece in slices for each in piece["inputs"].values() for size in each["shape"]):
        raise WrongAnswer("has a slice of an open size")


def _require(fields: Iterable[str], document: Mapping[str, object]) -> None:
    for field in fields:
        if field not in document:
            raise WrongAnswer(f"lacks {field!r}")


_SLICE = re.compile(r"slice-[0-9]{4,9}\.onnx")


def _require_known(what: str, names: Any, known: Collection[str]) -> None:
    """Refuse unknown names. If no names are known (a work order of an older release), accept all."""
    foreign = [name for name in names if known and name not in known]
    if foreign:
        raise WrongAnswer(f"has an {what} that the model does not have: {foreign[0][:100]!r}")


def require_sound(value: object) -> None:
    """Refuse what an answer may have nowhere: numbers that are not finite, half characters, too large values."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                if len(text) > LONGEST_TEXT:
                    raise WrongAnswer(f"has a text of more than {LONGEST_TEXT} characters")
                if _HALF.search(text):  # JSON can carry it, but UTF-8 cannot.
                    raise WrongAnswer("has half a character")
            case float() as number if not math.isfinite(number):
                raise WrongAnswer("has a number that is not finite")
            case int() as number if abs(number) > LARGEST:
                raise WrongAnswer("has a number beyond 64 bits")
            case list() | dict() as items:
                if len(items) > MOST_ITEMS:
                    raise WrongAnswer(f"has more than {MOST_ITEMS} entries in one place")
                left += [*items, *items.values()] if isinstance(items, dict) else items


# --- reading by a type ------------------------------------------------------------------------------------------------

_PLAIN: Mapping[Any, tuple[type | types.UnionType, str]] = {
    str: (str, "text"),
    int: (int, "whole number"),
    float: (int | float, "number"),
    bool: (bool, "true or false"),
    type(None): (type(None), "null"),
}


def read_as(kind: Any, value: Any) -> Any:
    """Return a value of an answer as one of this type. Raises WrongAnswer."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired, Annotated):
        found = read_as(arguments[0], value)
        for bound in arguments[1:]:
            if isinstance(bound, Bound):
                _require_within(found, bound)
        return found
    if origin in (Union, types.UnionType):
        *others, last = sorted(arguments, key=lambda each: each is not type(None))
        for each in others:
            with suppress(WrongAnswer):
                return read_as(each, value)
        return read_as(last, value)
    if origin is Sequence:
        return [read_as(arguments[0], item) for item in _require_kind(value, list, "list")]
    if origin is Mapping:
        items = _require_kind(value, dict, "object").items()
        return {read_as(arguments[0], name): read_as(arguments[1], item) for name, item in items}
    return _require_kind(value, *_PLAIN[kind]) if kind in _PLAIN else _read_document(kind, value)


def _require_kind(value: Any, kinds: type | types.UnionType, what: str) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise WrongAnswer(f"has no {what}")
    return value


def _require_within(value: Any, bound: Bound) -> None:
    if bound.least is not None and value < bound.least:
        raise WrongAnswer(f"has a number below {bound.least:g}")
    if bound.most is not None and value > bound.most:
        raise WrongAnswer(f"has a number above {bound.most:g}")
    if bound.above is not None and value <= bound.above:
        raise WrongAnswer(f"has a number that is not above {bound.above:g}")
    if bound.longest is not None and len(value) > bound.longest:
        raise WrongAnswer(f"has more than {bound.longest} {'characters' if isinstance(value, str) else 'entries'}")
    if bound.shortest and len(value) < bound.shortest:
        raise WrongAnswer("has too few entries")
    if bound.pattern and not re.fullmatch(bound.pattern, value):
        raise WrongAnswer("has a text of another form")
    if bound.inside:
        try:
            relative(value)
        except ValueError:
            raise WrongAnswer(f"names a file that is not in the model's folder: {value[:100]!r}") from None


def _read_document(kind: Any, value: Any) -> dict[str, object]:
    """Return an object with the fields of a TypedDict; others are left out."""
    hints, required = _fields_of(kind)
    _require(required, _require_kind(value, dict, "object"))
    found = {}
    for name, hint in hints.items():
        if name in value:
            try:
                found[name] = read_as(hint, value[name])
            except WrongAnswer as wrong:
                # The message names the innermost field only.
                raise (wrong if "'" in str(wrong) else WrongAnswer(f"{wrong} in {name!r}")) from None
    return found


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a TypedDict's fields, and which of them it must have."""
    hints = get_type_hints(kind, include_extras=True)
    # Annotations are texts: a class does not see in them which fields differ from its `total`.
    required = [
        name
        for name, hint in hints.items()
        if get_origin(hint) is Required or (name in kind.__required_keys__ and get_origin(hint) is not NotRequired)
    ]
    return hints, required
