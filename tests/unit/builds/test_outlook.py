"""Outlooks: builds whose ends lie in what was said of them, before they run and while they do."""

import random
from typing import Any

import pytest

from farm.builds.outlook import Kept, kept, outlook
from farm.jobs.estimate import Estimate
from tests.benchmarks.outlooks import SHAPES, run


@pytest.mark.parametrize(
    ("name", "widest"), [("one slot", 2.5), ("heavy tails", 4), ("unknown models", 7), ("drifting speed", 2.5)]
)
def test_builds_of_a_simulated_farm_end_in_their_ranges(name: str, widest: float) -> None:
    """Nominal are 80 of 100; all shapes and more builds are in the benchmark. The same seeds, so the same answer."""
    (shape,) = (shape for shape in SHAPES if shape.name == name)
    tally = run(shape, farms=3, builds=16)
    assert 0.72 <= tally.share("time") <= 0.96
    assert 0.72 <= tally.share("work") <= 0.96
    assert max(tally.width("time"), tally.width("work")) <= widest, "by being right, not by promising little"


def cell(seconds: float | None = None, **changes: Any) -> dict[str, Any]:
    found = Estimate(seconds / 2, seconds, seconds * 2).as_dict() if seconds else None
    return {"state": "queued", "pool": "cpu", "job": f"j-{random.random()}", "estimate": found, **changes}


def pool(slots: int, name: str = "cpu", **changes: Any) -> dict[str, Any]:
    return {"name": name, "slots": slots, "waiting": 0, "running": 0, **changes}


def test_slots_share_the_work_and_the_longest_bounds_it() -> None:
    assert outlook([cell(100.0) for _ in range(8)], [pool(4)])["eta"]["expected"] == pytest.approx(250, rel=0.2)
    assert outlook([cell(100.0), cell(1000.0)], [pool(4)])["eta"]["expected"] == pytest.approx(1000, rel=0.1)


def test_a_bound_on_parallel_jobs_bounds_the_slots() -> None:
    wide, narrow = (outlook([cell(100.0) for _ in range(8)], [pool(8)], parallel=most)["eta"] for most in (0, 2))
    assert narrow["expected"] > 2 * wide["expected"]


def test_a_bound_on_parallel_jobs_holds_for_all_pools_together() -> None:
    cells = [cell(100.0, pool=name) for name in ("cpu", "ref") for _ in range(4)]
    pools = [pool(4), pool(4, "ref")]
    assert outlook(cells, pools, parallel=2)["eta"]["expected"] == pytest.approx(400, rel=0.2)


def test_many_cells_have_a_narrower_range_than_one() -> None:
    one, many = (outlook([cell(100.0) for _ in range(count)], [pool(1)])["slot_seconds"] for count in (1, 100))
    assert one["high"] / one["expected"] == pytest.approx(2, rel=0.1)
    assert 1.5 < many["high"] / many["expected"] < 1.95, "their errors go the same way in part"


def test_what_runs_is_counted_with_what_is_left_of_it() -> None:
    running = cell(100.0, state="running", elapsed=60.0, spent=60.0)
    found = outlook([running], [pool(1)])
    assert 30 < found["eta"]["expected"] < 60
    assert found["spent_seconds"] == 60


def test_what_is_late_is_never_said_to_be_over() -> None:
    """The longer it has taken, the longer it will: it is one of the slow ones."""
    left = [outlook([cell(100.0, state="running", elapsed=float(age))], [pool(1)])["eta"] for age in (250, 1000, 9000)]
    assert all(0 < eta["low"] < eta["expected"] < eta["high"] for eta in left)
    assert [eta["expected"] for eta in left] == sorted(eta["expected"] for eta in left)


@pytest.mark.parametrize("age", [0.5, 3.9, 4.2, 5.0, 9.0, 20.0])
def test_a_build_far_faster_than_its_ranges_still_has_an_outlook(age: float) -> None:
    """Forty past compiles promised 10 s to a tenth; on a faster machine the first cells took 4."""
    found = [cell(10.0, model="m", estimate={"low": 9.0, "expected": 10.0, "high": 11.1}) for _ in range(8)]
    ended = [{**each, "state": "succeeded", "elapsed": 4.0, "spent": 4.0} for each in found[:4]]
    eta = outlook([*ended, {**found[4], "state": "running", "elapsed": age}, *found[5:]], [pool(2)])["eta"]
    assert 0 < eta["low"] < eta["expected"] < eta["high"] < 20


def test_what_ended_far_outside_a_narrow_range_says_little_of_a_wide_one() -> None:
    narrow = {"low": 9.9, "expected": 10.0, "high": 10.1}
    ended = [cell(1.0, estimate=narrow, state="succeeded", elapsed=elapsed) for elapsed in (0.1, 1000.0)]
    wide = {"low": 0.1, "expected": 10.0, "high": 1000.0}
    for each in ended:
        assert outlook([each, cell(1.0, estimate=wide)], [pool(1)])["eta"]["high"] < 1e6


def test_a_compile_of_no_time_has_an_outlook() -> None:
    assert outlook([cell(1.0, estimate={"low": 0.0, "expected": 0.0, "high": 0.0})], [pool(1)])["eta"]


def test_a_range_shrinks_while_the_build_runs() -> None:
    cells = [cell(100.0, model=f"m{number % 5}") for number in range(20)]
    widths = []
    for ended in (0, 5, 10, 19):
        now = [{**each, "state": "succeeded", "elapsed": 100.0, "spent": 100.0} for each in cells[:ended]]
        eta = outlook([*now, *cells[ended:]], [pool(2)])["eta"]
        widths.append(eta["high"] - eta["low"])
    assert widths == sorted(widths, reverse=True)
    assert widths[2] < widths[0] / 2.5


def test_what_has_ended_says_how_the_rest_will() -> None:
    cells = [cell(100.0, model=f"m{number}") for number in range(10)]
    slow = [{**each, "state": "succeeded", "elapsed": 150.0, "spent": 150.0} for each in cells[:5]]
    assert (
        outlook([*slow, *cells[5:]], [pool(1)])["eta"]["expected"]
        > 1.2 * outlook(cells[5:], [pool(1)])["eta"]["expected"]
    )


def test_the_same_build_has_the_same_outlook() -> None:
    cells = [cell(100.0, model=f"m{number}") for number in range(10)]
    assert outlook(cells, [pool(3)]) == outlook(cells, [pool(3)])


def test_what_came_of_past_builds_moves_and_stretches_a_range() -> None:
    def width(range_: dict[str, float]) -> float:
        return range_["high"] / range_["low"]

    cells = [cell(100.0) for _ in range(10)]
    fresh, slower, steady, wild = (
        outlook(cells, [pool(2)], past=past)["eta"]
        for past in (
            [],
            [Kept(1.5, 1.5)] * 20,
            [Kept(0.1, 0.1), Kept(-0.1, -0.1)] * 10,
            [Kept(2.5, 2.5), Kept(-2.5, -2.5)] * 10,
        )
    )
    assert slower["low"] > 1.2 * fresh["low"]
    assert width(steady) < 0.7 * width(fresh)
    assert width(wild) > 1.5 * width(fresh)


def test_how_a_build_ended_is_told_in_deviations() -> None:
    promised = outlook([cell(100.0) for _ in range(4)], [pool(2)])
    high, expected = promised["eta"]["high"], promised["slot_seconds"]["expected"]
    found = kept(promised, seconds=high, work=expected)
    assert found and found.time == pytest.approx(1.28, abs=0.2)
    assert found.work == pytest.approx(0, abs=0.01)
    assert kept(promised, seconds=None, work=expected) == Kept(None, found.work)
    assert kept(promised, seconds=-0.3, work=expected) == Kept(None, found.work), "two machines' clocks"
    assert kept({**promised, "unknown": 1}, seconds=high, work=expected) is None
    assert kept(outlook([], []), seconds=high, work=expected) is None


def test_other_builds_may_come_between() -> None:
    alone, crowded = (outlook([cell(100.0), cell(100.0)], [pool(1, waiting=waiting)])["eta"] for waiting in (2, 1000))
    assert alone["low"] < crowded["low"]
    assert crowded["high"] == pytest.approx(2 * alone["high"], rel=0.1), "they take turns"
    planned = [cell(100.0, state="miss"), cell(100.0, state="miss")]
    assert outlook(planned, [pool(1, waiting=2)])["eta"] == crowded, "its own jobs do not wait there yet"


def test_cells_that_share_a_job_are_counted_once_and_ended_ones_only_as_spent() -> None:
    cells = [cell(100.0, job="j-1"), cell(100.0, job="j-1"), cell(100.0, state="succeeded", spent=7.0)]
    found = outlook(cells, [pool(1)])
    assert found["slot_seconds"]["expected"] == pytest.approx(100, rel=0.05)
    assert found["spent_seconds"] == 7


def test_gpus_are_counted_in_hours() -> None:
    gpu = "migraphx-gfx942-304cu.rocm7.2-1"
    cells = [cell(3600.0, pool=gpu), cell(3600.0), cell(3600.0, pool=gpu, state="succeeded", spent=1800.0)]
    found = outlook(cells, [pool(1), pool(1, gpu)])
    assert found["gpu_hours"]["expected"] == pytest.approx(1, rel=0.05)
    assert found["spent_gpu_hours"] == pytest.approx(0.5)


def test_what_nobody_knows_is_said() -> None:
    found = outlook([cell(), cell(10.0)], [pool(1)])
    assert (found["unknown"], found["eta"]["expected"]) == (1, pytest.approx(10, rel=0.05))
    found = outlook([cell(10.0)], [pool(0)])
    assert (found["eta"], found["unserved"]) == (None, ["cpu"])
    found = outlook([cell(10.0)], [pool(1, paused=True)])
    assert (found["eta"], found["unserved"]) == (None, ["cpu"])
    assert outlook([cell(10.0)], [pool(1)], paused=True)["eta"] is None
    assert outlook([], []) == {
        "eta": None, "slot_seconds": None, "gpu_hours": None, "spent_seconds": 0, "spent_gpu_hours": 0, "unknown": 0,
        "unserved": [],
    }  # fmt: skip
