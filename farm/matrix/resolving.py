"""Resolves a combination: all of its cells but their shape, from the manifest's layers and what was looked up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from farm.errors import suggestion
from farm.jobs.order import LaterTuning, OrderedModel, OrderExtras
from farm.jobs.state import AttemptLimits
from farm.manifest.entries import Tuning, Verify
from farm.matrix.checks import check_background, check_model, check_pool, kind_of
from farm.matrix.combinations import Combination, Path
from farm.matrix.layers import CellSettings, gates_of, settings_of, tolerances
from farm.matrix.lookup import Lookup
from farm.matrix.planned import CellGates
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.spec import (
    CompileSpec,
    DataRecipe,
    Device,
    FileReference,
    KeyedModel,
    KeyedTuning,
    OptionValue,
    SpecDocument,
    canonical_fields,
)
from farm.targets.compilers import OFF, Compiler, DeviceKind
from farm.targets.pools import Choice, Pool


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
