"""Retries: a new build that runs an ended build's cells again, as they were planned. Pure.

A finished build never reopens. Failures are not recorded under cache keys, so a new build tries the same work order
again, and cells that succeeded (then or since) are hits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from farm.errors import UsageError
from farm.jobs.facts import ArtifactFacts
from farm.jobs.order import job_key
from farm.jobs.rows import PlannedBuild
from farm.jobs.state import State
from farm.matrix.planned import CellPlan, PlanDocument
from farm.results.report import Report


def unsuccessful(report: Report) -> set[str]:
    """Return the identifiers of a report's cells that failed unexpectedly or were cancelled."""
    return {
        cell["identifier"] for cell in report["cells"] if cell["state"] != State.SUCCEEDED and not cell["as_expected"]
    }


def plan_retry(
    planned: PlanDocument,
    cells: Sequence[CellPlan],
    *,
    known: Mapping[str, ArtifactFacts],
    running: Collection[str],
    live_workers: Mapping[str, int],
    build_id: str,
) -> PlanDocument:
    """Return the plan of a build that runs cells of an ended build again.

    `planned` is that build's plan, `cells` those of it to take. `known` has the facts of what is published by now, by
    the cells' identifiers; `running` are the job keys (`farm.jobs.order.job_key`) of unfinished jobs; `live_workers`
    counts workers by pool. `build_id` is the id of the new build.

    Raises UsageError for a cell that was a hit when it was planned, and whose artifact is gone.
    """
    before = planned["build"]
    # A sweep names the best of all its sizes; of only some of them it could name another.
    whole = len(cells) == len(planned["cells"])
    again: list[CellPlan] = []
    for cell in cells:
        facts, order = known.get(cell["identifier"]), cell["order"]
        if facts is None and order is None:
            raise UsageError(
                f"{cell['identifier']} existed before the build, and is gone now",
                hint="submit the manifest again: the build has no work order for it",
            )
        joined = order is not None and job_key(order, cell["key"]) in running
        state, reason = ("hit", "") if facts else ("joined", "") if joined else ("miss", "tried again")
        expected = cell["expected"]
        again.append(
            {
                **cell,
                "facts": facts,
                "state": state,
                "reason": reason,
                "live_workers": live_workers.get(cell["pool"], 0),
                # What somebody acknowledged then may have been taken back.
                "expected": None if expected and expected.get("by") else expected,
                "sweep": cell["sweep"] if whole else None,
            }
        )
    build: PlannedBuild = {
        **before,
        "warnings": [],
        "cells": len(again),
        "hits": sum(cell["state"] == "hit" for cell in again),
        "id": build_id,
        "retries": before["id"],
    }
    build.pop("concurrency", None)  # It is for what somebody asks for again, not for what is newer.
    document: PlanDocument = {"schema": 1, "build": build, "cells": again}
    if shadow := planned.get("shadow"):
        document["shadow"] = shadow
    return document
