"""The walk of one cell through the code: `docs/walk.md` says what a run does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.walk.__main__ import PAGE, files_of, follow
from tests.walk.recorder import is_shared

CLOCK = 0.05
"""What part of the hops may differ from run to run: what a process does by the clock, it need not do in each."""

WITH_CLOCKS = {"server", "supervisor"}
"""Processes that do some of their work by the clock: a run may end before, or just after, they enter a file."""

BY_THE_CLOCK = 4
"""How many of their files may differ from run to run."""


def test_the_page_says_what_a_run_does(tmp_path: Path) -> None:
    """Its files are those that a cell goes through, and its number of hops is theirs but for what the clock decides."""
    hops = follow(tmp_path)
    found, written = {(hop.role, hop.file) for hop in hops}, files_of(PAGE.read_text())
    differences = {"not on the page": found - written, "not in the run": written - found}
    by_the_clock = {(role, file) for role, file in found ^ written if role in WITH_CLOCKS}
    assert found ^ written == by_the_clock, f"`python -m tests.walk --write` writes docs/walk.md again: {differences}"
    assert len(by_the_clock) <= BY_THE_CLOCK, f"`python -m tests.walk --write` writes docs/walk.md again: {differences}"
    assert len(hops) == pytest.approx(counted()[0], rel=CLOCK), (
        "`python -m tests.walk --write` writes docs/walk.md again"
    )


def test_the_page_counts_what_it_lists() -> None:
    listed = {file for _, file in files_of(PAGE.read_text())}
    assert counted()[1] == len(listed)
    assert not any(is_shared(file) for file in listed)


def test_the_page_names_the_functions_that_matter() -> None:
    """Those in which one reads what the farm does with a cell, not the constructors that are called first."""
    for name in (
        "BuildService",
        "BuildRecords.create",
        "hand_out",
        "Pipeline.run",
        "Steps.compile",
        "JobRecords.finish",
    ):
        assert re.search(rf"`{name}", PAGE.read_text()), name


def counted() -> list[int]:
    found = re.search(r"^(\d+) hops into (\d+) files", PAGE.read_text(), re.MULTILINE)
    assert found
    return [int(number) for number in found.groups()]
