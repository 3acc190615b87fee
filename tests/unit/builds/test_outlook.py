"""Outlooks: builds whose ends lie in what was said about them, before they run and while they do."""

import math
import random
from typing import Any

import pytest

from farm.builds.plan import outlook


def cell(seconds: float | None = None, **changes: Any) -> dict[str, Any]:
    found = {"low": seconds / 2, "expected": seconds, "high": seconds * 2, "by": ""} if seconds else None
    return {"state": "queued", "pool": "cpu", "job": f"j-{random.random()}", "estimate": found, **changes}


def pool(slots: int, name: str = "cpu", **changes: Any) -> dict[str, Any]:
    return {"name": name, "slots": slots, "waiting": 0, "running": 0, "uploading": 0, **changes}


@pytest.mark.parametrize(("of_build", "of_compile"), [(0.0, 0.5), (0.2, 0.3), (0.5, 0.1)])
def test_most_builds_end_in_their_ranges(of_build: float, of_compile: float) -> None:
    """Whole builds, and compiles, are slower or faster by chance. More kinds of farms are in the benchmark."""
    chance = random.Random(1)
    inside = 0
    for _ in range(200):
        cells = [cell(chance.uniform(10, 100)) for _ in range(12)]
        factor = chance.gauss(0, of_build)
        free = [0.0] * 3
        for each in sorted(cells, key=lambda each: -each["estimate"]["expected"]):
            free[0] += each["estimate"]["expected"] * math.exp(factor + chance.gauss(0, of_compile))
            free.sort()
        eta = outlook(cells, [pool(3)])["eta"]
        inside += eta["low"] <= max(free) <= eta["high"]
    assert inside >= 0.76 * 200


def test_slots_share_the_work_and_the_longest_bounds_it() -> None:
    assert outlook([cell(100.0) for _ in range(8)], [pool(4)])["eta"]["expected"] == 200
    assert outlook([cell(100.0), cell(1000.0)], [pool(4)])["eta"]["expected"] == 1000


def test_the_longest_compile_starts_first() -> None:
    assert outlook([cell(50.0), cell(50.0), cell(100.0)], [pool(2)])["eta"]["expected"] == 100


def test_each_pool_has_slots_of_its_own() -> None:
    cells = [cell(100.0, pool=name) for name in ("cpu", "cpu", "ref")]
    found = outlook(cells, [pool(1), pool(1, "ref")])
    assert (found["eta"]["expected"], found["slot_seconds"]["expected"]) == (200, 300)


def test_a_bound_on_parallel_jobs_bounds_the_slots() -> None:
    assert outlook([cell(100.0) for _ in range(8)], [pool(8)], parallel=2)["eta"]["expected"] == 400


def test_a_bound_on_parallel_jobs_holds_for_all_pools_together() -> None:
    cells = [cell(100.0, pool=name) for name in ("cpu", "ref") for _ in range(4)]
    pools = [pool(4), pool(4, "ref")]
    assert outlook(cells, pools, parallel=2)["eta"]["expected"] == 400


def test_what_runs_is_counted_with_what_is_left_of_it() -> None:
    running = cell(100.0, state="running", elapsed=60.0, spent=60.0)
    found = outlook([running], [pool(1)])
    assert (found["eta"]["expected"], found["slot_seconds"]["expected"], found["spent_seconds"]) == (40, 40, 60)


def test_what_runs_keeps_its_slot() -> None:
    """If slots took the longest of all first, both builds would end after 120 s."""
    running = [cell(100.0, state="running", elapsed=40.0) for _ in range(2)]
    assert outlook([cell(100.0), *running], [pool(2)])["eta"]["expected"] == 160
    assert outlook([cell(30.0), cell(90.0), *running], [pool(2)])["eta"]["expected"] == 150


def test_what_is_late_is_never_said_to_be_over() -> None:
    """The longer it has taken, the longer it will."""
    left = [outlook([cell(100.0, state="running", elapsed=float(age))], [pool(1)])["eta"] for age in (100, 250, 9000)]
    assert all(0 < eta["low"] < eta["expected"] < eta["high"] for eta in left)
    assert [eta["expected"] for eta in left] == sorted({eta["expected"] for eta in left})


def test_a_compile_of_no_time_has_an_outlook() -> None:
    assert outlook([cell(1.0, estimate={"low": 0.0, "expected": 0.0, "high": 0.0})], [pool(1)])["eta"]


def test_a_range_shrinks_while_the_build_runs() -> None:
    cells = [cell(100.0) for _ in range(20)]
    widths = []
    for ended in (0, 5, 10, 19):
        now = [{**each, "state": "succeeded", "elapsed": 100.0, "spent": 100.0} for each in cells[:ended]]
        eta = outlook([*now, *cells[ended:]], [pool(2)])["eta"]
        widths.append(eta["high"] - eta["low"])
    assert widths == sorted(widths, reverse=True)
    assert widths[2] == pytest.approx(widths[0] / 2)


def test_other_builds_may_come_between() -> None:
    alone, crowded = (outlook([cell(100.0), cell(100.0)], [pool(1, waiting=waiting)])["eta"] for waiting in (2, 1000))
    assert crowded["expected"] == 2 * alone["expected"], "they take turns"
    planned = [cell(100.0, state="miss"), cell(100.0, state="miss")]
    assert outlook(planned, [pool(1, waiting=2)])["eta"] == crowded, "its own jobs do not wait there yet"


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [(0, 0, 100), (3, 0, 100), (4, 0, 130), (3, 1, 130), (5, 0, 160), (1000, 0, 190)],
)
def test_each_job_of_others_that_comes_between_takes_as_long_as_one_of_ours(
    waiting: int, running: int, expected: float
) -> None:
    cells = [cell(100.0), cell(50.0), cell(30.0)]
    assert outlook(cells, [pool(2, waiting=waiting, running=running)])["eta"]["expected"] == expected


def test_cells_that_share_a_job_are_counted_once_and_ended_ones_only_as_spent() -> None:
    cells = [cell(100.0, job="j-1"), cell(100.0, job="j-1"), cell(100.0, state="succeeded", spent=7.0)]
    found = outlook(cells, [pool(1)])
    assert found["slot_seconds"]["expected"] == 100
    assert found["spent_seconds"] == 7


def test_gpus_are_counted_in_hours() -> None:
    gpu = "migraphx-gfx942-304cu.rocm7.2-1"
    cells = [cell(3600.0, pool=gpu), cell(3600.0), cell(3600.0, pool=gpu, state="succeeded", spent=1800.0)]
    found = outlook(cells, [pool(1), pool(1, gpu)])
    assert found["gpu_hours"]["expected"] == 1
    assert found["spent_gpu_hours"] == pytest.approx(0.5)
    found = outlook([cell(pool=gpu, state="failed", spent=100 / 3), cell(100 / 3)], [pool(1), pool(1, gpu)])
    assert (found["spent_seconds"], found["spent_gpu_hours"]) == (33.333, 0.0093)
    assert found["eta"] == {"low": 15.873, "expected": 33.3333, "high": 70.0}


def test_what_nobody_knows_is_said() -> None:
    found = outlook([cell(), cell(10.0)], [pool(1)])
    assert (found["unknown"], found["eta"]["expected"]) == (1, 10)
    for pools in ([pool(0)], []):
        found = outlook([cell(10.0)], pools)
        assert (found["eta"], found["unserved"], found["paused"]) == (None, ["cpu"], [])
    assert found["slot_seconds"]["expected"] == 10, "what it costs does not depend on when"
    found = outlook([cell(10.0)], [pool(1, paused=True)])
    assert (found["eta"], found["unserved"], found["paused"]) == (None, ["cpu"], ["cpu"])
    assert outlook([cell()], [pool(1, paused=True)])["paused"] == ["cpu"], "also if nothing like it was compiled yet"
    found = outlook([cell(10.0)], [pool(1)], paused="b-1")
    assert (found["eta"], found["paused"]) == (None, ["b-1"])
    assert outlook([], []) == {
        "eta": None, "slot_seconds": None, "gpu_hours": None, "spent_seconds": 0, "spent_gpu_hours": 0, "unknown": 0,
        "unserved": [], "paused": [],
    }  # fmt: skip
