"""The machine as the survey reads it: its files, and the output of its programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM_SECONDS = 60.0

DYING_SECONDS = 5.0
"""Time for a killed program to end. A program that waits in the driver of a broken GPU never ends."""


class Machine:
    """Reads the files of one machine and runs its programs. Missing files and programs give empty values."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> None:
        self.root = root
        self.environ = environ

    def path(self, name: str) -> Path:
        """Return the path of a file such as `/sys/class/kfd`, below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without white space around it; empty if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def numbers(self, name: str) -> dict[str, int]:
        """Return the numbers of a file of `name value` lines, as KFD writes them. Other lines are skipped."""
        pairs = [line.split() for line in self.text(name).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    def numbered(self, name: str) -> list[int]:
        """Return the numbers that a folder has entries for, in order."""
        folder = self.path(name)
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []

    def program(self, name: str, folders: Sequence[str] = ()) -> str:
        """Return the path of a program in one of these folders, else on PATH; empty if there is none."""
        places = [str(self.path(folder)) for folder in folders]
        on_path = [self.environ.get("PATH", os.defpath)] if self.root == Path("/") else []
        return shutil.which(name, path=os.pathsep.join([*places, *on_path])) or ""

    def nvml(self) -> Any:
        """Return the binding of NVML, not opened yet. Raises ImportError if it is not installed."""
        import pynvml

        return pynvml

    def ask(self, program: str, *arguments: str) -> str:
        """Return the output of a program; empty if it fails or takes too long."""
        try:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return ""
        try:
            said, _ = process.communicate(timeout=PROGRAM_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            # Not `subprocess.run`: it waits until the program ends and nobody holds its output open, however long.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=DYING_SECONDS)
            if process.stdout:
                process.stdout.close()
            return ""
        return said if process.returncode == 0 else ""


HERE = Machine()
"""The machine of this process; tests put the root of a recorded tree in it."""
