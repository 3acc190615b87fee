"""What else changed between two measurements."""

from __future__ import annotations

from typing import Any

import pytest

from farm.results.surroundings import between
from farm.results.verdict import judge_cell
from tests.unit.results.test_gates import facts, planned
from tests.unit.results.test_verdict import row


def sidecar(**changes: Any) -> Any:
    device = {"arch": "gfx942", "model": changes.pop("model", "MI300X"), "driver": changes.pop("driver", "6.10")}
    measured = {"conditions": [{}, {"clocks": {"sclk": changes.pop("clock", 2100.0)}}]}
    return {"toolchain": "rocm7.1", "device": device, "node": "n1", "measurements": measured, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"clock": 2010.0}, []),
        ({"clock": 1300.0}, ["clock sclk 2100 -> 1300 MHz"]),
        ({"driver": None}, []),
        (
            {"toolchain": "rocm7.2", "model": "MI325X", "driver": "6.12", "node": "n2"},
            ["toolchain rocm7.1 -> rocm7.2", "device MI300X -> MI325X", "driver 6.10 -> 6.12", "node n1 -> n2"],
        ),
    ],
)
def test_two_sidecars_say_what_was_different_when_they_were_measured(changes: Any, said: list[str]) -> None:
    assert between(sidecar(), sidecar(**changes)) == said


def test_a_cell_says_what_else_differs_from_its_baseline_where_it_is_compared() -> None:
    for limits, said in (({"size": 0.05}, ["driver 6.10 -> 6.12", "node n0 -> n1"]), ({}, [])):
        asked = planned({"driver": "6.10", "node": "n0"}, limits=limits)
        assert judge_cell(asked, row(state="succeeded", facts=facts(driver="6.12")))["around"] == said
