"""The walk of one cell through the code: `docs/walk.md` says what a run does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.walk.__main__ import PAGE, SHARED, files_of, follow

MOST = {"hops": 148, "files": 103, "steps": 87, "step files": 64}
"""A walk may get shorter; a longer one needs a reason."""


def test_the_page_names_the_files_that_a_cell_goes_through(tmp_path: Path) -> None:
    """`python -m tests.walk --write` writes the page again."""
    hops = follow(tmp_path)
    assert {(hop.role, hop.file) for hop in hops} == files_of(PAGE.read_text())
    steps = [hop for hop in hops if hop.is_step]
    count = {
        "hops": len(hops),
        "files": len({hop.file for hop in hops}),
        "steps": len(steps),
        "step files": len({hop.file for hop in steps}),
    }
    assert {name: number for name, number in count.items() if number > MOST[name]} == {}


def test_the_page_counts_what_it_lists() -> None:
    text = PAGE.read_text()
    found = re.search(r"(\d+) hops into (\d+) files", text)
    listed = files_of(text)
    assert found
    assert [int(number) for number in found.groups()] == [len(listed), len({file for _, file in listed})]
    assert not {file for _, file in listed} & SHARED
