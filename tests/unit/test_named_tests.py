"""Pages that name a test for each wall, each fault that was found and each detail: the tests are there."""

from __future__ import annotations

import re

import pytest

from tests.support.places import ROOT

PAGES = {
    "security.md": "## How it is tested",
    "faults.md": "## What was lost before",
    "details.md": "## The details",
}
"""By page, the section that has the table."""

NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED = sorted({found for page in PAGES for found in NAME.findall((ROOT / "docs" / page).read_text())})


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_a_test(page: str) -> None:
    section = (ROOT / "docs" / page).read_text().partition(PAGES[page])[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][2:]
    assert len(rows) > 20
    assert not [row for row in rows if not NAME.search(row)]


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
