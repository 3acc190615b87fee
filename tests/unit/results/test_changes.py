"""What changed between two builds: one answer, whoever asks."""

from __future__ import annotations

import pytest

from farm.pages.build_view import ShownBuild, compare
from farm.results.gates import GateRow
from farm.results.verdict import SAME, CellChange, CellEnd, CellLine, change

BEFORE = CellEnd("net/cpu/fp32/b1", "compiled", key="old", latency=1e-3, device="cpu")
NOW = BEFORE._replace(key="new")
FAILED = NOW._replace(look="failed", kind="compiler_error", latency=None)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (BEFORE, NOW._replace(latency=1.05e-3), CellChange("same", False, pytest.approx(0.05))),
        (BEFORE, NOW._replace(latency=1.2e-3), CellChange("worse", False, pytest.approx(0.2))),
        (BEFORE, NOW._replace(latency=0.8e-3), CellChange("better", False, pytest.approx(-0.2))),
        (BEFORE, BEFORE._replace(look="hit", latency=2e-3), CellChange("same", left_out=SAME)),
        (BEFORE, NOW._replace(latency=None), CellChange("same", left_out="not measured in both builds")),
        (
            BEFORE,
            NOW._replace(latency=2e-3, device="gpu"),
            CellChange("same", left_out="measured on different devices"),
        ),
        (BEFORE, NOW._replace(latency=2e-3, shared=True), CellChange("same", left_out="not measured alone")),
        (BEFORE._replace(shared=True), NOW._replace(latency=2e-3), CellChange("same", left_out="not measured alone")),
        (BEFORE, FAILED, CellChange("newly failed", True)),
        (None, FAILED, CellChange("newly failed", True)),
        (None, NOW, CellChange("same")),
        (FAILED, FAILED, CellChange("still failing")),
        (FAILED, FAILED._replace(kind="timeout"), CellChange("still failing", True)),
        (FAILED._replace(look="expected"), FAILED, CellChange("still failing")),
        (FAILED, NOW, CellChange("fixed", True)),
        (BEFORE, FAILED._replace(look="expected"), CellChange("same", True)),
        (BEFORE, NOW._replace(look="running"), CellChange("open", True)),
        (BEFORE._replace(look="cancelled"), NOW, CellChange("open", True)),
    ],
)
def test_each_change_has_one_name(before: CellEnd | None, after: CellEnd, expected: CellChange) -> None:
    assert change(before, after) == expected


def test_a_comparison_in_turns_says_more_than_medians() -> None:
    row: GateRow = {
        "measure": "latency", "against": "prod", "value": 1.0, "base": 1.0, "change": 0.2, "interval": (0.1, 0.3),
        "limit": 0.05, "outcome": "worse", "why": "",
    }  # fmt: skip
    assert change(BEFORE, NOW, [row]).effect == "worse"
    assert change(BEFORE, NOW._replace(latency=9.0), [{**row, "outcome": "within"}]).effect == "same"
    unclear = change(BEFORE, NOW, [{**row, "outcome": "not compared", "why": "nobody measured it"}])
    assert unclear == CellChange(
        "same", left_out="gate latency=5%: latency is not compared with prod: nobody measured it"
    )


def test_a_page_puts_each_change_into_one_place() -> None:
    def shown(*looks: str) -> ShownBuild:
        cells = [
            CellLine(f"net-{number}", "net", "cpu", "fp32", "b1", look, key=f"{looks}", latency=1e-3 * len(look))
            for number, look in enumerate(looks)
        ]
        return ShownBuild({"state": "reported"}, cells)

    found = compare(shown("compiled", "failed", "hit", "queued"), shown("failed", "compiled", "compiled", "failed"))
    places = {name: [pair.after.identifier for pair in pairs] for name, pairs in found.pairs.items()}
    assert places == {
        "newly-failed": ["net-0"], "still-failed": [], "fixed": ["net-1"], "slower": ["net-2"], "faster": [],
        "unjudged": [],
    }  # fmt: skip
