"""Estimates: ranges that hold what they promise."""

import math
import random

import pytest

from farm.builds.plan import estimate
from farm.jobs.estimate import Compile
from farm.spec import comparable

NEW = "f" * 64


def history(random_: random.Random, count: int, *, spread: float = 0.4, power: float = 0.8) -> list[Compile]:
    """Compiles of `count` models, as a farm might see them: longer for larger models, with noise."""
    return [compile_of(random_, f"{number:064x}", spread, power) for number in range(count)]


def compile_of(random_: random.Random, model: str, spread: float, power: float) -> Compile:
    size = int(10 ** random_.uniform(6, 9))
    return Compile(model, size, 2e-5 * size**power * math.exp(random_.gauss(0, spread)))


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
            inside += found["low"] <= new.seconds <= found["high"]
    assert total > 300
    assert 0.72 <= inside / total <= (0.95 if count > 10 else 1.0), "where few are known it is wider, never narrower"


@pytest.mark.parametrize("count", [3, 8, 50])
def test_a_range_holds_about_80_of_100_of_the_same_model(count: int) -> None:
    random_ = random.Random(count)
    inside = 0
    for _ in range(600):
        *past, new = [Compile(NEW, 10**7, 60 * math.exp(random_.gauss(0, 0.3))) for _ in range(count + 1)]
        found = estimate(NEW, 10**7, past)
        assert found
        inside += found["low"] <= new.seconds <= found["high"]
    assert 0.75 <= inside / 600 <= (0.9 if count > 10 else 1.0)


@pytest.mark.parametrize(("builds", "cells"), [(1, 3), (3, 4), (20, 6)])
def test_a_range_holds_where_all_of_a_build_is_faster_or_slower(builds: int, cells: int) -> None:
    """As on a machine that is busy at one time and idle at another."""
    random_ = random.Random(builds)
    inside = 0
    for _ in range(400):
        *past, new = [a_build(random_, cells) for _ in range(builds + 1)]
        found = estimate(NEW, 10**7, [sample for build in past for sample in build])
        assert found
        inside += sum(found["low"] <= sample.seconds <= found["high"] for sample in new)
    assert 0.72 <= inside / (400 * cells) <= 0.95


def a_build(random_: random.Random, cells: int) -> list[Compile]:
    load = random_.gauss(0, 0.25)
    return [Compile(NEW, 10**7, 10 * math.exp(load + random_.gauss(0, 0.12))) for _ in range(cells)]


def test_the_same_model_is_nearer_than_others() -> None:
    past = [*history(random.Random(1), 50), Compile(NEW[:12], 10**8, 1234.0)]
    found = estimate(NEW, 10**8, past)
    assert found is not None
    assert found["expected"] == pytest.approx(1234.0)
    assert found["by"] == "1 of this model"
    assert found["low"] < 700 < 2000 < found["high"], "one alone says little"


@pytest.mark.parametrize(
    ("size", "past"),
    [
        (10**7, []),
        (10**7, history(random.Random(1), 2)),
        (10**12, history(random.Random(1), 50)),
        (10, history(random.Random(1), 50)),
        (0, history(random.Random(1), 50)),
        (10**7, [Compile("a", 0, 5.0)] * 9),
    ],
)
def test_what_is_not_comparable_is_not_estimated(size: int, past: list[Compile]) -> None:
    assert estimate(NEW, size, past) is None


def test_durations_depend_on_target_precision_and_tuning() -> None:
    spec = {
        "compiler": {"name": "migraphx"},
        "device": {"arch": "gfx942:sramecc+:xnack-"},
        "precision": "int8+fp16",
        "tuning": {"mode": "quick"},
    }
    assert comparable(spec) == "migraphx-gfx942-sramecc-xnack-.int8+fp16.quick"
