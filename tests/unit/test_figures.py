"""`make bench`: what it says of figures, of baselines and of goals."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.benchmarks.figures import KEEP, Figure, figure, read_figures, row
from tests.support.places import ROOT


@pytest.mark.parametrize(
    ("now", "before", "more_is_better", "said"),
    [
        ((3.0, 3.2, 3.1), (1.0, 1.1, 2.9), False, "worse"),
        ((3.0, 3.2, 3.1), (1.0, 1.1, 2.9), True, "better"),
        ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), False, "better"),
        ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), True, "worse"),
        ((1.0, 1.1, 1.3), (1.3, 1.4, 1.5), True, "same"),
        ((9.0, 9.0), (1.0, 1.0, 1.0), False, "too few values"),
    ],
)
def test_a_figure_is_worse_if_all_values_are(
    now: tuple[float, ...], before: tuple[float, ...], more_is_better: bool, said: str
) -> None:
    found, earlier = (Figure("f", "s", values, more_is_better=more_is_better) for values in (now, before))
    assert found.change_from(earlier) == said


@pytest.mark.parametrize(
    ("unit", "loop", "same_machine", "said"),
    [
        ("x", 0.09, False, "worse"),
        ("MB", 0.09, True, "worse"),
        ("MB", 0.02, False, "another machine"),
        ("s", 0.0219, True, "worse"),
        ("s", 0.0221, True, "another speed of the machine"),
        ("1/s", 0.0179, True, "another speed of the machine"),
        ("s", 0.02, False, "another machine"),
    ],
)
def test_times_are_compared_only_if_the_machine_is_as_fast_as_it_was(
    unit: str, loop: float, same_machine: bool, said: str
) -> None:
    found, earlier = (
        Figure("f", unit, values, loop=took) for values, took in (((3.0, 3.0, 3.0), loop), ((1.0, 1.0, 1.0), 0.02))
    )
    assert found.change_from(earlier, same_machine=same_machine) == said


def test_times_are_not_compared_with_those_of_an_unknown_speed() -> None:
    found, earlier = Figure("f", "s", (3.0,) * 3, loop=0.02), Figure("f", "s", (1.0,) * 3)
    assert found.change_from(earlier) == "another speed of the machine"


@pytest.mark.parametrize(
    ("value", "more_is_better", "met"), [(2.0, False, True), (2.1, False, False), (2.0, True, True), (1.9, True, False)]
)
def test_a_goal_is_met_from_its_own_value_on(value: float, more_is_better: bool, met: bool) -> None:
    found = Figure("f", "x", (0.0, value, 9.0), 2, more_is_better=more_is_better)
    assert found.meets_goal is met
    assert ("met" if met else "MISSED") in row(found)


def test_figures_are_kept_for_the_command_that_runs_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP, str(tmp_path / "kept"))
    made = [figure("one", 2.5, "s", 3), figure("two", [1, 2, 3], "x", more_is_better=True)]
    assert list(read_figures((tmp_path / "kept").read_text().splitlines()).values()) == made


def test_a_benchmark_that_runs_again_adds_its_values() -> None:
    kept = [json.dumps(asdict(Figure("one", "s", values))) for values in ((1.0,), (2.0, 3.0))]
    assert read_figures(kept) == {"one": Figure("one", "s", (1.0, 2.0, 3.0))}


def test_the_command_names_a_benchmark_that_is_not_there() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "startup", "nothing"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "there is no benchmark nothing" in run.stderr
