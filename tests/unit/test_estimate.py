"""Estimates: ranges that hold what they promise, and builds whose end they add up to."""

import math
import random
from typing import Any

import pytest

from farm.estimate import Estimate, Sample, comparable, estimate, outlook

NEW = "f" * 64


def history(random_: random.Random, count: int, *, spread: float = 0.4, power: float = 0.8) -> list[Sample]:
    """Compiles of `count` models, as a farm might see them: longer for larger models, with noise."""
    return [compile_of(random_, f"{number:064x}", spread, power) for number in range(count)]


def compile_of(random_: random.Random, model: str, spread: float, power: float) -> Sample:
    size = int(10 ** random_.uniform(6, 9))
    return Sample(model, size, 2e-5 * size**power * math.exp(random_.gauss(0, spread)))


@pytest.mark.parametrize("count", [4, 10, 30, 200])
@pytest.mark.parametrize("spread", [0.1, 0.8])
def test_a_range_holds_about_80_of_100_other_models(count: int, spread: float) -> None:
    random_ = random.Random(count)
    inside = total = 0
    for _ in range(600):
        past = history(random_, count, spread=spread)
        new = compile_of(random_, NEW, spread, 0.8)
        found = estimate(NEW, new.size, past)
        if found:
            total += 1
            inside += found.low <= new.seconds <= found.high
    assert total > 300
    assert 0.72 <= inside / total <= (0.95 if count > 10 else 1.0), "where few are known it is wider, never narrower"


@pytest.mark.parametrize("count", [3, 8, 50])
def test_a_range_holds_about_80_of_100_of_the_same_model(count: int) -> None:
    random_ = random.Random(count)
    inside = 0
    for _ in range(600):
        *past, new = [Sample(NEW, 10**7, 60 * math.exp(random_.gauss(0, 0.3))) for _ in range(count + 1)]
        found = estimate(NEW, 10**7, past)
        assert found
        inside += found.low <= new.seconds <= found.high
    assert 0.75 <= inside / 600 <= (0.9 if count > 10 else 1.0)


@pytest.mark.parametrize(("builds", "cells"), [(1, 3), (3, 4), (20, 6)])
def test_a_range_holds_where_all_of_a_build_is_faster_or_slower(builds: int, cells: int) -> None:
    """As on a machine that is busy at one time and idle at another."""
    random_ = random.Random(builds)
    inside = finished = 0
    for _ in range(400):
        *past, new = [a_build(random_, cells) for _ in range(builds + 1)]
        found = estimate(NEW, 10**7, [sample for build in past for sample in build])
        assert found
        inside += sum(found.low <= sample.seconds <= found.high for sample in new)
        rows = [cell(None, estimate=found.as_dict()) for _ in new]
        together = outlook(rows, [pool(1)])["slot_seconds"]
        finished += together["low"] <= sum(sample.seconds for sample in new) <= together["high"]
    assert 0.72 <= inside / (400 * cells) <= 0.95
    assert finished / 400 >= 0.65


def a_build(random_: random.Random, cells: int) -> list[Sample]:
    load = random_.gauss(0, 0.25)
    return [Sample(NEW, 10**7, 10 * math.exp(load + random_.gauss(0, 0.12))) for _ in range(cells)]


def test_the_same_model_is_nearer_than_others() -> None:
    past = [*history(random.Random(1), 50), Sample(NEW[:12], 10**8, 1234.0)]
    found = estimate(NEW, 10**8, past)
    assert found is not None
    assert found.expected == pytest.approx(1234.0)
    assert found.by == "1 of this model"
    assert found.low < 700 < 2000 < found.high, "one alone says little"


@pytest.mark.parametrize(
    ("size", "past"),
    [
        (10**7, []),
        (10**7, history(random.Random(1), 2)),
        (10**12, history(random.Random(1), 50)),
        (10, history(random.Random(1), 50)),
        (0, history(random.Random(1), 50)),
        (10**7, [Sample("a", 0, 5.0)] * 9),
    ],
)
def test_what_is_not_comparable_is_not_estimated(size: int, past: list[Sample]) -> None:
    assert estimate(NEW, size, past) is None


def test_durations_depend_on_target_precision_and_tuning() -> None:
    spec = {
        "compiler": {"name": "migraphx"},
        "device": {"arch": "gfx942:sramecc+:xnack-"},
        "precision": "int8+fp16",
        "tuning": {"mode": "quick"},
    }
    assert comparable(spec) == "migraphx-gfx942-sramecc-xnack-.int8+fp16.quick"


# --- builds -------------------------------------------------------------------------------------------------------


def cell(seconds: float | None = None, **changes: Any) -> dict[str, Any]:
    found = Estimate(seconds / 2, seconds, seconds * 2).as_dict() if seconds else None
    return {"state": "queued", "pool": "cpu", "job": f"j-{random.random()}", "estimate": found, **changes}


def pool(slots: int, name: str = "cpu", **changes: Any) -> dict[str, Any]:
    return {"name": name, "slots": slots, "waiting": 0, "running": 0, **changes}


def test_slots_share_the_work_and_the_longest_bounds_it() -> None:
    assert outlook([cell(100.0) for _ in range(8)], [pool(4)])["eta"]["expected"] == pytest.approx(200)
    assert outlook([cell(100.0), cell(1000.0)], [pool(4)])["eta"]["expected"] == pytest.approx(1000)


def test_many_cells_have_a_narrower_range_than_one() -> None:
    one, many = (outlook([cell(100.0) for _ in range(count)], [pool(1)])["slot_seconds"] for count in (1, 100))
    assert one["high"] / one["expected"] == pytest.approx(2)
    assert 1.6 < many["high"] / many["expected"] < 1.8, "their errors go the same way in part"


def test_what_runs_is_counted_with_what_is_left_of_it() -> None:
    running = cell(100.0, state="running", elapsed=60.0, spent=60.0)
    found = outlook([running], [pool(1)])
    assert found["eta"]["expected"] == pytest.approx(40)
    assert found["spent_seconds"] == 60
    late = outlook([cell(100.0, state="running", elapsed=150.0)], [pool(1)])
    assert late["eta"] == {"low": 0, "expected": 25, "high": 50}


def test_other_builds_may_come_between() -> None:
    alone, crowded = (outlook([cell(100.0), cell(100.0)], [pool(1, waiting=waiting)])["eta"] for waiting in (2, 1000))
    assert crowded["low"] == alone["low"]
    assert crowded["high"] == pytest.approx(2 * alone["high"]), "they take turns"


def test_cells_that_share_a_job_are_counted_once_and_ended_ones_only_as_spent() -> None:
    cells = [cell(100.0, job="j-1"), cell(100.0, job="j-1"), cell(100.0, state="succeeded", spent=7.0)]
    found = outlook(cells, [pool(1)])
    assert found["slot_seconds"]["expected"] == pytest.approx(100)
    assert found["spent_seconds"] == 7


def test_gpus_are_counted_in_hours() -> None:
    gpu = "migraphx-gfx942-304cu.rocm7.2-1"
    cells = [cell(3600.0, pool=gpu), cell(3600.0), cell(3600.0, pool=gpu, state="succeeded", spent=1800.0)]
    found = outlook(cells, [pool(1), pool(1, gpu)])
    assert found["gpu_hours"]["expected"] == pytest.approx(1)
    assert found["spent_gpu_hours"] == pytest.approx(0.5)


def test_what_nobody_knows_is_said() -> None:
    found = outlook([cell(), cell(10.0)], [pool(1)])
    assert (found["unknown"], found["eta"]["expected"]) == (1, 10)
    found = outlook([cell(10.0)], [pool(0)])
    assert (found["eta"], found["unserved"]) == (None, ["cpu"])
    found = outlook([cell(10.0)], [pool(1, paused=True)])
    assert (found["eta"], found["unserved"]) == (None, ["cpu"])
    assert outlook([cell(10.0)], [pool(1)], paused=True)["eta"] is None
    assert outlook([], []) == {
        "eta": None, "slot_seconds": None, "gpu_hours": None, "spent_seconds": 0, "spent_gpu_hours": 0, "unknown": 0,
        "unserved": [],
    }  # fmt: skip
