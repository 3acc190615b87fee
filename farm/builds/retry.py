"""Retries: the build that tries an ended build's cells again, as they were planned then. Pure.

A finished build never reopens. A failure is recorded under no cache key, so the same work order in a new build is tried
again, and what succeeded (then or since) is a hit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.errors import UsageError
from farm.jobs.state import State
from farm.spec import job_key

Document = dict[str, Any]


def unsuccessful(report: Mapping[str, Any]) -> set[str]:
    """Return the identifiers of a report's cells that failed or were cancelled, but not as the manifest expects."""
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
    """Return the plan of the build that has cells of an ended build again.

    `planned` is that build's plan, `cells` those of it to take. `known` has the facts of what is published by now, by
    the cells' identifiers; `running` are the job keys (`farm.spec.job_key`) of unfinished jobs; `live_workers` counts
    workers by pool. `build` is what the new build does not share with the old one (`id`, `created_by`, `created_at`).

    Raises UsageError for a cell that was a hit when it was planned, and is not there any more.
    """
    before = planned["build"]
    # A sweep names the best of all its sizes: of some of them alone it would name another.
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
