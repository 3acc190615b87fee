"""The verdict: a build's cells judged by its own gates and expectations, what the build changed, and the one exit code.

A job's success is a program that was compiled, loaded back and measured; whether it is good enough is each build's own
question, so it is asked when a build is read (`docs/decisions/0002-judged-at-read.md`). Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from datetime import time as datetime_time

from farm.errors import ExitCode
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import CellRow, TimedFailure, VerdictDocument
from farm.jobs.state import FailureKind, Fault, State, is_gate, policy_of
from farm.matrix.planned import UNKNOWN, CellPlan, ExpectedFailure
from farm.results.gates import (
    improvements,
    judge_program,
    judge_unverified,
    new,
    rules_of,
    undecided,
)
from farm.results.lines import CellChange, CellEnd, Look, change, look_of
from farm.results.report import Changes, JudgedCell, Remark
from farm.targets.compilers import default_equal_share

DAY = 86_400.0


def judge_cell(planned: CellPlan, row: CellRow | None) -> JudgedCell:
    """Join what was planned for a cell with what the store knows of it, and judge a success by the build's gates."""
    cell = _join(planned, row)
    if cell["state"] == State.SUCCEEDED and cell["facts"]:
        judge_program(planned, cell, cell["facts"])
    policy = policy_of(cell["kind"]) if cell["kind"] else None
    cell["fault"] = policy.fault if policy else None
    cell["advice"] = policy.advice if policy else ""
    entry = _valid_expectation(planned)
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
    return {
        **(row or _WAITING),
        "identifier": planned["identifier"],
        "model": planned["model"],
        "target": planned["target"],
        "precision": planned["precision"],
        "shape": planned["shape"],
        "key": planned["key"],
        "pool": planned["pool"],
        "sizes": planned["sizes"],
        "sweep": planned["sweep"],
        "estimate": planned.get("estimate"),
        "waiting": "",
        "warning": "",
        "held": "",
        "gate": planned["gates"],
        "line": planned["line"],
        "fault": None,
        "advice": "",
        "expected": False,
        "as_expected": False,
        "expected_reason": "",
        "expected_link": "",
        "reason": planned.get("reason") or "",
        "before": planned.get("before"),
        "compared": [],
        "around": [],
    }


_WAITING: CellRow = {
    "identifier": "",
    "state": State.QUEUED,
    "hit": False,
    "kind": None,
    "message": "",
    "detail": "",
    "phase": None,
    "progress": None,
    "job": None,
    "attempt": 0,
    "worker": None,
    "elapsed": None,
    "spent": 0.0,
    "facts": None,
    "log": None,
}


def verdict_of(cells: Sequence[JudgedCell]) -> VerdictDocument:
    """Return a build's one verdict.

    Cells that fail as the manifest expects keep it green; one that was expected to fail and did not is a failed gate,
    because the manifest is then out of date.
    """
    wrong = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    surprises = [cell for cell in cells if cell["expected"] and cell["state"] == State.SUCCEEDED]
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
    count = sum(cell["state"] == State.SUCCEEDED for cell in cells)
    parts = [f"{count} of {len(cells)} cells succeeded"]
    unverified = sum(cell["state"] == State.SUCCEEDED and is_unverified(cell) for cell in cells)
    if unverified:
        parts[0] += f" ({unverified} not or only partly verified)"
    unjudged = sum(cell["kind"] == FailureKind.UNDECIDED for cell in by_gate)
    rows = [cell.get("compared") or [] for cell in cells if cell["state"] == State.SUCCEEDED]
    for number, words in (
        (sum(cell["as_expected"] for cell in cells), "failed as expected"),
        (len(wrong) - len(by_farm) - len(by_gate), "failed"),
        (len(by_gate) - unjudged, "failed a gate"),
        (unjudged, "that a gate cannot judge"),
        (len(by_farm), "ended by the farm's fault"),
        (len(surprises), "succeeded against the manifest's expectation"),
        (len(cancelled), "cancelled"),
        (sum(bool(improvements(found)) for found in rows), "better than the baseline"),
        (sum(bool(undecided(found)) for found in rows), "not judged by a gate"),
        (sum(bool(new(found)) for found in rows), "new to the baseline"),
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
    facts, limits, share = cell.get("facts"), cell["gate"]["tolerance"], default_equal_share(cell["precision"])
    return bool(facts and judge_unverified(facts.get("unverified", ""), facts, limits, equal_share=share))


def expected_failure(planned: CellPlan) -> TimedFailure | None:
    """Return the failure that a planned cell is expected to have, and until when."""
    entry = planned["expected"]
    if not entry:
        return None
    if not entry["until"]:
        return {"kind": entry["kind"], "before": math.inf}
    last = datetime.combine(date.fromisoformat(entry["until"]), datetime_time(), UTC)
    return {"kind": entry["kind"], "before": last.timestamp() + DAY}


def _valid_expectation(planned: CellPlan) -> ExpectedFailure | None:
    expected = expected_failure(planned)
    return planned["expected"] if expected and datetime.now(UTC).timestamp() < expected["before"] else None


def changes_of(cells: Sequence[JudgedCell]) -> Changes:
    """Return what judged cells (`farm.results.verdict.judge_cell`) say about a build, in the manifest's order.

    Of a cell whose build before is not read yet nothing is said to be new or fixed: its failure is undecided.
    """
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    succeeded = [cell for cell in cells if cell["state"] == State.SUCCEEDED]
    changes = {cell["identifier"]: change_of(cell) for cell in cells}
    effects = {name: found.effect for name, found in changes.items()}
    return {
        "new_failures": [_failure(cell) for cell in failed if effects[cell["identifier"]] == "newly failed"],
        "still_failing": [_failure(cell) for cell in failed if effects[cell["identifier"]] == "still failing"],
        "regressions": [_failure(cell) for cell in failed if cell["kind"] == FailureKind.REGRESSION],
        "improvements": [
            _remark(cell, "; ".join(said)) for cell in succeeded if (said := improvements(cell.get("compared") or []))
        ],
        "fixed": [
            _remark(cell, f"failed before: {past['kind']}")
            for cell in succeeded
            if (past := cell.get("before")) and effects[cell["identifier"]] == "fixed"
        ],
        "unjudged": [
            _remark(cell, f"failed before: {past['kind']}; no longer judged by {changes[cell['identifier']].left_out}")
            for cell in succeeded
            if (past := cell.get("before")) and effects[cell["identifier"]] == "unjudged"
        ],
        "held": [_remark(cell, held) for cell in succeeded if (held := cell.get("held"))],
        "new": [_remark(cell, "; ".join(said)) for cell in cells if (said := new(cell.get("compared") or []))],
        "undecided": [_remark(cell, "; ".join(said)) for cell in cells if (said := list(_undecided(cell)))],
        "hits": [cell["identifier"] for cell in cells if cell["hit"]],
        "recompiled": [_remark(cell, cell["reason"]) for cell in cells if cell.get("reason") and not cell["hit"]],
    }


def change_of(cell: JudgedCell) -> CellChange:
    """Return what happened to a cell since the build before; `open` if that is not known."""
    past = cell.get("before")
    now = look_of(cell["state"], hit=cell["hit"], expected=cell["as_expected"])
    after = CellEnd(cell["identifier"], now, cell["kind"] or "", rules=json.dumps(rules_of(cell)))
    if past and past["state"] == UNKNOWN:
        return CellChange("open")
    look: Look = "failed" if past and past["state"] == State.FAILED else "compiled"
    before = after._replace(look=look, rules=past.get("rules", "{}")) if past else None
    return change(before, after)


def _undecided(cell: JudgedCell) -> Iterator[str]:
    past = cell.get("before")
    if cell["state"] == State.FAILED and past and past["state"] == UNKNOWN:
        yield f"{cell['kind']}: {cell['message']}; it is not known if it failed before: {past['kind']}"
    yield from undecided(cell.get("compared") or [])


def _failure(cell: JudgedCell) -> Remark:
    return _remark(cell, f"{cell['kind']}: {cell['message']}")


def _remark(cell: JudgedCell, text: str) -> Remark:
    return {"identifier": cell["identifier"], "text": text}
