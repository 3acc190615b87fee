"""Shapes: what the inputs of a model become with a manifest's sizes, in numbers or dynamic. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from farm.errors import UsageError, suggestion
from farm.runner.documents import InputSpec, OpenSize, TensorInfo
from farm.spec import PlainSize

if TYPE_CHECKING:
    from farm.models.frozen import FrozenModel

Dimension = int | str | None  # A number, a name or sum of names, or None if the model does not say.
BATCH = "batch"  # The dimension on which samples stack.


@dataclass(frozen=True, slots=True)
class Span:
    """A dynamic dimension: one program takes every size from `low` to `high`. `optimals` are those that matter most."""

    low: int
    high: int
    optimals: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.low}to{self.high}"

    def as_dict(self) -> OpenSize:
        """Return what the spec says about the dimension."""
        return {"min": self.low, "max": self.high, "optimals": list(self.optimals)}


Extent = int | Span  # The size of a named dimension.


def plain_size(size: Extent) -> PlainSize:
    """Return a size as plain JSON."""
    return size.as_dict() if isinstance(size, Span) else size


def sum_of(sizes: Sequence[Extent]) -> Extent:
    """Return a sum of sizes; the optimals of dynamic ones are added first to first, second to second."""
    spans = [size for size in sizes if isinstance(size, Span)]
    fixed = sum(size for size in sizes if isinstance(size, int))
    if not spans:
        return fixed
    most = max(len(span.optimals) for span in spans)
    # Where a dimension has fewer, its largest size stands in.
    optimals = [(*span.optimals, *[span.high] * (most - len(span.optimals))) for span in spans]
    return Span(
        fixed + sum(span.low for span in spans),
        fixed + sum(span.high for span in spans),
        tuple(fixed + sum(sizes) for sizes in zip(*optimals, strict=True)),
    )


class ShapeError(UsageError):
    """Input shapes do not work out. `field` is where in the model's entry: `("inputs", "x", "shape")`."""

    def __init__(self, message: str, *field: str | int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


@dataclass(frozen=True, slots=True)
class Input:
    """An input with its shape in numbers. Samples stack on `batch_axis`, or on a new first axis if it is None."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    batch_axis: int | None

    def as_dict(self) -> InputSpec:
        """Return what the spec says about the input."""
        document = InputSpec(dtype=self.dtype, shape=[plain_size(size) for size in self.shape])
        return document if self.batch_axis is None else {**document, "batch_axis": self.batch_axis}


def symbolic_inputs(model: FrozenModel, shapes: Mapping[str, Sequence[int | str] | None]) -> dict[str, TensorInfo]:
    """Return the model's inputs with the shapes that a manifest gives them by name or pattern.

    A `None` shape in `shapes` keeps the model's. The first entry that matches an input counts. Raises ShapeError
    for an entry that matches no input, or that contradicts the model.
    """
    result: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for tensor in model["inputs"]:
        matching = [pattern for pattern in shapes if pattern == tensor["name"] or fnmatchcase(tensor["name"], pattern)]
        used.update(matching)
        result[tensor["name"]] = tensor
        for pattern in matching:
            if (given := shapes[pattern]) is not None:
                _check_against_model(tensor, given, pattern)
                result[tensor["name"]] = {**tensor, "shape": tuple(given)}
                break
    for pattern in shapes:
        if pattern not in used:
            names = [tensor["name"] for tensor in model["inputs"]]
            message = f"no input of the model matches `{pattern}`"
            raise ShapeError(message, "inputs", pattern, hint=suggestion(pattern, names))
    return result


def _check_against_model(tensor: TensorInfo, given: Sequence[int | str], pattern: str) -> None:
    if tensor["shape"] is None:
        return
    place = ("inputs", pattern, "shape")
    if len(given) != len(tensor["shape"]):
        theirs = f"{len(tensor['shape'])} dimensions in the model, {shown_shape(tensor['shape'])}"
        raise ShapeError(f"input `{tensor['name']}` has {theirs}, not {len(given)}", *place)
    for axis, (ours, fixed) in enumerate(zip(given, tensor["shape"], strict=True)):
        if isinstance(ours, int) and isinstance(fixed, int) and ours != fixed:
            message = f"input `{tensor['name']}`: the model fixes dimension {axis} at {fixed}, not {ours}"
            raise ShapeError(message, *place, axis)


def resolve_inputs(
    model: FrozenModel, symbolic: Mapping[str, TensorInfo], sizes: Mapping[str, Extent]
) -> tuple[dict[str, Input], frozenset[str]]:
    """Put numbers for the names in the inputs' shapes; return them with the names that were used.

    Raises ShapeError for a dimension without a size, and for a size that the model does not allow.
    """
    fixed = {tensor["name"]: tensor["shape"] for tensor in model["inputs"]}
    resolved: dict[str, Input] = {}
    used: set[str] = set()
    for name, tensor in symbolic.items():
        if tensor["shape"] is None:
            raise ShapeError(f"input `{name}` has a shape of unknown rank", hint=_shape_hint(name, ["batch", "…"]))
        shape = []
        for axis, dimension in enumerate(tensor["shape"]):
            size, names = _resolve(dimension, sizes)
            if size is None:
                raise _without_size(tensor, axis)
            theirs = (fixed[name] or tensor["shape"])[axis]
            if isinstance(theirs, int) and theirs != size:
                message = f"input `{name}`: the model fixes dimension {axis} at {theirs}; `{dimension}` is {size} here"
                hint = f"export the model with a dynamic dimension, or write {theirs}"
                raise ShapeError(message, "dims", str(dimension), hint=hint)
            used |= names
            shape.append(size)
        axis_of_batch = tensor["shape"].index(BATCH) if BATCH in tensor["shape"] else None
        resolved[name] = Input(name, tensor["dtype"], tuple(shape), axis_of_batch)
    return resolved, frozenset(used)


def _resolve(dimension: Dimension, sizes: Mapping[str, Extent]) -> tuple[Extent | None, frozenset[str]]:
    """Return a dimension's size, or None if a name has none, and the names that it is made of."""
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


def _without_size(tensor: TensorInfo, axis: int) -> ShapeError:
    shape = tensor["shape"] or ()
    open_sizes = [BATCH, *["SIZE"] * len(shape)]
    suggested = [str(each) if isinstance(each, int) else name for each, name in zip(shape, open_sizes, strict=False)]
    hint = _shape_hint(tensor["name"], suggested)
    where = f"input `{tensor['name']}`: dimension {axis} of {shown_shape(shape)}"
    if shape[axis] is None:
        return ShapeError(f"{where} has no size", hint=hint)
    hint = f"give it one: `dims: {{{shape[axis]}: 1}}`, or {hint}"
    return ShapeError(f"{where}, `{shape[axis]}`, has no size", hint=hint)


def _shape_hint(name: str, shape: Sequence[str]) -> str:
    return f'`inputs: {{"{name}": {{shape: [{", ".join(shape)}]}}}}`'


def shown_shape(shape: Iterable[Dimension | Span]) -> str:
    """Return a shape for people; a size that is not known is `?`."""
    return f"[{', '.join('?' if dimension is None else str(dimension) for dimension in shape)}]"


PACK = ".pack"  # Ends the shape label of a program that is compiled for packs, in addition to one of the same shape.


def shape_label(sizes: Mapping[str, Extent], name: str = "") -> str:
    """Return the label of a shape: `b8`, `b1to8-seq128`, `decode`, `decode-b8`; `static` if nothing is named.

    `name` is a named shape's, `sizes` are those that are not its own. The batch comes first, the others by name. A
    dimension whose name ends in a digit is parted from its size by `_`.
    """
    parts = [name] if name else []
    parts += [f"b{sizes[BATCH]}"] if BATCH in sizes else []
    for dimension in sorted(set(sizes) - {BATCH}):
        parts.append(f"{dimension.lower()}{'_' if dimension[-1].isdigit() else ''}{sizes[dimension]}")
    return "-".join(parts) or "static"
