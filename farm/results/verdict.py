"""The verdict: a build's cells judged by its own gates and expectations, and the one exit code. Pure.

A job's success is a program that was compiled, loaded back and measured; whether it is good enough is each build's own
question, so it is asked when a build is read (`docs/decisions/0002-judged-at-read.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from datetime import time as datetime_time
from typing import Any

from farm.errors import ExitCode
from farm.jobs.state import FailureKind, Fault, State
from farm.results import accuracy
from farm.results.gates import improvements, judge_gates, undecided
from farm.targets.compilers import default_equal_share

DAY = 86_400.0

Document = dict[str, Any]


def judge_cell(planned: Mapping[str, Any], row: Mapping[str, Any]) -> Document:
    """Join what was planned for a cell with what the store knows of it, and judge a success by the build's gates."""
    cell: Document = {
        name: planned[name] for name in ("identifier", "model", "target", "precision", "shape", "key", "pool")
    }
    gates = planned["gates"]
    cell |= {
        "sizes": planned["sizes"],
        "sweep": planned["sweep"],
        "state": row.get("state", State.QUEUED),
        "hit": bool(row.get("hit")),
        "kind": row.get("kind") or None,
        "message": row.get("message") or "",
        "detail": row.get("detail") or "",
        "phase": row.get("phase") or None,
        "progress": row.get("progress"),
        "job": row.get("job") or None,
        "attempt": row.get("attempt") or 0,
        "worker": row.get("worker") or None,
        "elapsed": row.get("elapsed"),
        "estimate": planned.get("estimate"),
        "spent": _spent(row),
        "facts": row.get("facts") or None,
        "log": row.get("log") or None,
        "waiting": "",
        "warning": "",
        "gate": gates,
        "line": planned["line"],
        "reason": planned.get("reason") or "",
        "before": planned.get("before"),
        "compared": [],
    }
    if cell["state"] == State.SUCCEEDED and cell["facts"]:
        judgement = accuracy.judge(
            cell["facts"], gates["tolerance"], gates["weak"], equal_share=default_equal_share(planned["precision"])
        )
        unverified = accuracy.judge_unverified(cell["facts"])
        failed = [judgement] if gates["on_fail"] == "fail" else []
        failed += [unverified] if gates.get("unverifiable") == "fail" else []
        fallback = accuracy.judge_fallback(cell["facts"]) if gates.get("fallback", "warn") != "allow" else None
        failed += [fallback] if gates.get("fallback") == "fail" else []
        judged = judge_gates(planned, cell["facts"], hit=cell["hit"])
        cell["compared"] = judged.rows
        failed += [accuracy.Judgement(judged.kind, judged.message)] if judged.kind else []
        if reason := next(filter(None, failed), None):
            cell |= {"state": State.FAILED, "kind": reason.kind, "message": reason.message}
        else:
            cell["warning"] = "; ".join(found.message for found in (judgement, unverified, fallback) if found)
    policy = FailureKind(cell["kind"]).policy if cell["kind"] else None
    cell["fault"] = policy.fault if policy else None
    cell["advice"] = policy.advice if policy else ""
    entry = _valid_expectation(planned)
    cell["expected"] = entry is not None
    cell["as_expected"] = entry is not None and cell["state"] == State.FAILED and cell["kind"] == entry["kind"]
    cell["expected_reason"] = entry["reason"] if entry else ""
    cell["expected_link"] = (entry.get("link") or "") if entry else ""
    if planned["expected"] and not entry and cell["state"] == State.FAILED:
        cell["message"] += f" (expected until {planned['expected']['until']}, which is over)"
    return cell


def verdict_of(cells: Sequence[Mapping[str, Any]]) -> Document:
    """Return a build's one verdict: `{"exit_code", "text", "counts"}`.

    Cells that fail as the manifest expects keep it green; one that was expected to fail and did not is a failed gate,
    because the manifest no longer tells the truth.
    """
    wrong = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    surprises = [cell for cell in cells if cell["expected"] and cell["state"] == State.SUCCEEDED]
    cancelled = [cell for cell in cells if cell["state"] == State.CANCELLED]
    by_farm = [cell for cell in wrong if cell["fault"] == Fault.FARM]
    by_gate = [cell for cell in wrong if FailureKind(cell["kind"]).is_gate]
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
    rows = [cell.get("compared") or [] for cell in cells if cell["state"] == State.SUCCEEDED]
    for number, words in (
        (sum(cell["as_expected"] for cell in cells), "failed as expected"),
        (len(wrong) - len(by_farm) - len(by_gate), "failed"),
        (len(by_gate), "failed a gate"),
        (len(by_farm), "ended by the farm's fault"),
        (len(surprises), "succeeded against the manifest's expectation"),
        (len(cancelled), "cancelled"),
        (sum(bool(improvements(found)) for found in rows), "better than the baseline"),
        (sum(bool(undecided(found)) for found in rows), "not (surely) compared with the baseline"),
    ):
        if number:
            parts.append(f"{number} {words}")
    counts = {state.value: sum(cell["state"] == state for cell in cells) for state in State}
    counts["hits"] = sum(cell["hit"] for cell in cells)
    return {"exit_code": int(code), "text": ", ".join(parts), "counts": counts}


def is_unverified(cell: Mapping[str, Any]) -> bool:
    """Whether a cell's program was to be compared with a reference and was not, or only some of its outputs."""
    return bool((cell.get("facts") or {}).get("unverified"))


def expected_failure(planned: Mapping[str, Any]) -> Document | None:
    """Return the failure that a planned cell is expected to have: `{"kind", "before"}`, until then (Unix seconds)."""
    entry: Mapping[str, Any] | None = planned["expected"]
    if not entry:
        return None
    if not entry.get("until"):
        return {"kind": entry["kind"], "before": math.inf}
    last = datetime.combine(date.fromisoformat(entry["until"]), datetime_time(), UTC)
    return {"kind": entry["kind"], "before": last.timestamp() + DAY}


def _valid_expectation(planned: Mapping[str, Any]) -> Mapping[str, Any] | None:
    expected = expected_failure(planned)
    return planned["expected"] if expected and datetime.now(UTC).timestamp() < expected["before"] else None


def _spent(row: Mapping[str, Any]) -> float:
    """Seconds that the job's attempts have held a slot, with the one that runs."""
    running = (row.get("elapsed") or 0.0) if row.get("state") == State.RUNNING else 0.0
    return round((row.get("spent") or 0.0) + running, 3)
