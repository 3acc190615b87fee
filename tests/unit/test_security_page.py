"""`docs/security.md` names a test for each wall: they are there."""

from __future__ import annotations

import re

import pytest

from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40
    for row in PAGE.partition("## How it is tested")[2].splitlines():
        if row.startswith("| ") and not row.startswith(("| wall", "| ---")):
            assert "::" in row, row


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
