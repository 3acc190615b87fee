"""Runs a hostile child for an ordinary user, in a process that root starts.

The child has the system's interpreter, since a root's own may lie where nobody else may look.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildEnd, ChildLimits, EndedBy
from tests.support.places import ROOT
from tests.support.reaching import HOSTILE

NOBODY = 65534
PYTHON = "/usr/bin/python3"


def why_not() -> str:
    """Return why no child can be run for another user here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can become another user"
    seen = f"import sys; open({str(HOSTILE)!r}); sys.exit(sys.version_info < (3, 10))"
    found = shutil.which(PYTHON) and subprocess.run(
        [PYTHON, "-c", seen], user=NOBODY, group=NOBODY, extra_groups=[], check=False, capture_output=True
    )
    return "" if found and found.returncode == 0 else f"an ordinary user has no {PYTHON} of 3.10, or cannot read {ROOT}"


def run_as_user(request: Any, limits: ChildLimits) -> ChildEnd:
    """Run a sealed child of a worker that is an ordinary user; all files of it are in a folder of that user."""
    folder = tempfile.mkdtemp()
    try:
        return _run(request, folder, limits)
    finally:
        shutil.rmtree(folder)


def _run(request: Any, folder: str, limits: ChildLimits) -> ChildEnd:
    words = [json.dumps(request), json.dumps(dataclasses.asdict(limits))]
    command = [sys.executable, "-m", "tests.support.other_user", folder, *words]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    found = json.loads(said)
    return ChildEnd(**{**found, "by": EndedBy(found["by"]), "limits": limits, "stuck": tuple(found["stuck"])})


def main(folder: Path, request: str, limits: str) -> None:
    """Become an ordinary user, run the child, and print how it ended."""
    first: Any = {"do": "answer", "action": "hostile"}  # It imports what that user may not read.
    run_child(first, log_path=folder / "first.txt", folder=folder, script=HOSTILE, python=PYTHON)
    os.chown(folder, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    (folder / "made").mkdir(exist_ok=True)
    end = run_child(
        json.loads(request),
        log_path=folder / "log.txt",
        folder=folder,
        script=HOSTILE,
        python=PYTHON,
        limits=ChildLimits(**json.loads(limits)),
        seal=Seal(read=[HOSTILE.parent], write=[folder / "made"], within=folder),
    )
    fields = {field.name: getattr(end, field.name) for field in dataclasses.fields(end) if field.name != "limits"}
    print(json.dumps(fields))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
