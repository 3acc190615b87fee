"""What a build changed: new failures, regressions, improvements, what is fixed, hits, and why the rest was compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from farm.jobs.state import FailureKind, State
from farm.results.gates import improvements, undecided


class Remark(TypedDict):
    """A cell, and what is said of it."""

    identifier: str
    text: str


class Changes(TypedDict):
    """A build's cells by what changed since the manifest's build before. A cell may be in several lists.

    `new_failures` passed before, or are new; `still_failing` failed before too. Cells that fail as expected are in
    neither. `regressions` failed a limit against a baseline. `undecided` could not be compared, or not surely.
    `recompiled` says of each cell why it was no hit.
    """

    new_failures: list[Remark]
    still_failing: list[Remark]
    regressions: list[Remark]
    improvements: list[Remark]
    fixed: list[Remark]
    undecided: list[Remark]
    hits: list[str]
    recompiled: list[Remark]


def changes_of(cells: Sequence[Mapping[str, Any]]) -> Changes:
    """Return what judged cells (`farm.results.verdict.judge_cell`) say of a build, each list in the manifest's order.

    Of a report by a farm before 0.2.0, which kept neither reasons nor what was before, every failure is a new one.
    """
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    succeeded = [cell for cell in cells if cell["state"] == State.SUCCEEDED]
    before = {cell["identifier"]: (cell.get("before") or {}).get("state") for cell in cells}
    new = [cell for cell in failed if before[cell["identifier"]] != State.FAILED]
    return {
        "new_failures": [_failure(cell) for cell in new],
        "still_failing": [_failure(cell) for cell in failed if before[cell["identifier"]] == State.FAILED],
        "regressions": [_failure(cell) for cell in failed if cell["kind"] == FailureKind.REGRESSION],
        "improvements": [
            _remark(cell, "; ".join(said)) for cell in succeeded if (said := improvements(cell.get("compared") or []))
        ],
        "fixed": [
            _remark(cell, f"failed before: {cell['before']['kind']}")
            for cell in succeeded
            if before[cell["identifier"]] == State.FAILED
        ],
        "undecided": [
            _remark(cell, "; ".join(said)) for cell in cells if (said := undecided(cell.get("compared") or []))
        ],
        "hits": [cell["identifier"] for cell in cells if cell["hit"]],
        "recompiled": [_remark(cell, cell["reason"]) for cell in cells if cell.get("reason") and not cell["hit"]],
    }


def _failure(cell: Mapping[str, Any]) -> Remark:
    return _remark(cell, f"{cell['kind']}: {cell['message']}")


def _remark(cell: Mapping[str, Any], text: str) -> Remark:
    return {"identifier": cell["identifier"], "text": text}
