"""Facts: the small extract of an artifact's sidecar that the store, the index and reports keep."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from farm.runner.documents import Evidence
from farm.spec import FileReference
from farm.wire.program import Against, Processes


class TurnsFacts(Against):
    """The same for a program that was there already: when (ISO 8601, UTC) and on which node it took turns."""

    measured: str
    node: str
    shared: NotRequired[bool]  # Whether others ran on the host meanwhile, or used the GPU.


class TuningCounts(TypedDict):
    """The result of tuning: counts of the model's operations, and seconds spent and saved."""

    operations: int | None
    known: int
    tuned: int | None
    untunable: int
    seconds: float
    saved: float


class TuningSummary(TuningCounts):
    """The result of one program's tuning, and which of the two measured programs is published."""

    mode: str
    finished: bool
    published: Literal["tuned", "untuned"] | None
    carried: bool | None


class ComparableWork(TypedDict):
    """What other compiles estimate their durations by: the sort of compile, the model and its bytes."""

    like: str
    model: str
    size: int


class ArtifactFacts(Evidence):
    """The facts of one artifact; builds judge by them.

    `sidecar` is the object key of the whole sidecar. Times are in seconds, sizes in bytes, `errors` by output name as
    in the sidecar. `latency` is None if nothing was measured, `baseline_latency` if no untuned program was.
    `unverified` says which outputs were compared with nothing, and why; it is empty if verification is off.
    `fallback` names nodes, by operator, that run on the CPU because the GPU's provider has no kernel for them.
    `processes` are the most others that used the GPU before or after tuning or measuring; None if it is not known.
    `runs_as` is equal for programs that run alike: the same bytes with the same settings, under the same toolchain.
    `turns` is how the program compares with its build's baseline, if the build measured that; `unmeasured` is why it
    could not.
    `range` is from the fastest run to the 90th of 100; `card`, `cpu` and `clocks` (MHz) are those it was measured with.
    Farms before 0.2.0 did not write `driver`, `p99`, `throughput`, `compile_seconds`, `node` and `runs_as`.
    """

    key: str
    namespace: str
    sidecar: str
    program: FileReference
    toolchain: str
    device: str
    driver: NotRequired[str]
    verified: bool
    unverified: str
    latency: float | None
    p99: NotRequired[float | None]
    range: NotRequired[Sequence[float | None]]
    card: NotRequired[str]
    cpu: NotRequired[str]
    clocks: NotRequired[Mapping[str, float]]
    baseline_latency: float | None
    ratio: float | None
    against: Against | None
    turns: NotRequired[TurnsFacts]
    unmeasured: NotRequired[str]
    runs_as: NotRequired[str]
    tuning: TuningSummary | None
    load: float | None
    throughput: NotRequired[float | None]
    compile_seconds: NotRequired[float | None]
    node: NotRequired[str]
    shared: bool
    processes: Processes | None
    peak_memory: int | None
    quantized: Mapping[str, int]
    fallback: Mapping[str, Sequence[str]]
    seconds: float
    work: ComparableWork | None
    created: str
