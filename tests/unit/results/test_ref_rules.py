"""The rules of refs, one at a time: which programs are named, and which entries others may replace or drop."""

from __future__ import annotations

from typing import Any

import pytest

from farm.results.ref_rules import UNNAMED_FOR, given_up, has_passed, replaced

NAME = "net/onnxruntime-cpu/fp32/b1"


def entry(key: str, submitted: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"identifier": NAME, "device": "cpu", "key": key, "submitted": submitted, "manifest": "demo", **more}


@pytest.mark.parametrize("warning", ["output `y` is off by 0.5", "not verified: no reference can run the model"])
def test_latest_takes_no_program_of_which_a_build_warns(warning: str) -> None:
    cell: Any = {"state": "succeeded", "facts": {"key": "a"}, "warning": ""}
    assert has_passed(cell)
    assert not has_passed({**cell, "warning": warning})


def test_a_faster_program_replaces_only_the_one_that_it_was_measured_against() -> None:
    faster, slower = {"cell": entry("fast", 2.0)}, {NAME: "slow"}
    assert replaced({"cell": entry("slow")}, faster, slower) == faster
    there = {"cell": entry("another")}
    assert replaced(there, faster, slower) == there, "a build that was submitted before it has put that there"


def test_a_retry_gives_nothing_up() -> None:
    """It may have some of the cells alone; the others are no longer in a plan, and still wanted."""
    build: Any = {"name": "demo", "created_at": UNNAMED_FOR + 10.0}
    old: Any = entry("a", submitted=1.0)
    assert given_up({"build": build, "cells": []}, [])(old)
    assert not given_up({"build": {**build, "retries": "b-1"}, "cells": []}, [])(old)
