"""How busy a GPU is, and how much of its memory is in use, while something runs: what the kernel's driver counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from farm.nodes.gpus import Gpu
from farm.nodes.machine import Machine

LOOK_SECONDS = 0.1


@dataclass
class Usage:
    """What was seen of a GPU: its mean share of busy time, and the most memory in bytes beyond what was in use before.

    None where the driver does not say. The counters are the whole card's, also where it is partitioned.
    """

    busy: float | None = None
    memory: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"busy": self.busy, "memory": self.memory}


@contextmanager
def watch(gpu: Gpu | None, machine: Machine | None = None) -> Iterator[Usage]:
    """Look at a GPU again and again while the block runs; what it gives is filled in at its end. None: no GPU.

    amdgpu shows both counters in sysfs (`gpu_busy_percent`, `mem_info_vram_used`), to everyone and without a tool.
    """
    usage = Usage()
    if gpu is None or not gpu.bdf:
        yield usage
        return
    machine = machine or Machine()
    folder = f"/sys/bus/pci/devices/{gpu.bdf}"
    before = _number(machine, f"{folder}/mem_info_vram_used")
    busy: list[int] = []
    used: list[int] = []
    over = threading.Event()

    def look() -> None:
        while True:
            for name, found in (("gpu_busy_percent", busy), ("mem_info_vram_used", used)):
                value = _number(machine, f"{folder}/{name}")
                if value is not None:
                    found.append(value)
            if over.wait(LOOK_SECONDS):
                return

    thread = threading.Thread(target=look, name="gpu-usage", daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        over.set()
        thread.join()
        usage.busy = sum(busy) / len(busy) / 100 if busy else None
        usage.memory = max(0, max(used) - (before or 0)) if used else None


def _number(machine: Machine, name: str) -> int | None:
    text = machine.text(name)
    return int(text) if text.isdigit() else None
