"""Which processes are on each card, asked of the driver again and again."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from farm.extras.nvidia.driver import find, open_nvml
from farm.node.amd_gpus import find_amd_gpus
from farm.node.gpus import Gpu, Machine, memory_held

SAMPLE_SECONDS = 0.05


class CardSampler(ABC):
    """Asks which processes are on each card, again and again, and remembers every change.

    Without a driver there are no cards, and nothing is asked.
    """

    def __init__(self, cards: list[str]) -> None:
        self.cards = cards
        self.samples = 0
        self.changes: list[tuple[float, int, tuple[int, ...]]] = []
        self.began = time.monotonic()
        self._now: dict[int, tuple[int, ...]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @abstractmethod
    def processes(self, card: int) -> Iterable[int]:
        """Return the processes that are on a card now."""

    @abstractmethod
    def memory(self) -> list[int]:
        """Return the bytes of memory that are in use on each card."""

    def _run(self) -> None:
        while self.cards and not self._over.wait(SAMPLE_SECONDS):
            self.samples += 1
            for card in range(len(self.cards)):
                pids = tuple(sorted(self.processes(card)))
                if pids != self._now.get(card, ()):
                    self._now[card] = pids
                    self.changes.append((self.now, card, pids))

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join()

    def most(self, since: float) -> int:
        """The most processes that were on one card at once, from a moment on; nobody may have stopped looking."""
        assert self._thread.is_alive() or not self.cards, "the processes on the cards are not watched any more"
        return max((len(pids) for at, _, pids in self.changes if at >= since), default=0)

    @property
    def now(self) -> float:
        """Seconds since the first look."""
        return round(time.monotonic() - self.began, 3)


class NvmlSampler(CardSampler):
    """Asks NVML."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.nvml, _ = open_nvml(machine or Machine())
        super().__init__([gpu.uuid for gpu in find(machine or Machine(environ={}))[0]] if self.nvml else [])

    def processes(self, card: int) -> Iterable[int]:
        """Return the processes that use a card."""
        nvml, device = self.nvml, self._device(self.cards[card])
        found = nvml.ask("DeviceGetComputeRunningProcesses", device) if nvml else None
        return [int(each.pid) for each in found or []]

    def memory(self) -> list[int]:
        """Return the bytes of memory that are in use on each card."""
        nvml = self.nvml
        if nvml is None:
            return []
        return [nvml.number("DeviceGetMemoryInfo", self._device(uuid), "used") or 0 for uuid in self.cards]

    def _device(self, uuid: str) -> Any:
        return self.nvml.ask("DeviceGetHandleByUUID", uuid) if self.nvml else None


class KfdSampler(CardSampler):
    """Asks KFD, where a process shows itself when it allocates memory."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = find_amd_gpus(Machine(), ["/opt/rocm/bin"])[0]
        super().__init__([gpu.pin for gpu in self.gpus])

    def processes(self, card: int) -> Iterable[int]:
        """Return the processes that hold memory of a card."""
        return memory_held(Machine(), self.gpus[card].bdf) or ()

    def memory(self) -> list[int]:
        """Return the bytes of memory that processes hold on each card."""
        return [sum((memory_held(Machine(), gpu.bdf) or {}).values()) for gpu in self.gpus]
