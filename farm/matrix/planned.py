"""What is submitted, and what is planned for it: the documents of a submission, of `plan.json` and of a shown plan."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import Annotated, Generic, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict, TypeVar

from farm.jobs.estimate import Estimate, OutlookDocument
from farm.jobs.facts import ArtifactFacts, TurnsFacts
from farm.jobs.rows import PlannedBuild
from farm.jobs.state import AttemptLimits, WorkOrder
from farm.models.frozen import FrozenData, FrozenModel, is_what_it_says
from farm.runner.protocol import Default
from farm.spec import PlainSize
from farm.wire.asked import BlobSize, BuildId, ChosenGates, Labels, Patterns
from farm.wire.program import ConversionRecord


@with_config(ConfigDict(extra="forbid"))
class FrozenManifest(TypedDict):
    """A manifest with everything that it names frozen to digests.

    Models in buckets (`s3:`) are not in a stored one: each build reads them.
    """

    manifest: Annotated[str, Field(max_length=2**20, description="the manifest's YAML text")]
    file: Annotated[str, Field(max_length=1024, description="the manifest's name in messages", default="manifest.yaml")]
    models: Mapping[str, Annotated[FrozenModel, AfterValidator(is_what_it_says)]]
    data: Annotated[Mapping[str, FrozenData], Field(default={})]
    files: Annotated[Mapping[str, BlobSize], Field(description="files of environment variables, by path", default={})]
    labels: Annotated[Labels, Field(default={})]
    gates: Annotated[NotRequired[ChosenGates | None], Field(default=None)]


class SubmissionDocument(FrozenManifest):
    """What a build is made of. Repeating it with the same `build_id` changes nothing.

    `only`: the cells whose identifier fits one of the patterns. `fail_fast`: also if the manifest does not ask for it.
    """

    build_id: BuildId
    only: NotRequired[Patterns]
    fail_fast: NotRequired[bool]


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
    card: str
    cpu: str
    clocks: Mapping[str, float]
    range: Sequence[float | None]
    shared: bool
    turns: TurnsFacts


class Baseline(TypedDict):
    """What a cell is compared with, as it was found when the build was planned.

    `ref` is the tag that named it, `key` its cache key (empty if the tag has no such cell). `by_node` has the
    numbers of this cell that stand in for it on other nodes (`farm.builds.past_builds`); `unread` says how many reports
    were read, if there may be more of them. `runs_as` as in `ArtifactFacts`. Of a hit, `turns` is how it compared when
    it was last measured, and `unmeasured` why this build does not measure it.
    """

    ref: str
    key: str
    toolchain: str
    values: Values
    by_node: Mapping[str, Values]
    runs_as: NotRequired[str]
    turns: NotRequired[TurnsFacts]
    unmeasured: NotRequired[str]
    unread: NotRequired[str]
    absent: NotRequired[str]


class AskedGates(TypedDict, total=False):
    """Gates that are asked for: limits as shares of the baseline's number, budgets in base units."""

    baseline: str
    limits: Mapping[str, float]
    budgets: Mapping[str, float]
    undecided: Literal["warn", "fail"]
    hits: Literal["measure", "list"]


UNKNOWN = "unknown"  # State of a cell in an earlier build whose report is not read yet.


class PastState(TypedDict):
    """How a cell ended in the manifest's newest build that had it.

    `state` is `unknown` if not all reports were read when the build was planned; then `kind` says how many were.
    `rules` are those that refused it (`farm.results.gates`), as JSON.
    """

    state: str
    kind: str
    build: str
    rules: NotRequired[str]


class CellGates(AskedGates):
    """What a build judges a cell by: the tolerance of each output (`*`: of all others), limits, budgets."""

    tolerance: Mapping[str, float]
    weak: str
    on_fail: str
    unverifiable: str
    fallback: NotRequired[str]


class ExpectedFailure(TypedDict):
    """The manifest's entry for a cell that must fail; `until` is its last day, as an ISO date.

    With `by` it is not an entry of the manifest: somebody acknowledged the failure, and the cell may pass, too.
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
    emulated: list[str]
    state: str
    reason: str
    live_workers: int
    expected_seconds: float | None
    estimate: Estimate | None
    line: int
    warnings: list[str]


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


Cell = TypeVar("Cell", bound=ShownCell | CellPlan, default=ShownCell | CellPlan)


class ShownPlan(TypedDict, Generic[Cell]):
    """What a submission or a retry would do; a submission's `kept` accepts it (`BuildService.submit_planned`)."""

    build_id: str
    kept: NotRequired[
        Annotated[str, Field(description="what accepts the build: POST /v1/builds/{build_id}?kept=…"), Default("")]
    ]
    digest: NotRequired[
        Annotated[str, Field(description="SHA-256 of the cells' identifiers, cache keys and pools"), Default("")]
    ]
    name: str
    cells: Sequence[Cell]
    outlook: OutlookDocument
    warnings: list[str]
    conversions: NotRequired[Annotated[Mapping[str, ConversionRecord], Default({})]]
    missing_blobs: list[str]
