"""Gates and budgets that are chosen on a command line."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.manifest.parsing import read_gates


def test_gates_and_budgets_are_read_with_their_units() -> None:
    chosen = read_gates(["latency=5%", "size=off", "compile-time=1.5%"], ["latency=10ms", "throughput=2.5"], "prod")
    assert chosen == {
        "baseline": "prod",
        "limits": {"latency": 0.05, "size": None, "compile_time": 0.015},
        "budgets": {"latency": 0.01, "throughput": 2.5},
    }


def test_nothing_chosen_is_nothing() -> None:
    assert read_gates([], []) is None
    assert read_gates(["latency=off"], []) == {"baseline": "", "limits": {"latency": None}, "budgets": {}}
    assert read_gates([], [], first=True) == {"baseline": "", "limits": {}, "budgets": {}, "first": True}


@pytest.mark.parametrize(
    ("gates", "budgets", "baseline", "message", "hint"),
    [
        (["latncy=5%"], [], "", "--gate latncy=5%: not NAME=VALUE of a gate", "did you mean `latency`?"),
        (["latency"], [], "", "--gate latency: not NAME=VALUE", "such as --gate latency=5%"),
        (["latency=fast"], [], "", "--gate latency=fast: ", None),
        ([], ["latncy=1s"], "", "--budget latncy=1s: not NAME=VALUE", "did you mean `latency`?"),
        ([], ["throughput=0"], "", "--budget throughput=0: must be greater than zero", None),
        ([], ["throughput=much"], "", "--budget throughput=much: ", None),
        ([], ["throughput=1.2.3"], "", "--budget throughput=1.2.3: ", None),
        ([], [], "not a tag", "--baseline not a tag: ", None),
    ],
)
def test_what_is_not_a_gate_says_what_would_be(
    gates: list[str], budgets: list[str], baseline: str, message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        read_gates(gates, budgets, baseline)
    assert message in caught.value.message
    if hint is not None:
        assert caught.value.hint == hint
