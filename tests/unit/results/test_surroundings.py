"""What else changed between two measurements."""

from __future__ import annotations

from typing import Any

import pytest

from farm.results.gates import between
from farm.results.verdict import judge_cell
from tests.unit.results.test_gates import facts, planned
from tests.unit.results.test_verdict import row

KNOWN = {
    "toolchain": "rocm7.1", "card": "MI300X", "driver": "6.10", "cpu": "EPYC 9654", "node": "n1",
    "clocks": {"sclk": 2100.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"clocks": {"sclk": 2010.0}}, []),
        ({"clocks": {"sclk": 1300.0}}, ["clock sclk 2100 -> 1300 MHz"]),
        ({"driver": None}, []),
        (
            {"toolchain": "rocm7.2", "card": "MI325X", "driver": "6.12", "cpu": "EPYC 7763", "node": "n2"},
            [
                "toolchain rocm7.1 -> rocm7.2",
                "card MI300X -> MI325X",
                "driver 6.10 -> 6.12",
                "cpu EPYC 9654 -> EPYC 7763",
                "node n1 -> n2",
            ],
        ),
    ],
)
def test_two_programs_say_what_was_different_when_they_were_measured(changes: Any, said: list[str]) -> None:
    assert between(KNOWN, {**KNOWN, **changes}) == said


def test_a_cell_says_what_else_differs_from_its_baseline_where_it_is_compared() -> None:
    before = {"driver": "6.10", "node": "n0", "cpu": "EPYC 9654", "clocks": {"cpu": 2600.0}}
    now = facts(driver="6.12", cpu="EPYC 7763", clocks={"cpu": 3500.0})
    moved = [
        "driver 6.10 -> 6.12", "cpu EPYC 9654 -> EPYC 7763", "node n0 -> n1", "clock cpu 2600 -> 3500 MHz"
    ]  # fmt: skip
    for limits, said in (({"size": 0.05}, moved), ({}, [])):
        assert judge_cell(planned(before, limits=limits), row(state="succeeded", facts=now))["around"] == said
