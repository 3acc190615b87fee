"""Cells: each combination of a manifest with its fully resolved spec, if it is possible. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from farm.errors import ManifestError, Problem
from farm.jobs.order import WorkOrder, job_key
from farm.jobs.state import AttemptLimits
from farm.manifest.entries import ModelEntry
from farm.matrix.cell_inputs import Shape
from farm.matrix.checks import takes_packs
from farm.matrix.combinations import Combination, Combinations, Complaints
from farm.matrix.dynamic import price, refusal
from farm.matrix.lookup import Lookup, PoolChoice
from farm.matrix.planned import CellGates, ExpectedFailure, SoughtBatch
from farm.matrix.resolving import Resolved, Work, resolve
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.models.shapes import Span, plain_size
from farm.spec import CompileSpec, PlainSize, SpecDocument, key_of_fields
from farm.targets.pools import Pool
from farm.wire.asked import BlobSize

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
