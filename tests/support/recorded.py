"""Node trees of `tests/support/nodes/`: unpacked into a folder that takes the place of the machine's root."""

import shlex
from pathlib import Path

from farm.node.gpus import Machine

NODES = Path(__file__).parent / "nodes"


def unpack(name: str, root: Path) -> Path:
    """Write a recorded tree below `root` and return it; a file marked `!` becomes a program that prints its text."""
    for part in (NODES / f"{name}.txt").read_text().split("\n=== ")[1:]:
        head, _, text = part.partition("\n")
        path, _, mark = head.partition(" ")
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if mark:
            program(file, text)
        else:
            file.write_text(f"{text}\n")
    return root


def program(path: Path, text: str, status: int = 0) -> None:
    """Write a program that prints a text and exits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(text)}\nexit {status}\n")
    path.chmod(0o755)


def recorded(name: str, root: Path, **environ: str) -> Machine:
    """Return a recorded node as the survey reads it."""
    return Machine(unpack(name, root), environ)
