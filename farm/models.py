"""Models: what a file is (read on the submitting side), and what its inputs become with a manifest's sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.spec import model_digest
from farm.yamldoc import suggestion

Dimension = int | str | None
"""A number, a name or sum of names, or None where the model does not say."""


@dataclass(frozen=True, slots=True)
class Span:
    """A dynamic dimension: one program takes every size from `low` to `high`. `optimals` are those that matter most."""

    low: int
    high: int
    optimals: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.low}to{self.high}"

    def as_dict(self) -> dict[str, Any]:
        """Return what the spec says of the dimension."""
        return {"min": self.low, "max": self.high, "optimals": list(self.optimals)}

    def optimal(self, index: int) -> int:
        """Return the optimal of that number; the largest size where there are fewer."""
        return self.optimals[index] if index < len(self.optimals) else self.high


Extent = int | Span
"""The size of a named dimension."""


def plain_size(size: Extent) -> int | dict[str, Any]:
    """Return a size as plain JSON."""
    return size.as_dict() if isinstance(size, Span) else size


def sum_of(sizes: Sequence[Extent]) -> Extent:
    """Return a sum of sizes; the optimals of dynamic ones are added first to first, second to second."""
    spans = [size for size in sizes if isinstance(size, Span)]
    fixed = sum(size for size in sizes if isinstance(size, int))
    if not spans:
        return fixed
    return Span(
        fixed + sum(span.low for span in spans),
        fixed + sum(span.high for span in spans),
        tuple(
            fixed + sum(span.optimal(index) for span in spans)
            for index in range(max(len(span.optimals) for span in spans))
        ),
    )


_CHUNK = 1 << 20

_LOWER_DTYPES = frozenset({"float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_LOWER_OPERATORS = frozenset(
    {
        "QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
        "com.microsoft.MatMulNBits", "com.microsoft.QGemm", "com.microsoft.QLinearAdd",
    }
)  # fmt: skip


class UnreadableModel(UsageError):
    """A model file cannot be used; `kind` is the farm's failure kind for it."""

    def __init__(self, message: str, kind: str = "bad_model", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output: numpy's name of its dtype, and its shape (None where the rank is unknown)."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Return the tensor as plain JSON."""
        shape = None if self.shape is None else list(self.shape)
        return {"name": self.name, "dtype": self.dtype, "shape": shape}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Tensor:
        """Read back what `as_dict` wrote."""
        shape = document["shape"]
        return cls(document["name"], document["dtype"], None if shape is None else tuple(shape))


@dataclass(frozen=True)
class FrozenModel:
    """A model as it was read and hashed: what the farm needs to know of it without opening it.

    `files` are `{"path", "digest", "size"}`, the model itself first, then its external data; `size` is theirs
    together in bytes; `weight_dtypes` has the one with most bytes first.
    """

    digest: str
    format: str
    files: Sequence[Mapping[str, Any]]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    size: int
    opset: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)
    weight_dtypes: Sequence[str] = ()
    conversion: Mapping[str, Any] | None = None
    """How the model was made from one of another format (`farm.conversion`), if it was."""

    def as_dict(self) -> dict[str, Any]:
        """Return the model as plain JSON."""
        return {
            "digest": self.digest,
            "format": self.format,
            "files": [dict(file) for file in self.files],
            "inputs": [tensor.as_dict() for tensor in self.inputs],
            "outputs": [tensor.as_dict() for tensor in self.outputs],
            "opset": self.opset,
            "operators": dict(self.operators),
            "weight_dtypes": list(self.weight_dtypes),
            "size": self.size,
            "conversion": self.conversion,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> FrozenModel:
        """Read back what `as_dict` wrote; fields of a newer client are left out."""
        return cls(
            digest=document["digest"],
            format=document["format"],
            files=document["files"],
            inputs=[Tensor.from_dict(tensor) for tensor in document["inputs"]],
            outputs=[Tensor.from_dict(tensor) for tensor in document["outputs"]],
            size=document["size"],
            opset=document.get("opset", 0),
            operators=document.get("operators", {}),
            weight_dtypes=document.get("weight_dtypes", ()),
            conversion=document.get("conversion"),
        )

    @cached_property
    def lowered(self) -> str:
        """Why this model is below fp32 already (`float16 weights`, `QDQ nodes`), or an empty string."""
        lower = [dtype for dtype in self.weight_dtypes if dtype in _LOWER_DTYPES]
        if lower:
            return f"{lower[0]} weights"
        quantized = sorted(_LOWER_OPERATORS & set(self.operators))
        return f"{quantized[0]} nodes" if quantized else ""


Check = Callable[[Path, str, Sequence[str]], Mapping[str, Any]]
"""Takes a model's file, its format and the outputs that are wanted of it; says what is in it. Raises BadModel."""


def check_here(path: Path, format: str, outputs: Sequence[str]) -> Mapping[str, Any]:
    """Check a model in this process: for models of the user who runs it. Raises BadModel."""
    from farm.runner.onnx_check import check_onnx
    from farm.runner.tf_check import check_tf

    return check_tf(path, outputs) if format == "tf" else check_onnx(path)


def read_model(
    path: Path, format: str = "onnx", outputs: Sequence[str] = (), *, check: Check = check_here
) -> FrozenModel:
    """Check a model file (ONNX, or with `format` "tf" a frozen TensorFlow graph), and hash it with its external data.

    `outputs` are the nodes that a TensorFlow graph is cut at; without them its ends are. `check` says what is in the
    model. Raises UnreadableModel; its sentence names the tensor or node that is wrong.
    """
    from farm.runner.onnx_check import BadModel

    try:
        found = check(path, format, outputs)
        names = [path.name, *found.get("external_files", ())]
        files = [file_reference(path.parent / name, name) for name in names]
    except BadModel as error:
        raise UnreadableModel(f"{path}: {error.message}", error.kind, hint=_way_out(error.message)) from None
    except OSError as error:
        raise UnreadableModel(f"{path}: {error.strerror or error}") from None
    return FrozenModel(
        digest=model_digest({file["path"]: file["digest"] for file in files}),
        format=format,
        files=files,
        inputs=[Tensor.from_dict(tensor) for tensor in found["inputs"]],
        outputs=[Tensor.from_dict(tensor) for tensor in found["outputs"]],
        size=sum(file["size"] for file in files),
        opset=found["opset"],
        operators=found["operators"],
        weight_dtypes=found["weight_dtypes"],
    )


_WAYS_OUT = {
    "external data": "keep it as a plain file in its folder: onnx.save(model, path, save_as_external_data=True)",
    "is empty": "export or download it again",
    "not an ONNX model": "export or download it again; a frozen TensorFlow graph needs `format: tf`",
    "not a regular file": "name the model file itself",
}
"""What to do about a model that cannot be read, by words of the sentence that says why."""


def _way_out(message: str) -> str:
    return next((hint for words, hint in _WAYS_OUT.items() if words in message), "")


def file_reference(path: Path, name: str) -> dict[str, Any]:
    """Return `{"path": name, "digest", "size"}` of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            digest.update(piece)
            size += len(piece)
    return {"path": name, "digest": digest.hexdigest(), "size": size}


# --- shapes -------------------------------------------------------------------------------------------------------


class ShapeError(ValueError):
    """Input shapes do not work out. `field` is where in the model's entry: `("inputs", "x", "shape")`."""

    def __init__(self, message: str, *field: str | int, hint: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Input:
    """An input with its shape in numbers. Samples stack on `batch_axis`, or on a new first axis where it is None."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    batch_axis: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return what the spec says of the input."""
        axis = {} if self.batch_axis is None else {"batch_axis": self.batch_axis}
        return {"dtype": self.dtype, "shape": [plain_size(size) for size in self.shape], **axis}


BATCH = "batch"
"""The dimension on which samples stack."""


def symbolic_inputs(model: FrozenModel, shapes: Mapping[str, Sequence[int | str] | None]) -> dict[str, Tensor]:
    """Return the model's inputs with the shapes that a manifest gives them by name or pattern.

    A `None` shape in `shapes` keeps the model's. The first entry that matches an input counts. Raises ShapeError
    for an entry that matches no input, or that contradicts the model.
    """
    result: dict[str, Tensor] = {}
    used: set[str] = set()
    for tensor in model.inputs:
        matching = [pattern for pattern in shapes if pattern == tensor.name or fnmatchcase(tensor.name, pattern)]
        used.update(matching)
        given = next((shapes[pattern] for pattern in matching if shapes[pattern] is not None), None)
        if given is not None:
            pattern = next(pattern for pattern in matching if shapes[pattern] is not None)
            _check_against_model(tensor, given, pattern)
            result[tensor.name] = Tensor(tensor.name, tensor.dtype, tuple(given))
        else:
            result[tensor.name] = tensor
    for pattern in shapes:
        if pattern not in used:
            names = [tensor.name for tensor in model.inputs]
            message = f"no input of the model matches `{pattern}`"
            raise ShapeError(message, "inputs", pattern, hint=suggestion(pattern, names))
    return result


def _check_against_model(tensor: Tensor, given: Sequence[int | str], pattern: str) -> None:
    if tensor.shape is None:
        return
    place = ("inputs", pattern, "shape")
    if len(given) != len(tensor.shape):
        theirs = f"{len(tensor.shape)} dimensions in the model, {_shown(tensor.shape)}"
        raise ShapeError(f"input `{tensor.name}` has {theirs}, not {len(given)}", *place)
    for axis, (ours, fixed) in enumerate(zip(given, tensor.shape, strict=True)):
        if isinstance(ours, int) and isinstance(fixed, int) and ours != fixed:
            message = f"input `{tensor.name}`: the model fixes dimension {axis} at {fixed}, not {ours}"
            raise ShapeError(message, *place, axis)


def resolve_inputs(
    model: FrozenModel, symbolic: Mapping[str, Tensor], sizes: Mapping[str, Extent]
) -> tuple[dict[str, Input], frozenset[str]]:
    """Put numbers for the names in the inputs' shapes; return them with the names that were used.

    Raises ShapeError for a dimension without a size, and for a size that the model does not allow.
    """
    fixed = {tensor.name: tensor.shape for tensor in model.inputs}
    resolved: dict[str, Input] = {}
    used: set[str] = set()
    for name, tensor in symbolic.items():
        if tensor.shape is None:
            raise ShapeError(f"input `{name}` has a shape of unknown rank", hint=_shape_hint(name, ["batch", "…"]))
        shape = []
        for axis, dimension in enumerate(tensor.shape):
            size, names = _resolve(dimension, sizes)
            if size is None:
                raise _without_size(tensor, axis)
            theirs = (fixed[name] or tensor.shape)[axis]
            if isinstance(theirs, int) and theirs != size:
                message = f"input `{name}`: the model fixes dimension {axis} at {theirs}; `{dimension}` is {size} here"
                hint = f"export the model with a dynamic dimension, or write {theirs}"
                raise ShapeError(message, "dims", str(dimension), hint=hint)
            used |= names
            shape.append(size)
        axis_of_batch = tensor.shape.index(BATCH) if BATCH in tensor.shape else None
        resolved[name] = Input(name, tensor.dtype, tuple(shape), axis_of_batch)
    return resolved, frozenset(used)


def _resolve(dimension: Dimension, sizes: Mapping[str, Extent]) -> tuple[Extent | None, frozenset[str]]:
    """Return a dimension's size, or None where a name has none, and the names that it is made of."""
    if not isinstance(dimension, str):
        return dimension, frozenset()
    if dimension in sizes:
        return sizes[dimension], frozenset({dimension})
    parts: list[Extent] = []
    names = set()
    for part in (part.strip() for part in dimension.split("+")):
        if part.isascii() and part.isdigit():
            parts.append(int(part))
        elif part in sizes:
            parts.append(sizes[part])
            names.add(part)
        else:
            return None, frozenset()
    return sum_of(parts), frozenset(names)


def _without_size(tensor: Tensor, axis: int) -> ShapeError:
    shape = tensor.shape or ()
    dimension = shape[axis]
    if dimension is None:
        message = f"input `{tensor.name}`: dimension {axis} of {_shown(shape)} has no size"
        return ShapeError(message, hint=_shape_hint(tensor.name, _suggested(shape)))
    message = f"input `{tensor.name}`: dimension {axis} of {_shown(shape)}, `{dimension}`, has no size"
    hint = f"give it one: `dims: {{{dimension}: 1}}`, or {_shape_hint(tensor.name, _suggested(shape))}"
    return ShapeError(message, hint=hint)


def _suggested(shape: Iterable[Dimension]) -> list[str]:
    return [
        str(dimension) if isinstance(dimension, int) else BATCH if axis == 0 else "SIZE"
        for axis, dimension in enumerate(shape)
    ]


def _shape_hint(name: str, shape: Sequence[str]) -> str:
    return f'`inputs: {{"{name}": {{shape: [{", ".join(shape)}]}}}}`'


def _shown(shape: Iterable[Dimension]) -> str:
    return f"[{', '.join('?' if dimension is None else str(dimension) for dimension in shape)}]"


def shape_label(sizes: Mapping[str, Extent], name: str = "") -> str:
    """Return the label of a shape: `b8`, `b1to8-seq128`, `decode`, `decode-b8`; `static` where nothing is named.

    `name` is a named shape's, `sizes` are those that are not its own. The batch comes first, the others by name. A
    dimension whose name ends in a digit is parted from its size by `_`.
    """
    parts = [name] if name else []
    parts += [f"b{sizes[BATCH]}"] if BATCH in sizes else []
    for dimension in sorted(set(sizes) - {BATCH}):
        parts.append(f"{dimension.lower()}{'_' if dimension[-1].isdigit() else ''}{sizes[dimension]}")
    return "-".join(parts) or "static"
