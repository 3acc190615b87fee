"""The packages of `docs/extend.md`, as a reader would write and install them, in a real farm."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.places import ROOT
from tests.support.side_packages import command, install, write_project

PAGE = (ROOT / "docs" / "extend.md").read_text()


def written(section: str, folder: Path) -> Path:
    """Write the files of a section's package; return its folder."""
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(section)]
    for name, content in re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        place = folder / section / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return folder / section


def test_a_compiler_and_a_notifier_of_somebody_else_make_a_program_and_tell_of_it(tmp_path: Path) -> None:
    packages = [written(section, tmp_path) for section in ("Add a compiler", "Tell somebody")]
    place = install(tmp_path / "installed", *packages)
    write_project(tmp_path, "acme/cpu")
    built = json.loads(command(tmp_path, place, "run", "farm.yaml", "-o", "built", "--json"))
    (cell,) = built["cells"]
    assert (cell["state"], cell["facts"]["toolchain"]) == ("succeeded", "acme1.0-00000001")
    assert list((tmp_path / "built").glob("**/*.acme.onnx"))
    (line,) = set((tmp_path / ".farm" / "builds.log").read_text().splitlines())  # It may be called again.
    assert re.fullmatch(r"main extended b-[0-9a-f]{16}: 1 of 1 cells succeeded.*", line)
