"""The gate on latency on real programs: how often noise alone fails one, and a tenth more work is found.

A few compiles are measured in several processes, for long; from their rounds as many comparisons are judged as the
gate's promise needs. That noise fails few programs is promised on every machine. That a tenth is found is promised if
the machine's own noise leaves it visible: the same rounds say so, with a twin's times made a tenth longer by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.node.executor import PAIRS, PAIRS_AGAIN, ROUNDS, ROUNDS_AGAIN
from farm.results.gates import is_suspicious
from farm.results.speed import Comparison, Rounds, compare_pairs
from tests.support.compiling import Case
from tests.support.side_toolchains import renamed

LIMIT = 0.05
COMPARISONS = 2000
PROCESSES = 5
RECORDED = 2 * ROUNDS_AGAIN
"""Rounds in each process."""
ROUND_SECONDS = 0.03
PROCESS_ROUNDS = 48
"""Processes of each side."""
WIDTH, BATCH = 128, 32
BASE, TWIN, LONGER = range(3)
TWIN_LONGER_BY_HAND = 3
TRIES = 3
"""Recordings before a machine counts as too noisy; other work on it comes and goes."""


def program(folder: Path, layers: int) -> Case:
    """A chain of so many matrix products, compiled."""
    folder.mkdir()
    names = ["x", *(f"h{index}" for index in range(layers - 1)), "y"]
    weight = np.eye(WIDTH, dtype=np.float32)
    port = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, WIDTH]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [before, f"w{after}"], [after]) for before, after in pairwise(names)],
        "chain",
        port[:1],
        port[1:],
        [numpy_helper.from_array(weight, f"w{name}") for name in names[1:]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "chain.onnx")
    case = Case(folder, folder / "chain.onnx", {"x": {"dtype": "float32", "shape": [BATCH, WIDTH]}}, batch=None)
    case.compile("fp32")
    return case


def record(cases: list[Case], rounds: int, *, turned: bool) -> list[Rounds]:
    """Let programs take turns in one process, which loads them in this order or the other one."""
    order = list(reversed(cases)) if turned else cases
    found = bench(cases[0], order, rounds, ROUND_SECONDS)
    return list(reversed(found)) if turned else found


def bench(child: Case, cases: list[Case], rounds: int, seconds: float) -> list[Rounds]:
    """Measure programs in turns in one process of a case's interpreter; `seconds` are those of one round."""
    parts = [
        {
            "compiler": case.compiler,
            "device": case.device,
            "inputs": case.inputs,
            "batch": None,
            "options": {},
            "precision": "fp32",
            "program": str(case.program),
            "model": {"format": "onnx"},
            "outputs": ["y"],
            "samples": {"generate": 1, "seed": 0, "ranges": {}},
            "session": None,
        }
        for case in cases
    ]
    answer = child.run("bench", programs=parts, rounds=rounds, seconds=seconds * rounds, first=2)
    return [each["rounds"] for each in answer["programs"]]


def judge(record_all: Callable[[], Callable[[int], bool]]) -> None:
    """Record, and judge comparisons: a twin hardly ever fails, a tenth is found unless the machine's noise hides it.

    What `record_all` returns judges one comparison of its recording, drawn at random, with the side of that number.
    """
    for _ in range(TRIES):
        fails = record_all()
        assert found(fails, TWIN) <= 0.02
        hidden = 1 - found(fails, TWIN_LONGER_BY_HAND)
        if hidden <= 0.01:
            assert found(fails, LONGER) >= 0.95
            return
    pytest.skip(f"a quieter machine is missing: its noise hid a tenth in {hidden:.0%} of the comparisons")


def found(fails: Callable[[int], bool], side: int) -> float:
    """Return the share of comparisons in which the gate fails a side."""
    return sum(fails(side) for _ in range(COMPARISONS)) / COMPARISONS


def longer_by_hand(rounds: Rounds) -> Rounds:
    """Return rounds as they would be if each run had lasted a tenth longer."""
    return [[1.1 * run for run in runs] for runs in rounds]


@pytest.mark.noise
def test_noise_fails_two_of_a_hundred_at_most_and_a_tenth_more_work_is_found_in_95(tmp_path: Path) -> None:
    base, longer = program(tmp_path / "base", 40), program(tmp_path / "longer", 44)
    random = np.random.default_rng(16)

    def record_all() -> Callable[[int], bool]:
        recorded = [record([base, base, longer], RECORDED, turned=bool(number % 2)) for number in range(PROCESSES)]
        for sides in recorded:
            sides.append(longer_by_hand(sides[TWIN]))

        def measured(process: int, which: int, rounds: int) -> Comparison:
            """Judge rounds of one process that followed one another."""
            start = random.integers(RECORDED - rounds + 1)
            ours, theirs = (recorded[process][each][start : start + rounds] for each in (which, BASE))
            return compare_pairs(ours, theirs)

        def fails(which: int) -> bool:
            """Whether the gate fails a program as the worker measures it: again in another process if in doubt."""
            first, again = random.choice(PROCESSES, 2, replace=False)
            if not is_suspicious(measured(first, which, ROUNDS), LIMIT):
                return False
            return 1 / measured(again, which, ROUNDS_AGAIN).high > 1 + LIMIT

        return fails

    judge(record_all)


@pytest.mark.noise
def test_two_toolchains_are_distinguished_by_a_delay_of_ten_percent_and_not_by_noise(tmp_path: Path) -> None:
    """The installed ONNX Runtime, renamed, as it is and with runs that last a tenth longer; each run is a process."""
    base = program(tmp_path / "base", 40)
    sides = [
        base,
        replace(base, python=str(renamed(tmp_path / "twin", "1.98.0"))),
        replace(base, python=str(renamed(tmp_path / "slower", "1.99.0", share=0.1))),
    ]
    random = np.random.default_rng(16)

    def record_all() -> Callable[[int], bool]:
        recorded: list[Rounds] = [[], [], []]
        for number in range(PROCESS_ROUNDS):
            turns = list(enumerate(sides))
            for place, side in reversed(turns) if number % 2 else turns:
                recorded[place] = [*recorded[place], *bench(side, [side], 1, 1.0 / PAIRS)[0]]
        recorded.append(longer_by_hand(recorded[TWIN]))

        def measured(which: int, pairs: int) -> Comparison:
            start = random.integers(PROCESS_ROUNDS - pairs + 1)
            ours, theirs = (recorded[each][start : start + pairs] for each in (which, BASE))
            return compare_pairs(ours, theirs)

        def fails(which: int) -> bool:
            return is_suspicious(measured(which, PAIRS), LIMIT) and 1 / measured(which, PAIRS_AGAIN).high > 1 + LIMIT

        return fails

    judge(record_all)
