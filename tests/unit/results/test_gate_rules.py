"""Which rules refused a cell, and whether it has passed them since."""

from __future__ import annotations

from typing import Any

import pytest

from farm.results.gates import joined, left_out, rules_of
from farm.results.verdict import CellEnd, CellLine, change, changes_of, judge_cell
from tests.unit.results.test_gates import against, facts, planned
from tests.unit.results.test_verdict import row as row_of


def judged(found: dict[str, Any] | None = None, **gates: Any) -> Any:
    more = {name: gates.pop(name) for name in ("before",) if name in gates}
    return judge_cell({**planned(**gates), **more}, row_of("succeeded", facts=facts(**(found or {}))))


def test_a_cell_has_the_rules_that_refused_it_or_that_it_passed() -> None:
    limits, budgets = {"latency": 0.05, "size": 0.1, "memory": 0.5}, {"throughput": 600.0, "size": 2000}
    found = judged(against(0.8, 0.79, 0.81), limits=limits, budgets=budgets)
    assert rules_of(found) == {"gate latency prod": 0.05, "budget throughput": 600.0}
    found = judged(limits={"latency": 0.05, "size": 0.1})
    assert rules_of(found) == {"gate size prod": 0.1, "tolerance *": 0.1}, "the latency was not compared"
    assert rules_of(judged({"errors": {"y": 0.3}}, limits={"size": 0.1})) == {"tolerance *": 0.1}
    assert rules_of(judged({"spread": {"y": 0.0}}, weak="fail")) == {"weak": 0.0}
    assert rules_of(judged({"errors": {"y": 0.3}, "spread": {"y": 0.0}}, weak="fail")) == {"tolerance *": 0.1}
    assert rules_of(judged({"spread": {"y": 1.0}}, weak="fail")) == {"tolerance *": 0.1, "weak": 0.0}
    assert rules_of(judged(unverifiable="fail")) == {"tolerance *": 0.1, "unverifiable": 0.0}
    assert rules_of(judged({"errors": {"y": 0.3}}, unverifiable="fail")) == {"tolerance *": 0.1}
    unverified = {"verified": False, "unverified": "not verified: no reference", "errors": {}}
    assert rules_of(judged(unverified, unverifiable="fail")) == {"unverifiable": 0.0}
    assert rules_of(judged(limits={"latency": 0.05}, undecided="fail")) == {"gate latency prod": 0.05}


@pytest.mark.parametrize(
    ("refused", "passed", "said"),
    [
        ({"gate latency prod": 0.05}, {"gate latency prod": 0.05}, []),
        ({"gate latency prod": 0.05}, {"gate latency prod": 0.04}, []),
        ({"gate latency prod": 0.05}, {"gate latency prod": 0.5}, ["gate latency=5%"]),
        ({"gate latency prod": 0.05}, {"gate latency old": 0.05}, ["gate latency=5%"]),
        ({"gate latency prod": 0.05, "budget size": 50e6}, {"gate latency prod": 0.05}, ["budget size=50MB"]),
        ({"budget throughput": 600.0}, {"budget throughput": 700.0}, []),
        ({"budget throughput": 600.0}, {"budget throughput": 600.0}, []),
        ({"budget throughput": 600.0}, {"budget throughput": 500.0}, ["budget throughput=600"]),
        ({"tolerance y": 0.01}, {"tolerance *": 0.01}, []),
        ({"tolerance *": 0.01}, {"tolerance *": 0.02}, ["tolerance 0.01"]),
        ({"unverifiable": 0.0}, {}, ["unverifiable: fail"]),
        ({"weak": 0.0}, {"tolerance *": 0.1}, ["weak: fail"]),
    ],
)
def test_only_the_same_rule_or_a_stricter_one_ends_a_refusal(
    refused: dict[str, float], passed: dict[str, float], said: list[str]
) -> None:
    assert left_out(refused, passed) == said


def test_of_two_refusals_the_stricter_rule_stays() -> None:
    assert joined({"gate size prod": 0.1, "budget size": 9.0}, {"gate size prod": 0.5}) == {
        "gate size prod": 0.1,
        "budget size": 9.0,
    }
    assert joined({"gate size prod": 0.5}, {"gate size prod": 0.1}) == {"gate size prod": 0.1}


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ({"limits": {"size": 0.1}}, "fixed"),
        ({"limits": {"size": 5.0}}, "unjudged"),
        ({"budgets": {"size": 2000}}, "unjudged"),
    ],
)
def test_fixed_is_said_only_of_what_passed_the_same_rule(gates: dict[str, Any], expected: str) -> None:
    failed = judged({"program": {"path": "p", "digest": "d" * 64, "size": 2000}}, limits={"size": 0.1})
    before = CellEnd.of(CellLine.of(failed))
    past = {"state": "failed", "kind": "regression", "build": "b-1", "rules": before.rules}
    now = judged(before=past, **gates)
    assert change(before, CellEnd.of(CellLine.of(now))).effect == expected
    found = changes_of([now])
    assert {name for name in ("fixed", "unjudged") if found[name]} == {expected}
