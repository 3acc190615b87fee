"""GPU usage: what a GPU's driver reports, for every maker.

While something runs: how busy the GPU is, and how much of its memory is in use. At one moment: its clocks, power cap,
temperatures, throttling and other users.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from typing_extensions import TypedDict

from farm.compiling.attempt import Slot, unless_held
from farm.logging import get_logger
from farm.node import kfd
from farm.node.gpu_reports import whole_card
from farm.node.gpus import Gpu, driver_of
from farm.node.machine import HERE, Machine
from farm.targets.compilers import Maker
from farm.wire.program import Conditions, Processes

log = get_logger(__name__)

LOOK_SECONDS = 0.1
RELEASE_SECONDS = 2.0
"""Time for the driver to forget a process that has ended: a work queue frees its memory later."""

FORGET_SECONDS = 20.0
"""Time for KFD to forget a process that was killed, while nobody else may take its GPU."""
FOREIGN_BYTES = 64 << 20
"""Bytes of a GPU's memory that others may hold before it counts as in use: monitors open it and hold a little."""


class Usage(TypedDict):
    """The mean share of time in which a GPU was busy, and the most bytes of memory that were in use beyond the start.

    None if the driver does not report it. The counters are those of the whole card, even if it is partitioned.
    """

    busy: float | None
    memory: int | None


@contextmanager
def watch(gpu: Gpu | None, machine: Machine = HERE) -> Iterator[Usage]:
    """Look at a GPU repeatedly while the block runs. The usage that it yields is filled in when the block ends.

    Without a GPU the usage stays empty. amdgpu has both counters in sysfs (`gpu_busy_percent`, `mem_info_vram_used`),
    which everybody may read.
    """
    usage = Usage(busy=None, memory=None)
    if gpu is None or not (gpu.bdf or driver_of(gpu.maker)):
        yield usage
        return
    read_busy, read_used = _gauges(gpu.maker, gpu.bdf, gpu.pin, machine)
    before = read_used()
    busy: list[int] = []
    used: list[int] = []
    over = threading.Event()

    def look() -> None:
        while True:
            for read, found in ((read_busy, busy), (read_used, used)):
                value = read()
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
        usage["busy"] = sum(busy) / len(busy) / 100 if busy else None
        usage["memory"] = max(0, max(used) - (before or 0)) if used else None


def now(slot: Slot, machine: Machine = HERE) -> Usage:
    """Return how busy a slot's GPU is at this moment, and how many bytes of its memory are in use, by anybody."""
    if not (slot.bdf or (slot.gpu and driver_of(slot.maker))):
        return {"busy": None, "memory": None}
    read_busy, read_used = _gauges(slot.maker, slot.bdf, slot.gpu, machine)
    busy = read_busy()
    return {"busy": None if busy is None else busy / 100, "memory": read_used()}


def _gauges(
    maker: Maker, bdf: str, pin: str, machine: Machine
) -> tuple[Callable[[], int | None], Callable[[], int | None]]:
    if driver := driver_of(maker):
        return driver.gauges(machine, pin)
    folder = f"/sys/bus/pci/devices/{bdf}"
    return (
        partial(_number, machine, f"{folder}/gpu_busy_percent"),
        partial(_number, machine, f"{folder}/mem_info_vram_used"),
    )


_THROTTLE_STATUS = {(1, 1): 68, (1, 2): 68, (1, 3): 68, (1, 4): 40, (1, 5): 104}
"""Where amdgpu's `gpu_metrics` has its throttle status, by format: `struct gpu_metrics_v1_3` and so on of Linux'
`drivers/gpu/drm/amd/include/kgd_pp_interface.h`."""
_UNKNOWN = 0xFFFFFFFF


def conditions(slot: Slot, machine: Machine = HERE) -> Conditions | None:
    """Return the state of a slot's device at this moment; None if nothing reports it.

    Clocks and temperatures have the driver's labels (`sclk`, `mclk`; `edge`, `junction`, `mem`). They come from
    amdgpu's hwmon files and `gpu_metrics`, or from an extension's driver, which may also report `clock_reasons`,
    `ecc_errors` (uncorrected, since boot) and `xids` (errors since the last look). For a partition, the values are
    those of the whole card. `processes` hold memory of this GPU or partition. Call this while no child runs on the GPU,
    so that all of them are processes of others.
    """
    if driver := driver_of(slot.maker):
        found = driver.conditions(machine, slot.gpu)
        if found:
            found["processes"] = _others(lambda: driver.held(machine, slot.gpu))
    else:
        found = _amd_conditions(slot.bdf, machine) if slot.bdf else None
    if cpu := dict(re.findall(r"^(model name|cpu MHz)\s*: (.+)$", machine.text("/proc/cpuinfo"), re.MULTILINE)):
        limit = _number(machine, f"/sys/devices/system/cpu/cpu{min(slot.cpus, default=0)}/cpufreq/scaling_max_freq")
        clock = limit / 1e3 if limit else float(cpu.get("cpu MHz", 0))
        found = found or {"clocks": {"cpu": clock} if clock and not slot.gpu else {}, "processes": None}
        found["cpu"] = cpu.get("model name", "")
    return found


def _amd_conditions(bdf: str, machine: Machine) -> Conditions | None:
    card = f"/sys/bus/pci/devices/{whole_card(bdf)}"
    folder = f"{card}/hwmon"
    monitors = sorted(machine.path(folder).glob("hwmon*"))
    monitor = f"{folder}/{monitors[0].name}" if monitors else folder
    cap = _number(machine, f"{monitor}/power1_cap")
    found: Conditions = {
        "clocks": _labelled(machine, monitor, "freq", 1e6),
        "temperatures": _labelled(machine, monitor, "temp", 1e3),
        "power_cap": cap / 1e6 if cap is not None else None,
        "throttled": _throttled(machine.path(f"{card}/gpu_metrics")),
        "processes": _others(lambda: _held(machine, bdf)),  # last: it may wait while the GPU cools down
    }
    return found if monitors or found["processes"] else None


def _others(look: Callable[[], list[int] | None]) -> Processes | None:
    """Return how many processes hold memory of a GPU, and how many bytes in all.

    Processes of our own that have just ended are given time to disappear. Their pids would not identify them: KFD
    reports those of the host, and a worker in a container sees others.
    """
    until = time.monotonic() + RELEASE_SECONDS
    while (held := look()) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return None if held is None else {"count": len(held), "memory": sum(held)}


def _held(machine: Machine, bdf: str) -> list[int] | None:
    found = kfd.held(machine, bdf)
    return None if found is None else list(found.values())


@contextmanager
def until_forgotten(slot: Slot, machine: Machine = HERE) -> Iterator[None]:
    """Do not end before KFD has forgotten the processes that began to use a slot's AMD GPU while the block ran.

    A killed process holds the GPU's memory for a while after its end, and the next one would miss it. To be used by
    whoever holds the slot: then the new processes are children of this block. Waits for `FORGET_SECONDS` at most.
    """
    before = _users(slot, machine)
    try:
        yield
    finally:
        until = time.monotonic() + FORGET_SECONDS
        while left := _users(slot, machine) - before:
            if time.monotonic() >= until:
                log.warning("KFD still has processes of a child that ended", gpu=slot.gpu, pids=sorted(left))
                break
            time.sleep(LOOK_SECONDS)


def _users(slot: Slot, machine: Machine) -> set[int]:
    return set(kfd.held(machine, slot.bdf) or ()) if slot.bdf and slot.maker == "amd" else set()


def foreign_users(slots: Iterable[Slot], folder: str, machine: Machine = HERE) -> str:
    """Return which AMD GPU others than the farm use, and how much of its memory they hold; empty if none is used.

    A GPU whose lock in `folder` is taken is in use by the farm itself, and is not looked at.
    """
    for slot in slots:
        if not slot.bdf or slot.maker != "amd":
            continue
        found = None
        with suppress(OSError), unless_held(slot, folder) as ours:  # Attempts report a lock that cannot be opened.
            found = kfd.held(machine, slot.bdf) if ours else None
        if found and sum(found.values()) > FOREIGN_BYTES:
            first, *more = sorted(found)
            pids = f"{first} and {len(more)} more" if more else str(first)
            return f"GPU {slot.gpu} is not free: others (process {pids}) hold {sum(found.values()) / 1e9:.2g} GB of it"
    return ""


def _labelled(machine: Machine, monitor: str, kind: str, unit: float) -> dict[str, float]:
    """Return a monitor's values of one kind (`freq1_input`, …) by their labels."""
    found = {}
    for path in sorted(machine.path(monitor).glob(f"{kind}[0-9]*_input")):
        value = _number(machine, f"{monitor}/{path.name}")
        name = path.name.removesuffix("_input")
        if value is not None:
            found[machine.text(f"{monitor}/{name}_label") or name] = value / unit
    return found


def _throttled(path: Path) -> bool | None:
    try:
        table = path.read_bytes()
    except OSError:
        return None
    place = _THROTTLE_STATUS.get((table[2], table[3])) if len(table) > 3 else None
    if place is None or len(table) < place + 4:
        return None
    (status,) = struct.unpack_from("<I", table, place)
    return None if status == _UNKNOWN else status != 0


def _number(machine: Machine, name: str) -> int | None:
    text = machine.text(name)
    return int(text) if text.isdigit() else None
