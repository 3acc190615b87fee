"""A job, or a cell of a build, as its page shows it: attempts, what its key is made of, what came out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from farm.jobs.rows import AttemptView, JobView
from farm.jobs.state import Phase
from farm.results.lines import CellLine
from farm.runner.documents import Latency
from farm.wire.program import Sidecar

_NOTHING: Sequence[object] = (None, "", {}, [], ())


PHASES: Sequence[str] = [phase.value for phase in Phase]
"""In the order in which an attempt goes through them."""
REST = "rest"
"""The time of an attempt outside of its phases."""


class AttemptPart(NamedTuple):
    """A phase of an attempt, in seconds since the attempt began."""

    name: str
    start: float
    seconds: float

    @property
    def look(self) -> str:
        """Its class in the style sheet."""
        return self.name if self.name in (*PHASES, REST) else "other"


class AttemptLine(NamedTuple):
    """One attempt, and the seconds that it took; so far, while it runs."""

    row: AttemptView
    seconds: float | None

    @property
    def failed(self) -> bool:
        """Whether it did not do what it should."""
        return self.row["end"] in ("failed", "lost")

    @property
    def rest(self) -> float:
        """The seconds outside of its phases: preparing, waiting for a device, cleaning up."""
        return max(0.0, (self.seconds or 0.0) - sum(self.row["phases"].values()))

    def parts(self) -> Iterator[AttemptPart]:
        """Yield its phases in their order, those that are not known here behind them, and the rest last."""
        phases, at = self.row["phases"], 0.0
        order = sorted(phases, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
        for name, seconds in [*((name, phases[name]) for name in order), (REST, self.rest)]:
            if seconds > 0:
                yield AttemptPart(name, at, seconds)
                at += seconds


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
    """A job as the store has it, if it still does, with the build's judgement if it is looked at as a cell of one."""

    cell: CellLine
    """The cell; of a job, what a cell would show."""
    build: str
    """Empty for a job that is looked at as one."""
    job: JobView | None
    sidecar: Sidecar | None
    attempts: Sequence[AttemptLine] = ()
    """The oldest first."""
    position: str = ""
    """After which of the build's events news of the cell may come; empty if none will."""

    @property
    def identifier(self) -> str:
        """The cell that has a history; empty for a job without one."""
        return self.cell.identifier if "/" in self.cell.identifier else ""

    @property
    def has_error(self) -> bool:
        """Whether the log says what went wrong: of a gate it says nothing."""
        return bool(self.cell.kind) and not self.cell.is_gate

    @property
    def ingredients(self) -> list[tuple[str, str]]:
        """What its cache key is made of, as far as that is known."""
        spec = self.job["order"].get("spec") if self.job else self.sidecar["spec"] if self.sidecar else None
        return list(ingredients_of(spec or {}))


def attempts_of(job: JobView, now: float) -> list[AttemptLine]:
    """Return the attempts of a job, oldest first; `now` in Unix seconds."""
    return [
        AttemptLine(row, max(0.0, (row["ended_at"] or now) - row["started_at"]) if row["started_at"] else None)
        for row in job["attempts"]
    ]


def attempt_of(made: Sidecar) -> AttemptLine:
    """Return the attempt that made a program."""
    row: AttemptView = {
        "number": 1,
        "worker": made["worker"],
        "node": made["node"],
        "started_at": datetime.fromisoformat(made["created"]).timestamp() - made["seconds"],
        "ended_at": None,
        "limits": {"time": 0.0, "memory": 0},
        "end": "succeeded",
        "kind": None,
        "message": "",
        "detail": "",
        "log": None,
        "phases": made["phases"],
    }
    return AttemptLine(row, made["seconds"])


def ingredients_of(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a spec with their values as text, in the order of their names; what is empty is left out."""
    if value in _NOTHING:
        return
    match value:
        case Mapping():
            for name in sorted(value):
                yield from ingredients_of(value[name], f"{path}.{name}" if path else str(name))
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


def runs_of(sidecar: Sidecar) -> list[tuple[str, Latency]]:
    """Return what was measured of each kind of run."""
    measured = sidecar["measurements"]
    kinds = {
        "whole run": measured["latency"],
        "device only": measured["device_latency"],
        "tuned": measured["tuned"],
        "untuned": measured["baseline"],
    }
    return [(label, each) for label, each in kinds.items() if each]
