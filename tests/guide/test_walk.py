"""The walk of one cell through the code: `docs/walk.md` says what a run does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.walk.__main__ import PAGE, SHARED, files_of, follow


def test_the_page_names_the_files_that_a_cell_goes_through(tmp_path: Path) -> None:
    found = {(hop.role, hop.file) for hop in follow(tmp_path)}
    written = files_of(PAGE.read_text())
    differences = {"not on the page": found - written, "not in the run": written - found}
    assert not (found ^ written), f"`python -m tests.walk --write` writes docs/walk.md again: {differences}"


def test_the_page_counts_what_it_lists() -> None:
    text = PAGE.read_text()
    found = re.search(r"(\d+) hops into (\d+) files", text)
    listed = files_of(text)
    assert found
    assert [int(number) for number in found.groups()] == [len(listed), len({file for _, file in listed})]
    assert not {file for _, file in listed} & SHARED
