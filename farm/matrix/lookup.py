"""Looks up what combinations name: inputs, models, data, files and pools. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from farm.errors import suggestion
from farm.manifest.entries import CellSettings, Manifest
from farm.manifest.values import Data, EnvFile
from farm.matrix.combinations import Combination, Combinations, Complaints, Path
from farm.models.data import DataError, FrozenData, check_data
from farm.models.model import FrozenModel
from farm.models.shapes import BATCH, Input, ShapeError, plain_size, resolve_inputs, symbolic_inputs
from farm.runner.documents import DataRecipe, DeclaredValues, InputSpec, TensorInfo
from farm.spec import FileReference, OptionValue, PlainSize, canonical_fields
from farm.targets.compilers import Compiler, DeviceKind
from farm.targets.environment import FILE
from farm.targets.pools import NoPool, Pool, choose_pools
from farm.wire.asked import BlobSize


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
        self._symbolic: dict[int, Mapping[str, TensorInfo] | None] = {}
        self._shapes: dict[tuple[int, str], Shape | None] = {}

    def at(self, combination: Combination) -> Shape | None:
        """Return a model's inputs at a cell's sizes; None if they contradict each other or the model is unknown."""
        where = (combination.index, combination.label)
        if where not in self._shapes:
            self._shapes[where] = self._resolve(combination)
        return self._shapes[where]

    def fits(self, combination: Combination, use: str, frozen: FrozenData, shape: Shape) -> bool:
        """Whether data fits the inputs; complains once for each shape that it does not fit."""
        checked = (use, frozen["digest"])
        if checked not in shape.checked:
            model = self._models[combination.model.name]
            try:
                check_data(frozen, shape.tensors, model["outputs"])
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
                whole = tensor["dtype"].startswith(("int", "uint", "bool"))
                if whole and any(value != int(value or 0) for value in values):
                    message = f"input `{name}` is {tensor['dtype']}: its {field} must be whole numbers"
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

    def _inputs_of(self, index: int) -> Mapping[str, TensorInfo] | None:
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

    def _unused(self, combination: Combination, name: str, symbolic: Mapping[str, TensorInfo]) -> None:
        named = {part for tensor in symbolic.values() for part in tensor["shape"] or () if isinstance(part, str)}
        first = next(iter(symbolic.values()), None)
        shown = ", ".join("…" if size is None else str(size) for size in (first["shape"] or ())[1:]) if first else ""
        by_name = suggestion(name, named)
        at = first["name"] if first else ""
        hint = f"name it in an input's shape: `inputs: {{{at}: {{shape: [{name}, {shown}]}}}}`" if first else ""
        both = "; ".join(part for part in (by_name, hint) if part)
        message = f"model `{combination.model.name}`: no input has the dimension `{name}`"
        self._complain(message, self.place_of_size(combination, name), both, key=True)


class Recipe(NamedTuple):
    """What a spec says about how a model is compiled, calibrated and compared; `data` and `env_files` are the blobs."""

    options: Mapping[str, OptionValue]
    quantization: Mapping[str, OptionValue]
    env: Mapping[str, str]
    env_files: Mapping[str, FileReference]
    calibration: DataRecipe | None
    samples: DataRecipe | None
    data: Mapping[str, FrozenData]


FoundData = tuple[DataRecipe | None, FrozenData | None]
"""What a spec says about data, and the data if it is a blob."""


class Lookup:
    """What one matrix finds of all that was brought, and of the pools that there are; complains of what is missing."""

    def __init__(
        self,
        matrix: Combinations,
        models: Mapping[str, FrozenModel],
        data: Mapping[str, FrozenData],
        files: Mapping[str, BlobSize],
        pools: PoolChoice | None,
        complaints: Complaints,
    ) -> None:
        """Look up in frozen `models` by name, `data` by dataset or `data_key`, and `files` by path.

        Without `pools` none are known: then nobody complains of what may still be brought.
        """
        self.matrix = matrix
        self.complaints = complaints
        self.complain = complaints.complain
        self.pools = pools
        self.inputs = CellInputs(matrix.manifest, models, complaints)
        self.models = models
        self._data = data
        self._files = files

    def model(self, combination: Combination) -> FrozenModel | None:
        """Return the frozen model of a combination."""
        found = self.models.get(combination.model.name)
        if found is None and self.pools:
            message = f"model `{combination.model.name}` was not submitted with the manifest"
            hint = "the submitter reads path, package and https; the farm itself s3"
            self.complain(message, ("models", combination.index, "source"), hint)
        return found

    def recipe(self, combination: Combination, kind: DeviceKind, settings: CellSettings) -> Recipe:
        """Return how a combination is compiled; what is wrong with it, or missing, is a complaint."""
        compiler = combination.compiler
        given = {**settings.options, **(compiler.pack_options if combination.packs else {})}
        try:
            options, quantization = compiler.resolved(combination.precision, given, combination.choice.served.device)
        except ValueError as error:
            options, quantization = {}, {}
            place: Path = ("models", combination.index, "options") if combination.model.options else ("options",)
            self.complain(str(error), place)
        env, env_files = self._env(compiler, settings.env)
        ranges = self.inputs.ranges(combination)
        calibration, calibration_data = self._calibration(combination, compiler, ranges)
        samples, sample_data = self._samples(combination, kind, ranges)
        data = {"calibration": calibration_data, "samples": sample_data if settings.verify.mode != "off" else None}
        blobs = {use: found for use, found in data.items() if found}
        return Recipe(options, quantization, env, env_files, calibration, samples, blobs)

    def _env(
        self, compiler: Compiler, given: Mapping[str, bool | int | str | EnvFile]
    ) -> tuple[dict[str, str], dict[str, FileReference]]:
        """Return the environment of a compile as its spec has it, and the files that it names, by variable.

        Values were checked with the manifest; files that were not brought are a problem.
        """
        own = {name: value for name, value in given.items() if compiler.has_env(name)}
        files: dict[str, FileReference] = {}
        for name, value in own.items():
            if isinstance(value, EnvFile) and value.path in self._files:
                found = self._files[value.path]
                files[name] = {"path": name, "digest": found["digest"], "size": found["size"]}
                own[name] = FILE + found["digest"]
        if absent := [name for name, value in own.items() if isinstance(value, EnvFile)]:
            if self.pools:
                self.complain(f"the file of `{absent[0]}` was not submitted with the manifest", ("env",))
            return {}, {}
        return compiler.resolve_env(own), files

    def _calibration(
        self, combination: Combination, compiler: Compiler, ranges: Mapping[str, DeclaredValues]
    ) -> FoundData:
        """Return the calibration data of a combination that needs some."""
        if not compiler.needs_calibration(combination.precision):
            return None, None
        entry, override = combination.model, combination.calibrated_by
        use = entry.calibration if override is None else self.matrix.manifest.overrides[override].calibration
        if use is None:
            model = self.models.get(entry.name)
            names = ", ".join(f"`{tensor['name']}`" for tensor in model["inputs"]) if model else "each input"
            message = f"{combination.precision} of model `{entry.name}` needs calibration data"
            hint = f"add `calibration: {{path: FILE.npz}}` with an array for {names}; `{{generate: 32}}` to try it out"
            self.complain(message, ("models", combination.index, "name"), hint)
            return None, None
        return self._described(combination, "calibration", use, ranges)

    def _samples(self, combination: Combination, kind: DeviceKind, ranges: Mapping[str, DeclaredValues]) -> FoundData:
        """Return the samples with which a program is compared and measured."""
        use = combination.model.samples
        if use is None:
            return {"generate": kind.min_samples, "seed": 0, "ranges": ranges}, None
        return self._described(combination, "samples", use, ranges)

    def _described(
        self, combination: Combination, use: str, described: Data, ranges: Mapping[str, DeclaredValues]
    ) -> FoundData:
        place = combination.data_place(use)
        key = data_key(combination.model.name, use, combination.calibrated_by if place[0] == "overrides" else None)
        if described.dataset:
            # A model to which the dataset is not what it is to the first that names it has it under a key of its own.
            key = key if key in self._data else described.dataset
            described = self.matrix.manifest.datasets[described.dataset]
        if described.generate:
            return {"generate": described.generate, "seed": described.seed, "ranges": ranges}, None
        frozen = self._data.get(key)
        if frozen is None:
            if self.pools:
                message = f"{use} of model `{combination.model.name}` was not submitted with the manifest"
                self.complain(message, place)
            return None, None
        return {"digest": frozen["digest"]}, frozen


class PoolChoice:
    """The pools to plan for, and which of them serve a combination."""

    def __init__(
        self,
        matrix: Combinations,
        pools: Sequence[Pool],
        known: Sequence[Pool],
        slots: Mapping[str, int],
        complaints: Complaints,
    ) -> None:
        """Choose of `pools`, or of all that are `known` if the manifest names a toolchain; `slots` are by pool."""
        self._matrix = matrix
        self._pools = pools
        self._known = known
        self._slots = slots
        self._complain = complaints.complain
        self._chosen: dict[tuple[object, ...], list[Pool]] = {}

    def serving(self, combination: Combination, *, family_bound: bool) -> list[Pool]:
        """Return the pools that serve a target with a toolchain, all with the same key; none if that is a problem."""
        slug, toolchain = combination.slug, combination.toolchain
        libraries = combination.compiler.libraries_of(combination.precision)
        asked = slug, toolchain, family_bound, libraries
        if asked not in self._chosen:
            self._chosen[asked] = []
            try:
                self._chosen[asked] = choose_pools(
                    combination.choice,
                    toolchain,
                    in_use=self._pools,
                    known=self._known,
                    family_bound=family_bound,
                    libraries=libraries,
                )
            except NoPool as error:
                place = combination.places["toolchain" if toolchain else "target"]
                self._complain(str(error), place, error.hint)
        return self._chosen[asked]

    def spread(self, identifier: str, pools: Sequence[str]) -> str:
        """Return the pool for a cell, of those that serve it alike: each has a share by slots, and keeps its cells.

        One that takes no jobs now gets none, unless none of them does: nobody may come to take them.
        """

        def score(pool: str) -> float:
            chance = int(hashlib.sha256(f"{pool} {identifier}".encode()).hexdigest(), 16) / 16**64
            return -math.log(chance) / (self._slots.get(pool) or 1)

        if len(pools) == 1:
            return pools[0]
        return min([pool for pool in pools if self._slots.get(pool)] or pools, key=score)


def data_key(model: str, use: str, override: int | None = None) -> str:
    """Return the name of a model's own data among all that was brought: `net/samples`, `net/calibration/2`."""
    return f"{model}/{use}" if override is None else f"{model}/{use}/{override}"
