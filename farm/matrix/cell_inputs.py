"""The inputs of cells: a model's inputs at each point of its sizes, checked against the manifest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from farm.errors import suggestion
from farm.manifest.entries import Manifest
from farm.matrix.combinations import Combination, Complaints, Path
from farm.models.data import DataError, FrozenData, check_data
from farm.models.model import FrozenModel, Tensor
from farm.models.shapes import BATCH, Input, ShapeError, plain_size, resolve_inputs, symbolic_inputs
from farm.runner.documents import InputSpec
from farm.spec import DeclaredValues, PlainSize, canonical_fields


@dataclass(slots=True)
class Shape:
    """A model's inputs at one point of its sizes: for the spec and for checks, and the data that fits them."""

    inputs: Mapping[str, InputSpec]
    tensors: Mapping[str, Input]
    batch: PlainSize | None
    texts: Mapping[str, str]
    """Canonical JSON of the spec's fields `inputs` and `batch`."""
    checked: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether data fits, by its use and digest."""


class CellInputs:
    """The inputs of the cells of one expansion; cells with the same shape share the work."""

    def __init__(self, manifest: Manifest, models: Mapping[str, FrozenModel], complaints: Complaints) -> None:
        self._manifest = manifest
        self._models = models
        self._complain = complaints.complain
        self._symbolic: dict[int, Mapping[str, Tensor] | None] = {}
        self._shapes: dict[tuple[int, str], Shape | None] = {}

    def at(self, combination: Combination) -> Shape | None:
        """Return a model's inputs at a cell's sizes; None if they contradict each other or the model is unknown."""
        where = (combination.index, combination.label)
        if where not in self._shapes:
            self._shapes[where] = self._resolve(combination)
        return self._shapes[where]

    def fits(self, combination: Combination, use: str, frozen: FrozenData, shape: Shape) -> bool:
        """Whether data fits the inputs; complains once for each shape that it does not fit."""
        checked = (use, frozen.digest)
        if checked not in shape.checked:
            model = self._models[combination.model.name]
            try:
                check_data(frozen, shape.tensors, model.outputs)
                shape.checked[checked] = True
            except DataError as error:
                shape.checked[checked] = False
                message = f"{use} of model `{combination.model.name}` at {combination.label}: {error.message}"
                self._complain(message, combination.data_place(use), error.hint)
        return shape.checked[checked]

    def ranges(self, combination: Combination) -> dict[str, DeclaredValues]:
        """Return the values that the manifest declares for inputs, by input."""
        declared: dict[str, DeclaredValues] = {}
        for name, tensor in (self._inputs_of(combination.index) or {}).items():
            for pattern, item in combination.model.inputs.items():
                if (item.range is None and item.value is None) or not (pattern == name or fnmatchcase(name, pattern)):
                    continue
                field, values = ("range", item.range) if item.range is not None else ("value", (item.value,))
                whole = tensor.dtype.startswith(("int", "uint", "bool"))
                if whole and any(value != int(value or 0) for value in values):
                    message = f"input `{name}` is {tensor.dtype}: its {field} must be whole numbers"
                    self._complain(message, ("models", combination.index, "inputs", pattern, field))
                numbers = [int(value or 0) if whole else float(value or 0) for value in values]
                declared[name] = {"range": numbers} if field == "range" else {"value": numbers[0]}
                break
        return declared

    def place_of_size(self, combination: Combination, name: str) -> Path:
        """Return where the manifest says how large a dimension is."""
        model, shape = combination.model, combination.point.name
        if name in model.shapes.get(shape, {}):
            return ("models", combination.index, "shapes", shape, name)
        field: Path = ("dims", name)
        if name == BATCH and BATCH not in model.dims:
            field = ("sweep", "batches") if model.sweep else ("batches",)
        return (*combination.places["sizes"], *field)

    def _resolve(self, combination: Combination) -> Shape | None:
        entry, place = combination.model, combination.places["sizes"]
        frozen, symbolic = self._models.get(entry.name), self._inputs_of(combination.index)
        if frozen is None or symbolic is None:
            return None
        try:
            inputs, used = resolve_inputs(frozen, symbolic, combination.sizes)
        except ShapeError as error:
            field: Path = tuple(error.field)
            found = self.place_of_size(combination, str(field[1])) if field[:1] == ("dims",) else (*place, *field)
            at = f" at {combination.label}" if combination.sizes else ""
            self._complain(f"model `{entry.name}`{at}: {error}", found, error.hint)
            return None
        unused = [name for name in combination.sizes if name not in used]
        for name in unused:
            self._unused(combination, name, symbolic)
        if unused:
            return None
        batch = plain_size(combination.sizes[BATCH]) if BATCH in combination.sizes else None
        documents = {name: tensor.as_dict() for name, tensor in inputs.items()}
        return Shape(documents, inputs, batch, canonical_fields({"inputs": documents, "batch": batch}))

    def _inputs_of(self, index: int) -> Mapping[str, Tensor] | None:
        """Return a model's inputs with the manifest's shapes; None if that fails or the model is unknown."""
        if index not in self._symbolic:
            entry = self._manifest.models[index]
            shapes = {pattern: item.shape if item.has_shape else None for pattern, item in entry.inputs.items()}
            frozen = self._models.get(entry.name)
            try:
                self._symbolic[index] = symbolic_inputs(frozen, shapes) if frozen else None
            except ShapeError as error:
                self._symbolic[index] = None
                self._complain(f"model `{entry.name}`: {error}", ("models", index, *error.field), error.hint)
        return self._symbolic[index]

    def _unused(self, combination: Combination, name: str, symbolic: Mapping[str, Tensor]) -> None:
        named = {part for tensor in symbolic.values() for part in tensor.shape or () if isinstance(part, str)}
        first = next(iter(symbolic.values()), None)
        shown = ", ".join("…" if size is None else str(size) for size in (first.shape or ())[1:]) if first else ""
        by_name = suggestion(name, named)
        hint = f"name it in an input's shape: `inputs: {{{first.name}: {{shape: [{name}, {shown}]}}}}`" if first else ""
        both = "; ".join(part for part in (by_name, hint) if part)
        message = f"model `{combination.model.name}`: no input has the dimension `{name}`"
        self._complain(message, self.place_of_size(combination, name), both, key=True)
