"""Pictures of a terminal, made as those of pages are: the command runs in one, and what it shows is kept."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

from farm.app import Farm
from tests.pages.conftest import Shown

COLUMNS, LINES = 110, 40
TOP, BOTTOM = 8, 24
"""Lines of a long answer that its picture shows."""


def shown_by(command: list[str], environment: dict[str, str]) -> str:
    """What a command shows in a terminal of `COLUMNS` columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "", **environment}
    for name in ("NO_COLOR", "CI", "GITHUB_ACTIONS", "COLUMNS"):
        environment.pop(name, None)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # So Linux says that nobody has the other end open any more.
                break
            if not part:
                break
            parts.append(part)
        process.wait(120)
    os.close(ours)
    return b"".join(parts).decode()


def test_the_state_of_a_build_in_a_terminal(farm: Farm, url: str, shown: Shown, tmp_path: Path) -> None:
    token = farm.settings.api_token.get_secret_value()
    environment = {
        "FARM_API_URL": url,
        "FARM_API_TOKEN": token,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    said = shown_by([sys.executable, "-m", "farm", "status", shown.build], environment)
    text = Text.from_ansi(said.replace("\r\n", "\n"))
    assert "compiler_crash" in text.plain and "58 of 60 cells succeeded" in text.plain
    if folder := os.environ.get("SCREENSHOTS"):
        lines = text.split("\n")
        kept = [*lines[:TOP], Text("…", style="dim"), *lines[-BOTTOM:]] if len(lines) > TOP + BOTTOM else lines
        with Path(os.devnull).open("w") as nothing:
            console = Console(record=True, width=COLUMNS, file=nothing, force_terminal=True)
            console.print(Text(f"$ farm status {shown.build}", style="bold"))
            console.print(Text("\n").join(kept))
        # Without the fonts that it would fetch from elsewhere.
        picture = re.sub(r"@font-face \{[^}]*\}", "", console.export_svg(title="farm status"))
        (Path(folder) / "status.svg").write_text(picture)
