"""Follow-ups: builds that tune another build's programs further, in the background. Pure.

A cell whose tuning has a `background` mode is published as soon as its own mode has ended. Its follow-up has the same
cell with the `background` mode, measures its program in turns with the published one, and replaces it in `latest` if
it is shown to be faster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from farm.jobs.order import LaterTuning, WorkOrder
from farm.jobs.rows import PlannedBuild
from farm.matrix.planned import CellGates, CellPlan, PlanDocument
from farm.results.ref_rules import submitted
from farm.results.report import JudgedCell
from farm.spec import CompileSpec, cache_key

PRIORITY = -1000
"""Lower than any build that somebody waits for."""

NOT_JUDGED = ("latency", "throughput", "compile_time", "tuning_time")
"""Limits that a follow-up leaves out: it is faster than the program that passed them, and takes longer to be made."""


def follow_up_id(build_id: str) -> str:
    """Return the id of a build's follow-up: always the same, so that it is submitted once."""
    return f"b-{hashlib.sha256(f'{build_id} in the background'.encode()).hexdigest()[:16]}"


def background_cells(planned: Iterable[CellPlan], passed: Iterable[JudgedCell]) -> list[CellPlan]:
    """Return the planned cells of a follow-up: the cells that passed and have background tuning.

    `planned` are the cells of a build's plan, `passed` its judged cells that `latest` may name.
    """
    published = {cell["identifier"]: cell["facts"]["key"] for cell in passed if cell["facts"]}
    return [
        _more_thorough(cell, order, later, published[cell["identifier"]])
        for cell in planned
        if cell["identifier"] in published and (order := cell["order"]) and (later := order.get("background"))
    ]


def _more_thorough(cell: CellPlan, ordered: WorkOrder, later: LaterTuning, published: str) -> CellPlan:
    order: WorkOrder = {**ordered, "spec": {**ordered["spec"], **later}, "against": published}
    order.pop("background", None)
    order.pop("budget", None)
    order.pop("limit", None)
    key = cache_key(CompileSpec.from_dict(order["spec"]))
    mode = order["spec"]["tuning"]["mode"]
    gates: CellGates = {**cell["gates"]}
    if limits := {name: limit for name, limit in gates.pop("limits", {}).items() if name not in NOT_JUDGED}:
        gates["limits"] = limits
    # A deep search takes days, and reaching the time limit would be final.
    return {
        **cell,
        "key": key,
        "order": order,
        "gates": gates,
        "limits": {**cell["limits"], "time": 0.0},
        "state": "miss",
        "reason": f"tuning {mode}, in the background",
        "facts": None,
        "priority": PRIORITY,
        "expected": None,
        "expected_seconds": None,
        "estimate": None,
        "sweep": None,
        "warnings": [],
    }


def plan_follow_up(planned: PlanDocument, cells: Sequence[CellPlan], now: float) -> PlanDocument:
    """Return the plan of a build's follow-up with these cells; `now` is in Unix seconds."""
    before = planned["build"]
    build: PlannedBuild = {
        **before,
        "id": follow_up_id(before["id"]),
        "follows": before["id"],
        "submitted": submitted(before),
        "created_at": now,
        "cells": len(cells),
        "hits": 0,
        "fail_fast": False,
        "retries": None,
        "warnings": [],
    }
    build.pop("request", None)
    build.pop("concurrency", None)
    return {"schema": 1, "build": build, "cells": list(cells)}
