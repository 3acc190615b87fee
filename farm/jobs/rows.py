"""Rows: builds, cells, jobs, events, workers and pools, as the store takes them and returns them."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import Annotated, Generic, NotRequired, TypeVar

from typing_extensions import TypedDict

from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import AttemptLimits, WorkOrder
from farm.runner.documents import DeviceDocument
from farm.runner.protocol import Default
from farm.spec import FileReference

Row = TypeVar("Row")

# --- builds -----------------------------------------------------------------------------------------------------------


class VerdictDocument(TypedDict):
    """A build's one verdict: what `farm` exits with, one sentence, and its cells by state."""

    exit_code: int
    text: str
    counts: dict[str, int]


class ConcurrencyGroup(TypedDict):
    """The group that a build is in; `cancels`: it takes the place of older builds."""

    group: str
    cancels: bool


class PlannedBuild(TypedDict):
    """A build as it was accepted. Times are in Unix seconds.

    `cells` is their final number, `plan` the digest of the plan; `follows` is the build whose programs this one tunes
    further, `submitted` when that one was submitted, `retries` the build whose cells this one runs again, `shadows` the
    ref whose cells it compiles under another toolchain, `only` the patterns that chose among its manifest's cells.
    `request` is the digest of what asked for the build: the same build id with another request is refused.
    """

    id: str
    namespace: str
    name: str
    labels: dict[str, str]
    created_by: str
    created_at: float
    cells: int
    hits: int
    max_parallel: int | None
    fail_fast: bool
    warnings: list[str]
    plan: NotRequired[str]
    follows: NotRequired[str]
    submitted: NotRequired[float]
    retries: NotRequired[str | None]
    request: NotRequired[str]
    concurrency: NotRequired[ConcurrencyGroup]
    shadows: NotRequired[str]
    only: NotRequired[list[str]]


class BuildRow(PlannedBuild):
    """A build in the store: `state` is open, ended or reported, `accepted` counts the cells that the store has."""

    state: str
    ended_at: float | None
    accepted: int
    paused: bool
    counts: dict[str, int]
    verdict: VerdictDocument | None


class AuditLine(TypedDict, total=False):
    """One disagreement in the farm: where, what and what to do; the last line has only the counts."""

    where: str
    problem: str
    remedy: str
    counts: dict[str, int]


class Listed(TypedDict, Generic[Row]):
    """A list of documents as the API answers it, or a part of one: then `next` is where the next part goes on."""

    items: list[Row]
    next: NotRequired[Annotated[str | None, Default(None)]]


class OpenMark(TypedDict, total=False):
    """What object storage keeps of the requests about an unfinished build."""

    cancelled: bool
    paused: bool


class CancelledCells(TypedDict):
    """How many cells of a build were cancelled."""

    build: str
    cancelled: int


# --- cells ------------------------------------------------------------------------------------------------------------


class FailureDocument(TypedDict):
    """Why a cell or an attempt failed."""

    kind: str
    message: str


class TimedFailure(TypedDict):
    """A failure that stops no fail-fast build before this time (Unix seconds)."""

    kind: str
    before: float


class NewCell(TypedDict):
    """A cell for the store. One with `facts` is a hit, which needs no job.

    A hit whose `order` says so is measured first. If that fails, it is a hit without a measurement.
    """

    identifier: str
    key: str
    namespace: str
    pool: str
    priority: int
    limits: AttemptLimits
    expected_seconds: float | None
    order: WorkOrder | None
    facts: ArtifactFacts | None
    expected: TimedFailure | None


class CellRow(TypedDict):
    """How a cell is now: `state` is queued, running, succeeded, failed or cancelled.

    `elapsed` are the seconds for which its last attempt has run and was not paused, `spent` all of all its attempts.
    """

    identifier: str
    state: str
    hit: bool
    kind: str | None
    message: str
    detail: str
    phase: str | None
    progress: float | None
    job: str | None
    attempt: int
    worker: str | None
    elapsed: float | None
    spent: float
    facts: ArtifactFacts | None
    log: str | None


# --- jobs -------------------------------------------------------------------------------------------------------------


class AttemptView(TypedDict):
    """One attempt of a job; `end` is None while it runs."""

    number: int
    worker: str | None
    node: str | None
    started_at: float | None
    ended_at: float | None
    limits: AttemptLimits
    end: str | None
    kind: str | None
    message: str
    detail: str
    log: str | None
    phases: Mapping[str, float]


class CellOfBuild(TypedDict):
    """A cell that joined a job."""

    build: str
    identifier: str


class JobView(TypedDict):
    """A job with its attempts, oldest first, and the cells that joined it. Times are in Unix seconds."""

    id: str
    state: str
    namespace: str
    key: str
    pool: str
    priority: int
    attempt: int
    charged: int
    order: WorkOrder
    cancelling: bool
    quarantined: bool
    worker: str | None
    node: str | None
    phase: str | None
    progress: float | None
    detail: str
    created_at: float | None
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    kind: str | None
    message: str
    facts: ArtifactFacts | None
    log: str | None
    attempts: list[AttemptView]
    cells: list[CellOfBuild]


class WaitReasons(TypedDict):
    """Why a queued job waits.

    `live_workers` are those of its pool, `slots` those of them that take jobs, `resting` says why none does; `ahead`
    is about how many jobs go first; `bounded_by` is a build at its max_parallel; `paused` is the pool or the build that
    is paused; `before` is the attempt before this one. A reason that does not apply is None.
    """

    live_workers: int
    slots: int
    ahead: int
    handed_out: bool
    resting: str | None
    bounded_by: str | None
    paused: str | None
    delayed_until: float | None
    before: AttemptView | None


class ReproductionDocument(TypedDict):
    """Everything that determines an attempt, and how it ended; `reference` are its reference outputs if they exist."""

    schema: int
    farm: str
    job: str
    attempt: int
    namespace: str
    build: str
    worker: str
    key: str
    limits: AttemptLimits
    previous: list[str]
    ended: FailureDocument | None
    reference: FileReference | None
    order: WorkOrder


# --- events -----------------------------------------------------------------------------------------------------------


class BuildEvent(TypedDict):
    """One event of a build; `at` is in Unix seconds.

    Types: `build` (state open, ended, reported), `accepted` (a lot of `cells` came in), `cell` (a cell's new `state`,
    with `identifier`, `job`, `attempt`, `worker`, `kind`), `phase` (of a running cell), `reset` (the reader's position
    was trimmed, or belongs to another epoch; its id is where to go on after reading the state).
    """

    id: str
    at: float
    build: str
    type: str
    state: NotRequired[str]
    paused: NotRequired[str]
    cells: NotRequired[int]
    accepted: NotRequired[int]
    identifier: NotRequired[str]
    job: NotRequired[str]
    attempt: NotRequired[int]
    worker: NotRequired[str]
    kind: NotRequired[str]
    phase: NotRequired[str]


class EventBatch(TypedDict):
    """Events after a position, oldest first.

    `reset`: the position was trimmed, or belongs to another epoch, so the reader reads the state. Then the only item is
    of type `reset`.
    """

    items: list[BuildEvent]
    reset: bool


# --- workers ----------------------------------------------------------------------------------------------------------


class TargetDocument(TypedDict):
    """A compiler and a device."""

    compiler: str
    device: str


class PoolDocument(TypedDict):
    """A pool as its workers register it (`farm.targets.pools.Pool`)."""

    target: TargetDocument
    toolchain: str
    device: DeviceDocument
    recipe: int
    libraries: Mapping[str, str]
    features: Sequence[str]
    cpu_family: str
    memory: int | None
    untuned: bool
    name: str


class _WorkerFacts(TypedDict):
    id: str
    node: str
    host: NotRequired[str]
    pid: NotRequired[int]
    kind: NotRequired[str]
    slots: int
    gpus: NotRequired[list[str]]
    threads: NotRequired[int]
    locks: NotRequired[str]  # The kernel that it runs on, and the folder of its lock files there.
    versions: NotRequired[Mapping[str, str]]


class NewWorker(_WorkerFacts):
    """A worker as it registers."""

    pools: list[PoolDocument]


class WorkerView(_WorkerFacts):
    """A live worker; `running` are job ids, of other namespaces only the number `running_others`.

    `fenced` says why its node takes no jobs, `resting` why it takes none for now, `warning` what else is wrong there.
    """

    pools: list[str]
    draining: bool
    registered_at: float
    seen_at: float
    running: list[str]
    running_others: int
    fenced: str
    resting: str
    warning: str


class ToolchainLine(TypedDict):
    """A toolchain of a target: its live workers, and how many cells of a ref readers get of it, or may still name."""

    target: str
    toolchain: str
    live_workers: int
    named: int
    superseded: int


class PoolView(TypedDict):
    """A pool that was ever registered; `slots` are those of workers that take jobs.

    `running` jobs hold slots, those `uploading` have left them.
    """

    name: str
    pool: PoolDocument
    live_workers: int
    slots: int
    waiting: int
    running: int
    uploading: int
    paused: bool
