"""A build's report: its cells, judged, its verdict and its sweeps. What the API answers and `report.json` holds."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from farm.jobs.estimate import Estimate, OutlookDocument
from farm.jobs.rows import CellRow, VerdictDocument
from farm.matrix.planned import CellGates, PastState, ShadowNotes, SoughtBatch, Values
from farm.results.gates import GateRow
from farm.runner.protocol import Default
from farm.spec import PlainSize
from farm.wire.asked import TAG, BuildId


class JudgedCell(CellRow):
    """A cell of a build, judged by its gates.

    `state` is queued, running, succeeded, failed or cancelled. `fault` says who has to act on a failure: user or farm.
    `warning` says what a gate would refuse if the manifest asked for it, `waiting` why the cell waits, `held` why
    `latest` does not take its program, which passed: an earlier build's rule refused it. `around` says what else
    differs from the baseline that it was `compared` with.
    """

    model: str
    target: str
    precision: str
    shape: str
    key: str
    pool: str
    sizes: Mapping[str, PlainSize]
    sweep: SoughtBatch | None
    estimate: Estimate | None
    waiting: str
    warning: str
    gate: CellGates
    line: int
    fault: str | None
    advice: str
    expected: bool
    as_expected: bool
    expected_reason: str
    expected_link: str
    reason: NotRequired[str]
    held: NotRequired[str]
    before: NotRequired[PastState | None]
    compared: NotRequired[list[GateRow]]
    around: NotRequired[list[str]]


_PLAN = "answer to a submission: the digest of the plan that was accepted"


class BuildView(TypedDict):
    """A build as people and scripts see it; once it has a verdict, with the verdict's counts."""

    id: BuildId
    namespace: Annotated[str, Field(pattern=TAG)]
    name: str
    labels: dict[str, str]
    state: Annotated[str, Field(description="open, ended or reported")]
    paused: bool | None
    created_by: str | None
    created_at: float
    ended_at: float | None
    verdict: VerdictDocument | None
    follows: str | None
    followed_by: str | None
    retries: str | None
    shadows: NotRequired[str]
    counts: dict[str, int]
    warnings: list[str]
    outlook: NotRequired[OutlookDocument]
    plan: NotRequired[Annotated[str | None, Field(description=_PLAN), Default(None)]]


class SweepPoint(TypedDict):
    """One batch of a sweep: seconds, samples a second, and if another attempt ran at the same time."""

    identifier: str
    batch: int
    latency: float | None
    throughput: float | None
    shared: bool


class SweepResult(TypedDict):
    """A sweep: `best` is the identifier of the best cell that passed, None if there is none.

    `weak`: a point was not measured alone, so that another batch may be the best.
    """

    model: str
    target: str
    precision: str
    sizes: Mapping[str, PlainSize]
    metric: Literal["throughput", "latency"]
    max_latency: float | None
    points: list[SweepPoint]
    best: str | None
    weak: bool


class Remark(TypedDict):
    """A cell, and what is said about it."""

    identifier: str
    text: str


class Changes(TypedDict):
    """A build's cells by what changed since the manifest's build before. A cell may be in several lists.

    `new_failures` passed before, or are new; `still_failing` failed before too. Cells that fail as expected are in
    neither. `regressions` failed a limit against a baseline. `undecided` could not be compared, or not surely; of `new`
    ones the baseline's tag has no cell. `unjudged` ones failed before by a rule that did not judge them now; `held` as
    in `JudgedCell`.
    `recompiled` says about each cell why it was not a hit.
    """

    new_failures: list[Remark]
    still_failing: list[Remark]
    regressions: list[Remark]
    improvements: list[Remark]
    fixed: list[Remark]
    unjudged: NotRequired[list[Remark]]
    held: NotRequired[list[Remark]]
    new: NotRequired[list[Remark]]
    undecided: list[Remark]
    hits: list[str]
    recompiled: list[Remark]


class Report(TypedDict):
    """A build with its cells; `shadow` says about a shadow build what it is compared with."""

    schema: int
    build: BuildView
    cells: list[JudgedCell]
    sweeps: list[SweepResult]
    changes: NotRequired[Changes]
    shadow: NotRequired[ShadowNotes]


class BuildChange(TypedDict):
    """What changed in a build.

    `cells`: these cells, as they are now, at times with a new `outlook`. `reset`: read the whole report, and then
    follow the changes after this `id`. `build`: its report is written.
    """

    type: Literal["cells", "reset", "build"]
    id: NotRequired[str]
    cells: NotRequired[list[JudgedCell]]
    outlook: NotRequired[OutlookDocument]
    state: NotRequired[str]


class CellDifference(TypedDict):
    """A cell in which two builds differ: None for a build without it; `changes` of the key if both are published.

    `effect` is what happened to it, `share` how much longer a run takes now (0.25: 25 %), if that can be compared.
    `around` says where the two programs were measured differently.
    """

    identifier: str
    left: JudgedCell | None
    right: JudgedCell | None
    changes: list[str]
    around: list[str]
    effect: str | None
    share: float | None


class LeftOut(TypedDict):
    """The cells that only one of two builds has."""

    left: list[str]
    right: list[str]


class Differences(TypedDict):
    """In what two builds differ; `same` counts the cells that ended alike with one cache key."""

    left: BuildView
    right: BuildView
    same: int
    cells: list[CellDifference]
    left_out: LeftOut


class Rebuilt(TypedDict):
    """How many reports a history was made of."""

    reports: int


class PastCell(TypedDict):
    """How a cell ended in one build. `ended` in Unix seconds, `error` the largest relative error of an output,
    `baseline` the latency (seconds) that a gate compared it with.
    """

    identifier: str
    ended: float
    build: str
    manifest: str
    state: str
    kind: str
    expected: bool
    hit: bool
    key: str
    toolchain: str
    device: str
    node: str
    error: float | None
    rules: NotRequired[str]
    baseline: NotRequired[float | None]
    values: Values
