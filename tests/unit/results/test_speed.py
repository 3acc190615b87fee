"""Statistics of measured runs, held against distributions that are known."""

from __future__ import annotations

import numpy as np
import pytest

from farm.results.speed import MIN_ROUNDS, compare, compare_pairs, distribution, fast_runs

ROUNDS = 20


def rounds_of(median: float, random: np.random.Generator, drift: np.ndarray | None = None) -> list[list[float]]:
    """Runs around a median with the long tail that latencies have; `drift` slows whole rounds."""
    slower = np.ones(ROUNDS) if drift is None else drift
    return [list(median * slower[number] * random.lognormal(0, 0.05, size=30)) for number in range(ROUNDS)]


def test_percentiles_and_throughput_of_a_known_sample() -> None:
    found = distribution([number / 1000 for number in range(1, 102)], batch=8)
    assert found["minimum"] == pytest.approx(0.001)
    assert found["p50"] == pytest.approx(0.051)
    assert found["p90"] == pytest.approx(0.091)
    assert found["p99"] == pytest.approx(0.100)
    assert found["repeats"] == 101
    assert found["throughput"] == pytest.approx(8 / 0.051)


def test_no_runs_are_no_distribution() -> None:
    with pytest.raises(ValueError, match="no runs"):
        distribution([])


def test_a_faster_program_is_called_faster_and_the_other_slower() -> None:
    random = np.random.default_rng(1)
    fast, slow = rounds_of(1.0, random), rounds_of(1.2, random)
    found, turned = compare(fast, slow), compare(slow, fast)
    assert (found.verdict, turned.verdict) == ("faster", "slower")
    assert found.low < 1.2 < found.high
    assert found.ratio == pytest.approx(1 / turned.ratio)


def test_programs_alike_are_not_distinguished() -> None:
    """Without a difference a verdict would be wrong: at most as often as the confidence allows."""
    random = np.random.default_rng(2)
    verdicts = [compare(rounds_of(1.0, random), rounds_of(1.0, random)).verdict for _ in range(100)]
    assert verdicts.count("no difference shown") >= 95


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        found = compare(rounds_of(1.0, random), rounds_of(1.1, random))
        covered += found.low <= 1.1 <= found.high
    assert covered >= 180


def test_a_machine_that_slows_down_meets_both_alike() -> None:
    """A drift far above the difference does not hide it, since both had every round."""
    random = np.random.default_rng(4)
    drift = np.linspace(1, 3, ROUNDS)
    found = compare(rounds_of(1.0, random, drift), rounds_of(1.3, random, drift))
    assert found.ratio == pytest.approx(1.3, rel=0.1)
    assert found.verdict == "faster"


def test_a_difference_within_the_band_is_none() -> None:
    steady, hardly = [[1.0] * 5] * ROUNDS, [[1.01] * 5] * ROUNDS
    assert compare(steady, hardly).verdict == "no difference shown"
    for more, faster, slower in ((1.02, "no difference shown", "no difference shown"), (1.021, "faster", "slower")):
        assert compare(steady, [[more] * 5] * ROUNDS).verdict == faster
        assert compare([[more] * 5] * ROUNDS, steady).verdict == slower


def test_few_rounds_show_nothing() -> None:
    few = MIN_ROUNDS - 1
    assert compare([[1.0]] * few, [[2.0]] * few).verdict == "no difference shown"
    assert compare([[1.0]] * MIN_ROUNDS, [[2.0]] * MIN_ROUNDS).verdict == "faster"
    assert compare([[2.0]] * few, [[1.0]] * few).verdict == "no difference shown"
    assert compare([[2.0]] * MIN_ROUNDS, [[1.0]] * MIN_ROUNDS).verdict == "slower"


def test_other_numbers_of_rounds_are_refused() -> None:
    for by in (compare, compare_pairs):
        with pytest.raises(ValueError, match="2 rounds against 1"):
            by([[1.0], [1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(1, 1, 1), (7, 1, 7), (10, 1, 10), (12, 2, 11), (15, 3, 13), (20, 4, 17), (30, 8, 23), (37, 11, 27)],
)
def test_pairs_have_the_interval_of_the_median_that_tables_of_order_statistics_give(
    pairs: int, low: int, high: int
) -> None:
    """The outermost pairs of which the tables say that 99 % lie between, whatever the distribution."""
    found = compare_pairs([[1.0]] * pairs, [[float(number)] for number in range(1, pairs + 1)])
    assert (found.low, found.high) == (low, high)
    assert found.ratio == (pairs + 1) / 2


def test_pairs_are_compared_by_the_fast_runs_of_each_round() -> None:
    """What else the machine does makes runs slower, never faster."""
    ours = [[1.0] * 10 + [50.0] * 10] * MIN_ROUNDS
    theirs = [[2.0] * 19 + [900.0]] * MIN_ROUNDS
    assert compare_pairs(ours, theirs).ratio == 2.0
    assert list(fast_runs([[float(number) for number in reversed(range(30))], [7.0]])) == [3.0, 7.0]


def test_the_interval_of_drawn_rounds_is_that_of_the_binomial_distribution() -> None:
    """The median of 21 draws of 1 to 21 is at most 5 in 0.43 % of all cases, and at most 6 in 1.8 %."""
    found = compare([[1.0]] * 21, [[float(number)] for number in range(1, 22)])
    assert (found.ratio, found.low, found.high) == (11.0, 6.0, 16.0)
