"""The machine as the survey reads it: files below a root, and the output of programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path("/")
"""Where the machine's files begin; tests set a recorded tree in its place."""

PROGRAM_SECONDS = 60.0

DYING_SECONDS = 5.0
"""What a program gets to be gone after it was killed; one that waits in the driver of a broken GPU never is."""


class Machine:
    """Reads one machine's files and asks its programs; what is not there is empty."""

    def __init__(self, root: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.root = ROOT if root is None else root
        self.environ = os.environ if environ is None else environ

    def path(self, name: str) -> Path:
        """Return where a file of the machine is: `/sys/class/kfd` below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without white space around it; empty where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def numbers(self, name: str) -> dict[str, int]:
        """Return a file of `name value` lines, as KFD writes them; what is not such a line is left out."""
        pairs = [line.split() for line in self.text(name).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    def numbered(self, name: str) -> list[int]:
        """Return the numbers that a folder has entries for, in order."""
        folder = self.path(name)
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []

    def program(self, name: str, folders: Sequence[str] = ()) -> str:
        """Return the path of a program in one of these folders, else on PATH; empty where it is not."""
        places = [str(self.path(folder)) for folder in folders]
        on_path = [self.environ.get("PATH", os.defpath)] if self.root == Path("/") else []
        return shutil.which(name, path=os.pathsep.join([*places, *on_path])) or ""

    def nvml(self) -> Any:
        """Return the binding of NVML, not opened yet. Raises ImportError where it is not installed."""
        import pynvml

        return pynvml

    def ask(self, program: str, *arguments: str) -> str:
        """Return what a program prints; empty where it fails or takes too long."""
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
            # Not `subprocess.run`, which waits for its end, and for who has its output open, however long that takes.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=DYING_SECONDS)
            if process.stdout:
                process.stdout.close()
            return ""
        return said if process.returncode == 0 else ""
