"""Combinations: which cells a manifest asks for, by the rules of GitHub's matrix, and what they name. Pure.

The product in the order written; `exclude` first, then `include` extends or adds; `overrides` and `expected` select
among what is left."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from farm.errors import ManifestError, NotFound, Problem, suggestion
from farm.manifest.entries import AXES, CellSettings, IncludeEntry, Manifest, ModelEntry, SelectEntry
from farm.manifest.values import Data, EnvFile
from farm.models.frozen import DataError, FrozenData, FrozenModel, check_data
from farm.models.shapes import (
    BATCH,
    PACK,
    Extent,
    Input,
    ShapeError,
    plain_size,
    resolve_inputs,
    shape_label,
    symbolic_inputs,
)
from farm.runner.documents import DataRecipe, DeclaredValues, InputSpec, TensorInfo
from farm.spec import FileReference, OptionValue, PlainSize, canonical_fields
from farm.targets.compilers import Compiler, DeviceKind, compilers
from farm.targets.environment import FILE
from farm.targets.pools import Choice, understand_target

if TYPE_CHECKING:
    from farm.matrix.planned import ExpectedFailure
    from farm.wire.asked import BlobSize

MAX_CELLS = 50_000  # Largest matrix of one manifest.

MAX_COMPARISONS = 3_000_000
"""Most comparisons of a selector or `include` entry with a cell, for one manifest; about a second."""

Path = tuple[str | int, ...]  # Where in a manifest something is written: keys and positions from the top.


@lru_cache(maxsize=1024)  # A server gets patterns from everybody, for as long as it runs.
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def fits_any(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether one of the names fits one of the patterns."""
    return any(_compiled(pattern).match(name) for pattern in patterns for name in names)


@dataclass(frozen=True, slots=True)
class Point:
    """Sizes of all named dimensions, with their label; `name` is that of the manifest's `shapes` they come from."""

    sizes: Mapping[str, Extent]
    label: str
    name: str = ""


@dataclass(slots=True)
class Combination:
    """One cell before anything is looked up: its value on each axis, and the entries of `include` that extend it."""

    index: int
    model: ModelEntry
    slug: str
    """Its target in identifiers."""
    choice: Choice
    """What its target means."""
    compiler: Compiler
    toolchain: str
    """The start of its toolchain's id; empty if the manifest leaves the choice to the farm."""
    suffix: str
    """The toolchain in identifiers; empty if it is the only one of its target."""
    precision: str
    point: Point
    places: Mapping[str, Path]
    """Where in the manifest its model, target, toolchain, precision and sizes are written."""
    extras: list[tuple[str, int]] = field(default_factory=list)
    """The places of the entries of `include`, and then of `overrides`, that are laid over it."""
    calibrated_by: int | None = None
    """The entry of `overrides` that names its calibration data."""
    packs: tuple[str, ...] = ()
    """The layouts for which its program is compiled; empty for a program that is used as it is."""

    @property
    def label(self) -> str:
        """The shape label; that of a program for packs is its twin's and `.pack`."""
        return f"{self.point.label}{PACK}" if self.packs else self.point.label

    def value(self, axis: str) -> str:
        """Return its value on an axis of the matrix."""
        own = {"model": self.model.name, "target": self.slug, "shape": self.point.label}
        return own.get(axis) or str(getattr(self, axis))

    @property
    def identifier(self) -> str:
        """The cell's readable name, unique in its build."""
        return f"{self.model.name}/{self.slug}{self.suffix}/{self.precision}/{self.label}"

    @property
    def without_shape(self) -> tuple[object, ...]:
        """What is the same for its siblings of other shapes, and decides all but their inputs."""
        target = self.places["target"]
        return self.index, self.slug, self.toolchain, self.precision, tuple(self.extras), target, self.packs

    def asked_packs(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the layouts that its manifest asks for."""
        return self.model.packs if "packs" in self.model.model_fields_set else manifest.packs

    def data_place(self, use: str) -> Path:
        """Return the place of its calibration data or its samples in the manifest."""
        if use == "calibration" and self.calibrated_by is not None:
            return ("overrides", self.calibrated_by, use)
        return ("models", self.index, use)


class Complaints:
    """The problems of a manifest, each once, with its place."""

    def __init__(self, manifest: Manifest, known: Iterable[Problem] = ()) -> None:
        self._written = manifest.written
        self.problems = dict.fromkeys(known)

    def found(self) -> list[Problem]:
        """Return the problems in the order of the file."""
        return sorted(self.problems, key=lambda problem: (problem.line, problem.column))

    def complain(self, message: str, path: Path, hint: str = "", *, key: bool = False) -> None:
        """Note a problem at a place; with `key` at the field's name, not at its value."""
        self.problems[self._written.problem(message, path, hint=hint, key=key)] = None


@dataclass(frozen=True, slots=True)
class Combinations:
    """What a manifest asks for, before anything is looked up.

    `expected` has the failures that the manifest names, by identifier; `problems` are those of the matrix itself.
    `needed` are the indexes of the models that it is about: of all, or of those of chosen cells.
    """

    manifest: Manifest
    combinations: Sequence[Combination]
    expected: Mapping[str, ExpectedFailure]
    problems: Sequence[Problem]
    needed: Collection[int]

    def overridden_calibration(self) -> list[tuple[int, int]]:
        """Return which entries of `overrides` bring calibration data to which models: indexes of model and entry."""
        found = [
            (each.index, each.calibrated_by)
            for each in self.combinations
            if each.calibrated_by is not None and each.compiler.needs_calibration(each.precision)
        ]
        return list(dict.fromkeys(found))


def combine(manifest: Manifest, only: Sequence[str] = ()) -> Combinations:
    """Apply the rules of the matrix to a manifest, and keep the cells whose identifier fits one of `only` (none: all).

    Raises ManifestError if the matrix is too large to be made, NotFound if no cell fits.
    """
    rules = MatrixRules(manifest)
    combinations = rules.all()
    expected = rules.expected(combinations)
    needed: Collection[int] = range(len(manifest.models))
    if only:
        known = [each.identifier for each in combinations]
        combinations = [each for each in combinations if fits_any(only, [each.identifier])]
        if not combinations and not rules.complaints.problems:
            raise NotFound(f"no cell fits {' or '.join(only)}", hint=f"the first of {len(known)} is {known[0]}")
        needed = {each.index for each in combinations}
    return Combinations(manifest, combinations, expected, tuple(rules.complaints.problems), needed)


class MatrixRules:
    """The rules of the matrix for one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.complaints = Complaints(manifest)
        self.complain = self.complaints.complain
        self.comparisons = 0

    def all(self) -> list[Combination]:
        """Apply the rules of the matrix, with `overrides`; stop before multiplying out a matrix that is too large."""
        self._check_size()
        original: list[Combination] = []
        for index, model in enumerate(self.manifest.models):
            points = list(_points(model, model.sizes))
            original += self._product(index, self._targets(index), self._precisions(index), None, points)
        excluded: set[int] = set()
        for position, entry in enumerate(self.manifest.exclude):
            excluded.update(self._chosen_by(entry, ("exclude", position), original))
        kept = [combination for number, combination in enumerate(original) if number not in excluded]
        cells = self._unique([*kept, *self._included(kept)])
        if not cells and not self.complaints.problems:
            hint = "a build needs a cell: `exclude` fewer cells, or `include` some"
            self.complain("nothing is left to compile", ("exclude",), hint, key=True)
        for position, override in enumerate(self.manifest.overrides):
            for number in self._chosen_by(override.select, ("overrides", position, "select"), cells):
                cells[number].extras.append(("overrides", position))
                if override.calibration is not None:
                    cells[number].calibrated_by = position
        paired = [each for cell in cells for each in (cell, *self._for_packs(cell))]
        return self._unique(paired) if len(paired) > len(cells) else cells

    def expected(self, combinations: Sequence[Combination]) -> dict[str, ExpectedFailure]:
        """Return the expected failures of combinations, by identifier; the first entry that names a cell counts."""
        found: dict[str, ExpectedFailure] = {}
        for position, entry in enumerate(self.manifest.expected):
            for number in self._chosen_by(entry, ("expected", position), combinations):
                known: ExpectedFailure = {"kind": entry.kind, "reason": entry.reason, "until": entry.until}
                if entry.link:
                    known["link"] = entry.link
                found.setdefault(combinations[number].identifier, known)
        return found

    def _for_packs(self, cell: Combination) -> Iterator[Combination]:
        """Yield the twin of a cell whose program can be put into packs, if the manifest asks for some."""
        packs = cell.asked_packs(self.manifest)
        if packs and cell.compiler.packable(cell.choice.served.device):
            yield replace(cell, packs=packs)

    def _unique(self, combinations: Iterable[Combination]) -> list[Combination]:
        seen: dict[str, Combination] = {}
        for combination in combinations:
            first = seen.setdefault(combination.identifier, combination)
            if first is not combination:
                line = self.manifest.written.place(first.places["cell"])[0]
                message = f"`{combination.identifier}` is already in the matrix (line {line})"
                self.complain(message, combination.places["cell"])
        return list(seen.values())

    def _check_size(self) -> None:
        total = 0
        for index, model in enumerate(self.manifest.models):
            targets = sum(len(self._toolchains(compilers()[each.target.compiler])) for _, each in self._targets(index))
            precisions = len(model.precisions or self.manifest.precisions)
            count = targets * precisions * _count(model, model.sizes)
            total += count
            if total > MAX_CELLS:
                message = f"the matrix has {total:,} cells up to model `{model.name}`, more than {MAX_CELLS:,}"
                hint = f"this model alone has {count:,}; split the manifest, or give fewer sizes"
                self.complain(message, ("models", index, "dims" if model.dims else "name"), hint)
                raise ManifestError(self.complaints.found())

    def _product(
        self,
        index: int,
        targets: Sequence[tuple[Path, Choice]],
        precisions: Sequence[tuple[Path, str]],
        toolchains: Sequence[tuple[Path, str]] | None,
        points: Sequence[Point],
        added: Path = (),
    ) -> Iterator[Combination]:
        """Yield each combination of a model's; `added` is the place of the entry of `include` that adds it."""
        model, own = self.manifest.models[index], added or ("models", index)
        for (target_place, choice), (precision_place, precision) in product(targets, precisions):
            slug, compiler = choice.slug, compilers()[choice.target.compiler]
            cell = added or (*own, "name")
            places = {"cell": cell, "target": target_place, "precision": precision_place, "sizes": own}
            for toolchain_place, toolchain in toolchains or self._toolchains(compiler):
                placed = {**places, "toolchain": toolchain_place or target_place}
                alone = [prefix for _, prefix in self._toolchains(compiler)] == [toolchain]
                suffix = "" if alone or not toolchain else f".{toolchain}"
                for point in points:
                    yield Combination(index, model, slug, choice, compiler, toolchain, suffix, precision, point, placed)

    def _targets(self, index: int) -> list[tuple[Path, Choice]]:
        own = self.manifest.models[index].targets
        place: Path = ("models", index, "targets") if own else ("targets",)
        texts = own or self.manifest.targets
        return [((*place, position), understand_target(text)) for position, text in enumerate(texts)]

    def _toolchains(self, compiler: Compiler) -> list[tuple[Path, str]]:
        """Return the entries of `toolchains` for a target's compiler; one empty entry if the farm chooses."""
        named: list[tuple[Path, str]] = [
            (("toolchains", position), prefix)
            for position, prefix in enumerate(self.manifest.toolchains)
            if prefix.startswith(compiler.toolchains)
        ]
        return named or [((), "")]

    def _precisions(self, index: int) -> list[tuple[Path, str]]:
        own = self.manifest.models[index].precisions
        place: Path = ("models", index, "precisions") if own else ("precisions",)
        return [((*place, position), name) for position, name in enumerate(own or self.manifest.precisions)]

    def _included(self, kept: Sequence[Combination]) -> list[Combination]:
        """Let every `include` entry extend cells of the product, or add new cells if it extends none."""
        added: list[Combination] = []
        names = {model.name: index for index, model in enumerate(self.manifest.models)}
        for position, entry in enumerate(self.manifest.include):
            path = ("include", position)
            if entry.model and entry.model not in names:
                self.complain(f"no model `{entry.model}`", (*path, "model"), suggestion(entry.model, names))
                continue
            slug = understand_target(entry.target).slug if entry.target else ""
            candidates = [item for item in kept if item.model.name == entry.model] if entry.model else kept
            for point in _product(entry.sizes):
                self._compare(len(candidates), path)
                extended = [
                    combination
                    for combination in candidates
                    if (not slug or combination.slug == slug)
                    and (not entry.toolchain or combination.toolchain == entry.toolchain)
                    and (not entry.precision or combination.precision == entry.precision)
                    and all(combination.point.sizes.get(name) == size for name, size in point.items())
                ]
                for combination in extended:
                    combination.extras.append(path)
                if not extended:
                    indexes = [names[entry.model]] if entry.model else list(names.values())
                    for index in indexes:
                        added += self._added(index, entry, point, path)
                if len(kept) + len(added) > MAX_CELLS:
                    self.complain(f"the matrix has more than {MAX_CELLS:,} cells with this entry", path)
                    raise ManifestError(self.complaints.found())
        return added

    def _added(
        self, index: int, entry: IncludeEntry, point: Mapping[str, Extent], path: tuple[str, int]
    ) -> Iterator[Combination]:
        model = self.manifest.models[index]
        sizes = {**model.sizes, **{name: (size,) for name, size in point.items()}}
        targets: list[tuple[Path, Choice]]
        targets = [((*path, "target"), understand_target(entry.target))] if entry.target else self._targets(index)
        precisions: list[tuple[Path, str]]
        precisions = [((*path, "precision"), entry.precision)] if entry.precision else self._precisions(index)
        if len(targets) * len(precisions) * _count(model, sizes) > MAX_CELLS:
            self.complain(f"this entry alone adds more than {MAX_CELLS:,} cells", path)
            raise ManifestError(self.complaints.found())
        toolchains = [((*path, "toolchain"), entry.toolchain)] if entry.toolchain else None
        for each in self._product(index, targets, precisions, toolchains, list(_points(model, sizes)), path):
            each.extras.append(path)
            yield each

    def _chosen_by(self, entry: SelectEntry, path: Path, combinations: Sequence[Combination]) -> list[int]:
        """Return the numbers of the combinations that a selector at `path` chooses; complain if there are none."""
        self._compare(len(combinations), path)
        # Patterns are compared once with each value of an axis, not once for each cell.
        taken = {
            axis: {value for value, names in _values(axis, combinations).items() if fits_any(patterns, names)}
            for axis in AXES
            if (patterns := getattr(entry, axis))
        }
        chosen = [
            number
            for number, each in enumerate(combinations)
            if all(each.value(axis) in values for axis, values in taken.items())
        ]
        if not chosen:
            self._matches_nothing(entry, path, combinations)
        return chosen

    def _compare(self, count: int, path: Path) -> None:
        """Count an entry that is compared with `count` cells; stop a manifest that would take minutes."""
        self.comparisons += count
        if self.comparisons > MAX_COMPARISONS:
            hint = "write fewer entries, each for more cells; or split the manifest"
            self.complain("too many selectors for so many cells", path, hint)
            raise ManifestError(self.complaints.found())

    def _matches_nothing(self, entry: SelectEntry, path: Path, combinations: Sequence[Combination]) -> None:
        """Say that a selector chooses nothing, and which of its fields is to blame."""
        where = f"{path[0]}[{path[1]}]"
        for axis in AXES:
            patterns: tuple[str, ...] = getattr(entry, axis)
            values = _values(axis, combinations)
            names = {name for each in values.values() for name in each if name}
            if patterns and not fits_any(patterns, names):
                message = f"{where} matches nothing: no cell has the {axis} {' or '.join(patterns)}"
                self.complain(message, (*path, axis), suggestion(patterns[0], names))
                return
        self.complain(
            f"{where} matches nothing: no cell has all of this", path, "remove the entry, or one of its fields"
        )


def _values(axis: str, combinations: Iterable[Combination]) -> dict[str, Collection[str]]:
    """Return the values that combinations have on an axis, each with the names under which a selector may name it."""
    found = {each.value(axis): each for each in combinations}
    if axis == "target":
        return {value: each.choice.names for value, each in found.items()}
    return {value: {value, value.replace("-", "+")} if axis == "precision" else {value} for value in found}


def _points(model: ModelEntry, sizes: Mapping[str, Sequence[Extent]]) -> Iterator[Point]:
    for name, own in (model.shapes or {"": {}}).items():
        for given in _product(sizes):
            yield Point({**own, **given}, shape_label(given, name), name)


def _count(model: ModelEntry, sizes: Mapping[str, Sequence[Extent]]) -> int:
    return max(1, len(model.shapes)) * prod(len(values) for values in sizes.values())


def _product(sizes: Mapping[str, Sequence[Extent]]) -> Iterator[dict[str, Extent]]:
    for values in product(*sizes.values()):
        yield dict(zip(sizes, values, strict=True))


# --- what combinations name: inputs, models, data and files -----------------------------------------------------------


@dataclass(slots=True)
class Shape:
    """A model's inputs at one point of its sizes: for the spec and for checks, and the data that fits them."""

    inputs: Mapping[str, InputSpec]
    tensors: Mapping[str, Input]
    batch: PlainSize | None
    texts: Mapping[str, str]  # Canonical JSON of the spec's fields `inputs` and `batch`.
    checked: dict[tuple[str, str], bool] = field(default_factory=dict)  # Whether data fits, by its use and digest.


class Recipe(NamedTuple):
    """What a spec says about how a model is compiled, calibrated and compared; `data` and `env_files` are the blobs."""

    options: Mapping[str, OptionValue]
    quantization: Mapping[str, OptionValue]
    env: Mapping[str, str]
    env_files: Mapping[str, FileReference]
    calibration: DataRecipe | None
    samples: DataRecipe | None
    data: Mapping[str, FrozenData]


FoundData = tuple[DataRecipe | None, FrozenData | None]  # What a spec says about data, and the data if it is a blob.


@dataclass
class Lookup:
    """What one matrix finds of all that was brought, for cells of one shape once; complains of what is missing.

    Frozen `models` are by name, `data` by dataset or `data_key`, and `files` by path. If that `is_all`, what is missing
    is a complaint; else it may still be brought.
    """

    matrix: Combinations
    models: Mapping[str, FrozenModel]
    data: Mapping[str, FrozenData]
    files: Mapping[str, BlobSize]
    is_all: bool = field(kw_only=True)
    _symbolic: dict[int, Mapping[str, TensorInfo] | None] = field(default_factory=dict, init=False)
    _shapes: dict[tuple[int, str], Shape | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.complaints = Complaints(self.matrix.manifest, self.matrix.problems)
        self.complain = self.complaints.complain

    def model(self, combination: Combination) -> FrozenModel | None:
        """Return the frozen model of a combination."""
        found = self.models.get(combination.model.name)
        if found is None and self.is_all:
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
        ranges = self.ranges(combination)
        calibration, calibration_data = self._calibration(combination, compiler, ranges)
        given_samples = combination.model.samples or Data(generate=kind.min_samples)
        samples, sample_data = self._described(combination, "samples", given_samples, ranges)
        data = {"calibration": calibration_data, "samples": sample_data if settings.verify.mode != "off" else None}
        blobs = {use: found for use, found in data.items() if found}
        return Recipe(options, quantization, env, env_files, calibration, samples, blobs)

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
            model = self.models[combination.model.name]
            try:
                check_data(frozen, shape.tensors, model["outputs"])
                shape.checked[checked] = True
            except DataError as error:
                shape.checked[checked] = False
                message = f"{use} of model `{combination.model.name}` at {combination.label}: {error.message}"
                self.complain(message, combination.data_place(use), error.hint)
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
                    self.complain(message, ("models", combination.index, "inputs", pattern, field))
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
        frozen, symbolic = self.models.get(entry.name), self._inputs_of(combination.index)
        if frozen is None or symbolic is None:
            return None
        try:
            inputs, used = resolve_inputs(frozen, symbolic, combination.point.sizes)
        except ShapeError as error:
            field: Path = tuple(error.field)
            found = self.place_of_size(combination, str(field[1])) if field[:1] == ("dims",) else (*place, *field)
            at = f" at {combination.label}" if combination.point.sizes else ""
            self.complain(f"model `{entry.name}`{at}: {error.message}", found, error.hint)
            return None
        unused = [name for name in combination.point.sizes if name not in used]
        for name in unused:
            self._unused(combination, name, symbolic)
        if unused:
            return None
        batch = plain_size(combination.point.sizes[BATCH]) if BATCH in combination.point.sizes else None
        documents = {name: tensor.as_dict() for name, tensor in inputs.items()}
        # Without all that the cells need they get no key.
        texts = canonical_fields({"inputs": documents, "batch": batch}) if self.is_all else {}
        return Shape(documents, inputs, batch, texts)

    def _inputs_of(self, index: int) -> Mapping[str, TensorInfo] | None:
        """Return a model's inputs with the manifest's shapes; None if that fails or the model is unknown."""
        if index not in self._symbolic:
            entry = self.matrix.manifest.models[index]
            shapes = {pattern: item.shape if item.has_shape else None for pattern, item in entry.inputs.items()}
            frozen = self.models.get(entry.name)
            try:
                self._symbolic[index] = symbolic_inputs(frozen, shapes) if frozen else None
            except ShapeError as error:
                self._symbolic[index] = None
                self.complain(f"model `{entry.name}`: {error.message}", ("models", index, *error.field), error.hint)
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
        self.complain(message, self.place_of_size(combination, name), both, key=True)

    def _env(
        self, compiler: Compiler, given: Mapping[str, bool | int | str | EnvFile]
    ) -> tuple[dict[str, str], dict[str, FileReference]]:
        """Return the environment of a compile as its spec has it, and the files that it names, by variable.

        Values were checked with the manifest; files that were not brought are a problem.
        """
        own = {name: value for name, value in given.items() if compiler.variable(name)}
        files: dict[str, FileReference] = {}
        for name, value in own.items():
            if isinstance(value, EnvFile) and value.path in self.files:
                found = self.files[value.path]
                files[name] = {"path": name, "digest": found["digest"], "size": found["size"]}
                own[name] = FILE + found["digest"]
        if absent := [name for name, value in own.items() if isinstance(value, EnvFile)]:
            if self.is_all:
                self.complain(f"the file of `{absent[0]}` was not submitted with the manifest", ("env",))
            return {}, {}
        return compiler.resolve_env(own), files

    def _calibration(
        self, combination: Combination, compiler: Compiler, ranges: Mapping[str, DeclaredValues]
    ) -> FoundData:
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

    def _described(
        self, combination: Combination, use: str, described: Data, ranges: Mapping[str, DeclaredValues]
    ) -> FoundData:
        """Return what a spec says about calibration data or samples, and the data if it is a blob."""
        place = combination.data_place(use)
        key = data_key(combination.model.name, use, combination.calibrated_by if place[0] == "overrides" else None)
        if described.dataset:
            # A model to which the dataset is not what it is to the first that names it has it under a key of its own.
            key = key if key in self.data else described.dataset
            described = self.matrix.manifest.datasets[described.dataset]
        if described.generate:
            return {"generate": described.generate, "seed": described.seed, "ranges": ranges}, None
        if frozen := self.data.get(key):
            return {"digest": frozen["digest"]}, frozen
        if self.is_all:
            self.complain(f"{use} of model `{combination.model.name}` was not submitted with the manifest", place)
        return None, None


def data_key(model: str, use: str, override: int | None = None) -> str:
    """Return the name of a model's own data among all that was brought: `net/samples`, `net/calibration/2`."""
    return f"{model}/{use}" if override is None else f"{model}/{use}/{override}"
