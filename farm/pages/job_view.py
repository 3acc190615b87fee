"""A job, or a cell of a build, as its page shows it: attempts, what its key is made of, what came out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farm.jobs.rows import JobView
from farm.jobs.state import FailureKind
from farm.pages.drawing import Bar, Spread
from farm.results.lines import CellLine
from farm.wire.program import Latency, Sidecar

DIGEST = 64

_NOTHING: Sequence[object] = (None, "", {}, [], ())


class AttemptLine(NamedTuple):
    """One attempt. Times in Unix seconds."""

    number: int
    end: str
    """How it ended; empty while it runs."""
    kind: str
    message: str
    worker: str
    node: str
    started_at: float | None
    seconds: float | None
    """So far, while it runs."""
    phases: Mapping[str, float]
    has_log: bool

    @property
    def rest(self) -> float:
        """The seconds outside of its phases: preparing, waiting for a device, cleaning up."""
        return max(0.0, (self.seconds or 0.0) - sum(self.phases.values()))


class Ingredient(NamedTuple):
    """One field of a cache key."""

    name: str
    value: str
    is_digest: bool


class OutputLine(NamedTuple):
    """How one output compares with the reference."""

    name: str
    error: float | None
    rms: float | None
    equal: float | None
    spread: float | None
    origin: str
    remark: str


@dataclass(frozen=True, slots=True)
class JobPage:
    """A job as the store has it, with the build's judgement if it is looked at as a cell of one."""

    title: str
    namespace: str
    build: str
    cell: CellLine | None
    job: str
    state: str
    kind: str
    message: str
    detail: str
    advice: str
    waiting: str
    phase: str
    """What a running attempt does now."""
    key: str
    pool: str
    created_at: float | None
    ended_at: float | None
    attempts: Sequence[AttemptLine]
    cells: Sequence[tuple[str, str]]
    """Builds and cells that wait for this job, or waited for it."""
    ingredients: Sequence[Ingredient]
    sidecar: Sidecar | None
    reason: str
    """Why the build's plan called it a miss."""
    position: str = ""
    """After which of the build's events news of the cell may come; empty if none will."""

    @property
    def identifier(self) -> str:
        """The cell that has a history; empty for a job without one."""
        return self.title if "/" in self.title else ""

    @property
    def has_log(self) -> bool:
        """Whether there is a log to look at."""
        return bool(self.job or (self.sidecar and self.sidecar["blobs"]["log"]))

    @property
    def has_error(self) -> bool:
        """Whether the log says what went wrong: of a gate it says nothing."""
        return bool(self.kind) and not FailureKind(self.kind).is_gate

    @property
    def reproduce(self) -> str:
        """The command that runs its last attempt alone."""
        return f"farm reproduce {self.job or self.key} -o again"

    def bars(self) -> list[Bar]:
        """Return the attempts on an axis that begins with the first one."""
        started = [one.started_at for one in self.attempts if one.started_at]
        if not started:
            return []
        origin = min(started)
        return [
            Bar(
                f"attempt {one.number}",
                one.started_at - origin,
                one.started_at - origin + (one.seconds or 0.0),
                one.phases,
                one.end in ("failed", "lost"),
            )
            for one in self.attempts
            if one.started_at
        ]


def attempts_of(job: JobView, now: float) -> list[AttemptLine]:
    """Return the attempts of a job, oldest first; `now` in Unix seconds."""
    return [
        AttemptLine(
            one["number"],
            one["end"] or "",
            one["kind"] or "",
            one["message"],
            one["worker"] or "",
            one["node"] or "",
            one["started_at"],
            max(0.0, (one["ended_at"] or now) - one["started_at"]) if one["started_at"] else None,
            one["phases"],
            bool(one["log"]),
        )
        for one in job["attempts"]
    ]


def ingredients_of(spec: Mapping[str, object]) -> list[Ingredient]:
    """Return the fields of a spec, one a line, in the order of their names; what is empty is left out."""
    return [Ingredient(name, text, len(text) == DIGEST and text.isalnum()) for name, text in _fields("", spec)]


def _fields(path: str, value: object) -> Iterator[tuple[str, str]]:
    if value in _NOTHING:
        return
    match value:
        case Mapping():
            for name in sorted(value):
                yield from _fields(f"{path}.{name}" if path else str(name), value[name])
        case list() | tuple():
            yield path, ", ".join(str(item) for item in value)
        case bool():
            yield path, str(value).lower()
        case _:
            yield path, str(value)


def outputs_of(sidecar: Sidecar) -> list[OutputLine]:
    """Return how each output compares with the reference, worst first."""
    found = sidecar["verification"]
    if found is None:
        return []
    names = dict.fromkeys([*found["errors"], *found["equal"], *found["unverified"]])
    rows = [
        OutputLine(
            name,
            found["errors"].get(name),
            found["rms"].get(name),
            found["equal"].get(name),
            found["spread"].get(name),
            found["origin"].get(name) or found["reference"],
            found["unverified"].get(name)
            or found.get("doubted", {}).get(name)
            or ("not finite" if name in found["nonfinite"] else ""),
        )
        for name in names
    ]
    return sorted(rows, key=lambda row: -(row.error if row.error is not None else 1 - (row.equal or 0)))


def spreads_of(sidecar: Sidecar) -> list[Spread]:
    """Return the distributions of runs that were measured often enough to have one."""
    measured = sidecar["measurements"]
    kinds: list[tuple[str, Latency | None]] = [
        ("whole run", measured["latency"]),
        ("device only", measured["device_latency"]),
        ("tuned", measured["tuned"]),
        ("untuned", measured["baseline"]),
    ]
    return [
        Spread(
            label,
            each["minimum"] if each["minimum"] is not None else each["median"],
            each["median"],
            each["p90"],
            each["p99"],
        )
        for label, each in kinds
        if each and each["p90"] is not None and each["p99"] is not None
    ]
