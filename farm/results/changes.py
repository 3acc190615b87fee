"""What a build changed: new failures, regressions, improvements, what is fixed, hits, and why the rest was compiled."""

from __future__ import annotations

from collections.abc import Sequence

from farm.jobs.state import FailureKind, State
from farm.results.gates import improvements, undecided
from farm.results.report import Changes, JudgedCell, Remark


def changes_of(cells: Sequence[JudgedCell]) -> Changes:
    """Return what judged cells (`farm.results.verdict.judge_cell`) say of a build, each list in the manifest's order.

    Of a report by a farm before 0.2.0, which kept neither reasons nor what was before, every failure is a new one.
    """
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    succeeded = [cell for cell in cells if cell["state"] == State.SUCCEEDED]
    before = {cell["identifier"]: past["state"] if (past := cell.get("before")) else None for cell in cells}
    new = [cell for cell in failed if before[cell["identifier"]] != State.FAILED]
    return {
        "new_failures": [_failure(cell) for cell in new],
        "still_failing": [_failure(cell) for cell in failed if before[cell["identifier"]] == State.FAILED],
        "regressions": [_failure(cell) for cell in failed if cell["kind"] == FailureKind.REGRESSION],
        "improvements": [
            _remark(cell, "; ".join(said)) for cell in succeeded if (said := improvements(cell.get("compared") or []))
        ],
        "fixed": [
            _remark(cell, f"failed before: {past['kind']}")
            for cell in succeeded
            if (past := cell.get("before")) and past["state"] == State.FAILED
        ],
        "undecided": [
            _remark(cell, "; ".join(said)) for cell in cells if (said := undecided(cell.get("compared") or []))
        ],
        "hits": [cell["identifier"] for cell in cells if cell["hit"]],
        "recompiled": [_remark(cell, cell["reason"]) for cell in cells if cell.get("reason") and not cell["hit"]],
    }


def _failure(cell: JudgedCell) -> Remark:
    return _remark(cell, f"{cell['kind']}: {cell['message']}")


def _remark(cell: JudgedCell, text: str) -> Remark:
    return {"identifier": cell["identifier"], "text": text}
