"""An embedded farm in a test: another process that runs one, and what it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from farm.local.embedded import EmbeddedFarm
from farm.settings import Settings, load_settings

RUN = """
import sys
from pathlib import Path
from farm.local.embedded import EmbeddedFarm
from farm.settings import load_settings

with EmbeddedFarm(load_settings({}, data_dir=Path(sys.argv[1]), cpu_slots=1)) as settings:
    print(settings.api_url, flush=True)
    sys.stdin.read()
print("stopped", flush=True)
"""


class Run:
    """Another process that runs a farm in a folder, like `farm up`, until its input is closed."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", RUN, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes: list[psutil.Process] = []

    def wait_until_up(self) -> str:
        assert self.process.stdout
        url = self.process.stdout.readline().strip()
        self.processes = psutil.Process(self.process.pid).children(recursive=True)
        return url

    def leave(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()

    def kill(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def settings_for(folder: Path, **changes: Any) -> Settings:
    return load_settings({}, data_dir=folder, cpu_slots=1, **changes)


def bearer(settings: Settings) -> dict[str, str]:
    return {"Authorization": f"Bearer {settings.api_token.get_secret_value()}"}


def ask(settings: Settings, path: str) -> Any:
    return httpx.get(settings.api_url + path, headers=bearer(settings), timeout=60).raise_for_status().json()


def processes_of(farm: EmbeddedFarm) -> list[psutil.Process]:
    guards = [psutil.Process(server._guard.pid) for server in farm._servers if server._guard]
    return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]


def none_runs(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
