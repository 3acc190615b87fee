"""Gates other than accuracy: what fails, what is said, and how often noise alone fails a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.errors import ExitCode
from farm.manifest.parsing import read_gates
from farm.node.executor import ROUNDS, ROUNDS_AGAIN
from farm.results.gates import (
    OPEN,
    gate_rows,
    is_suspicious,
    judge_gates,
    movements,
    rule,
    sentence,
    sentences,
    values_of,
    weak_outputs,
)
from farm.results.speed import Comparison, compare_pairs
from farm.results.verdict import changes_of, judge_cell, verdict_of
from tests.unit.results.test_verdict import row as row_of

OLD, NEW = "a" * 64, "b" * 64


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "key": NEW,
        "program": {"path": "p", "digest": "d" * 64, "size": 1000},
        "toolchain": "onnxruntime1-00000000",
        "device": "cpu",
        "errors": {"y": 0.0},
        "equal": {},
        "latency": 0.002,
        "throughput": 500.0,
        "peak_memory": 100,
        "load": 0.1,
        "compile_seconds": 10.0,
        "node": "n1",
        "shared": False,
        "created": "2026-11-20T10:00:00+00:00",
        "tuning": None,
        **changes,
    }


def planned(baseline: dict[str, Any] | None = None, **gates: Any) -> dict[str, Any]:
    """A planned cell; `baseline` are what the baseline's numbers differ in."""
    asked = {"baseline": "prod", **gates} if "limits" in gates else gates
    known = {"size": 1000, "memory": 100, "load": 0.1, "compile_time": 10.0, "node": "n1", "shared": False}
    return {
        "identifier": "net/onnxruntime-cpu/fp32/b1",
        "model": "net",
        "target": "onnxruntime/cpu",
        "precision": "fp32",
        "shape": "b1",
        "sizes": {"batch": 1},
        "sweep": None,
        "key": NEW,
        "pool": "p",
        "line": 7,
        "reason": "",
        "expected": None,
        "gates": {"tolerance": {"*": 0.1}, "weak": "warn", "on_fail": "fail", **asked},
        "baseline": {
            "ref": "prod",
            "key": OLD,
            "toolchain": "onnxruntime1-00000000",
            "values": {**known, **(baseline or {})},
            "by_node": {},
        },
    }


def against(ratio: float, low: float, high: float, key: str = OLD) -> dict[str, Any]:
    return {"against": {**Comparison(ratio, low, high, "slower").as_dict(), "key": key}}


def outcome(cell: dict[str, Any], found: dict[str, Any], *, hit: bool = False) -> str:
    (row,) = gate_rows(cell, found, hit=hit)
    return row["outcome"]


# --- one number --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (against(0.90, 0.89, 0.91), "worse"),
        (against(0.90, 0.89, 0.97), "unclear"),
        (against(0.99, 0.97, 1.01), "within"),
        (against(1.10, 1.08, 1.12), "better"),
    ],
)
def test_latency_is_judged_by_the_interval_of_turns(measured: dict[str, Any], expected: str) -> None:
    assert outcome(planned(limits={"latency": 0.05}), facts(**measured)) == expected
    assert outcome(planned(limits={"throughput": 0.05}), facts(**measured)) == expected


def test_the_numbers_of_turns_are_shares_above_the_baseline() -> None:
    """If the baseline takes 0.8 of our time, latency rose by a quarter and throughput fell by a fifth."""
    found = facts(**against(0.8, 0.5, 1.0))
    latency, throughput = (
        gate_rows(planned(limits={name: 0.05}), found, hit=False)[0] for name in ("latency", "throughput")
    )
    assert latency["change"] == pytest.approx(0.25)
    assert latency["interval"] == pytest.approx((0.0, 1.0))
    assert throughput["change"] == pytest.approx(-0.2)
    assert throughput["interval"] == pytest.approx((-0.5, 0.0))


@pytest.mark.parametrize(
    ("beside", "theirs_beside", "low", "high"),
    [
        (False, False, 1.5 / 1.21, 1.5 * 1.21),
        (True, False, 1.5 / 1.65, 1.5 * 1.65),
        (True, True, 1.5 / 2.25, 1.5 * 2.25),
    ],
)
def test_a_number_that_is_measured_once_may_be_off_by_a_tenth_alone_and_by_half_beside_others(
    beside: bool, theirs_beside: bool, low: float, high: float
) -> None:
    cell = planned({"memory": 100, "shared": theirs_beside}, limits={"memory": 0.1})
    (row,) = gate_rows(cell, facts(peak_memory=150, shared=beside), hit=False)
    assert row["change"] == pytest.approx(0.5)
    assert row["interval"] == pytest.approx((low - 1, high - 1))


@pytest.mark.parametrize(
    ("size", "outcome_", "why"),
    [(1049, "within", ""), (1051, "worse", ""), (949, "better", ""), (0, "not compared", "it was not measured")],
)
def test_a_size_is_compared_to_the_byte(size: int, outcome_: str, why: str) -> None:
    found = facts(program={"path": "p", "digest": "d" * 64, "size": size})
    (row,) = gate_rows(planned(limits={"size": 0.05}), found, hit=False)
    assert (row["outcome"], row["why"]) == (outcome_, why)
    if size:
        assert row["interval"] == pytest.approx((size / 1000 - 1, size / 1000 - 1))


def test_a_number_that_the_baseline_lacks_is_not_compared() -> None:
    (row,) = gate_rows(planned({"memory": None}, limits={"memory": 0.1}), facts(), hit=False)
    assert (row["outcome"], row["why"]) == ("not compared", "it was not measured")


@pytest.mark.parametrize(
    ("measure", "budget", "measured", "expected"),
    [
        ("latency", 0.002, {"latency": 0.002}, "within"),
        ("latency", 0.002, {"latency": 0.0021}, "worse"),
        ("throughput", 500.0, {"throughput": 500.0}, "within"),
        ("throughput", 500.0, {"throughput": 499.0}, "worse"),
        ("latency", 0.002, {"latency": 0.1, "shared": True}, "not compared"),
        ("memory", 100, {"peak_memory": 101, "shared": True}, "worse"),
        ("memory", 100, {"peak_memory": None}, "not compared"),
    ],
)
def test_a_budget_is_exceeded_by_what_is_beyond_it(
    measure: str, budget: float, measured: dict[str, Any], expected: str
) -> None:
    cell = planned(budgets={measure: budget})
    assert outcome(cell, facts(**measured)) == expected
    (row,) = gate_rows(cell, facts(**measured), hit=True)
    assert ("it is a hit" in row["why"]) is (expected != "not compared")


def test_a_regression_fails_its_build_with_a_sentence_that_has_the_numbers() -> None:
    cell = judge_cell(planned(limits={"latency": 0.05}), row_of("succeeded", facts=facts(**against(0.80, 0.79, 0.81))))
    assert (cell["state"], cell["kind"], cell["fault"]) == ("failed", "regression", "user")
    assert cell["message"] == "gate latency=5%: latency is 25 % above prod's (23.5 % to 26.6 %)"
    assert verdict_of([cell])["exit_code"] == ExitCode.GATE_FAILED


def test_numbers_of_turns_with_another_program_are_not_used() -> None:
    """Nor are medians of two days: without turns there is no comparison, and that is said."""
    row = gate_rows(planned(limits={"latency": 0.05}), facts(**against(0.5, 0.4, 0.6, key="c" * 64)), hit=True)[0]
    assert sentence(row) == (
        "gate latency=5%: latency is not compared with prod: it is a hit of 2026-11-20, which did not run in turns with"
        " this baseline"
    )


def test_a_hit_that_was_measured_against_this_baseline_says_when() -> None:
    row = gate_rows(planned(limits={"latency": 0.05}), facts(**against(0.8, 0.79, 0.81)), hit=True)[0]
    assert row["outcome"] == "worse"
    assert "measured on 2026-11-20, it is a hit" in sentence(row)


def test_the_baseline_itself_passes() -> None:
    assert outcome(planned(limits={"latency": 0.0}), facts(key=OLD), hit=True) == "within"


@pytest.mark.parametrize(
    ("seconds", "beside", "expected"),
    [
        (14.0, False, "within"),
        (19.0, False, "worse"),
        (30.0, True, "within"),
        (60.0, True, "worse"),
        (4.0, False, "better"),
    ],
)
def test_compile_time_has_to_be_longer_than_noise_explains(seconds: float, beside: bool, expected: str) -> None:
    cell = planned({"shared": beside}, limits={"compile_time": 0.5})
    assert outcome(cell, facts(compile_seconds=seconds, shared=beside)) == expected


def test_times_that_a_process_has_by_luck_are_no_regression_whatever_the_share() -> None:
    cell = planned({"load": 0.01}, limits={"load": 0.5})
    assert outcome(cell, facts(load=0.2)) == "within"
    assert outcome(cell, facts(load=0.5)) == "worse"


def test_times_of_two_nodes_are_never_compared() -> None:
    cell = planned({"node": "n2"}, limits={"compile_time": 0.5})
    assert outcome(cell, facts(compile_seconds=1000.0)) == "not compared"
    cell["baseline"]["by_node"] = {"n1": {"compile_time": 10.0, "node": "n1"}}
    assert outcome(cell, facts(compile_seconds=1000.0)) == "worse", "the history has this node's own"


def test_numbers_of_a_hit_are_judged_with_their_day_so_that_trying_again_makes_nothing_green() -> None:
    (row,) = gate_rows(planned(limits={"compile_time": 0.5}), facts(compile_seconds=1000.0), hit=True)
    assert (row["outcome"], row["why"]) == ("worse", "measured on 2026-11-20, it is a hit")
    assert outcome(planned({"size": 500}, limits={"size": 0.5}), facts(), hit=True) == "worse"


def test_programs_that_run_alike_are_equal_and_their_compiles_need_not_be() -> None:
    limits = {"latency": 0.05, "compile_time": 0.5}
    cell = planned(limits=limits)
    cell["baseline"]["runs_as"] = "e" * 64
    rows = gate_rows(cell, facts(runs_as="e" * 64, compile_seconds=1000.0), hit=False)
    assert [row["outcome"] for row in rows] == ["within", "worse"]
    cell["baseline"]["runs_as"] = ""
    assert outcome(cell | {"gates": cell["gates"] | {"limits": {"latency": 0.05}}}, facts(runs_as="")) == "not compared"


def test_the_numbers_of_a_program_name_its_node_and_driver_and_its_own_baseline_is_no_change() -> None:
    values = values_of(facts(driver="6.12"))
    assert (values["node"], values["driver"], values["shared"]) == ("n1", "6.12", False)
    assert values_of(facts(node=None))["node"] == values_of(facts())["driver"] == ""
    cell = planned(limits={"latency": 0.05})
    cell["baseline"]["key"] = NEW
    (row,) = gate_rows(cell, facts(), hit=True)
    assert (row["outcome"], row["change"]) == ("within", 0.0)


def test_what_this_build_measured_goes_before_what_others_did() -> None:
    cell = planned(limits={"latency": 0.05})
    now = against(0.8, 0.79, 0.81)["against"] | {"measured": "2026-11-22T01:00:00+00:00", "node": "n1"}
    cell["baseline"]["turns"] = against(1.0, 0.99, 1.01)["against"] | {"measured": "2026-11-21T01:00:00+00:00"}
    (row,) = gate_rows(cell, facts(turns=now, **against(0.9, 0.89, 0.91)), hit=True)
    assert (row["outcome"], row["why"]) == ("worse", "")
    (row,) = gate_rows(cell, facts(**against(0.9, 0.89, 0.91)), hit=True)
    assert (row["outcome"], row["why"]) == ("within", "measured on 2026-11-21, it is a hit")


def test_turns_that_others_disturbed_are_marked_and_a_programs_own_disturbed_figures_mark_no_others() -> None:
    cell, mark = planned(limits={"latency": 0.05}), "others ran on the host or used the GPU meanwhile"
    slower, turns = against(0.8, 0.79, 0.81), {"measured": "2026-11-22T01:00:00+00:00", "node": "n1"}
    for found, hit, said in (
        (facts(shared=True, **slower), False, mark),
        (facts(shared=True, **slower), True, f"measured on 2026-11-20, it is a hit; {mark}"),
        (facts(shared=True, turns={**slower["against"], **turns, "shared": False}), False, ""),
        (facts(shared=False, turns={**slower["against"], **turns, "shared": True}), False, mark),
    ):
        rows = gate_rows(cell, found, hit=hit)
        assert (rows[0]["outcome"], rows[0]["why"]) == ("worse", said)
        judgement = judge_gates(cell, rows)
        assert judgement
        assert judgement.message.endswith(said)


def test_what_was_not_compared_fails_only_if_that_is_asked() -> None:
    row = row_of("succeeded", facts=facts(), hit=True)
    assert judge_cell(planned(limits={"latency": 0.05}), row)["state"] == "succeeded"
    assert judge_cell(planned(limits={"latency": 0.05}, undecided="fail"), row)["kind"] == "undecided"


@pytest.mark.parametrize(
    ("budget", "changes", "expected"),
    [
        ({"latency": 0.001}, {}, "worse"),
        ({"latency": 0.001}, {"shared": True}, "not compared"),
        ({"latency": 0.003}, {}, "within"),
        ({"throughput": 600.0}, {}, "worse"),
        ({"throughput": 400.0}, {}, "within"),
        ({"size": 999}, {}, "worse"),
        ({"load": 1.0}, {"load": None}, "not compared"),
    ],
)
def test_a_budget_needs_no_baseline(budget: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    cell = {**planned(budgets=budget), "baseline": None}
    assert outcome(cell, facts(**changes)) == expected
    kind = judge_cell(cell, row_of("succeeded", facts=facts(**changes)))["kind"]
    assert (kind == "budget") is (expected == "worse")


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        ("latency", 0.005, "latency=5ms"),
        ("latency", 0.0005, "latency=0.5ms"),
        ("compile_time", 90.0, "compile-time=90s"),
        ("size", 50_000_000, "size=50MB"),
        ("throughput", 600.0, "throughput=600"),
    ],
)
def test_a_message_names_the_rule_as_it_is_written(name: str, number: float, shown: str) -> None:
    """Of a gate and a budget on the same number one sees which of the two spoke."""
    chosen = read_gates([], [shown])
    assert chosen and chosen["budgets"] == {name: number}
    cell = planned(limits={name: 0.125}, budgets={name: number})
    limit, budget = gate_rows(cell, facts(), hit=False)
    assert (rule(limit), rule(budget)) == (f"gate {shown.partition('=')[0]}=12.5%", f"budget {shown}")
    assert sentence(budget).startswith(f"budget {shown}: ")


def test_facts_and_plans_of_an_older_farm_are_judged_without_gates() -> None:
    old = {name: value for name, value in facts().items() if name not in ("throughput", "compile_seconds", "node")}
    cell = planned()
    del cell["baseline"], cell["reason"]
    assert judge_cell(cell, row_of("succeeded", facts=old))["compared"] == []


# --- a build -----------------------------------------------------------------------------------------------------


def test_a_build_lists_what_changed() -> None:
    def cell(name: str, state: str, before: str | None, **more: Any) -> dict[str, Any]:
        was = {"state": before, "kind": "accuracy", "build": "b-1"} if before else None
        row = row_of(state, kind="hang" if state == "failed" else None, message="m", **more)
        row |= {"facts": facts(**against(1.5, 1.4, 1.6))} if state == "succeeded" else {}
        found = {**planned(limits={"latency": 0.05}), "identifier": name, "before": was, "reason": "salt: a -> b"}
        return judge_cell(found, row)

    found = changes_of(
        [
            cell("new", "failed", "succeeded"),
            cell("first", "failed", None),
            cell("old", "failed", "failed"),
            cell("fixed", "succeeded", "failed"),
            cell("hit", "succeeded", "succeeded", hit=True),
        ]
    )
    assert [each["identifier"] for each in found["new_failures"]] == ["new", "first"]
    assert [each["identifier"] for each in found["still_failing"]] == ["old"]
    assert found["fixed"] == [{"identifier": "fixed", "text": "failed before: accuracy"}]
    assert found["hits"] == ["hit"]
    assert {"identifier": "fixed", "text": "salt: a -> b"} in found["recompiled"]
    assert found["improvements"][0]["text"].startswith("gate latency=5%: latency is 33.3 % below prod's")


def test_an_expectation_that_is_over_says_so() -> None:
    cell = {**planned(), "expected": {"kind": "hang", "reason": "r", "until": "2020-01-01", "link": "https://x.org/1"}}
    found = judge_cell(cell, row_of("failed", kind="hang", message="it hangs"))
    assert found["message"] == "it hangs (expected until 2020-01-01, which is over)"
    assert not found["expected"]


# --- noise -------------------------------------------------------------------------------------------------------

PAIRS = json.loads((Path(__file__).parent / "noise.json").read_text())["pairs"]
"""Fast runs of rounds in which one model took turns with itself (`tests/benchmarks/noise.py`), on a machine with six
times as much work as cores."""

LIMIT = 0.05
COMPARISONS = 2000


def gate_fails(random: np.random.Generator, slower: float) -> bool:
    """Whether a gate fails a program that takes `slower` times as long, as the worker measures: again if in doubt."""

    def measured(rounds: int) -> Comparison:
        pair = PAIRS[random.integers(len(PAIRS))]
        # Rounds that followed one another: what disturbs a machine lasts longer than a round.
        start = random.integers(len(pair["ours"]))
        chosen = [(start + number) % len(pair["ours"]) for number in range(rounds)]
        return compare_pairs(
            [[pair["ours"][index] * slower] for index in chosen], [[pair["theirs"][index]] for index in chosen]
        )

    first = measured(ROUNDS)
    return is_suspicious(first, LIMIT) and 1 / measured(ROUNDS_AGAIN).high > 1 + LIMIT


def test_noise_alone_fails_at_most_two_of_a_hundred_comparisons() -> None:
    random = np.random.default_rng(16)
    assert sum(gate_fails(random, 1.0) for _ in range(COMPARISONS)) <= 0.02 * COMPARISONS


def test_a_slow_down_of_ten_percent_is_found_in_95_of_a_hundred() -> None:
    random = np.random.default_rng(16)
    assert sum(gate_fails(random, 1.1) for _ in range(COMPARISONS)) >= 0.95 * COMPARISONS


# --- at the limits -----------------------------------------------------------------------------------------------


def row_at(cell: dict[str, Any], hit: bool = False, **changes: Any) -> dict[str, Any]:
    (found,) = gate_rows(cell, facts(**changes), hit=hit)
    return dict(found)


def of_size(size: int) -> dict[str, Any]:
    return {"path": "p", "digest": "d" * 64, "size": size}


def test_a_size_is_compared_with_a_baseline_of_another_node_and_both_numbers_are_kept() -> None:
    row = row_at(planned({"node": "n2", "size": 2000}, limits={"size": 0.05}))
    assert (row["value"], row["base"], row["change"], row["outcome"]) == (1000, 2000, -0.5, "better")
    elsewhere = planned({"node": "n2"}, limits={"memory": 0.5})
    elsewhere["baseline"]["by_node"] = {"n1": {"memory": 400, "node": "n1"}}
    row = row_at(elsewhere)
    assert (row["value"], row["base"], row["outcome"]) == (100, 400, "better")
    assert row_at(planned(limits={"latency": 0.05}), **against(0.8, 0.79, 0.81))["base"] is None
    assert row_at(planned({"load": 0.2}, limits={"load": 0.5}))["base"] == 0.2


def test_what_moved_as_far_is_in_the_natural_order_of_its_cells() -> None:
    judged = judge_cell(planned(limits={"size": 0.05}), row_of("succeeded", facts=facts(program=of_size(2000))))
    names = ("net/cpu/fp32/b1", "net/cpu/fp32/b2", "net/cpu/fp32/b11")
    assert [name for name, _ in movements([{**judged, "identifier": name} for name in names])] == [*names]


@pytest.mark.parametrize(
    ("limits", "changes", "expected"),
    [
        ({"size": 0.25}, {"program": of_size(1250)}, "within"),
        ({"size": 0.25}, {"program": of_size(1251)}, "worse"),
        ({"size": 0.5}, {"program": of_size(970)}, "better"),
        ({"size": 0.5}, {"program": of_size(985)}, "within"),
        ({"memory": 0.5}, {"peak_memory": 60}, "within"),
        ({"memory": 0.5}, {"peak_memory": 30}, "better"),
        ({"latency": 0.25}, against(0.9, 0.8, 1.0), "within"),
        ({"latency": 0.25}, against(0.8, 0.8, 0.8), "within"),
        ({"latency": 0.5}, against(1.1, 1.08, 1.12), "better"),
        ({"latency": 0.5}, against(1.1, 1.01, 1.12), "within"),
    ],
)
def test_what_is_just_at_a_limit_is_within_it(limits: dict[str, float], changes: dict[str, Any], expected: str) -> None:
    assert row_at(planned(limits=limits), **changes)["outcome"] == expected


def test_two_times_that_differ_by_a_quarter_of_a_second_can_be_a_regression() -> None:
    cell = planned({"load": 0.25}, limits={"load": 0.5})
    assert row_at(cell, load=0.5)["outcome"] == "worse"
    row = row_at(cell, load=0.375)
    assert (row["outcome"], row["change"], row["why"]) == ("within", 0.5, "they differ by less than 250 ms")


def test_a_missing_comparison_says_why_if_either_program_does() -> None:
    cell = planned(limits={"latency": 0.05})
    said = "the program did not run in turns with this baseline"
    assert row_at(cell)["why"] == said
    assert row_at(cell, unmeasured="no room")["why"] == f"{said}: no room"
    cell["baseline"]["unmeasured"] = "it is gone"
    assert row_at(cell)["why"] == f"{said}: it is gone"


def test_a_cell_without_a_baseline_is_new_and_one_whose_baseline_is_gone_is_not() -> None:
    limits = {"limits": {"size": 0.1}}
    assert row_at({**planned(**limits), "baseline": None})["outcome"] == "new"
    cell = planned(**limits)
    cell["baseline"] |= {"values": {}, "key": ""}
    assert row_at(cell)["outcome"] == "new"
    cell["baseline"] |= {"key": OLD}
    assert (row_at(cell)["outcome"], row_at(cell)["why"]) == ("not compared", "its program is gone")
    cell["baseline"] |= {"key": "", "absent": "no tag"}
    assert (row_at(cell)["outcome"], row_at(cell)["why"]) == ("not compared", "no tag")


@pytest.mark.parametrize(
    ("cell", "changes", "hit", "said"),
    [
        (planned(budgets={"size": 2000}), {}, True, "budget size=2kB: size is 1 kB"),
        (planned(budgets={"latency": 1.0}), {}, False, "budget latency=1s: latency is 2 ms"),
        (planned(budgets={"latency": 1.5}), {}, False, "budget latency=1.5s: latency is 2 ms"),
        (
            planned(budgets={"latency": 0.5}),
            {},
            True,
            "budget latency=500ms: latency is 2 ms (measured on 2026-11-20, it is a hit)",
        ),
        (planned(budgets={"throughput": 9.0}), {}, False, "budget throughput=9: throughput is 500/s"),
        (planned(budgets={"memory": 99.0}), {}, False, "budget memory=99B: memory is 100 B"),
        (planned(limits={"size": 0.1}), {}, False, "gate size=10%: size is the same as prod's"),
        (planned(limits={"size": 0.1}), {"program": of_size(1010)}, False, "gate size=10%: size is 1 % above prod's"),
        (
            planned({"size": 1_000_000}, limits={"size": 0.1}),
            {"program": of_size(1_000_400)},
            False,
            "gate size=10%: size is the same as prod's",
        ),
        (
            planned({"size": 1_000_000}, limits={"size": 0.1}),
            {"program": of_size(1_000_700)},
            False,
            "gate size=10%: size is 0.07 % above prod's",
        ),
        (planned(limits={"size": 9.0}), {"program": of_size(990)}, False, "gate size=900%: size is 1 % below prod's"),
        (planned(limits={"size": 10.0}), {}, False, "gate size=1000%: size is the same as prod's"),
        ({**planned(limits={"size": 0.1}), "baseline": None}, {}, False, "gate size=10%: prod has no such cell yet"),
    ],
)
def test_a_sentence_has_the_rule_the_number_and_why(
    cell: dict[str, Any], changes: dict[str, Any], hit: bool, said: str
) -> None:
    row = row_at(cell, hit, **changes)
    assert sentence(row) == said
    assert sentences([row], "new") == ([said] if "no such cell" in said else [])
    assert sentences([row], *OPEN) == sentences([row], "better") == []


def test_a_difference_is_measured_again_if_it_may_be_beyond_the_limit() -> None:
    assert is_suspicious(Comparison(1.0, 0.5, 1.5, "slower"), 0.9)
    assert not is_suspicious(Comparison(1.0, 0.5, 1.5, "slower"), 1.0)
    assert not is_suspicious(Comparison(1.0, 0.5, 1.5, "slower"), 1.1)


def test_outputs_that_hardly_differ_are_weak_by_their_name_or_together() -> None:
    assert weak_outputs({"spread": {"y": 1.5e-9, "z": 1.0}, "errors": {"y": 0.0}}, {"*": 0.1}, equal_share=0.99) == [
        "y"
    ]
    assert weak_outputs({"spread": {"y": 1.5e-9}, "errors": {"y": 0.0}}, {"*": 1e-10}, equal_share=0.99) == []
    assert weak_outputs({"spread": {"y": 1e-9}, "errors": {"y": 0.0}}, {"*": 0.1}, equal_share=0.99) == [""]
    assert weak_outputs({"spread": {"y": 0.1}, "errors": {"y": 0.0}}, {"*": 0.1}, equal_share=0.99) == ["y"]
    assert weak_outputs({"spread": {"y": 0.01}}, {"*": 1e-10}, equal_share=0.5) == ["y"]
