"""Cells: each combination of a manifest with its fully resolved spec, if it is possible. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from farm.errors import ManifestError, Problem, suggestion
from farm.jobs.order import LaterTuning, OrderedModel, OrderExtras, WorkOrder, job_key
from farm.jobs.state import AttemptLimits
from farm.manifest import Data, EnvFile, Limits, Manifest, ModelEntry, Tuning, Verify
from farm.matrix.combinations import CellInputs, Combination, Combinations, Complaints, Path
from farm.matrix.dynamic import price, refusal
from farm.matrix.layers import CellSettings, gates_of, settings_of, tolerances
from farm.matrix.planned import BlobSize, CellGates, ExpectedFailure, SoughtBatch
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.models.shapes import Span, plain_size
from farm.spec import (
    CompileSpec,
    DataRecipe,
    DeclaredValues,
    Device,
    FileReference,
    KeyedModel,
    KeyedTuning,
    OptionValue,
    PlainSize,
    SpecDocument,
    canonical_fields,
    key_of_fields,
)
from farm.targets.compilers import COMPILERS, OFF, TUNING_MODES, Compiler, DeviceKind, default_tolerance
from farm.targets.environment import FILE
from farm.targets.pools import Choice, NoPool, Pool, choose_pools

DEFAULT_LIMITS = AttemptLimits(time=14_400.0, memory=0)
"""Limits of an attempt if the manifest sets none: seconds, bytes (0 = no limit)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One compile that a build asks for.

    `target` is spelt as the user chose it (`migraphx/mi300x`), `shape` is the shape label and `sizes` are those of the
    named dimensions, `job` is what cells that share a job have in common (`farm.jobs.order.job_key`), `order` is what a
    worker gets, `emulated` the parts of its precision that its device has no units for, `gates` what the build judges
    by, `expected` the manifest's entry if this cell must fail, `sweep` what is sought among its siblings of other
    batches, `line` its place, `warnings` what to know before it is compiled.
    """

    identifier: str
    model: str
    target: str
    precision: str
    shape: str
    sizes: Mapping[str, PlainSize]
    spec: CompileSpec
    key: str
    job: str
    pool: str
    order: WorkOrder
    emulated: tuple[str, ...]
    limits: AttemptLimits
    priority: int
    gates: CellGates
    expected: ExpectedFailure | None
    sweep: SoughtBatch | None
    line: int
    warnings: tuple[str, ...] = ()


def expand(
    manifest: Manifest,
    models: Mapping[str, FrozenModel],
    data: Mapping[str, FrozenData],
    pools: Sequence[Pool],
    *,
    known: Sequence[Pool] = (),
    slots: Mapping[str, int] | None = None,
    files: Mapping[str, BlobSize] | None = None,
    file: str = "",
    limits: AttemptLimits = DEFAULT_LIMITS,
) -> list[Cell]:
    """Return a manifest's cells, in the order written.

    `models` are the frozen models by name, `data` the frozen data by dataset or by `data_key`, and `files` those that
    environment variables name, by path. `pools` are the pools to plan for, `known` all that there are: `toolchains` may
    choose of them. Cells that several pools serve with the same key are spread over them by `slots`, a number by pool.
    `limits` are for cells for which the manifest sets none. `file` overrides the manifest's name in messages.

    Raises ManifestError with every problem found, each with its place.
    """
    expansion = _Expansion(manifest, models, data, pools, limits, file or manifest.file)
    expansion.known, expansion.files, expansion.slots = known or pools, files or {}, slots or {}
    cells = expansion.cells()
    if expansion.complaints.problems:
        raise ManifestError(expansion.complaints.found())
    return cells


def check(manifest: Manifest, models: Mapping[str, FrozenModel], data: Mapping[str, FrozenData]) -> list[Problem]:
    """Return all problems that show without knowing any pool; models and data that are not given are skipped."""
    expansion = _Expansion(manifest, models, data, None, DEFAULT_LIMITS, manifest.file)
    expansion.cells()
    return expansion.complaints.found()


def names_of(manifest: Manifest) -> list[str]:
    """Return the identifiers of a manifest's cells, in the order written, as far as they show without a server.

    Raises ManifestError if the matrix is too large to be made.
    """
    expansion = _Expansion(manifest, {}, {}, None, DEFAULT_LIMITS, manifest.file)
    return [combination.identifier for combination in expansion.rules.all()]


def data_key(model: str, use: str, override: int | None = None) -> str:
    """Return the name of a model's own data among all that was brought: `net/samples`, `net/calibration/2`."""
    return f"{model}/{use}" if override is None else f"{model}/{use}/{override}"


def overridden_calibration(manifest: Manifest) -> list[tuple[int, int]]:
    """Return which entries of `overrides` bring calibration data to which models: indexes of model and entry.

    Raises ManifestError if the matrix is too large to be made.
    """
    expansion = _Expansion(manifest, {}, {}, None, DEFAULT_LIMITS, manifest.file)
    needed = {
        (combination.index, combination.calibrated_by): None
        for combination in expansion.rules.all()
        if combination.calibrated_by is not None
        and expansion.compiler(combination).needs_calibration(combination.precision)
    }
    return [(index, position) for index, position in needed if position is not None]


class _Expansion:
    """One expansion. Parts that many cells share are worked out once."""

    def __init__(
        self,
        manifest: Manifest,
        models: Mapping[str, FrozenModel],
        data: Mapping[str, FrozenData],
        pools: Sequence[Pool] | None,
        limits: AttemptLimits,
        file: str,
    ) -> None:
        self.manifest = manifest
        self.models = models
        self.data = data
        self.pools = pools
        self.known: Sequence[Pool] = pools or ()
        self.files: Mapping[str, BlobSize] = {}
        self.slots: Mapping[str, int] = {}
        self.limits = limits
        self.complaints = Complaints(manifest, file)
        self.complain = self.complaints.complain
        self.rules = Combinations(manifest, self.complaints)
        self.inputs = CellInputs(manifest, models, self.complaints)
        self.choices = self.rules.choices
        self.plans: dict[tuple[object, ...], _Plan | None] = {}
        self.chosen: dict[tuple[object, ...], list[Pool]] = {}

    def cells(self) -> list[Cell]:
        combinations = self.rules.all()
        expected = self.rules.expected(combinations)
        cells = (self.cell(combination, expected.get(id(combination))) for combination in combinations)
        return [cell for cell in cells if cell]

    def cell(self, combination: Combination, expected: ExpectedFailure | None) -> Cell | None:
        """Return the finished cell, or None if something is wrong with it or no pools are given."""
        extras = tuple(id(entry) for entry in combination.extras)
        where = (
            combination.index,
            combination.slug,
            combination.toolchain,
            combination.precision,
            extras,
            combination.places["target"],
            combination.packs,
        )
        if where not in self.plans:
            self.plans[where] = self.plan(combination)
        plan, shape = self.plans[where], self.inputs.at(combination)
        if plan is None or shape is None:
            return None
        for use, frozen in plan.data.items():
            if not self.inputs.fits(combination, use, frozen, shape):
                return None
        work = plan.work
        if work is None:
            return None
        target = self.choices[combination.slug].served
        warnings = work.warnings
        if combination.packs and not self.takes_packs(combination, work.model["format"]):
            return None
        if dynamic := [name for name, size in combination.sizes.items() if isinstance(size, Span)]:
            inputs = list(shape.tensors.values())
            if refused := refusal(target, work.model["format"], inputs, work.document["env"]):
                message = f"model `{combination.model.name}` at {combination.label} on {target}: {refused}"
                self.complain(message, self.inputs.place_of_size(combination, dynamic[0]))
                return None
            operators = self.models[combination.model.name].operators
            warnings += tuple(price(target, combination.precision, inputs, operators))
        identifier = combination.identifier
        pool = self.spread(identifier, work.pools)
        # The same as spec.as_dict(), from parts that cells share.
        document: SpecDocument = {**work.document, "inputs": shape.inputs, "batch": shape.batch}
        files = {use: frozen.reference(f"{use}.npz") for use, frozen in plan.data.items()}
        order: WorkOrder = {
            "identifier": identifier,
            "pool": pool,
            "target": str(target),
            "spec": document,
            "model": work.model,
            "calibration": files.get("calibration"),
            "samples": files.get("samples"),
            **work.order,
        }
        key = key_of_fields({**work.texts, **shape.texts})
        return Cell(
            identifier=identifier,
            model=combination.model.name,
            target=str(self.choices[combination.slug].target),
            precision=combination.precision,
            shape=combination.label,
            sizes={name: plain_size(size) for name, size in combination.sizes.items()},
            spec=replace(work.spec, inputs=shape.inputs, batch=shape.batch),
            key=key,
            job=job_key(order, key),
            pool=pool,
            order=order,
            emulated=work.emulated,
            limits=plan.limits,
            priority=plan.priority,
            gates=plan.gates,
            expected=expected,
            sweep=None if combination.packs else _sought(combination.model),
            line=plan.line,
            warnings=warnings,
        )

    def compiler(self, combination: Combination) -> Compiler:
        """Return the compiler of a combination's target."""
        return COMPILERS[self.choices[combination.slug].target.compiler]

    def serving(self, combination: Combination, *, family_bound: bool) -> list[Pool]:
        """Return the pools that serve a target with a toolchain, all with the same key; none if that is a problem."""
        slug, toolchain = combination.slug, combination.toolchain
        libraries = self.compiler(combination).libraries_of(combination.precision)
        asked = slug, toolchain, family_bound, libraries
        if asked not in self.chosen:
            choice, place = self.choices[slug], combination.places["toolchain" if toolchain else "target"]
            self.chosen[asked] = []
            try:
                self.chosen[asked] = choose_pools(
                    choice,
                    toolchain,
                    in_use=self.pools or (),
                    known=self.known,
                    family_bound=family_bound,
                    libraries=libraries,
                )
            except NoPool as error:
                self.complain(str(error), place, error.hint)
        return self.chosen[asked]

    def spread(self, identifier: str, pools: Sequence[str]) -> str:
        """Return the pool for a cell, of those that serve it alike: each has a share by slots, and keeps its cells.

        One that takes no jobs now gets none, unless none of them does: nobody may come to take them.
        """

        def score(pool: str) -> float:
            chance = (int(hashlib.sha256(f"{pool} {identifier}".encode()).hexdigest()[:12], 16) + 1) / (16**12 + 1)
            return (self.slots.get(pool) or 1) / -math.log(chance)

        return (
            pools[0] if len(pools) == 1 else max([pool for pool in pools if self.slots.get(pool)] or pools, key=score)
        )

    def plan(self, combination: Combination) -> _Plan | None:
        """Work out all of a cell but its shape. Returns None if something is wrong."""
        choice, precision = self.choices[combination.slug], combination.precision
        kind = self.compiler(combination).device(choice.served.device)
        if kind is None or precision not in kind.precisions:
            has = ", ".join(kind.precisions) if kind else "none"
            message = f"{choice.target} has no precision {precision}"
            hint = f"it has {has}; or `exclude: [{{target: {choice.text}, precision: {precision}}}]`"
            self.complain(message, combination.places["precision"], hint)
            return None
        before = len(self.complaints.problems)
        parts = self.parts(combination, kind)
        without = self.pools is not None and (not parts.pools or parts.model is None)
        if without or len(self.complaints.problems) > before:
            return None
        settings = parts.settings
        gates = self.gates(combination, settings, parts.model)
        return _Plan(
            data=parts.data,
            limits=self.limits_of(settings.limits),
            priority=settings.priority,
            gates=gates,
            line=self.manifest.written.line(*combination.places["cell"]),
            work=self.specify(combination, kind, parts, parts.model) if parts.pools and parts.model else None,
        )

    def parts(self, combination: Combination, kind: DeviceKind) -> _Parts:
        """Look up the parts of a plan, and complain of parts that are missing or that contradict each other."""
        entry, compiler = combination.model, self.compiler(combination)
        frozen = self.models.get(entry.name)
        if frozen:
            self.check_model(combination, frozen, compiler)
        elif self.pools is not None:
            message = f"model `{entry.name}` was not submitted with the manifest"
            hint = "the submitter reads path, package and https; the farm itself s3"
            self.complain(message, ("models", combination.index, "source"), hint)
        settings = settings_of(self.manifest, combination)
        given = {**settings.options, **(compiler.pack_options if combination.packs else {})}
        options, quantization = self.options(combination, compiler, given)
        env, env_files = self.env(compiler, settings.env)
        ranges = self.inputs.ranges(combination)
        calibration, calibration_data = self.calibration(combination, compiler, ranges)
        samples, sample_data = self.samples(combination, kind, ranges)
        if settings.verify.mode == "off":
            sample_data = None
        tuning, choice = settings.tuning, self.choices[combination.slug]
        modes = {_tuning(tuning, compiler, kind, choice, mode)["mode"] for mode in (tuning.mode, tuning.background)}
        bound = any(compiler.family_bound(options, mode) for mode in modes)
        pools = self.serving(combination, family_bound=bound) if self.pools is not None else []
        for pool in pools[:1]:
            self.check_features(combination, compiler, pool, {**options, **quantization})
            if pool.untuned:
                self.check_untuned(combination, settings)
        self.check_background(combination, settings.tuning)
        data = {"calibration": calibration_data, "samples": sample_data}
        return _Parts(
            settings=settings,
            model=frozen,
            pools=pools,
            options=options,
            quantization=quantization,
            env=env,
            env_files=env_files,
            calibration=calibration,
            samples=samples,
            data={use: item for use, item in data.items() if item},
        )

    def specify(self, combination: Combination, kind: DeviceKind, parts: _Parts, model: FrozenModel) -> _Work:
        """Return a plan's spec and work order."""
        entry, choice, precision = combination.model, self.choices[combination.slug], combination.precision
        compiler, settings, pool = self.compiler(combination), parts.settings, parts.pools[0]

        def device(mode: str) -> Device:
            return choice.device(pool, family_bound=compiler.family_bound(parts.options, mode))

        tuning = _tuning(settings.tuning, compiler, kind, choice, settings.tuning.mode)
        later = _tuning(settings.tuning, compiler, kind, choice, settings.tuning.background)
        background = LaterTuning(tuning=later, device=device(later["mode"]).as_dict()) if later["mode"] != OFF else None
        names = [output.name for output in model.outputs]
        ordered = OrderedModel(format=model.format, files=list(model.files), names=names)
        keyed = KeyedModel(digest=model.digest, format=model.format)
        if entry.outputs:
            ordered["outputs"] = keyed["outputs"] = list(entry.output_nodes)
        if model.conversion:
            ordered["conversion"] = model.conversion
        emulated = compiler.emulates(choice.served.device, precision)
        libraries = [name for name in compiler.libraries_of(precision) if name in pool.libraries]
        spec = CompileSpec(
            model=keyed,
            compiler={
                "name": compiler.name,
                "recipe": pool.recipe,
                "libraries": {name: pool.libraries[name] for name in libraries},
            },
            device=device(tuning["mode"]),
            toolchain=pool.toolchain,
            precision=precision,
            inputs={},
            options=parts.options,
            tuning=tuning,
            env=parts.env,
            calibration=parts.calibration,
            quantization=parts.quantization,
            verification=None
            if settings.verify.mode == "off"
            else {"samples": parts.samples, "reference": _reference(settings.verify, model)},
            salt=settings.salt,
        )
        document, of_shape = spec.as_dict(), ("inputs", "batch")
        return _Work(
            pools=[each.name for each in parts.pools],
            model=ordered,
            order=_order(emulated, settings, tuning["mode"], background, parts.env_files, pool),
            emulated=emulated,
            warnings=(*_untuned(settings.tuning, kind, choice), *_doubts(model, compiler)),
            spec=spec,
            document=document,
            texts=canonical_fields({name: value for name, value in document.items() if name not in of_shape}),
        )

    def check_untuned(self, combination: Combination, settings: CellSettings) -> None:
        """Complain if the manifest asks for work that needs the GPU: nobody may believe that it was done."""
        text, place = self.choices[combination.slug].text, combination.places["target"]
        modes = (settings.tuning.mode, settings.tuning.background)
        asked = [f"tuning {mode}" for mode in modes if mode != OFF]
        asked += ["verification"] * (settings.verify.mode != "off")
        if asked:
            message = f"no worker has a `{text}`, those that compile for it cannot do this: {', '.join(asked)}"
            hint = "write `tuning: {mode: off}` and `verify: off` for it, or start `farm worker` on a node with one"
            self.complain(message, place, hint)

    def check_background(self, combination: Combination, tuning: Tuning) -> None:
        if tuning.background != OFF and TUNING_MODES.index(tuning.background) <= TUNING_MODES.index(tuning.mode):
            message = f"`background: {tuning.background}` finds nothing that `mode: {tuning.mode}` does not"
            hint = f"more thorough is: {', '.join(TUNING_MODES[TUNING_MODES.index(tuning.mode) + 1 :]) or 'nothing'}"
            self.complain(f"{message} (model `{combination.model.name}`)", combination.places["cell"], hint)

    def check_model(self, combination: Combination, frozen: FrozenModel, compiler: Compiler) -> None:
        name, place = combination.model.name, combination.places["precision"]
        if frozen.format not in compiler.formats:
            message = f"{compiler.name} does not read {frozen.format} files (model `{name}`)"
            self.complain(message, combination.places["target"], f"it reads {', '.join(compiler.formats)}")
        if compiler.packs(combination.precision) and frozen.format != "onnx":
            message = f"{combination.precision} of model `{name}`: int4 needs an ONNX model"
            self.complain(message, place, "convert it to ONNX, or leave the precision out")
        if combination.precision == "fp32" and frozen.lowered:
            hint = f"write `precisions: [native]` for model `{name}`: it is compiled as it was exported"
            self.complain(f"fp32 for model `{name}`, which is lower already ({frozen.lowered})", place, hint)

    def takes_packs(self, combination: Combination, format: str) -> bool:
        """Complain of packs that no program of the cell can go into; whether there are none."""
        sizes = [name for name, size in combination.sizes.items() if isinstance(size, Span)]
        reading = [layout for layout in combination.packs if layout != "onnxruntime"]
        hint = f"write `packs: []` for model `{combination.model.name}`"
        if sizes:
            message = f"`packs` of model `{combination.model.name}`: ONNX Runtime's provider takes fixed sizes only"
            place = self.inputs.place_of_size(combination, sizes[0])
            self.complain(f"{message}, and `{sizes[0]}` is a range", place, f"{hint}, or list the sizes")
            return False
        if format != "onnx" and reading:
            message = (
                f"`packs: [{reading[0]}]` of model `{combination.model.name}`: ONNX Runtime does not read {format}"
            )
            self.complain(message, ("models", combination.index, "name"), f"{hint}, or `packs: [onnxruntime]`")
            return False
        return True

    def check_features(
        self, combination: Combination, compiler: Compiler, pool: Pool, options: Mapping[str, OptionValue]
    ) -> None:
        """Complain of features that the installed compiler or the card lacks, before a worker finds out."""
        if old := compiler.too_old(pool.target.device, pool.device.arch, combination.precision):
            hint = "`exclude` the cell, or choose another card"
            self.complain(f"{old} ({self.choices[combination.slug].text})", combination.places["precision"], hint)
        for feature, what in compiler.lacks(pool.features, combination.precision, options).items():
            since = compiler.features.get(feature, "another release")
            message = f"toolchain_mismatch: {pool.toolchain} has no {feature}, which {what} needs"
            hint = f"{since} and newer have it; `exclude` the cell, or choose by `toolchains`"
            place = combination.places["precision" if what.startswith("precision") else "target"]
            self.complain(f"{message} ({self.choices[combination.slug].text})", place, hint)

    def options(
        self, combination: Combination, compiler: Compiler, given: Mapping[str, OptionValue]
    ) -> tuple[dict[str, OptionValue], dict[str, OptionValue]]:
        """Return compile and quantization options of one compiler, from those given for all, defaults filled in."""
        device = self.choices[combination.slug].served.device
        quantizer = compiler.quantization_options(combination.precision, device)
        try:
            return (
                dict(compiler.resolve_options(_only(given, compiler.options_of(device)), device)),
                dict(compiler.resolve_quantization(combination.precision, _only(given, quantizer), device)),
            )
        except ValueError as error:
            place: Path = ("models", combination.index, "options") if combination.model.options else ("options",)
            self.complain(str(error), place)
            return {}, {}

    def env(
        self, compiler: Compiler, given: Mapping[str, bool | int | str | EnvFile]
    ) -> tuple[dict[str, str], dict[str, FileReference]]:
        """Return the environment of a compile as its spec has it, and the files that it names, by variable.

        Values were checked with the manifest; files that were not brought are a problem.
        """
        own = {name: value for name, value in given.items() if compiler.has_env(name)}
        files: dict[str, FileReference] = {}
        for name, value in own.items():
            if isinstance(value, EnvFile) and value.path in self.files:
                found = self.files[value.path]
                files[name] = {"path": name, "digest": found["digest"], "size": found["size"]}
                own[name] = FILE + found["digest"]
        if absent := [name for name, value in own.items() if isinstance(value, EnvFile)]:
            if self.pools is not None:
                self.complain(f"the file of `{absent[0]}` was not submitted with the manifest", ("env",))
            return {}, {}
        return compiler.resolve_env(own), files

    def calibration(
        self, combination: Combination, compiler: Compiler, ranges: Mapping[str, DeclaredValues]
    ) -> tuple[DataRecipe | None, FrozenData | None]:
        if not compiler.needs_calibration(combination.precision):
            return None, None
        entry, override = combination.model, combination.calibrated_by
        use = entry.calibration if override is None else self.manifest.overrides[override].calibration
        if use is None:
            frozen = self.models.get(entry.name)
            names = ", ".join(f"`{tensor.name}`" for tensor in frozen.inputs) if frozen else "each input"
            message = f"{combination.precision} of model `{entry.name}` needs calibration data"
            hint = f"add `calibration: {{path: FILE.npz}}` with an array for {names}; `{{generate: 32}}` to try it out"
            self.complain(message, ("models", combination.index, "name"), hint)
            return None, None
        return self.recipe(combination, "calibration", use, ranges)

    def samples(
        self, combination: Combination, kind: DeviceKind, ranges: Mapping[str, DeclaredValues]
    ) -> tuple[DataRecipe | None, FrozenData | None]:
        use = combination.model.samples
        if use is None:
            return {"generate": kind.min_samples, "seed": 0, "ranges": ranges}, None
        return self.recipe(combination, "samples", use, ranges)

    def recipe(
        self, combination: Combination, use: str, described: Data, ranges: Mapping[str, DeclaredValues]
    ) -> tuple[DataRecipe | None, FrozenData | None]:
        """Return the recipe of data for the spec, and the data if it is a blob."""
        place = combination.data_place(use)
        key = data_key(combination.model.name, use, combination.calibrated_by if place[0] == "overrides" else None)
        if described.dataset:
            # A model to which the dataset is not what it is to the first that names it has it under a key of its own.
            key = key if key in self.data else described.dataset
            described = self.manifest.datasets[described.dataset]
        if described.generate:
            return {"generate": described.generate, "seed": described.seed, "ranges": ranges}, None
        frozen = self.data.get(key)
        if frozen is None:
            if self.pools is not None:
                message = f"{use} of model `{combination.model.name}` was not submitted with the manifest"
                self.complain(message, place)
            return None, None
        return {"digest": frozen.digest}, frozen

    def limits_of(self, limits: Limits) -> AttemptLimits:
        return {
            "time": self.limits["time"] if limits.time is None else limits.time,
            "memory": self.limits["memory"] if limits.memory is None else limits.memory,
        }

    def gates(self, combination: Combination, settings: CellSettings, frozen: FrozenModel | None) -> CellGates:
        """Return the gates of the build: the tolerance of each output (`*`: of all others) and its consequences.

        Limits and budgets are added if there are any.
        """
        verify = settings.verify
        outputs = [tensor.name for tensor in frozen.outputs] if frozen else []
        own = combination.model.verify.tolerance.values()
        for pattern in dict.fromkeys(pattern for values in own for pattern in values):
            if frozen and pattern != "*" and not any(fnmatchcase(name, pattern) for name in outputs):
                message = f"model `{combination.model.name}` has no output `{pattern}`"
                place: Path = ("models", combination.index, "verify", "tolerance")
                self.complain(message, place, suggestion(pattern, outputs))
        tolerance = tolerances(verify, combination.precision, outputs, default_tolerance(combination.precision))
        gates = CellGates(
            tolerance=tolerance, weak=verify.weak, on_fail=verify.on_fail, unverifiable=verify.unverifiable
        )
        if self.choices[combination.slug].served.maker:
            gates["fallback"] = verify.fallback
        return {**gates, **gates_of(settings.gates, settings.budgets)}


class _Parts(NamedTuple):
    """What a plan is made of. Any of `pools` gives the same key.

    `calibration` and `samples` are what the spec says, `data` those that are blobs.
    """

    settings: CellSettings
    model: FrozenModel | None
    pools: list[Pool]
    options: Mapping[str, OptionValue]
    quantization: Mapping[str, OptionValue]
    env: Mapping[str, str]
    env_files: Mapping[str, FileReference]
    calibration: DataRecipe | None
    samples: DataRecipe | None
    data: Mapping[str, FrozenData]


class _Work(NamedTuple):
    """The spec and the work order of a cell but for its shape; `pools` are the names of the pools that serve it."""

    pools: Sequence[str]
    model: OrderedModel
    order: OrderExtras
    emulated: tuple[str, ...]
    warnings: tuple[str, ...]
    spec: CompileSpec
    document: SpecDocument
    """The spec as plain JSON."""
    texts: Mapping[str, str]
    """Canonical JSON of the spec's fields but `inputs` and `batch`."""


class _Plan(NamedTuple):
    """All of a cell but its shape; there is no `work` if no pools are known."""

    data: Mapping[str, FrozenData]
    limits: AttemptLimits
    priority: int
    gates: CellGates
    line: int
    work: _Work | None


def _order(
    emulated: Sequence[str],
    settings: CellSettings,
    tuning: str,
    background: LaterTuning | None,
    env_files: Mapping[str, FileReference],
    pool: Pool,
) -> OrderExtras:
    """Return the fields of a work order that only some have; none of them is part of the key."""
    extras = OrderExtras()
    if emulated:
        extras["emulated"] = list(emulated)
    if tuning != OFF and settings.tuning.budget:
        extras["budget"] = settings.tuning.budget
    if background:
        extras["background"] = background
    if env_files:
        extras["env"] = env_files
    if pool.untuned:
        device = pool.device
        extras["cross"] = {"arch": device.arch, "compute_units": device.compute_units, "xcc": device.xcc}
    if debug := settings.debug.chosen:
        extras["debug"] = debug
    return extras


def _sought(model: ModelEntry) -> SoughtBatch | None:
    return {"metric": model.sweep.metric, "max_latency": model.sweep.max_latency} if model.sweep else None


def _tuning(given: Tuning, compiler: Compiler, kind: DeviceKind, choice: Choice, mode: str) -> KeyedTuning:
    """Return the tuning of a spec. A program that runs on any card of an architecture is tuned for none."""
    if mode not in kind.tuning or choice.any_device:
        return {"mode": OFF}
    enforced = given.miopen_find_enforce if compiler.find_enforce else None
    return {"mode": mode, "miopen_find_enforce": enforced} if enforced else {"mode": mode}


def _untuned(given: Tuning, kind: DeviceKind, choice: Choice) -> Iterator[str]:
    """Say which tuning the manifest asks for and the target does not have."""
    has = "shares no tuning: it is no one device" if choice.any_device else f"has {' and '.join(kind.tuning) or 'none'}"
    for name, mode in (("tuning", given.mode), ("background", given.background)):
        if mode != OFF and (choice.any_device or mode not in kind.tuning):
            yield f"`{name}: {mode}` does nothing, {choice.text} {has}"


def _doubts(model: FrozenModel, compiler: Compiler) -> Iterator[str]:
    """Say why a compiler may refuse the model; not every one does."""
    for doubt in model.doubts:
        yield f"{doubt}; if {compiler.name} does not take it all the same, the cell fails"


def _reference(verify: Verify, model: FrozenModel) -> str:
    """Return the reference that computes the expected outputs; ONNX Runtime cannot run TensorFlow graphs."""
    return "migraphx" if model.format == "tf" and "reference" not in verify.model_fields_set else verify.reference


def _only(given: Mapping[str, OptionValue], known: Mapping[str, object]) -> dict[str, OptionValue]:
    return {name: value for name, value in given.items() if name in known}
