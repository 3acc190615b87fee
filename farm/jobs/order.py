"""Work orders: what the server gives a worker to compile one cell."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from farm.runner.documents import DeviceDocument
from farm.spec import FileReference, KeyedTuning, SpecDocument, cache_key, cut_short, whole_seconds
from farm.wire.program import ConversionRecord


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


class DebugWish(TypedDict, total=False):
    """What the compiler logs of its work, as a manifest's `debug` says."""

    log_level: str
    trace: Sequence[str]
    print: bool
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
