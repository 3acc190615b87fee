"""GPUs of a node, taken by one attempt at a time: tuning and measuring need a card of their own."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farm.nodes import Gpu, find_gpus
from farm.pools import Pool

LOOK_SECONDS = 0.5
"""Between two looks for a free GPU; its holder may be a process of another worker."""


class NoSuchGpu(Exception):
    """This node has no GPU of the kind that was asked for."""


class Gpus:
    """The GPUs of this node. A lock file for each UUID keeps workers of the whole node apart."""

    def __init__(self, find: Callable[[], Sequence[Gpu]] = find_gpus, folder: Path | None = None) -> None:
        """Look for GPUs when the first is asked for; the lock files are in `folder`, else in the temporary one."""
        self._find = find
        self._folder = folder or Path(tempfile.gettempdir())
        self._found: Sequence[Gpu] | None = None

    @contextmanager
    def one(self, device: Mapping[str, Any], cancelled: threading.Event) -> Iterator[str]:
        """Hold a GPU of a spec's device while the block runs, and give what a child is pinned to (its UUID).

        Waits for a free one; gives "" for a device that is no GPU, or when `cancelled` is set meanwhile.
        Raises NoSuchGpu where this node has no such GPU.
        """
        if not str(device["arch"]).startswith("gfx"):
            yield ""
            return
        lock, uuid = self._take(device, cancelled)
        try:
            yield uuid
        finally:
            if lock is not None:
                os.close(lock)

    def _take(self, device: Mapping[str, Any], cancelled: threading.Event) -> tuple[int | None, str]:
        if self._found is None:
            self._found = self._find()
        fitting = [gpu for gpu in self._found if _fits(gpu, device)]
        if not fitting:
            raise NoSuchGpu(f"this node has no {device['arch']}")
        while not cancelled.is_set():
            for gpu in fitting:
                lock = os.open(self._folder / f"farm-{gpu.uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                else:
                    return lock, gpu.uuid
            cancelled.wait(LOOK_SECONDS)
        return None, ""


def _fits(gpu: Gpu, device: Mapping[str, Any]) -> bool:
    """A key of an architecture alone (`gfx942:any`) fits every card of it; any other names the card exactly."""
    arch, _, features = str(device["arch"]).partition(":")
    if features == "any":
        return gpu.arch.partition(":")[0] == arch
    return (gpu.arch, gpu.compute_units, gpu.xcc) == (device["arch"], device["compute_units"], device["xcc"])


def slots_for(pools: Sequence[Pool], gpus: Sequence[Gpu], cpu_slots: int) -> tuple[list[Pool], int]:
    """Return the pools that one worker of a node serves, and its slots: its GPUs, else those for CPU targets."""
    on_gpu = [pool for pool in pools if pool.target.device.startswith("gfx")]
    if on_gpu and gpus:
        return on_gpu, len(gpus)
    return [pool for pool in pools if pool not in on_gpu], cpu_slots
