"""Cells: each combination of a manifest with its fully resolved spec, if it is possible. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from farm.errors import ManifestError, Problem, suggestion
from farm.jobs.state import AttemptLimits, LaterTuning, OrderedModel, OrderExtras, WorkOrder, job_key
from farm.manifest.entries import Budgets, CellSettings, IncludeEntry, Manifest, OverrideEntry, Tuning, Verify
from farm.manifest.values import Entry
from farm.matrix.combinations import Combination, Combinations, Complaints, Lookup, Path, Recipe, Shape
from farm.models.frozen import FrozenData, FrozenModel, lowered
from farm.models.shapes import Input, Span, plain_size
from farm.spec import (
    SCHEMA,
    FileReference,
    KeyedModel,
    KeyedTuning,
    KeyedVerification,
    OptionValue,
    PlainSize,
    SpecDocument,
    canonical_fields,
    key_of_fields,
)
from farm.targets.compilers import OFF, TUNING_MODES, Compiler, DeviceKind, default_tolerance
from farm.targets.pools import Choice, NoPool, Pool, Target, choose_pools

if TYPE_CHECKING:
    from farm.matrix.planned import CellGates, ExpectedFailure, SoughtBatch
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

    `spec` lacks `inputs` and `batch`, `texts` has the canonical JSON of its other fields (`canonical_fields`).
    """

    pools: list[str]
    model: OrderedModel
    order: OrderExtras
    emulated: tuple[str, ...]
    warnings: tuple[str, ...]
    spec: SpecDocument
    texts: Mapping[str, str]


def resolve(
    lookup: Lookup, known: PoolChoice | None, combination: Combination, limits: AttemptLimits
) -> Resolved | None:
    """Resolve a combination; None, with a complaint, if its device does not have the precision.

    `limits` are for what the manifest does not limit.
    """
    kind = kind_of(lookup, combination)
    if kind is None:
        return None
    manifest, compiler, choice = lookup.matrix.manifest, combination.compiler, combination.choice
    if model := lookup.model(combination):
        check_model(lookup, combination, model)
    settings = settings_of(manifest, combination)
    recipe = lookup.recipe(combination, kind, settings)
    modes = settings.tuning.mode, settings.tuning.background
    tunings = [_tuning(settings.tuning, compiler, kind, choice, mode) for mode in modes]
    bound = [compiler.family_bound(recipe.options, tuning["mode"]) for tuning in tunings]
    pools = known.serving(combination, family_bound=any(bound)) if known else []
    for pool in pools[:1]:
        check_pool(lookup, combination, pool, settings, {**recipe.options, **recipe.quantization})
    check_background(lookup, combination, settings)
    work = _work(combination, settings, recipe, pools, model, tunings, bound) if pools and model else None
    return Resolved(
        data=recipe.data,
        limits={
            "time": limits["time"] if settings.limits.time is None else settings.limits.time,
            "memory": limits["memory"] if settings.limits.memory is None else settings.limits.memory,
        },
        priority=settings.priority,
        gates=_gates(lookup, combination, kind, settings, model),
        line=manifest.written.place(combination.places["cell"])[0],
        work=work and work._replace(warnings=(*_untuned(settings.tuning, kind, choice), *work.warnings)),
    )


def _gates(
    lookup: Lookup, combination: Combination, kind: DeviceKind, settings: CellSettings, model: FrozenModel | None
) -> CellGates:
    """Return the gates of the build: the tolerance of each output (`*`: of all others) and its consequences.

    Limits and budgets are added if there are any.
    """
    verify = settings.verify
    outputs = [tensor["name"] for tensor in model["outputs"]] if model else []
    own = combination.model.verify.tolerance.values()
    for pattern in dict.fromkeys(pattern for values in own for pattern in values):
        if model and pattern != "*" and not any(fnmatchcase(name, pattern) for name in outputs):
            message = f"model `{combination.model.name}` has no output `{pattern}`"
            place: Path = ("models", combination.index, "verify", "tolerance")
            lookup.complain(message, place, suggestion(pattern, outputs))
    told = tolerances(verify, combination.precision, outputs)
    weak, on_fail, unknown = verify.weak, verify.on_fail, verify.unverifiable
    gates: CellGates = {"tolerance": told, "weak": weak, "on_fail": on_fail, "unverifiable": unknown}
    if kind.maker:
        gates["fallback"] = verify.fallback
    asked, budgets = settings.gates, settings.budgets.model_dump(exclude_none=True)
    limits = {name: limit for name in Budgets.model_fields if (limit := getattr(asked, name)) is not None}
    if limits:
        gates.update({"limits": limits, "baseline": asked.baseline, "hits": asked.hits})
    if budgets:
        gates["budgets"] = budgets
    if limits or budgets:
        gates["undecided"] = asked.undecided
    return gates


def _work(
    combination: Combination,
    settings: CellSettings,
    recipe: Recipe,
    pools: list[Pool],
    model: FrozenModel,
    tunings: Sequence[KeyedTuning],
    bound: Sequence[bool],
) -> Work:
    """Return the work of a combination with what it is tuned by, now and later, and whether that binds to a CPU."""
    compiler, choice, pool, (tuning, later) = combination.compiler, combination.choice, pools[0], tunings
    device, device_later = (choice.device(pool, family_bound=each).as_dict() for each in bound)
    keyed = KeyedModel(digest=model["digest"], format=model["format"])
    names = [output["name"] for output in model["outputs"]]
    ordered = OrderedModel(format=model["format"], files=list(model["files"]), names=names)
    if combination.model.outputs:
        ordered["outputs"] = keyed["outputs"] = list(combination.model.output_nodes)
    if conversion := model.get("conversion"):
        ordered["conversion"] = conversion
    extras = OrderExtras()  # None of them is part of the key.
    if emulated := compiler.emulates(choice.served.device, combination.precision):
        extras["emulated"] = list(emulated)
    if tuning["mode"] != OFF and settings.tuning.budget:
        extras["budget"] = settings.tuning.budget
    if later["mode"] != OFF:
        extras["background"] = LaterTuning(tuning=later, device=device_later)
    if recipe.env_files:
        extras["env"] = recipe.env_files
    if pool.untuned:
        extras["cross"] = pool.device.as_dict()
    if debug := settings.debug.chosen:
        extras["debug"] = debug
    libraries = [name for name in compiler.libraries_of(combination.precision) if name in pool.libraries]
    verify, compared = settings.verify, None
    if verify.mode != "off":
        # ONNX Runtime cannot run TensorFlow graphs.
        is_foreign = model["format"] == "tf" and "reference" not in verify.model_fields_set
        reference = "migraphx" if is_foreign else verify.reference
        compared = KeyedVerification(samples=recipe.samples, reference=reference)
    spec: SpecDocument = {
        "model": keyed,
        "compiler": {
            "name": compiler.name,
            "recipe": pool.recipe,
            "libraries": {name: pool.libraries[name] for name in libraries},
        },
        "device": device,
        "toolchain": pool.toolchain,
        "precision": combination.precision,
        "inputs": {},
        "batch": None,
        "options": recipe.options,
        "tuning": tuning,
        "env": recipe.env,
        "calibration": recipe.calibration,
        "quantization": recipe.quantization,
        "verification": compared,
        "salt": settings.salt,
        "schema": SCHEMA,
    }
    return Work(
        pools=[each.name for each in pools],
        model=ordered,
        order=extras,
        emulated=emulated,
        warnings=tuple(
            f"{doubt}; if {compiler.name} does not take it all the same, the cell fails"
            for doubt in model.get("doubts", ())
        ),
        spec=spec,
        texts=canonical_fields({name: value for name, value in spec.items() if name not in ("inputs", "batch")}),
    )


def _tuning(given: Tuning, compiler: Compiler, kind: DeviceKind, choice: Choice, mode: str) -> KeyedTuning:
    """Return the tuning of a spec. A program that runs on any card of an architecture is tuned for none."""
    if mode not in kind.tuning or choice.any_device:
        return {"mode": OFF}
    enforced = given.miopen_find_enforce if compiler.find_enforce else None
    return {"mode": mode, "miopen_find_enforce": enforced} if enforced else {"mode": mode}


def _untuned(given: Tuning, kind: DeviceKind, choice: Choice) -> Iterator[str]:
    has = "shares no tuning: it is any device" if choice.any_device else f"has {' and '.join(kind.tuning) or 'none'}"
    for name, mode in (("tuning", given.mode), ("background", given.background)):
        if mode != OFF and (choice.any_device or mode not in kind.tuning):
            yield f"`{name}: {mode}` does nothing, {choice.text} {has}"


DEFAULT_LIMITS = AttemptLimits(time=14_400.0, memory=0)
"""Limits of an attempt if the manifest sets none: seconds, bytes (0 = no limit)."""


class Cell(NamedTuple):
    """One compile that a build asks for.

    `target` is spelt as the user chose it (`migraphx/mi300x`), `shape` is the shape label and `sizes` are those of the
    named dimensions, `job` is what cells that share a job have in common (`farm.jobs.state.job_key`), `order` is what a
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

    @property
    def spec(self) -> SpecDocument:
        """What its key is made of."""
        return self.order["spec"]


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
    lookup = Lookup(matrix, models, data, files or {}, is_all=True)
    cells = list(_cells(lookup, PoolChoice(pools, known or pools, slots or {}, lookup.complaints), limits))
    if lookup.complaints.problems:
        raise ManifestError(lookup.complaints.found())
    return cells


def check(matrix: Combinations, models: Mapping[str, FrozenModel], data: Mapping[str, FrozenData]) -> list[Problem]:
    """Return all problems that show without knowing any pool; models and data that are not given are skipped."""
    lookup = Lookup(matrix, models, data, {}, is_all=False)
    list(_cells(lookup, None, DEFAULT_LIMITS))
    return lookup.complaints.found()


def _cells(lookup: Lookup, pools: PoolChoice | None, limits: AttemptLimits) -> Iterator[Cell]:
    """Yield the cells that are possible; combinations that differ in their shape alone are resolved once."""
    known: dict[tuple[object, ...], Resolved | None] = {}
    for combination in lookup.matrix.combinations:
        alike = combination.without_shape
        if alike not in known:
            known[alike] = resolve(lookup, pools, combination, limits)
        resolved, shape = known[alike], lookup.at(combination)
        if resolved and shape and (cell := _cell(lookup, pools, combination, resolved, shape)):
            yield cell


def _cell(
    lookup: Lookup, pools: PoolChoice | None, combination: Combination, resolved: Resolved, shape: Shape
) -> Cell | None:
    """Return the cell of a shape; None if its inputs do not fit, with a complaint, or if no pools are known."""
    work, choice = resolved.work, combination.choice
    if not all(lookup.fits(combination, use, frozen, shape) for use, frozen in resolved.data.items()):
        return None
    if work is None or pools is None or (warnings := _warnings(lookup, combination, work, shape)) is None:
        return None
    identifier = combination.identifier
    pool = pools.spread(identifier, work.pools)
    files: dict[str, FileReference] = {
        use: {"path": f"{use}.npz", "digest": frozen["digest"], "size": frozen["size"]}
        for use, frozen in resolved.data.items()
    }
    order: WorkOrder = {
        "identifier": identifier,
        "pool": pool,
        "target": str(choice.served),
        "spec": {**work.spec, "inputs": shape.inputs, "batch": shape.batch},
        "model": work.model,
        "calibration": files.get("calibration"),
        "samples": files.get("samples"),
        **work.order,
    }
    key, sweep = key_of_fields({**work.texts, **shape.texts}), combination.model.sweep
    sought: SoughtBatch | None = None
    if sweep and not combination.packs:
        sought = {"metric": sweep.metric, "max_latency": sweep.max_latency}
    return Cell(
        identifier=identifier,
        model=combination.model.name,
        target=str(choice.target),
        precision=combination.precision,
        shape=combination.label,
        sizes={name: plain_size(size) for name, size in combination.point.sizes.items()},
        key=key,
        job=job_key(order, key),
        pool=pool,
        order=order,
        emulated=work.emulated,
        limits=resolved.limits,
        priority=resolved.priority,
        gates=resolved.gates,
        expected=lookup.matrix.expected.get(identifier),
        sweep=sought,
        line=resolved.line,
        warnings=warnings,
    )


def _warnings(lookup: Lookup, combination: Combination, work: Work, shape: Shape) -> tuple[str, ...] | None:
    """Return what to know before a cell is compiled; None, with a complaint, if its shape is not possible."""
    if combination.packs:
        check_packs(lookup, combination, work.model["format"])
    warnings, asked = work.warnings, combination.asked_packs(lookup.matrix.manifest)
    # Programs of ONNX Runtime's own need no provider; only its cache has none of them.
    lost = [each for each in asked if combination.compiler.pack_options or each == "onnxruntime-cache"]
    if lost and not combination.compiler.packable(combination.choice.served.device):
        warnings = (*warnings, f"no pack for {', '.join(lost)}: only programs of MIGraphX for AMD GPUs fit there")
    dynamic = [name for name, size in combination.point.sizes.items() if isinstance(size, Span)]
    if not dynamic:
        return warnings
    target, inputs = combination.choice.served, list(shape.tensors.values())
    if refused := refusal(target, work.model["format"], inputs, work.spec["env"]):
        message = f"model `{combination.model.name}` at {combination.label} on {target}: {refused}"
        lookup.complain(message, lookup.place_of_size(combination, dynamic[0]))
        return None
    operators = lookup.models[combination.model.name].get("operators", {})
    return (*warnings, *price(target, combination.precision, inputs, operators))


def kind_of(lookup: Lookup, combination: Combination) -> DeviceKind | None:
    """Return the kind of a combination's device; None, with a complaint, if it does not have the precision."""
    choice, precision = combination.choice, combination.precision
    kind = combination.compiler.device(choice.served.device)
    if precision in kind.precisions:
        return kind
    has = ", ".join(kind.precisions) or "none"
    hint = f"it has {has}; or `exclude: [{{target: {choice.text}, precision: {precision}}}]`"
    lookup.complain(f"{choice.target} has no precision {precision}", combination.places["precision"], hint)
    return None


def check_model(lookup: Lookup, combination: Combination, model: FrozenModel) -> None:
    """Complain of a model that the compiler does not read, or does not have in this precision."""
    name, place, compiler = combination.model.name, combination.places["precision"], combination.compiler
    if model["format"] not in compiler.formats:
        message = f"{compiler.name} does not read {model['format']} files (model `{name}`)"
        lookup.complain(message, combination.places["target"], f"it reads {', '.join(compiler.formats)}")
    if compiler.packs(combination.precision) and model["format"] != "onnx":
        message = f"{combination.precision} of model `{name}`: int4 needs an ONNX model"
        lookup.complain(message, place, "convert it to ONNX, or leave the precision out")
    if combination.precision == "fp32" and lowered(model):
        hint = f"write `precisions: [native]` for model `{name}`: it is compiled as it was exported"
        lookup.complain(f"fp32 for model `{name}`, which is lower already ({lowered(model)})", place, hint)


def check_background(lookup: Lookup, combination: Combination, settings: CellSettings) -> None:
    """Complain of background tuning that is not more thorough than what goes before it."""
    mode, background = settings.tuning.mode, settings.tuning.background
    if background != OFF and TUNING_MODES.index(background) <= TUNING_MODES.index(mode):
        message = f"`background: {background}` finds nothing that `mode: {mode}` does not"
        hint = f"more thorough is: {', '.join(TUNING_MODES[TUNING_MODES.index(mode) + 1 :]) or 'nothing'}"
        lookup.complain(f"{message} (model `{combination.model.name}`)", combination.places["cell"], hint)


def check_pool(
    lookup: Lookup, combination: Combination, pool: Pool, settings: CellSettings, options: Mapping[str, OptionValue]
) -> None:
    """Complain of what the installed compiler or the card lacks, and of work that needs a GPU which nobody has."""
    compiler, text = combination.compiler, combination.choice.text
    if old := compiler.too_old(pool.target.device, pool.device.arch, combination.precision):
        hint = "`exclude` the cell, or choose another card"
        lookup.complain(f"{old} ({text})", combination.places["precision"], hint)
    for feature, what in compiler.lacks(pool.features, combination.precision, options).items():
        since = compiler.features.get(feature, "another release")
        message = f"toolchain_mismatch: {pool.toolchain} has no {feature}, which {what} needs"
        hint = f"{since} and newer have it; `exclude` the cell, or choose by `toolchains`"
        place = combination.places["precision" if what.startswith("precision") else "target"]
        lookup.complain(f"{message} ({text})", place, hint)
    if not pool.untuned:
        return
    asked = [f"tuning {mode}" for mode in (settings.tuning.mode, settings.tuning.background) if mode != OFF]
    asked += ["verification"] * (settings.verify.mode != "off")
    if asked:  # Nobody may believe that it was done.
        message = f"no worker has a `{text}`, those that compile for it cannot do this: {', '.join(asked)}"
        hint = "write `tuning: {mode: off}` and `verify: off` for it, or start `farm worker` on a node with one"
        lookup.complain(message, combination.places["target"], hint)


def check_packs(lookup: Lookup, combination: Combination, format: str) -> None:
    """Complain of packs that no program of the cell can go into."""
    sizes = [name for name, size in combination.point.sizes.items() if isinstance(size, Span)]
    reading = [layout for layout in combination.packs if layout != "onnxruntime"]
    hint = f"write `packs: []` for model `{combination.model.name}`"
    if sizes:
        message = f"`packs` of model `{combination.model.name}`: ONNX Runtime's provider takes fixed sizes only"
        place = lookup.place_of_size(combination, sizes[0])
        lookup.complain(f"{message}, and `{sizes[0]}` is a range", place, f"{hint}, or list the sizes")
    elif format != "onnx" and reading:
        message = f"`packs: [{reading[0]}]` of model `{combination.model.name}`: ONNX Runtime does not read {format}"
        lookup.complain(message, ("models", combination.index, "name"), f"{hint}, or `packs: [onnxruntime]`")


# --- pools ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The pools to plan for, and which of them serve a combination.

    It chooses of `pools`, or of all that are `known` if the manifest names a toolchain; `slots` are by pool.
    """

    pools: Sequence[Pool]
    known: Sequence[Pool]
    slots: Mapping[str, int]
    complaints: Complaints
    _chosen: dict[tuple[object, ...], list[Pool]] = field(default_factory=dict, init=False)

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
                    in_use=self.pools,
                    known=self.known,
                    family_bound=family_bound,
                    libraries=libraries,
                )
            except NoPool as error:
                place = combination.places["toolchain" if toolchain else "target"]
                self.complaints.complain(error.message, place, error.hint)
        return self._chosen[asked]

    def spread(self, identifier: str, pools: Sequence[str]) -> str:
        """Return the pool for a cell, of those that serve it alike: each has a share by slots, and keeps its cells.

        One that takes no jobs now gets none, unless none of them does: nobody may come to take them.
        """

        def score(pool: str) -> float:
            chance = int(hashlib.sha256(f"{pool} {identifier}".encode()).hexdigest(), 16) / 16**64
            return -math.log(chance) / (self.slots.get(pool) or 1)

        if len(pools) == 1:
            return pools[0]
        return min([pool for pool in pools if self.slots.get(pool)] or pools, key=score)


# --- settings ----------------------------------------------------------------------------------------------------


def settings_of(manifest: Manifest, combination: Combination) -> CellSettings:
    """Return the settings of a cell: the manifest's, with its model's, those of `include` and `overrides` on top."""
    names = CellSettings.model_fields
    entries: Mapping[str, Sequence[IncludeEntry | OverrideEntry]]
    entries = {"include": manifest.include, "overrides": manifest.overrides}
    layers = [manifest, combination.model, *(entries[name][position] for name, position in combination.extras)]
    given = [{name: getattr(layer, name) for name in names if name in layer.model_fields_set} for layer in layers]
    return CellSettings.model_construct(**_merged(given))


def _merged(mappings: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Return mappings laid over each other: of what several name, the last one counts, with what is only in others."""
    names = dict.fromkeys(name for each in mappings for name in each)
    return {name: _laid_over([each[name] for each in mappings if name in each]) for name in names}


def _laid_over(values: Sequence[Any]) -> Any:
    last = values[-1]
    if isinstance(last, Entry):
        entries = [value for value in values if isinstance(value, Entry)]
        given = [{name: getattr(entry, name) for name in entry.model_fields_set} for entry in entries]
        return type(last).model_construct(**_merged(given))
    return _merged([value for value in values if isinstance(value, dict)]) if isinstance(last, dict) else last


def tolerances(verify: Verify, precision: str, outputs: Sequence[str]) -> dict[str, float]:
    """Return the tolerance of each output that has its own, and of all others (`*`).

    A precision that is not named has the default. A pair that is not named has the larger tolerance of its halves.
    """
    halves = [precision] if precision in verify.tolerance else precision.split("-")
    said = verify.tolerance
    given = [{"*": default_tolerance(half), **said.get(half, said.get("*", {}))} for half in halves]
    found = {"*": max(half["*"] for half in given)}
    for name in outputs:
        own = [
            [number for pattern, number in half.items() if pattern != "*" and fnmatchcase(name, pattern)]
            for half in given
        ]
        if any(own):
            found[name] = max(max(numbers, default=half["*"]) for numbers, half in zip(own, given, strict=True))
    return found


# --- dynamic dimensions ------------------------------------------------------------------------------------------

FULL_DYNAMIC = "MIGRAPHX_ENABLE_FULL_DYNAMIC"
REFUSED = frozenset({"HardSigmoid", "HardSwish", "LayerNormalization", "Softplus"})
"""ONNX operators for which MIGraphX's parser refuses a dynamic shape on every target (measured, 2.16)."""

REFUSED_ON_CPU = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "Div", "Elu", "Erf", "Exp",
    "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "InstanceNormalization", "LogSoftmax", "MatMul", "Max",
    "MaxPool", "Mul", "Pow", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Softmax", "Sqrt", "Tanh",
})  # fmt: skip
"""Operators for which only its cpu target refuses one (measured, 2.16): most operators that oneDNN runs."""

_TRUE = frozenset({"1", "enable", "enabled", "yes", "true"})


def refusal(target: Target, format: str, inputs: Iterable[Input], env: Mapping[str, str]) -> str:
    """Return why a target cannot have a program of these inputs, and what to do; empty if it can."""
    spans = [_spans(tensor) for tensor in inputs]
    if target.compiler != "migraphx" or not any(spans):
        return ""
    if format == "tf":
        return "MIGraphX supports no dynamic dimensions in TensorFlow graphs; build each size separately"
    if target.device.startswith("gfx") and _several(spans) and env.get(FULL_DYNAMIC, "") not in _TRUE:
        return (
            "MIGraphX compiles for one dynamic dimension on a GPU, these inputs have several; build the others size by "
            f"size, or set {FULL_DYNAMIC}, which compiles kernels when they run"
        )
    return ""


def price(target: Target, precision: str, inputs: Iterable[Input], operators: Iterable[str]) -> list[str]:
    """Return warnings about a dynamic program before it is compiled; `operators` are the model's."""
    spans = [_spans(tensor) for tensor in inputs]
    if target.compiler != "migraphx" or not any(spans):
        return []
    on_cpu, said = target.device == "cpu", list[str]()
    if found := sorted((REFUSED | REFUSED_ON_CPU if on_cpu else REFUSED) & set(operators)):
        names = ", ".join(found[:5]) + (f" and {len(found) - 5} more operators" if len(found) > 5 else "")
        where = "MIGraphX's cpu target" if on_cpu else "MIGraphX"
        # An operator whose shape does not depend on the range is accepted; this does not check which depend on it.
        what = "expect `compiler_error` if they depend on it, or build each size separately"
        said.append(f"{where} refuses a range in {names}, which the model has: {what}")
    if target.device == "ref" and precision.startswith(("int8", "fp8")):
        said.append("MIGraphX's ref target does not quantize programs with dynamic dimensions")
    elif not on_cpu and target.device != "ref" and _several(spans):
        why = "MIGraphX compiles kernels when the program runs, not before, and tunes none"
        said.append(f"several dynamic dimensions: {why}")
    elif not on_cpu and target.device != "ref":
        (span,) = {span for found in spans for span in found}
        sizes = f"one for each size from {span.low} to {span.high}: compile time and program size multiply"
        said.append(f"{span.high - span.low + 1} submodules, {sizes}")
    return said


def _spans(tensor: Input) -> list[Span]:
    return [size for size in tensor.shape if isinstance(size, Span)]


def _several(spans: Iterable[list[Span]]) -> bool:
    """Whether MIGraphX sees several dynamic dimensions: those with equal bounds and optimals count as one."""
    found = list(spans)
    return any(len(each) > 1 for each in found) or len({span for each in found for span in each}) > 1
