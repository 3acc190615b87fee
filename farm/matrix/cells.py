"""Cells: each combination of a manifest with its fully resolved spec, if it is possible. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from farm.errors import ManifestError, Problem, suggestion
from farm.jobs.order import LaterTuning, OrderedModel, OrderExtras, WorkOrder, job_key
from farm.jobs.state import AttemptLimits
from farm.manifest.entries import ModelEntry, Tuning, Verify
from farm.matrix.checks import check_background, check_model, check_pool, kind_of, price, refusal, takes_packs
from farm.matrix.combinations import (
    CellSettings,
    Combination,
    Combinations,
    Complaints,
    Path,
    gates_of,
    settings_of,
    tolerances,
)
from farm.matrix.lookup import Lookup, PoolChoice, Shape
from farm.matrix.planned import CellGates, ExpectedFailure, SoughtBatch
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.models.shapes import Span, plain_size
from farm.spec import (
    CompileSpec,
    DataRecipe,
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
from farm.targets.compilers import OFF, Compiler, DeviceKind
from farm.targets.pools import Choice, Pool
from farm.wire.asked import BlobSize


@dataclass(frozen=True, slots=True)
class Resolved:
    """All of a cell but its shape; cells of many shapes share it. There is no `work` if no pools are known.

    `data` are the blobs that it is calibrated, compared and measured with, by their use.
    """

    data: Mapping[str, FrozenData]
    limits: AttemptLimits
    priority: int
    gates: CellGates
    line: int
    work: Work | None


class Work(NamedTuple):
    """The spec and the work order of a cell but for its shape; any of `pools` gives the same key.

    `document` is the spec as plain JSON, `texts` the canonical JSON of its fields but `inputs` and `batch`.
    """

    pools: list[str]
    model: OrderedModel
    order: OrderExtras
    emulated: tuple[str, ...]
    warnings: tuple[str, ...]
    spec: CompileSpec
    document: SpecDocument
    texts: Mapping[str, str]


class Recipe(NamedTuple):
    """What a spec says about how a model is compiled, calibrated and compared; `data` and `env_files` are the blobs."""

    options: Mapping[str, OptionValue]
    quantization: Mapping[str, OptionValue]
    env: Mapping[str, str]
    env_files: Mapping[str, FileReference]
    calibration: DataRecipe | None
    samples: DataRecipe | None
    data: Mapping[str, FrozenData]


def resolve(lookup: Lookup, combination: Combination, limits: AttemptLimits) -> Resolved | None:
    """Resolve a combination; None, with a complaint, if something is wrong.

    `limits` are for what the manifest does not limit.
    """
    kind = kind_of(lookup, combination)
    if kind is None:
        return None
    before, matrix = len(lookup.complaints.problems), lookup.matrix
    if model := lookup.model(combination):
        check_model(lookup, combination, model)
    settings = settings_of(matrix.manifest, combination)
    recipe = _recipe(lookup, combination, kind, settings)
    pools = _pools(lookup, combination, kind, settings, recipe)
    check_background(lookup, combination, settings)
    if len(lookup.complaints.problems) > before or (lookup.pools and not (pools and model)):
        return None
    return Resolved(
        data=recipe.data,
        limits={
            "time": limits["time"] if settings.limits.time is None else settings.limits.time,
            "memory": limits["memory"] if settings.limits.memory is None else settings.limits.memory,
        },
        priority=settings.priority,
        gates=_gates(lookup, combination, settings, model),
        line=matrix.manifest.written.line(*combination.places["cell"]),
        work=_work(lookup, combination, kind, settings, recipe, pools, model) if pools and model else None,
    )


def _recipe(lookup: Lookup, combination: Combination, kind: DeviceKind, settings: CellSettings) -> Recipe:
    compiler = combination.compiler
    options, quantization = _options(lookup, combination, settings)
    env, env_files = lookup.env(compiler, settings.env)
    ranges = lookup.inputs.ranges(combination)
    calibration, calibration_data = lookup.calibration(combination, compiler, ranges)
    samples, sample_data = lookup.samples(combination, kind, ranges)
    data = {"calibration": calibration_data, "samples": sample_data if settings.verify.mode != "off" else None}
    blobs = {use: found for use, found in data.items() if found}
    return Recipe(options, quantization, env, env_files, calibration, samples, blobs)


def _options(
    lookup: Lookup, combination: Combination, settings: CellSettings
) -> tuple[dict[str, OptionValue], dict[str, OptionValue]]:
    """Return compile and quantization options of one compiler, from those given for all, defaults filled in."""
    compiler, device = combination.compiler, combination.choice.served.device
    given = {**settings.options, **(compiler.pack_options if combination.packs else {})}
    quantizer = compiler.quantization_options(combination.precision, device)
    try:
        return (
            dict(compiler.resolve_options(_only(given, compiler.options_of(device)), device)),
            dict(compiler.resolve_quantization(combination.precision, _only(given, quantizer), device)),
        )
    except ValueError as error:
        place: Path = ("models", combination.index, "options") if combination.model.options else ("options",)
        lookup.complain(str(error), place)
        return {}, {}


def _pools(
    lookup: Lookup, combination: Combination, kind: DeviceKind, settings: CellSettings, recipe: Recipe
) -> list[Pool]:
    """Return the pools that serve a combination, all with the same key; none if that is a problem, or none is known."""
    if not lookup.pools:
        return []
    compiler, choice, tuning = combination.compiler, combination.choice, settings.tuning
    modes = {_tuning(tuning, compiler, kind, choice, mode)["mode"] for mode in (tuning.mode, tuning.background)}
    bound = any(compiler.family_bound(recipe.options, mode) for mode in modes)
    pools = lookup.pools.serving(combination, family_bound=bound)
    for pool in pools[:1]:
        check_pool(lookup, combination, pool, settings, {**recipe.options, **recipe.quantization})
    return pools


def _gates(lookup: Lookup, combination: Combination, settings: CellSettings, model: FrozenModel | None) -> CellGates:
    """Return the gates of the build: the tolerance of each output (`*`: of all others) and its consequences.

    Limits and budgets are added if there are any.
    """
    verify = settings.verify
    outputs = [tensor.name for tensor in model.outputs] if model else []
    own = combination.model.verify.tolerance.values()
    for pattern in dict.fromkeys(pattern for values in own for pattern in values):
        if model and pattern != "*" and not any(fnmatchcase(name, pattern) for name in outputs):
            message = f"model `{combination.model.name}` has no output `{pattern}`"
            place: Path = ("models", combination.index, "verify", "tolerance")
            lookup.complain(message, place, suggestion(pattern, outputs))
    tolerance = tolerances(verify, combination.precision, outputs)
    gates = CellGates(tolerance=tolerance, weak=verify.weak, on_fail=verify.on_fail, unverifiable=verify.unverifiable)
    if combination.choice.served.maker:
        gates["fallback"] = verify.fallback
    return {**gates, **gates_of(settings.gates, settings.budgets)}


def _work(
    lookup: Lookup,
    combination: Combination,
    kind: DeviceKind,
    settings: CellSettings,
    recipe: Recipe,
    pools: list[Pool],
    model: FrozenModel,
) -> Work:
    compiler, choice, pool = combination.compiler, combination.choice, pools[0]

    def device(mode: str) -> Device:
        return choice.device(pool, family_bound=compiler.family_bound(recipe.options, mode))

    tuning = _tuning(settings.tuning, compiler, kind, choice, settings.tuning.mode)
    later = _tuning(settings.tuning, compiler, kind, choice, settings.tuning.background)
    background = LaterTuning(tuning=later, device=device(later["mode"]).as_dict()) if later["mode"] != OFF else None
    keyed, ordered = _models(combination, model)
    emulated = compiler.emulates(choice.served.device, combination.precision)
    libraries = [name for name in compiler.libraries_of(combination.precision) if name in pool.libraries]
    spec = CompileSpec(
        model=keyed,
        compiler={
            "name": compiler.name,
            "recipe": pool.recipe,
            "libraries": {name: pool.libraries[name] for name in libraries},
        },
        device=device(tuning["mode"]),
        toolchain=pool.toolchain,
        precision=combination.precision,
        inputs={},
        options=recipe.options,
        tuning=tuning,
        env=recipe.env,
        calibration=recipe.calibration,
        quantization=recipe.quantization,
        verification=None
        if settings.verify.mode == "off"
        else {"samples": recipe.samples, "reference": _reference(settings.verify, model)},
        salt=settings.salt,
    )
    document, of_shape = spec.as_dict(), ("inputs", "batch")
    return Work(
        pools=[each.name for each in pools],
        model=ordered,
        order=_extras(emulated, settings, tuning["mode"], background, recipe.env_files, pool),
        emulated=emulated,
        warnings=(*_untuned(settings.tuning, kind, choice), *_doubts(model, compiler)),
        spec=spec,
        document=document,
        texts=canonical_fields({name: value for name, value in document.items() if name not in of_shape}),
    )


def _models(combination: Combination, model: FrozenModel) -> tuple[KeyedModel, OrderedModel]:
    """Return a model as the key has it, and as a worker gets it."""
    keyed = KeyedModel(digest=model.digest, format=model.format)
    names = [output.name for output in model.outputs]
    ordered = OrderedModel(format=model.format, files=list(model.files), names=names)
    if combination.model.outputs:
        ordered["outputs"] = keyed["outputs"] = list(combination.model.output_nodes)
    if model.conversion:
        ordered["conversion"] = model.conversion
    return keyed, ordered


def _extras(
    emulated: tuple[str, ...],
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


def _tuning(given: Tuning, compiler: Compiler, kind: DeviceKind, choice: Choice, mode: str) -> KeyedTuning:
    """Return the tuning of a spec. A program that runs on any card of an architecture is tuned for none."""
    if mode not in kind.tuning or choice.any_device:
        return {"mode": OFF}
    enforced = given.miopen_find_enforce if compiler.find_enforce else None
    return {"mode": mode, "miopen_find_enforce": enforced} if enforced else {"mode": mode}


def _untuned(given: Tuning, kind: DeviceKind, choice: Choice) -> Iterator[str]:
    """Say which tuning the manifest asks for and the target does not have."""
    has = "shares no tuning: it is any device" if choice.any_device else f"has {' and '.join(kind.tuning) or 'none'}"
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
    matrix: Combinations,
    models: Mapping[str, FrozenModel],
    data: Mapping[str, FrozenData],
    pools: Sequence[Pool],
    *,
    known: Sequence[Pool] = (),
    slots: Mapping[str, int] | None = None,
    files: Mapping[str, BlobSize] | None = None,
    limits: AttemptLimits = DEFAULT_LIMITS,
) -> list[Cell]:
    """Return the cells of a manifest's matrix, in the order written.

    `models` are the frozen models by name, `data` the frozen data by dataset or by `data_key`, and `files` those that
    environment variables name, by path. `pools` are the pools to plan for, `known` all that there are: `toolchains` may
    choose of them. Cells that several pools serve with the same key are spread over them by `slots`, a number by pool.
    `limits` are for cells for which the manifest sets none.

    Raises ManifestError with every problem found, each with its place.
    """
    complaints = Complaints(matrix.manifest, matrix.problems)
    choice = PoolChoice(matrix, pools, known or pools, slots or {}, complaints)
    cells = list(_cells(Lookup(matrix, models, data, files or {}, choice, complaints), limits))
    if complaints.problems:
        raise ManifestError(complaints.found())
    return cells


def check(matrix: Combinations, models: Mapping[str, FrozenModel], data: Mapping[str, FrozenData]) -> list[Problem]:
    """Return all problems that show without knowing any pool; models and data that are not given are skipped."""
    complaints = Complaints(matrix.manifest, matrix.problems)
    list(_cells(Lookup(matrix, models, data, {}, None, complaints), DEFAULT_LIMITS))
    return complaints.found()


def _cells(lookup: Lookup, limits: AttemptLimits) -> Iterator[Cell]:
    """Yield the cells that are possible; combinations that differ in their shape alone are resolved once."""
    known: dict[tuple[object, ...], Resolved | None] = {}
    for combination in lookup.matrix.combinations:
        alike = combination.without_shape
        if alike not in known:
            known[alike] = resolve(lookup, combination, limits)
        resolved, shape = known[alike], lookup.inputs.at(combination)
        cell = _cell(lookup, combination, resolved, shape) if resolved and shape else None
        if cell:
            yield cell


def _cell(lookup: Lookup, combination: Combination, resolved: Resolved, shape: Shape) -> Cell | None:
    """Return the cell of a shape; None if its inputs do not fit, with a complaint, or if no pools are known."""
    work, choice, pools = resolved.work, combination.choice, lookup.pools
    if not all(lookup.inputs.fits(combination, use, frozen, shape) for use, frozen in resolved.data.items()):
        return None
    if work is None or pools is None or (warnings := _warnings(lookup, combination, work, shape)) is None:
        return None
    identifier = combination.identifier
    pool = pools.spread(identifier, work.pools)
    # The same as spec.as_dict(), from parts that cells share.
    document: SpecDocument = {**work.document, "inputs": shape.inputs, "batch": shape.batch}
    files = {use: frozen.reference(f"{use}.npz") for use, frozen in resolved.data.items()}
    order: WorkOrder = {
        "identifier": identifier,
        "pool": pool,
        "target": str(choice.served),
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
        target=str(choice.target),
        precision=combination.precision,
        shape=combination.label,
        sizes={name: plain_size(size) for name, size in combination.sizes.items()},
        spec=replace(work.spec, inputs=shape.inputs, batch=shape.batch),
        key=key,
        job=job_key(order, key),
        pool=pool,
        order=order,
        emulated=work.emulated,
        limits=resolved.limits,
        priority=resolved.priority,
        gates=resolved.gates,
        expected=lookup.matrix.expected.get(identifier),
        sweep=None if combination.packs else _sought(combination.model),
        line=resolved.line,
        warnings=warnings,
    )


def _warnings(lookup: Lookup, combination: Combination, work: Work, shape: Shape) -> tuple[str, ...] | None:
    """Return what to know before a cell is compiled; None, with a complaint, if its shape is not possible."""
    if combination.packs and not takes_packs(lookup, combination, work.model["format"]):
        return None
    dynamic = [name for name, size in combination.sizes.items() if isinstance(size, Span)]
    if not dynamic:
        return work.warnings
    target, inputs = combination.choice.served, list(shape.tensors.values())
    if refused := refusal(target, work.model["format"], inputs, work.document["env"]):
        message = f"model `{combination.model.name}` at {combination.label} on {target}: {refused}"
        lookup.complain(message, lookup.inputs.place_of_size(combination, dynamic[0]))
        return None
    operators = lookup.models[combination.model.name].operators
    return (*work.warnings, *price(target, combination.precision, inputs, operators))


def _sought(model: ModelEntry) -> SoughtBatch | None:
    return {"metric": model.sweep.metric, "max_latency": model.sweep.max_latency} if model.sweep else None
