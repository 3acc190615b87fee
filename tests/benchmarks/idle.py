"""What a farm that has nothing to do takes: shares of a core, and memory.

    python tests/benchmarks/idle.py [SECONDS]

An embedded farm makes one cell, so that all is loaded, and is then left alone for so long (30 s). The worker's parent
is the process that starts and watches its Celery process; its share of a core has those of all that it has started.
Memory is what belongs to a process alone, with its part of what it shares.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.benchmarks.one_cell import MANIFEST, one  # noqa: E402

PARTS = {
    "Valkey": "valkey-server",
    "storage": "weed -logtostderr",
    "API and loops": "farm serve",
    "worker's parent": "-m farm worker",
}
"""A word of the command line of each part."""


def main(seconds: float) -> None:
    """Let a farm be idle and print what it took."""
    with tempfile.TemporaryDirectory() as name:
        settings = load_settings(data_dir=Path(name) / "data", log_level="warning", cpu_slots=1)
        with EmbeddedFarm(settings) as up, FarmClient.from_settings(up) as client:
            manifest = Path(name) / "one.yaml"
            manifest.write_text(MANIFEST.format(target="onnxruntime/cpu", salt="idle"))
            one(client, manifest)
            children = [(each, " ".join(each.cmdline())) for each in psutil.Process().children(recursive=True)]
            parts = {
                part: next(each for each, line in children if word in line and "server_guard" not in line)
                for part, word in PARTS.items()
            }
            before = {part: used(process) for part, process in parts.items()}
            time.sleep(seconds)
            for part, process in parts.items():
                share = 100 * (used(process) - before[part]) / seconds
                figure(f"idle: {part}", share, "% of a core", 1 if part == "API and loops" else None)
                memory = process.memory_full_info().pss / 1e6
                figure(f"memory: {part}", memory, "MB", 90 if part == "worker's parent" else None)


def used(process: psutil.Process) -> float:
    """Return the seconds of CPU of a process and of what it has started."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()) for each in family)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
