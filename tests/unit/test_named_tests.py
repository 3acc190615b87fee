"""The tests that show what documents promise (`docs/shown.md`) are there."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.places import ROOT

SHOWN = tomllib.loads((ROOT / "tests" / "shown.toml").read_text())
NAMED = sorted({(file, name) for files in SHOWN.values() for file, names in files.items() for name in names})


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
