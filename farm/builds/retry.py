"""Retries: a new build that runs an ended build's cells again, as they were planned. Pure.

A finished build never reopens. Failures are not recorded under cache keys, so a new build tries the same work order
again, and cells that succeeded (then or since) are hits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.errors import UsageError
from farm.jobs.state import State
from farm.spec import job_key

Document = dict[str, Any]


def unsuccessful(report: Mapping[str, Any]) -> set[str]:
    """Return the identifiers of a report's cells that failed unexpectedly or were cancelled."""
    return {
        cell["identifier"] for cell in report["cells"] if cell["state"] != State.SUCCEEDED and not cell["as_expected"]
    }


def plan_retry(
    planned: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    *,
    known: Mapping[str, Mapping[str, Any]],
    running: Collection[str],
    live_workers: Mapping[str, int],
    build: Mapping[str, Any],
) -> Document:
    """Return the plan of a build that runs cells of an ended build again.

    `planned` is that build's plan, `cells` those of it to take. `known` has the facts of what is published by now, by
    the cells' identifiers; `running` are the job keys (`farm.spec.job_key`) of unfinished jobs; `live_workers` counts
    workers by pool. `build` is what the new build does not share with the old one (`id`, `created_by`, `created_at`).

    Raises UsageError for a cell that was a hit when it was planned, and whose artifact is gone.
    """
    before = planned["build"]
    # A sweep names the best of all its sizes; of only some of them it could name another.
    whole = len(cells) == len(planned["cells"])
    again: list[Document] = []
    for cell in cells:
        facts, order = known.get(cell["identifier"]), cell["order"]
        if facts is None and order is None:
            raise UsageError(
                f"{cell['identifier']} existed before the build, and is gone now",
                hint="submit the manifest again: the build has no work order for it",
            )
        joined = order is not None and job_key(order, cell["key"]) in running
        state, reason = ("hit", "") if facts else ("joined", "") if joined else ("miss", "tried again")
        again.append(
            {
                **cell,
                "facts": facts,
                "state": state,
                "reason": reason,
                "live_workers": live_workers.get(cell["pool"], 0),
                "sweep": cell["sweep"] if whole else None,
            }
        )
    counts = {"cells": len(again), "hits": sum(cell["state"] == "hit" for cell in again)}
    return {
        "schema": 1,
        "build": {**before, "warnings": [], **counts, **build, "retries": before["id"]},
        "cells": again,
    }
