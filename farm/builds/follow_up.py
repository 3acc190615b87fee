"""Follow-ups: builds that tune another build's programs further, in the background. Pure.

A cell whose tuning has a `background` mode is published as soon as its own mode has ended. Its follow-up has the same
cell with the `background` mode, measures its program in turns with the published one, and replaces it in `latest` if
it is shown to be faster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm.builds.latest import submitted
from farm.spec import CompileSpec, cache_key

Document = dict[str, Any]

PRIORITY = -1000
"""Lower than any build that somebody waits for."""


def follow_up_id(build_id: str) -> str:
    """Return the id of a build's follow-up: always the same, so that it is submitted once."""
    return f"b-{hashlib.sha256(f'{build_id} in the background'.encode()).hexdigest()[:16]}"


def background_cells(planned: Iterable[Mapping[str, Any]], passed: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return the planned cells of a follow-up: the cells that passed and have background tuning.

    `planned` are the cells of a build's plan, `passed` its judged cells that `latest` may name.
    """
    published = {cell["identifier"]: cell["facts"]["key"] for cell in passed}
    return [
        _more_thorough(cell, published[cell["identifier"]])
        for cell in planned
        if cell["identifier"] in published and (cell["order"] or {}).get("background")
    ]


def _more_thorough(cell: Mapping[str, Any], published: str) -> Document:
    # A deep search takes days, and reaching the time limit would be final.
    order = {name: value for name, value in cell["order"].items() if name not in ("background", "budget", "limit")}
    order |= {"spec": {**order["spec"], **cell["order"]["background"]}, "against": published}
    key = cache_key(CompileSpec.from_dict(order["spec"]))
    mode = order["spec"]["tuning"]["mode"]
    return {
        **cell,
        "key": key,
        "order": order,
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


def plan_follow_up(planned: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], now: float) -> Document:
    """Return the plan of a build's follow-up with these cells; `now` is in Unix seconds."""
    before = planned["build"]
    build = {
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
    return {"schema": 1, "build": build, "cells": list(cells)}


def is_proven(facts: Mapping[str, Any], published: str) -> bool:
    """Whether a program was shown to be faster than that with the key `published`, in turns on one device."""
    against = facts.get("against") or {}
    return against.get("key") == published and against.get("verdict") == "faster"
