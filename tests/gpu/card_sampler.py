"""Which processes are on each NVIDIA card, asked of NVML again and again."""

from __future__ import annotations

import threading
import time

from farm.extras.nvidia.nvidia_gpus import find_nvidia_gpus
from farm.extras.nvidia.nvml import open_nvml
from farm.node.machine import Machine

SAMPLE_SECONDS = 0.05


class Sampler:
    """Asks NVML which processes are on each card, again and again, and remembers every change.

    Without a driver there are no cards, and nothing is asked.
    """

    def __init__(self) -> None:
        self.nvml, _ = open_nvml(Machine())
        self.cards = [gpu.uuid for gpu in find_nvidia_gpus(Machine(environ={}))[0]]
        self.samples = 0
        self.changes: list[tuple[float, int, tuple[int, ...]]] = []
        self.began = time.monotonic()
        self._now: dict[int, tuple[int, ...]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self.nvml is None:
            return
        handles = [self.nvml.device(uuid) for uuid in self.cards]
        while not self._over.wait(SAMPLE_SECONDS):
            self.samples += 1
            for card, handle in enumerate(handles):
                pids = tuple(sorted(pid for pid, _ in self.nvml.processes(handle) or []))
                if pids != self._now.get(card, ()):
                    self._now[card] = pids
                    self.changes.append((round(time.monotonic() - self.began, 3), card, pids))

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join()

    def memory(self) -> list[int]:
        """Return the bytes of memory that are in use on each card."""
        nvml = self.nvml
        return [nvml.used(nvml.device(uuid)) or 0 for uuid in self.cards] if nvml else []

    def most(self, since: float) -> int:
        """The most processes that were on one card at once, from a moment on."""
        return max((len(pids) for at, _, pids in self.changes if at >= since), default=0)

    @property
    def now(self) -> float:
        """Seconds since the first look."""
        return round(time.monotonic() - self.began, 3)
