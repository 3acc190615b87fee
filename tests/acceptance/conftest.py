"""The whole farm as a user runs it: real servers, real compilers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farm_command import Command, command
from tests.support.places import ROOT

QUICKSTART = ROOT / "configs" / "manifests" / "quickstart.yaml"


@pytest.fixture(scope="session")
def demo_data() -> Path:
    """Real samples and calibration data, made where the quickstart manifest looks for them.

    Two test processes may make them at once: each file is moved there whole, and always has the same bytes.
    """
    folder = ROOT / ".farm" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        subprocess.run([sys.executable, str(ROOT / "configs" / "demo_data.py"), made], check=True)
        for path in Path(made).iterdir():
            path.replace(folder / path.name)
    return folder


@pytest.fixture(scope="package")
def quickstart(demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A farm that is up and has run the quickstart manifest once."""
    runner = command(tmp_path_factory.mktemp("quickstart"))
    # Many projects have a file of this name, and start the farm next to it.
    (runner.folder / "tasks.py").write_text("from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n")
    with runner.up():
        done = runner("submit", str(QUICKSTART))
        assert done.returncode == 0, done.stdout + done.stderr
        yield runner
