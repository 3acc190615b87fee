"""Jobs: the work orders that workers get; states of jobs, cells and attempts; the closed set of failure kinds. Pure."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, NotRequired, Self

from typing_extensions import TypedDict

from farm.runner.documents import DebugRequest, DeviceDocument
from farm.spec import FileReference, KeyedTuning, SpecDocument, cache_key, cut_short, whole_seconds
from farm.wire.program import ConversionRecord

if TYPE_CHECKING:
    from farm.jobs.facts import ArtifactFacts


class State(StrEnum):
    """State of a job and of a cell."""

    QUEUED = "queued"  # Waits for a worker, or for its delay after a failed attempt to pass.
    RUNNING = "running"  # An attempt holds the lease.
    SUCCEEDED = "succeeded"  # A program was compiled, loaded back and measured, or found complete in storage.
    FAILED = "failed"  # Ended with a failure kind.
    CANCELLED = "cancelled"  # Ended because nobody wants it any more.


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


class AttemptEnd(StrEnum):
    """How one attempt of a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # Its lease expired: the worker is gone, or could not reach the store.
    RELEASED = "released"
    """Given back by a worker that is draining, or could not go on without object storage; not charged."""
    SUPERSEDED = "superseded"  # It finished after losing its lease.


class Phase(StrEnum):
    """What a running attempt is doing."""

    FETCHING = "fetching"
    QUANTIZING = "quantizing"
    TUNING = "tuning"
    COMPILING = "compiling"
    VERIFYING = "verifying"
    MEASURING = "measuring"
    UPLOADING = "uploading"


WAITS_FOR_STORAGE = "waits for object storage, which is away"
"""Start of an attempt's detail while it cannot continue without object storage."""

WAITS_FOR_TURN = "waits for its turn to measure alone on its host"
PAUSED = "paused: another program is measured on its host"  # Details of an attempt that stands still.


class Fault(StrEnum):
    """Who has to act."""

    USER = "user"
    FARM = "farm"


class Policy(NamedTuple):
    """What follows from a failure: what to say and try, whose fault it is, how many charged attempts it may cost."""

    sentence: str
    advice: str
    fault: Fault = Fault.USER
    attempts: int = 1
    node: bool = False
    """Whether it may be the node's fault: if the same job then succeeds on another node, it counts against this one."""
    gate: bool = False  # Whether it is a build's check of a job that succeeded.


class FailureKind(StrEnum):
    """The closed set of ways in which a job, or a cell's gate, fails."""

    BAD_MODEL = "bad_model"
    UNSUPPORTED_OPERATOR = "unsupported_operator"
    BAD_CALIBRATION = "bad_calibration"
    NOTHING_QUANTIZED = "nothing_quantized"
    COMPILER_ERROR = "compiler_error"
    TIME_LIMIT = "time_limit"
    COMPILER_CRASH = "compiler_crash"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    GPU_MEMORY = "gpu_memory"
    HANG = "hang"
    GPU_FAULT = "gpu_fault"
    GPU_LOST = "gpu_lost"
    GPU_LIBRARY = "gpu_library"
    GPU_UNSERVED = "gpu_unserved"
    WORKER_LOST = "worker_lost"
    STORAGE = "storage"
    UNPLANNED = "unplanned"
    INTERNAL = "internal"
    TOOLCHAIN_MISMATCH = "toolchain_mismatch"
    ACCURACY = "accuracy"
    UNVERIFIABLE = "unverifiable"
    FALLBACK = "fallback"
    REGRESSION = "regression"
    BUDGET = "budget"
    UNDECIDED = "undecided"


def of_farm(sentence: str, advice: str, *, node: bool = False) -> Policy:
    """Return what follows from the farm's own faults: nothing else is tried a third time."""
    return Policy(sentence, advice, Fault.FARM, attempts=3, node=node)


POLICIES: Mapping[FailureKind, Policy] = {
    FailureKind.BAD_MODEL: Policy(
        "the model cannot be read", "check that the file is a complete, valid model (onnx.checker names the place)"
    ),
    FailureKind.UNSUPPORTED_OPERATOR: Policy(
        "the compiler does not have an operator of the model",
        "export with another opset, or choose another compiler for this cell (`exclude:` it here)",
    ),
    FailureKind.BAD_CALIBRATION: Policy(
        "the calibration data does not fit the model", "compare names, shapes and dtypes with `farm lint`"
    ),
    FailureKind.NOTHING_QUANTIZED: Policy(
        "the quantizer changed no operator",
        "use another precision for this model; nothing in it can be quantized this way",
    ),
    FailureKind.COMPILER_ERROR: Policy(
        "the compiler refused the model", "read the log: the last lines name the pass or the operator"
    ),
    FailureKind.TIME_LIMIT: Policy(
        "the attempt took longer than its time limit", "raise `limits: {time: …}` for this cell"
    ),
    FailureKind.COMPILER_CRASH: Policy(
        "the compiler died",
        "read the log; report it to the compiler's authors with the folder that `farm reproduce` writes",
        attempts=2,
        node=True,
    ),
    FailureKind.OUT_OF_MEMORY: Policy(
        "the attempt needed more memory than its limit", "raise `limits: {memory: …}` for this cell", attempts=2
    ),
    FailureKind.DISK_LIMIT: Policy(
        "the attempt wrote more than its node allows",
        "compile a smaller model, or ask the operator to raise `disk_limit` on the nodes",
    ),
    FailureKind.PROCESS_LIMIT: Policy(
        "the attempt started more processes than its node allows",
        "read the log; the operator can raise `process_limit` on the nodes",
    ),
    FailureKind.GPU_MEMORY: Policy(
        "the GPU's memory was not enough",
        "use a smaller batch, raise or leave out `gpu_mem_limit`, or choose a device with more memory",
        attempts=2,
    ),
    FailureKind.HANG: Policy(
        "the compiler stopped making progress",
        "read the log: the last lines name the pass or the operator",
        attempts=2,
        node=True,
    ),
    FailureKind.GPU_FAULT: of_farm("the GPU failed", "submit again after the operator has checked the node", node=True),
    FailureKind.GPU_LOST: of_farm(
        "the GPU is gone",
        "submit again; the operator finds out why the card cannot be reached (`farm doctor` on the node)",
        node=True,
    ),
    FailureKind.GPU_LIBRARY: of_farm(
        "a library for the GPU is missing, or has the wrong version",
        "submit again when `farm doctor` is green on the node: it names the library",
        node=True,
    ),
    FailureKind.GPU_UNSERVED: Policy(
        "the installed libraries have no kernels for this GPU",
        "choose a newer card for this cell (`exclude:` it here), or libraries that still support this one",
    ),
    FailureKind.WORKER_LOST: of_farm(
        "the worker was lost", "submit again; the operator finds out why the nodes disappear"
    ),
    FailureKind.STORAGE: of_farm("storage or a disk failed", "submit again when `farm doctor` is green", node=True),
    FailureKind.UNPLANNED: of_farm(
        "the work order is not one that the control plane has planned",
        "submit again; the operator finds out who has changed it in Redis",
    ),
    FailureKind.INTERNAL: of_farm("this is a bug in the farm", "submit again; report it with the log", node=True),
    FailureKind.TOOLCHAIN_MISMATCH: of_farm(
        "no worker with the right toolchain took the job", "start a worker that serves this pool"
    ),
    FailureKind.ACCURACY: Policy(
        "the program is not accurate enough",
        "use another precision, better calibration, or a wider tolerance; the log says if sums saturate on this CPU",
        gate=True,
    ),
    FailureKind.UNVERIFIABLE: Policy(
        "the program cannot be compared with a reference",
        "add samples with expected outputs, or write `verify: {unverifiable: publish}`",
        gate=True,
    ),
    FailureKind.FALLBACK: Policy(
        "nodes of the program run on the CPU because the GPU has no kernel for them",
        "replace these operators in the model, or write `verify: {fallback: warn}`",
        gate=True,
    ),
    FailureKind.REGRESSION: Policy(
        "the program is worse than its baseline", "see what changed; else measure again on an idle node", gate=True
    ),
    FailureKind.BUDGET: Policy("the program is over its budget", "check the budget in the manifest", gate=True),
    FailureKind.UNDECIDED: Policy(
        "a gate cannot judge the program", "build again when its baseline is there; measure on an idle node", gate=True
    ),
}


def policy_of(kind: str) -> Policy:
    """What follows from a recorded kind; after a rollback it may be of a newer release, and so not known here."""
    return POLICIES[FailureKind(kind) if kind in POLICIES else FailureKind.INTERNAL]


def is_gate(kind: str | None) -> bool:
    """Whether a kind is a build's gate's; a report of another release may have kinds that this one does not know."""
    return kind in {each.value for each, policy in POLICIES.items() if policy.gate}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended, decided once, written once.

    On success: `cache_key`, `hit` (found whole at lookup, or adopted) and `facts`, the small extract of the
    sidecar that builds judge and show. On failure: `kind`, `message` (one
    sentence that names the place) and `detail` (a few useful log lines); `made_again`: it was to measure a
    program, which was gone. `fences` says why the attempt's node is fenced for it, if it is. `log` is the digest of the
    whole log.
    """

    end: AttemptEnd
    kind: FailureKind | None = None
    message: str = ""
    detail: str = ""
    hit: bool = False
    facts: "ArtifactFacts | None" = None
    log: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    fences: str = ""
    made_again: bool = False

    @classmethod
    def success(
        cls, facts: "ArtifactFacts", *, hit: bool = False, log: str = "", phases: Mapping[str, float] | None = None
    ) -> Self:
        """The artifact is in the store."""
        return cls(AttemptEnd.SUCCEEDED, facts=facts, hit=hit, log=log, phases=phases or {})

    @classmethod
    def failure(cls, kind: FailureKind, message: str, *, detail: str = "", log: str = "") -> Self:
        """The attempt failed with a kind; whether another follows is the kind's policy."""
        return cls(AttemptEnd.FAILED, kind=kind, message=message, detail=detail, log=log)

    @classmethod
    def cancelled(cls) -> Self:
        """Nobody wanted it any more."""
        return cls(AttemptEnd.CANCELLED)

    @classmethod
    def released(cls, message: str = "") -> Self:
        """Given back by a draining worker, or for what `message` says; not charged."""
        return cls(AttemptEnd.RELEASED, message=message)


class AttemptLimits(TypedDict):
    """What an attempt may use; 0 = no limit."""

    time: float  # Seconds.
    memory: int  # Bytes.


class OrderedModel(TypedDict):
    """The model of a work order: its files, the model itself first, and the names of its outputs."""

    format: str
    files: Sequence[FileReference]
    names: Sequence[str]
    outputs: NotRequired[Sequence[str]]
    conversion: NotRequired[ConversionRecord]


class LaterTuning(TypedDict):
    """The parts of the spec that differ in the build that tunes further in the background."""

    tuning: KeyedTuning
    device: DeviceDocument


class DebugWish(DebugRequest, total=False):
    """What the compiler logs of its work, as a manifest's `debug` says."""

    trace: Sequence[str]
    timings: bool


class OrderExtras(TypedDict, total=False):
    """What only some work orders have.

    `budget` (seconds) bounds the tuning; `emulated` are the parts of the precision that the device has no units for;
    `env` has the files that variables name; `against` is the cache key of the program that takes turns with
    this one: a follow-up replaces it if it is faster, or a gate allows this one to be slower by `limit` (a share).
    `hit`: the program was there when the build was planned, so only the turns are left.
    """

    emulated: Sequence[str]
    budget: float
    background: LaterTuning
    env: Mapping[str, FileReference]
    cross: DeviceDocument
    debug: DebugWish
    against: str
    limit: float
    hit: bool


class WorkOrder(OrderExtras):
    """What a worker needs to compile one cell. The spec decides the cache key, the other fields do not."""

    identifier: str
    pool: str
    target: str
    spec: SpecDocument
    model: OrderedModel
    calibration: FileReference | None
    samples: FileReference | None


def keys_of(order: WorkOrder, key: str) -> list[str]:
    """Return the cache keys under which a work order's program may be: its own, and that of a tuning cut short."""
    if not order.get("budget"):
        return [key]
    return [key, cache_key(cut_short(order["spec"], order["budget"]))]


def job_key(order: WorkOrder | None, key: str) -> str:
    """Return what cells that share a job have in common: their cache key, and their tuning budget if they have one.

    A tuning that a budget cut short does not answer a cell with a larger budget, or none. Hits that are measured share
    the baseline.
    """
    if order and order.get("hit"):
        return f"{key}:against:{order['against']}"
    return f"{key}:{whole_seconds(order['budget'])}" if order and order.get("budget") else key
