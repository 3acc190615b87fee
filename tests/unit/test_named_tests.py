"""The tests that show what documents promise (`docs/shown.md`, `docs/details.md`) are there."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.places import ROOT

SHOWN = tomllib.loads((ROOT / "tests" / "shown.toml").read_text())
DETAILS = tomllib.loads((ROOT / "tests" / "details.toml").read_text())
NAMED = {(file, name) for files in SHOWN.values() for file, names in files.items() for name in names}
NAMED |= {
    (f"tests/{file}", name)
    for section in DETAILS.values()
    for _, _, _, *by in section["points"]
    for file, name in (each.split(":") for each in by)
}


@pytest.mark.parametrize(("file", "name"), sorted(NAMED))
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
