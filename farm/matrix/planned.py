"""What is submitted, and what is planned for it: the documents of a submission, of `plan.json` and of a shown plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

from farm.jobs.estimate import EstimateDocument, OutlookDocument
from farm.jobs.facts import ArtifactFacts, TurnsFacts
from farm.jobs.order import ChosenGates, ConversionRecord, WorkOrder
from farm.jobs.rows import PlannedBuild
from farm.jobs.state import AttemptLimits
from farm.models.data import FrozenDataDocument
from farm.models.model import FrozenModelDocument
from farm.spec import PlainSize


class BlobSize(TypedDict):
    """A blob, and its bytes."""

    digest: str
    size: int


class SubmissionDocument(TypedDict):
    """A manifest with everything that it names frozen to digests; `files` are those of environment variables."""

    build_id: str
    manifest: str
    file: str
    models: Mapping[str, FrozenModelDocument]
    data: Mapping[str, FrozenDataDocument]
    files: Mapping[str, BlobSize]
    labels: Mapping[str, str]
    gates: NotRequired[ChosenGates | None]


class Values(TypedDict, total=False):
    """A program's numbers: seconds, samples a second, bytes. A number that was not measured is None.

    In a cell's history, `turns` is how it compared with its baseline.
    """

    latency: float | None
    throughput: float | None
    size: int | None
    memory: int | None
    load: float | None
    compile_time: float | None
    tuning_time: float | None
    node: str
    driver: str
    shared: bool
    turns: TurnsFacts


class Baseline(TypedDict):
    """What a cell is compared with, as it was found when the build was planned.

    `ref` is the tag that named it, `key` its cache key (empty if the tag has no such cell). `by_node` has the newest
    numbers of this cell, made by the baseline's toolchain, on other nodes. `runs_as` as in `ArtifactFacts`. Of a hit,
    `turns` is how it compared when it was last measured, and `unmeasured` why this build does not measure it.
    """

    ref: str
    key: str
    toolchain: str
    values: Values
    by_node: Mapping[str, Values]
    runs_as: NotRequired[str]
    turns: NotRequired[TurnsFacts]
    unmeasured: NotRequired[str]


class AskedGates(TypedDict, total=False):
    """Gates that are asked for: limits as shares of the baseline's number, budgets in base units."""

    baseline: str
    limits: Mapping[str, float]
    budgets: Mapping[str, float]
    undecided: Literal["warn", "fail"]
    hits: Literal["measure", "list"]


class PastState(TypedDict):
    """How a cell ended in the manifest's newest build that had it."""

    state: str
    kind: str
    build: str


class CellGates(AskedGates):
    """What a build judges a cell by: the tolerance of each output (`*`: of all others), limits, budgets."""

    tolerance: Mapping[str, float]
    weak: str
    on_fail: str
    unverifiable: str
    fallback: NotRequired[str]


class ExpectedFailure(TypedDict):
    """The manifest's entry for a cell that must fail; `until` is its last day, as an ISO date.

    With `by` it is no entry of the manifest: somebody acknowledged the failure, and the cell may pass, too.
    """

    kind: str
    reason: str
    until: str | None
    link: NotRequired[str]
    by: NotRequired[str]


class SoughtBatch(TypedDict):
    """What a sweep seeks among cells of different batches; `max_latency` is in seconds."""

    metric: Literal["throughput", "latency"]
    max_latency: float | None


class _PlannedFields(TypedDict):
    identifier: str
    model: str
    target: str
    precision: str
    shape: str
    sizes: Mapping[str, PlainSize]
    key: str
    pool: str
    emulated: Sequence[str]
    state: str
    reason: str
    live_workers: int
    expected_seconds: float | None
    estimate: EstimateDocument | None
    line: int
    warnings: Sequence[str]


class ShownCell(_PlannedFields):
    """A planned cell as people and scripts see it: `state` is hit, miss or joined."""

    expected: bool


class CellPlan(_PlannedFields):
    """A cell of `plan.json`; `order` is None if nothing is left to compile, `facts` are those of a hit."""

    order: WorkOrder | None
    limits: AttemptLimits
    priority: int
    gates: CellGates
    expected: ExpectedFailure | None
    sweep: SoughtBatch | None
    facts: ArtifactFacts | None
    before: NotRequired[PastState | None]
    baseline: NotRequired[Baseline | None]


class ShadowedCell(TypedDict):
    """The program that a shadow build's cell is compared with, and the toolchain `under` which it is made again.

    `error` is the largest relative error of an output.
    """

    key: str
    toolchain: str
    under: str
    error: float | None


class NotShadowed(TypedDict):
    """A cell of the ref that a shadow build has not, and why; `breaks`: the toolchain cannot compile it."""

    identifier: str
    text: str
    breaks: bool


class ShadowNotes(TypedDict):
    """What a shadow build is the shadow of: a ref with its generation, and the programs it named, by identifier."""

    ref: str
    generation: int
    toolchain: str
    before: Mapping[str, ShadowedCell]
    left_out: Sequence[NotShadowed]


class PlanDocument(TypedDict):
    """`plan.json`: a build with its cells as they were planned."""

    schema: int
    build: PlannedBuild
    cells: list[CellPlan]
    shadow: NotRequired[ShadowNotes]


class ShownPlan(TypedDict):
    """What a submission or a retry would do."""

    build_id: str
    digest: NotRequired[str]
    name: str
    cells: Sequence[ShownCell | CellPlan]
    outlook: OutlookDocument
    warnings: list[str]
    conversions: NotRequired[Mapping[str, ConversionRecord]]
    missing_blobs: list[str]
