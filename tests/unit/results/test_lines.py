"""A cell's line of a build: what lists and comparisons show of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from farm.results.verdict import CellEnd, CellLine, change, differences, is_quiet, judge_cell, look_of
from tests.unit.results.test_verdict import FACTS, KEY, failed, planned, row, succeeded


@pytest.mark.parametrize(
    ("state", "how", "look"),
    [
        ("queued", {}, "queued"),
        ("running", {}, "running"),
        ("succeeded", {}, "compiled"),
        ("succeeded", {"hit": True}, "hit"),
        ("failed", {}, "failed"),
        ("failed", {"expected": True}, "expected"),
        ("cancelled", {}, "cancelled"),
    ],
)
def test_a_state_has_a_look(state: str, how: dict[str, bool], look: str) -> None:
    assert look_of(state, **how) == look


def test_a_line_has_what_is_known_of_its_cell_and_nothing_else() -> None:
    line = CellLine.of(judge_cell(planned(), row("running", phase="compiling", worker="w1", job="j-1", elapsed=2.0)))
    assert (line.look, line.phase, line.worker, line.job, line.elapsed) == ("running", "compiling", "w1", "j-1", 2.0)
    assert (line.key, line.published, line.by_farm, line.size, line.latency) == (KEY, False, False, None, None)
    assert (line.kind, line.device, line.shared, line.warning) == ("", "", False, "")
    line = CellLine.of(judge_cell(planned(), row("queued")))
    assert (line.phase, line.worker, line.job) == ("", "", "")


def test_a_line_of_a_program_has_its_figures() -> None:
    cell = judge_cell(planned(), succeeded({**FACTS, "key": "b" * 64, "shared": True}))
    line = CellLine.of({**cell, "held": "gate size=10% refused it"})
    assert (line.key, line.published, line.size, line.latency) == ("b" * 64, True, 10, 0.001)
    assert (line.device, line.shared, line.warning) == ("cpu", True, "gate size=10% refused it")
    assert CellLine.of({**cell, "held": "", "warning": "weak"}).warning == "weak"
    assert CellLine.of({**cell, "warning": "weak", "held": "held"}).warning == "weak"
    assert line.succeeded and not line.is_gate


@pytest.mark.parametrize(("kind", "by_farm"), [("storage", True), ("bad_model", False)])
def test_a_line_says_whose_fault_a_failure_is(kind: str, by_farm: bool) -> None:
    line = CellLine.of(judge_cell(planned(), failed(kind)))
    assert (line.by_farm, line.kind, line.published, line.succeeded) == (by_farm, kind, False, False)


def test_what_only_one_of_two_builds_has_is_left_out() -> None:
    def report(*names: str) -> Any:
        cells = [{**judge_cell(planned(), row("queued")), "identifier": name} for name in names]
        return {"build": {}, "cells": cells}

    found = differences(report("a", "b", "c"), report("b", "d"), lambda key: {})
    assert found["left_out"] == {"left": ["a", "c"], "right": ["d"]}
    assert ([each["identifier"] for each in found["cells"]], found["same"]) == (["a", "c", "d"], 1)


ENDS = [
    CellEnd("net", look, kind, key=key, latency=latency, device="cpu")
    for look, kind in (("compiled", ""), ("failed", "hang"), ("failed", "accuracy"))
    for key, latency in (("a", None), ("a", 1.0), ("b", 1.0625), ("c", 1.25), ("d", 0.75))
]


def test_what_is_quiet_is_what_a_change_cannot_be_noticed_of() -> None:
    for before, after in itertools.product(ENDS, ENDS):
        if is_quiet(before, after):
            assert not change(before, after).is_noticed
    of: dict[str, Any] = {"identifier": "net", "look": "compiled"}
    steady, none = CellEnd(**of, key="a", latency=1.0), CellEnd(**of, key="b")
    assert is_quiet(steady, CellEnd(**of, key="b", latency=1.0625))
    assert not is_quiet(steady, CellEnd(**of, key="b", latency=1.25))
    assert not is_quiet(steady, CellEnd(**of, key="b", latency=0.75))
    assert is_quiet(steady, none) and is_quiet(none, steady)
    assert not is_quiet(CellEnd("net", "failed", "hang"), CellEnd("net", "failed", "accuracy"))
    assert not is_quiet(CellEnd("net", "failed"), CellEnd("net", "compiled"))
    assert is_quiet(CellEnd("net", "failed", "hang"), CellEnd("net", "failed", "hang"))
