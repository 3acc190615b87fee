"""The `farm` command as a user types it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.places import ROOT


@dataclass(frozen=True)
class Command:
    """`farm` with a data folder of its own."""

    folder: Path
    environ: dict[str, str]

    def __call__(self, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run to the end and return what it printed."""
        return subprocess.run(
            [sys.executable, "-m", "farm", *arguments],
            cwd=self.folder,
            env=self.environ,
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start it, and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "farm", *arguments],
            cwd=self.folder,
            env=self.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @contextmanager
    def up(self) -> Iterator[None]:
        """Keep the farm up while the block runs."""
        process = self.start("up")
        try:
            assert process.stdout is not None
            assert any("http://" in line for line in process.stdout), "the farm did not start"
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)

    def json(self, *arguments: str) -> Any:
        """Run to the end and return the JSON on standard output."""
        done = self(*arguments, "--json")
        return json.loads(done.stdout)

    def processes(self) -> list[psutil.Process]:
        """Every process whose command line, folder or environment names the data folder."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.cwd(), process.environ().get("FARM_DATA_DIR", "")]
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            except OSError:  # Another test's, in a folder whose path is too long to be read.
                continue
            if process.pid != os.getpid() and any(str(self.folder) in word for word in words):
                found.append(process)
        return found


def command(folder: Path, **environ: str) -> Command:
    """Return `farm` with its data in a folder; `environ` is further environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "GITHUB_"))}
    settings = {
        "FARM_DATA_DIR": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "FARM_LEASE_SECONDS": "3",
        "FARM_RENEW_SECONDS": "0.5",
        "FARM_MEASURE_SECONDS": "0.1",
    }
    return Command(folder, clean | settings | {"PYTHONPATH": str(ROOT), "CI": "true"} | environ)
