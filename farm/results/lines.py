"""Cells in short: what lists of cells show of each, a line for each of the 100,000 cells of a large build. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

from farm.jobs.state import FailureKind, State
from farm.matrix.planned import CellPlan
from farm.results.gate_rules import rules_of
from farm.results.report import JudgedCell

Look = Literal["compiled", "hit", "failed", "expected", "running", "queued", "cancelled"]
"""How a cell looks: its state, split further by what people look for."""


class CellLine(NamedTuple):
    """One cell of a build, as far as lists show it. Times in seconds, sizes in bytes."""

    identifier: str
    model: str
    target: str
    precision: str
    shape: str
    look: Look
    kind: str = ""
    by_farm: bool = False
    message: str = ""
    detail: str = ""
    advice: str = ""
    phase: str = ""
    worker: str = ""
    elapsed: float | None = None
    waiting: str = ""
    warning: str = ""
    job: str = ""
    key: str = ""
    published: bool = False
    size: int | None = None
    latency: float | None = None
    shared: bool = False
    device: str = ""
    expected_reason: str = ""
    expected_link: str = ""
    reason: str = ""
    """Why its plan said that it has to be compiled."""
    rules: str = "{}"
    """The rules that refused it or, if it succeeded, those that it passed (`farm.results.gate_rules`), as JSON."""

    @classmethod
    def of(cls, cell: JudgedCell) -> CellLine:
        """Return the line of a judged cell."""
        facts = cell["facts"]
        return cls(
            identifier=cell["identifier"],
            model=cell["model"],
            target=cell["target"],
            precision=cell["precision"],
            shape=cell["shape"],
            look=look_of(cell),
            kind=cell["kind"] or "",
            by_farm=cell["fault"] == "farm",
            message=cell["message"],
            detail=cell["detail"],
            advice=cell["advice"],
            phase=cell["phase"] or "",
            worker=cell["worker"] or "",
            elapsed=cell["elapsed"],
            waiting=cell["waiting"],
            warning=cell["warning"] or cell.get("held", ""),
            job=cell["job"] or "",
            key=facts["key"] if facts else cell["key"],
            published=facts is not None,
            size=facts["program"]["size"] if facts else None,
            latency=facts["latency"] if facts else None,
            shared=bool(facts and facts["shared"]),
            device=facts["device"] if facts else "",
            expected_reason=cell.get("expected_reason", ""),
            expected_link=cell.get("expected_link", ""),
            reason=cell.get("reason", ""),
            rules=json.dumps(rules_of(cell)),
        )

    @classmethod
    def planned(cls, cell: CellPlan, state: str) -> CellLine:
        """Return the line of a cell in a state, before anything is judged.

        What its gates will refuse counts as compiled, and nothing has a speed.
        """
        look = _LOOKS.get(state) or ("hit" if cell["state"] == "hit" else "compiled")
        place = (cell["identifier"], cell["model"], cell["target"], cell["precision"], cell["shape"])
        return cls(*place, look, key=cell["key"], reason=cell.get("reason") or "")

    @property
    def is_gate(self) -> bool:
        """Whether its program is there, and a gate of the build refused it."""
        return bool(self.kind) and FailureKind(self.kind).is_gate

    @property
    def succeeded(self) -> bool:
        """Whether its program is there and passed."""
        return self.look in ("compiled", "hit")


class CellEnd(NamedTuple):
    """How a cell ended: what comparisons of builds need of it. The fields are as in its line."""

    identifier: str
    look: Look
    kind: str = ""
    phase: str = ""
    key: str = ""
    latency: float | None = None
    shared: bool = False
    device: str = ""
    rules: str = "{}"

    @classmethod
    def of(cls, line: CellLine) -> CellEnd:
        """Return the end of a line's cell."""
        return cls._make(_END(line))


_END = attrgetter(*CellEnd._fields)


_LOOKS: Mapping[str, Look] = {
    State.QUEUED: "queued",
    State.RUNNING: "running",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}


def look_of(cell: JudgedCell) -> Look:
    """Return how a judged cell looks."""
    match State(cell["state"]):
        case State.SUCCEEDED:
            return "hit" if cell["hit"] else "compiled"
        case State.FAILED:
            return "expected" if cell["as_expected"] else "failed"
        case State.RUNNING:
            return "running"
        case State.QUEUED:
            return "queued"
        case State.CANCELLED:
            return "cancelled"
