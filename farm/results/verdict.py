"""The verdict: cells in short, what changed between two builds, and a build's cells judged by its own gates. Pure.

A job's success is a program that was compiled, loaded back and measured; whether it is good enough is each build's own
question, so it is asked when a build is read (`docs/decisions/0002-judged-at-read.md`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from farm.artifacts.refs import SnapshotCell
from farm.errors import ArtifactGone, ExitCode, NotFound
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import CellRow, TimedFailure, VerdictDocument
from farm.jobs.state import FailureKind, Fault, State, is_gate, policy_of
from farm.matrix.planned import UNKNOWN, CellPlan
from farm.results.gates import (
    OPEN,
    GateRow,
    Outcome,
    between,
    judge_program,
    judge_unverified,
    left_out,
    moved,
    rules_of,
    sentences,
)
from farm.results.report import CellDifference, Changes, Differences, JudgedCell, PastCell, Remark, Report
from farm.results.tradeoff import error_of, marks_of, part_of
from farm.spec import changes
from farm.units import view_of
from farm.wire.program import Sidecar

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
    reason: str = ""  # Why its plan said that it has to be compiled.
    rules: str = "{}"  # Those that refused it or, if it succeeded, that it passed (`farm.results.gates`), as JSON.
    p99: float | None = None
    throughput: float | None = None  # Samples a second.
    error: float | None = None  # The largest one of an output.
    marks: str = ""  # What makes its numbers weak (`farm.results.tradeoff`), in words.
    baseline: float | None = None  # The latency of the program that a gate compares it with.
    sweep: str = ""  # Its part of a sweep (`farm.results.tradeoff`), as JSON; empty without one.
    moved: str = "[]"  # Its numbers against a gate's baseline, in words (`farm.results.gates.Movement`), as JSON.
    around: str = "[]"  # What else differs from there, as JSON.

    @classmethod
    def of(cls, cell: JudgedCell) -> CellLine:
        """Return the line of a judged cell: fields of the cell and of its program's facts, and what they say."""
        compared, known = cell.get("compared"), _known(cell, cell["facts"])
        known["look"] = look_of(cell["state"], hit=cell["hit"], expected=cell["as_expected"])
        known["by_farm"] = cell["fault"] == "farm"
        known["warning"] = cell["warning"] or cell.get("held", "")
        known["rules"] = json.dumps(rules_of(cell))
        if compared:
            known["baseline"] = next((row["base"] for row in compared if row["measure"] == "latency"), None)
            known["moved"] = json.dumps([said for row in compared if row["against"] and (said := moved(row))])
        if around := cell.get("around"):
            known["around"] = json.dumps(around)
        if part := part_of(cell):
            known["sweep"] = json.dumps(part)
        return cls(**known)

    @classmethod
    def named(cls, cell: SnapshotCell, facts: ArtifactFacts, newest: PastCell | None = None) -> CellLine:
        """Return the line of a cell that a ref names: its program passed. The limits are those of its newest build."""
        rules, base = (newest.get("rules"), newest.get("baseline")) if newest else (None, None)
        return cls(**_known(cell, facts), look="compiled", rules=rules or "{}", baseline=base)

    @classmethod
    def planned(cls, cell: CellPlan, state: str) -> CellLine:
        """Return the line of a cell in a state, before anything is judged.

        What its gates will refuse counts as compiled, and nothing has a speed.
        """
        return cls(**_known(cell, None), look=look_of(state, hit=cell["state"] == "hit"))

    @property
    def is_gate(self) -> bool:
        """Whether its program is there, and a gate of the build refused it."""
        return is_gate(self.kind)

    @property
    def succeeded(self) -> bool:
        """Whether its program is there and passed."""
        return self.look in ("compiled", "hit")

    @property
    def place(self) -> tuple[str, str]:
        """What it has in common with the programs of its model that could run in its place."""
        return self.target, self.shape


_COPIED = frozenset(CellLine._fields) - {"around", "baseline", "sweep"}


def _known(cell: Mapping[str, object], facts: ArtifactFacts | None) -> dict[str, Any]:
    known = {name: each for name, each in {**cell, **(facts or {})}.items() if name in _COPIED and each is not None}
    if facts:
        size, marks = facts["program"]["size"], " ".join(marks_of(facts))
        known |= {"published": True, "size": size, "error": error_of(facts), "marks": marks}
    return known


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


def look_of(state: str, *, hit: bool = False, expected: bool = False) -> Look:
    """Return how a cell in a state looks; `expected`: its failure was."""
    match State(state):
        case State.SUCCEEDED:
            return "hit" if hit else "compiled"
        case State.FAILED:
            return "expected" if expected else "failed"
        case State.RUNNING:
            return "running"
        case State.QUEUED:
            return "queued"
        case State.CANCELLED:
            return "cancelled"


# --- what changed between two builds ---------------------------------------------------------------------------------

Effect = Literal["open", "newly failed", "still failing", "fixed", "unjudged", "worse", "better", "same"]
"""What happened to a cell. `open`: one of the two has not ended, or was cancelled. `unjudged`: a rule refused it, and
the second build did not judge it by that."""

BAND = 0.10
"""Relative difference of two medians below which nothing is said: they were measured at different times, perhaps on
different nodes. `farm bench` measures two programs in turns, and sees smaller ones."""

SAME = "the program is the same"

_PASSED = frozenset({"compiled", "hit"})
_FAILED = frozenset({"failed", "expected"})


class CellChange(NamedTuple):
    """What changed in a cell from one build to another one.

    `share` is how much longer a run takes now, as a share of before, if both can be compared; else `left_out` says why
    they cannot. `other_end`: it passes and did not, or fails and did not, or fails in another way.
    """

    effect: Effect
    other_end: bool = False
    share: float | None = None
    left_out: str = ""

    @property
    def is_noticed(self) -> bool:
        """Whether it ended differently, or its speed changed by more than the noise."""
        return self.other_end or self.effect in ("worse", "better")


def is_quiet(before: CellEnd, after: CellEnd) -> bool:
    """Whether `change` can notice nothing of a cell: it ends as before, at about the same speed. Much faster."""
    if before.look != after.look or before.kind != after.kind:
        return False
    then, now = before.latency, after.latency
    return not then or not now or abs(now - then) <= BAND * then


def change(before: CellEnd | CellLine | None, after: CellEnd | CellLine, rows: Sequence[GateRow] = ()) -> CellChange:
    """Return what changed in a cell; `before` is None for a new one, which counts as one that passed.

    Two speeds are compared by their medians, unless `rows` has what a comparison in turns with `before` found.
    """
    passed = before is None or before.look in _PASSED
    failed = before is not None and before.look in _FAILED
    other_end = passed != (after.look in _PASSED) or (before is not None and before.kind != after.kind)
    if after.look == "failed":
        return CellChange("still failing" if failed else "newly failed", other_end)
    if after.look not in _PASSED or not (passed or failed):
        return CellChange("same" if after.look == "expected" else "open", other_end)
    if before is None:
        return CellChange("same", other_end)
    if failed:
        unjudged = left_out(json.loads(before.rules), json.loads(after.rules))
        return CellChange("unjudged" if unjudged else "fixed", other_end, left_out="; ".join(unjudged))
    return _speed(before, after, rows)


def _speed(before: CellEnd | CellLine, after: CellEnd | CellLine, rows: Sequence[GateRow]) -> CellChange:
    if rows:
        outcomes = {row["outcome"] for row in rows}
        effect: Effect = "worse" if "worse" in outcomes else "better" if "better" in outcomes else "same"
        return CellChange(effect, left_out="; ".join(sentences(rows, *OPEN)))
    if why := _unfair(before, after):
        return CellChange("same", left_out=why)
    assert before.latency and after.latency
    share = after.latency / before.latency - 1
    return CellChange("worse" if share > BAND else "better" if share < -BAND else "same", False, share)


def _unfair(before: CellEnd | CellLine, after: CellEnd | CellLine) -> str:
    """Return why two speeds cannot be compared; empty if they can."""
    if before.key == after.key:
        return SAME
    if not before.latency or not after.latency:
        return "not measured in both builds"
    if before.shared or after.shared:
        return "not measured alone"
    if before.device != after.device:
        return "measured on different devices"
    return ""


def differences(left: Report, right: Report, sidecar: Callable[[str], Sidecar]) -> Differences:
    """Return in what two builds differ; `sidecar` returns that of a cache key."""
    before, after = ({cell["identifier"]: cell for cell in report["cells"]} for report in (left, right))
    found = [_difference(name, before.get(name), after.get(name), sidecar) for name in before | after]
    return {
        "left": left["build"],
        "right": right["build"],
        "same": found.count(None),
        "cells": [each for each in found if each],
        "left_out": {
            "left": [name for name in before if name not in after],
            "right": [name for name in after if name not in before],
        },
    }


def _difference(
    name: str, left: JudgedCell | None, right: JudgedCell | None, sidecar: Callable[[str], Sidecar]
) -> CellDifference | None:
    """Return in what a cell differs between two builds; None if nothing is worth a notice."""
    found = change(CellEnd.of(CellLine.of(left)), CellEnd.of(CellLine.of(right))) if left and right else None
    keys = [cell["facts"]["key"] if cell["facts"] else cell["key"] for cell in (left, right) if cell]
    if found and not found.is_noticed and len(set(keys)) == 1:
        return None
    changed, around = list[str](), list[str]()
    published = [cell["facts"] for cell in (left, right) if cell and cell["facts"]]
    if len({facts["key"] for facts in published}) > 1:
        around = between(*published)
        with suppress(NotFound, ArtifactGone):
            changed = changes(*(sidecar(facts["key"])["spec"] for facts in published))
    effect, share = (found.effect, found.share) if found else (None, None)
    return {
        "identifier": name, "left": left, "right": right, "changes": changed, "around": around,
        "effect": effect, "share": share,
    }  # fmt: skip


# --- judged cells, and the one exit code ------------------------------------------------------------------------------

DAY = 86_400.0


def judge_cell(planned: CellPlan, row: CellRow | None) -> JudgedCell:
    """Join what was planned for a cell with what the store knows of it, and judge a success by the build's gates."""
    cell = _join(planned, row)
    if cell["state"] == State.SUCCEEDED and cell["facts"]:
        judge_program(planned, cell, cell["facts"])
    policy = policy_of(cell["kind"]) if cell["kind"] else None
    cell["fault"] = policy.fault if policy else None
    cell["advice"] = policy.advice if policy else ""
    expected = expected_failure(planned)
    entry = planned["expected"] if expected and datetime.now(UTC).timestamp() < expected["before"] else None
    # A failure that somebody acknowledged may be mended: that makes no manifest out of date.
    cell["expected"] = entry is not None and not (entry.get("by") and cell["state"] == State.SUCCEEDED)
    cell["as_expected"] = entry is not None and cell["state"] == State.FAILED and cell["kind"] == entry["kind"]
    cell["expected_reason"] = entry["reason"] if entry else ""
    cell["expected_link"] = (entry.get("link") or "") if entry else ""
    if planned["expected"] and not entry and cell["state"] == State.FAILED:
        cell["message"] += f" (expected until {planned['expected']['until']}, which is over)"
    return cell


def judge_instead(planned: CellPlan, cell: JudgedCell, facts: ArtifactFacts) -> JudgedCell:
    """Return a cell that passed as it would be with another program, which an earlier build made."""
    other: JudgedCell = {**cell, "facts": facts, "hit": True, "warning": "", "compared": []}
    judge_program(planned, other, facts)
    return other


def _join(planned: CellPlan, row: CellRow | None) -> JudgedCell:
    """Return a cell that is not judged yet; without a row it waits for its build to be accepted."""
    texts = ("message", "detail", "waiting", "warning", "held", "advice", "expected_reason", "expected_link")
    unknown = ("kind", "phase", "progress", "job", "worker", "elapsed", "log", "estimate", "before", "fault")
    known = {
        **dict.fromkeys(texts, ""),
        **dict.fromkeys(unknown),
        **planned,
        **(row or {"state": State.QUEUED, "hit": False, "attempt": 0, "spent": 0.0, "facts": None}),
        "identifier": planned["identifier"],
        "gate": planned["gates"],
        "expected": False,
        "as_expected": False,
        "reason": planned.get("reason") or "",
        "compared": [],
        "around": [],
    }
    return view_of(JudgedCell, known)


def verdict_of(cells: Sequence[JudgedCell]) -> VerdictDocument:
    """Return a build's one verdict.

    Cells that fail as the manifest expects keep it green; one that was expected to fail and did not is a failed gate,
    because the manifest is then out of date.
    """
    wrong = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    succeeded = [cell for cell in cells if cell["state"] == State.SUCCEEDED]
    surprises = [cell for cell in succeeded if cell["expected"]]
    cancelled = [cell for cell in cells if cell["state"] == State.CANCELLED]
    by_farm = [cell for cell in wrong if cell["fault"] == Fault.FARM]
    by_gate = [cell for cell in wrong if is_gate(cell["kind"])]
    if by_farm:
        code = ExitCode.FARM_FAULT
    elif len(wrong) > len(by_gate) or cancelled:
        code = ExitCode.CELL_FAILED
    elif wrong or surprises:
        code = ExitCode.GATE_FAILED
    else:
        code = ExitCode.OK
    parts = [f"{len(succeeded)} of {len(cells)} cells succeeded"]
    if unverified := sum(map(is_unverified, succeeded)):
        parts[0] += f" ({unverified} not or only partly verified)"
    unjudged = sum(cell["kind"] == FailureKind.UNDECIDED for cell in by_gate)
    outcomes = [{row["outcome"] for row in cell.get("compared") or ()} for cell in succeeded]
    for number, words in (
        (sum(cell["as_expected"] for cell in cells), "failed as expected"),
        (len(wrong) - len(by_farm) - len(by_gate), "failed"),
        (len(by_gate) - unjudged, "failed a gate"),
        (unjudged, "that a gate cannot judge"),
        (len(by_farm), "ended by the farm's fault"),
        (len(surprises), "succeeded against the manifest's expectation"),
        (len(cancelled), "cancelled"),
        (sum("better" in found for found in outcomes), "better than the baseline"),
        (sum(not found.isdisjoint(OPEN) for found in outcomes), "not judged by a gate"),
        (sum("new" in found for found in outcomes), "new to the baseline"),
        (sum(bool(cell.get("held")) for cell in cells), "that `latest` does not take"),
    ):
        if number:
            parts.append(f"{number} {words}")
    counts = {state.value: sum(cell["state"] == state for cell in cells) for state in State}
    counts["hits"] = sum(cell["hit"] for cell in cells)
    counts["expected"] = sum(cell["as_expected"] for cell in cells)
    return {"exit_code": int(code), "text": ", ".join(parts), "counts": counts}


def is_unverified(cell: JudgedCell) -> bool:
    """Whether a cell's program was to be compared with a reference and was not, or only some of its outputs."""
    from farm.targets.compilers import default_equal_share  # Who lists builds needs no targets.

    facts, limits, share = cell.get("facts"), cell["gate"]["tolerance"], default_equal_share(cell["precision"])
    return bool(facts and judge_unverified(facts.get("unverified", ""), facts, limits, equal_share=share))


def expected_failure(planned: CellPlan) -> TimedFailure | None:
    """Return the failure that a planned cell is expected to have, and until when."""
    entry = planned["expected"]
    if not entry:
        return None
    if not entry["until"]:
        return {"kind": entry["kind"], "before": math.inf}
    last = datetime.fromisoformat(entry["until"]).replace(tzinfo=UTC)
    return {"kind": entry["kind"], "before": last.timestamp() + DAY}


def changes_of(cells: Sequence[JudgedCell]) -> Changes:
    """Return what judged cells (`farm.results.verdict.judge_cell`) say about a build, in the manifest's order.

    Of a cell whose build before is not read yet nothing is said to be new or fixed: its failure is undecided.
    """
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    succeeded = [cell for cell in cells if cell["state"] == State.SUCCEEDED]
    found = [(cell, change_of(cell)) for cell in cells]
    past = {cell["identifier"]: f"failed before: {before['kind']}" for cell in cells if (before := cell.get("before"))}
    return {
        "new_failures": [_failure(cell) for cell, each in found if each.effect == "newly failed"],
        "still_failing": [_failure(cell) for cell, each in found if each.effect == "still failing"],
        "regressions": [_failure(cell) for cell in failed if cell["kind"] == FailureKind.REGRESSION],
        "improvements": _said(succeeded, "better"),
        "fixed": [_remark(cell, past[cell["identifier"]]) for cell, each in found if each.effect == "fixed"],
        "unjudged": [
            _remark(cell, f"{past[cell['identifier']]}; no longer judged by {each.left_out}")
            for cell, each in found
            if each.effect == "unjudged"
        ],
        "held": [_remark(cell, held) for cell in succeeded if (held := cell.get("held"))],
        "new": _said(cells, "new"),
        "undecided": [_remark(cell, "; ".join(said)) for cell in cells if (said := list(_undecided(cell)))],
        "hits": [cell["identifier"] for cell in cells if cell["hit"]],
        "recompiled": [_remark(cell, cell["reason"]) for cell in cells if cell.get("reason") and not cell["hit"]],
    }


def change_of(cell: JudgedCell) -> CellChange:
    """Return what happened to a cell since the build before; `open` if that is not known."""
    past = cell.get("before")
    now = look_of(cell["state"], hit=cell["hit"], expected=cell["as_expected"])
    after = CellEnd(cell["identifier"], now, cell["kind"] or "")
    if past and past["state"] == UNKNOWN:
        return CellChange("open")
    if not past or past["state"] != State.FAILED:
        return change(after._replace(look="compiled") if past else None, after)
    before = after._replace(look="failed", rules=past.get("rules", "{}"))
    return change(before, after._replace(rules=json.dumps(rules_of(cell))))


def _undecided(cell: JudgedCell) -> Iterator[str]:
    past = cell.get("before")
    if cell["state"] == State.FAILED and past and past["state"] == UNKNOWN:
        yield f"{cell['kind']}: {cell['message']}; it is not known if it failed before: {past['kind']}"
    if rows := cell.get("compared"):
        yield from sentences(rows, *OPEN)


def _said(cells: Sequence[JudgedCell], outcome: Outcome) -> list[Remark]:
    found = [(cell, sentences(rows, outcome)) for cell in cells if (rows := cell.get("compared"))]
    return [_remark(cell, "; ".join(said)) for cell, said in found if said]


def _failure(cell: JudgedCell) -> Remark:
    return _remark(cell, f"{cell['kind']}: {cell['message']}")


def _remark(cell: JudgedCell, text: str) -> Remark:
    return {"identifier": cell["identifier"], "text": text}
