"""Judging by facts: what passes, what does not, and the sentence that says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farm.jobs.state import FailureKind
from farm.results.gates import judge, judge_unverified, weak_outputs
from farm.runner.measuring import compare


def facts(**changes: Any) -> dict[str, Any]:
    return {"errors": {"y": 1e-4}, "equal": {}, "nonfinite": [], "spread": {"y": 0.5}, "weak": False, **changes}


def test_within_tolerance_passes() -> None:
    assert judge(facts(), {"*": 1e-3}) is None


def test_sentence_names_output_error_and_tolerance() -> None:
    judgement = judge(facts(errors={"y": 0.31, "z": 1e-5}), {"*": 0.2})
    assert judgement == (FailureKind.ACCURACY, "output `y` is off by 0.31 (rel_l2), the tolerance is 0.2")


def test_worst_output_is_named_and_others_counted() -> None:
    judgement = judge(facts(errors={"a": 0.3, "b": 0.9, "c": 0.4}), {"*": 0.2})
    assert judgement is not None
    assert judgement.message == "output `b` is off by 0.9 (rel_l2), the tolerance is 0.2; so are 2 more outputs"


DOUBTED = {"y": "the evaluator is not known to be right for LSTM with clip"}


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"errors": {"y": 0.31, "z": 1e-5}}, "output `y` is off by 0.31 (rel_l2), the tolerance is 0.2"),
        ({"nonfinite": ["y"]}, "output `y` is not finite, but the reference is"),
        (
            {"errors": {}, "equal": {"y": 0.5}},
            "output `y` equals the reference in 50.00% of its values, 99% are needed",
        ),
    ],
)
def test_a_difference_from_a_doubted_reference_proves_nothing(differs: dict[str, Any], said: str) -> None:
    doubted = facts(**differs, doubted=DOUBTED)
    assert judge(doubted, {"*": 0.2}) is None
    assert judge_unverified("", doubted, {"*": 0.2}) == (
        FailureKind.UNVERIFIABLE, f"not verified: {said}, but {DOUBTED['y']}"
    )  # fmt: skip
    assert judge(facts(**differs), {"*": 0.2}), "without the doubt it is the program that is wrong"


def test_what_agrees_with_a_doubted_reference_is_verified() -> None:
    assert judge_unverified("", facts(doubted=DOUBTED), {"*": 0.2}) is None


def test_other_outputs_are_judged_as_ever() -> None:
    judgement = judge(facts(errors={"y": 0.5, "z": 0.4}, doubted=DOUBTED), {"*": 0.2})
    assert judgement == (FailureKind.ACCURACY, "output `z` is off by 0.4 (rel_l2), the tolerance is 0.2")


def test_tolerance_of_one_output_wins() -> None:
    assert judge(facts(errors={"y": 0.3}), {"*": 0.2, "y": 0.4}) is None
    assert judge(facts(errors={"y": 0.1}), {"*": 0.2, "y": 0.05}) is not None


def test_an_error_may_be_as_large_as_the_tolerance_and_no_larger() -> None:
    assert judge(facts(errors={"y": 0.2}), {"*": 0.2}) is None
    assert judge(facts(errors={"y": 0.0}), {"*": 0.0}) is None
    judgement = judge(facts(errors={"y": 1e-9, "z": 0.3}), {"*": 0.2, "y": 0.0})
    assert judgement is not None
    assert judgement.message.startswith("output `y` is off by 1e-09")
    assert judgement.message.endswith("; so is 1 more output")


@pytest.mark.parametrize("errors", [{"y": 0.9, "z": 0.3}, {"z": 0.3, "y": 0.9}])
def test_the_output_that_is_furthest_beyond_its_own_tolerance_is_named(errors: dict[str, float]) -> None:
    judgement = judge(facts(errors=errors), {"y": 0.8, "z": 0.01})
    assert judgement is not None
    assert "`z` is off by 0.3 (rel_l2), the tolerance is 0.01" in judgement.message


def test_the_output_with_the_smallest_share_is_named() -> None:
    judgement = judge(facts(errors={}, equal={"i": 0.9, "j": 0.5, "k": 0.99}), {"*": 1e-3})
    assert judgement is not None
    assert judgement.message == (
        "output `j` equals the reference in 50.00% of its values, 99% are needed; so is 1 more output"
    )


@pytest.mark.parametrize(
    ("spread", "weak_ones"),
    [
        ({"y": 1e-3}, ["y"]),
        ({"y": 1.1e-3}, []),
        ({"i": 0.01}, ["i"]),
        ({"i": 0.02}, []),
        ({"y": 0.0}, [""]),
        ({"y": 1e-9, "i": 0.0}, [""]),
        ({"y": 0.0, "i": 0.5}, []),
        ({}, []),
    ],
)
def test_a_check_is_weak_if_a_constant_would_pass(spread: dict[str, float], weak_ones: list[str]) -> None:
    found = facts(errors={"y": 0.0}, equal={"i": 1.0}, spread=spread)
    assert list(weak_outputs(found, {"*": 1e-3}, equal_share=0.99)) == weak_ones
    judgement = judge(found, {"*": 1e-3}, "fail")
    assert (judgement is None) is (not weak_ones)
    if weak_ones == [""]:
        assert "the samples are too few" in judgement.message
    elif weak_ones:
        assert f"output `{weak_ones[0]}` varies by" in judgement.message


def test_not_finite_values_fail_whatever_the_tolerance() -> None:
    judgement = judge(facts(nonfinite=["y"]), {"*": 1e9})
    assert judgement is not None
    assert "`y` is not finite" in judgement.message


@pytest.mark.parametrize(("share", "needed", "passes"), [(1.0, 1.0, True), (0.995, 1.0, False), (0.995, 0.99, True)])
def test_integer_outputs_need_their_share(share: float, needed: float, passes: bool) -> None:
    judgement = judge(facts(errors={}, equal={"i": share}), {"*": 1e-3}, equal_share=needed)
    assert (judgement is None) is passes


@pytest.mark.parametrize(("weak", "passes"), [("warn", True), ("ok", True), ("fail", False)])
def test_weak_evidence_is_refused_only_where_asked(weak: str, passes: bool) -> None:
    judgement = judge(facts(spread={"y": 1e-5}), {"*": 1e-3}, weak)
    assert (judgement is None) is passes


def test_wider_tolerance_makes_evidence_weak() -> None:
    """Whether a check could fail depends on the tolerance that it is judged by."""
    assert not weak_outputs(facts(spread={"y": 0.1}), {"*": 1e-3}, equal_share=0.99)
    assert weak_outputs(facts(spread={"y": 0.1}), {"*": 0.2}, equal_share=0.99) == ["y"]


def test_without_verification_there_is_nothing_to_judge() -> None:
    assert judge({}, {"*": 1e-3}, "fail") is None


# --- the facts themselves --------------------------------------------------------------------------------------


def evidence(references: list[Any], outputs: list[Any], **more: Any) -> dict[str, Any]:
    settings = {"tolerance": 1e-3, "equal_share": 1.0, **more}
    return compare(
        [{"y": np.asarray(value)} for value in references],
        [{"y": np.asarray(value)} for value in outputs],
        **settings,
    )


def test_relative_error_is_over_all_samples() -> None:
    found = evidence([[3.0, 0.0], [0.0, 4.0]], [[3.0, 0.0], [0.0, 4.5]])
    assert found["errors"]["y"] == pytest.approx(0.5 / 5)
    assert found["rms"]["y"] == pytest.approx(0.5 / (2 * 4.5))


def test_zero_reference_gives_the_absolute_error() -> None:
    assert evidence([[0.0], [0.0]], [[0.0], [2.0]])["errors"]["y"] == 2.0


def test_not_finite_values_match_only_the_same() -> None:
    inf, nan = float("inf"), float("nan")
    assert evidence([[1.0, inf], [nan, 2.0]], [[1.0, inf], [nan, 2.0]])["nonfinite"] == []
    assert evidence([[1.0, inf], [0.0, 2.0]], [[1.0, -inf], [0.0, 2.0]])["nonfinite"] == ["y"]
    assert evidence([[1.0, 1.0], [0.0, 2.0]], [[1.0, nan], [0.0, 2.0]])["nonfinite"] == ["y"]


def test_constant_outputs_are_weak_evidence() -> None:
    """Where the reference hardly moves, always giving its mean would pass."""
    assert evidence([[1.0, 1.0], [1.0, 1.0001]], [[1.0, 1.0], [1.0, 1.0]])["weak"]
    assert not evidence([[1.0, 2.0], [2.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]])["weak"]


def test_samples_of_one_batch_are_distinguished() -> None:
    """Two equal batches of different samples are not constant."""
    batch = [[1.0, 2.0], [2.0, 1.0]]
    assert evidence([batch, batch], [batch, batch], batch=1)["weak"]
    assert not evidence([batch, batch], [batch, batch], batch=2)["weak"]


def test_discrete_spread_is_what_the_best_constant_misses() -> None:
    found = evidence([[1, 1], [1, 2], [1, 1], [1, 1]], [[1, 1], [1, 2], [1, 1], [1, 1]])
    assert found["equal"] == {"y": 1.0}
    assert found["spread"]["y"] == pytest.approx(1 / 8)
    assert not found["weak"]


def test_bfloat16_outputs_are_floats() -> None:
    import ml_dtypes

    found = evidence([np.ones(4, ml_dtypes.bfloat16)] * 2, [np.ones(4, ml_dtypes.bfloat16)] * 2)
    assert found["errors"] == {"y": 0.0}
