"""The machine and its GPUs, of every maker, by the kernel's files (KFD: `/sys/class/kfd`) and the makers' drivers.

While something runs: how busy a GPU is, and how much of its memory is in use. At one moment: its clocks, power cap,
temperatures, throttling and other users.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from typing_extensions import TypedDict

from farm import entry_points
from farm.compiling.attempt import Slot, unless_held
from farm.logging import get_logger
from farm.spec import Device
from farm.targets.compilers import Maker
from farm.wire.program import Conditions, GpuFields, Processes

PROGRAM_SECONDS = 60.0

DYING_SECONDS = 5.0  # Time for a killed program to end. A program that waits in the driver of a broken GPU never ends.


class Machine:
    """Reads the files of one machine and runs its programs. Missing files and programs give empty values."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> None:
        self.root = root
        self.environ = environ

    def path(self, name: str) -> Path:
        """Return the path of a file such as `/sys/class/kfd`, below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without white space around it; empty if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def numbers(self, name: str) -> dict[str, int]:
        """Return the numbers of a file of `name value` lines, as KFD writes them. Other lines are skipped."""
        pairs = [line.split() for line in self.text(name).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    def numbered(self, name: str) -> list[int]:
        """Return the numbers that a folder has entries for, in order."""
        folder = self.path(name)
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []

    def program(self, name: str, folders: Sequence[str] = ()) -> str:
        """Return the path of a program in one of these folders, else on PATH; empty if there is none."""
        places = [str(self.path(folder)) for folder in folders]
        on_path = [self.environ.get("PATH", os.defpath)] if self.root == Path("/") else []
        return shutil.which(name, path=os.pathsep.join([*places, *on_path])) or ""

    def nvml(self) -> Any:
        """Return the binding of NVML, not opened yet. Raises ImportError if it is not installed."""
        import pynvml

        return pynvml

    def ask(self, program: str, *arguments: str) -> str:
        """Return the output of a program; empty if it fails or takes too long."""
        try:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return ""
        try:
            said, _ = process.communicate(timeout=PROGRAM_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            # Not `subprocess.run`: it waits until the program ends and nobody holds its output open, however long.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=DYING_SECONDS)
            if process.stdout:
                process.stdout.close()
            return ""
        return said if process.returncode == 0 else ""


HERE = Machine()  # The machine of this process; tests put the root of a recorded tree in it.


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the operator of a node: what cannot be used, why, and what to do."""

    subject: str
    text: str
    fix: str = ""
    broken: bool = True  # It should work here, but does not.

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.subject}: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as found, or as one source reports it, or the part of one that its driver shows as a device.

    What is not known is None, 0 or empty.
    """

    index: int = 0  # Counts the maker's GPUs of the node.
    uuid: str = ""  # AMD: `GPU-` and 16 hex digits, which the partitions of a card share.
    arch: str = ""
    """AMD's full name with the feature bits if rocminfo reports them, or NVIDIA's compute capability with the model
    (`sm_90:h200`)."""
    compute_units: int = 0
    xcc: int | None = None
    memory: int | None = None  # In bytes.
    model: str = ""
    partition: str = ""
    bdf: str = ""  # The PCI address (`0000:05:00.0`); partitions of a card differ in the function.
    cpus: str = ""  # The CPUs of its NUMA node as the kernel writes lists (`0-47,96-143`).
    driver: str = ""  # The version of the maker's kernel module.
    alone: bool = True  # Whether no other GPU of the node has its UUID, as partitions of one card do.
    maker: Maker = "amd"
    node: int | None = None  # KFD's number of the node.
    render: int | None = None  # The number of its device in /dev/dri.

    @property
    def name(self) -> str:
        """What people call it: the makers count their GPUs apart."""
        return f"{'' if self.maker == 'amd' else 'NVIDIA '}GPU {self.index}"

    @property
    def device(self) -> Device:
        """What of it changes a program."""
        return Device(arch=self.arch, compute_units=self.compute_units, xcc=self.xcc)

    @property
    def described(self) -> GpuFields:
        """Further fields for sidecars: `{"model", "partition", "memory", "driver"}`; null is unknown."""
        return cast("GpuFields", {name: getattr(self, name) or None for name in GpuFields.__annotations__})

    @property
    def pin(self) -> str:
        """The value of ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES that shows a child this GPU alone.

        It is the UUID. Without one it is the index, as it is if two GPUs share a UUID: ROCr then shows neither of them.
        """
        return self.uuid if self.uuid and self.alone else str(self.index)

    @property
    def lock(self) -> str:
        """The name that keeps workers of one node apart; it stays the same whatever a process sees of the node."""
        return self.uuid if self.uuid and self.alone else "-".join(filter(None, (self.uuid, self.bdf))) or self.pin

    def __str__(self) -> str:
        """One line for people."""
        words = [
            f"{self.model} {self.arch}".strip(),
            f"{self.compute_units} {'CUs' if self.maker == 'amd' else 'SMs'}",
            f"{self.xcc} XCCs" if self.xcc else "",
            self.partition,
            f"{self.memory / 2**30:.0f} GiB" if self.memory else "memory unknown",
            f"pinned by {self.pin}",
            f"CPUs {self.cpus}" if self.cpus else "",
        ]
        return ", ".join(filter(None, words))


def visible(
    machine: Machine, variable: str, found: Sequence[Gpu], subject: str, is_meant: Callable[[Gpu, str], bool]
) -> tuple[list[Gpu], list[Note]]:
    """Keep the GPUs that a variable of the worker's environment names; `is_meant` compares one with a name."""
    choice = machine.environ.get(variable)
    names = [name.strip() for name in (choice or "").split(",") if name.strip()]
    kept = [gpu for gpu in found if choice is None or any(is_meant(gpu, name) for name in names)]
    text = f"{variable}={choice} leaves {len(kept)} of {len(found)} to this worker"
    return kept, [Note(subject, text, broken=False)] if len(kept) < len(found) else []


def closed(machine: Machine, subject: str, devices: Iterable[str], if_absent: str, if_closed: str) -> Note | None:
    """Return a note, with what to do, if this process may not open one of a GPU's device files."""
    for name in devices:
        path = machine.path(name)
        if not path.exists():
            return Note(subject, f"{name} is not there", if_absent)
        if not os.access(path, os.R_OK | os.W_OK):
            return Note(subject, f"this user may not open {name}", if_closed)
    return None


class Usage(TypedDict):
    """The mean share of time in which a GPU was busy, and the most bytes of memory that were in use beyond the start.

    None if the driver does not report it. The counters are those of the whole card, even if it is partitioned.
    """

    busy: float | None
    memory: int | None


class GpuDriver(Protocol):
    """How a node asks the driver of a maker's GPUs; an extension adds it. `pin` is that of a `Gpu`."""

    def find(self, machine: Machine) -> tuple[list[Gpu], list[Note]]:
        """Return the GPUs that can be used, and notes on GPUs that cannot be used."""

    def usage(self, machine: Machine, pin: str) -> Usage:
        """Return the share of time in which a GPU is busy at this moment, and the bytes of its memory in use."""

    def conditions(self, machine: Machine, pin: str) -> Conditions | None:
        """Return the state of a GPU at this moment, without its processes; None if it is gone."""

    def held(self, machine: Machine, pin: str) -> list[int] | None:
        """Return the bytes of memory that each process holds of a GPU; None if the driver does not say."""


@cache
def driver_of(maker: str) -> GpuDriver | None:
    """Return how to ask the driver of a maker's GPUs, if an extension adds that."""
    return cast("GpuDriver | None", entry_points.find(entry_points.GPUS, maker))


NODES = "/sys/class/kfd/kfd/topology/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"

_MEMORY_HEAPS = (1, 2)  # `heap_type` of a GPU's own memory: visible to the host, and not.


def pci_address(domain: int, location: int) -> str:
    """Return a PCI address from KFD's `domain` and `location_id` (rocminfo's BDFID): bus, device, function."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def whole_card(bdf: str) -> str:
    """Return the address of the card that a partition belongs to: function 0."""
    return bdf[:-1] + "0" if bdf else ""


def kernel_gpus(machine: Machine) -> list[Gpu]:
    """Return the GPUs that this process may see, in ROCr's order. Nodes that may not be read are skipped."""
    found = [(node, machine.numbers(f"{NODES}/{node}/properties")) for node in machine.numbered(NODES)]
    return [
        _gpu(machine, node, properties)
        for node, properties in found
        if properties.get("simd_count") or properties.get("gfx_target_version")
    ]


def memory_held(machine: Machine, bdf: str) -> dict[int, int] | None:
    """Return the bytes of a GPU's memory that each process holds, of those that hold any; None if KFD does not say.

    KFD has a folder for each process that uses it, in all containers, named by the pid on the host. The folder has
    a file `vram_<gpu_id>` for each GPU: `kfd_process.c` of Linux' amdkfd, 5.8 or newer.
    """
    ids = [
        machine.text(f"{NODES}/{node}/gpu_id")
        for node in machine.numbered(NODES)
        if bdf and _address(machine.numbers(f"{NODES}/{node}/properties")) == bdf
    ]
    if len(ids) != 1 or not ids[0] or not machine.path(PROCESSES).is_dir():
        return None
    found = {process: machine.text(f"{PROCESSES}/{process}/vram_{ids[0]}") for process in machine.numbered(PROCESSES)}
    return {process: int(text) for process, text in found.items() if text.isdigit() and int(text)}


def _address(properties: dict[str, int]) -> str:
    location = properties.get("location_id")
    return pci_address(properties.get("domain", 0), location) if location else ""


def _gpu(machine: Machine, node: int, properties: dict[str, int]) -> Gpu:
    simd, per_unit = properties.get("simd_count"), properties.get("simd_per_cu")
    unique, render = properties.get("unique_id"), properties.get("drm_render_minor")
    version = properties.get("gfx_target_version", 0)  # MMmmss, `ss` in hex: 90010 is gfx90a, 110000 gfx1100.
    banks = f"{NODES}/{node}/mem_banks"
    heaps = [machine.numbers(f"{banks}/{bank}/properties") for bank in machine.numbered(banks)]
    own = [heap.get("size_in_bytes", 0) for heap in heaps if heap.get("heap_type") in _MEMORY_HEAPS]
    return Gpu(
        node=node,
        bdf=_address(properties),
        uuid=f"GPU-{unique:016x}" if unique else "",
        arch=f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}" if version else "",
        compute_units=simd // per_unit if simd and per_unit else 0,
        xcc=properties.get("num_xcc"),
        memory=sum(own) or None,
        render=render or None,
    )


log = get_logger(__name__)

LOOK_SECONDS = 0.1
RELEASE_SECONDS = 2.0  # Time for the driver to forget a process that has ended: a work queue frees its memory later.
FORGET_SECONDS = 20.0  # Time for KFD to forget a process that was killed, while nobody else may take its GPU.
FOREIGN_BYTES = 64 << 20
"""Bytes of a GPU's memory that others may hold before it counts as in use: monitors open it and hold a little."""


@contextmanager
def watch(slot: Slot, machine: Machine = HERE) -> Iterator[Usage]:
    """Look at a slot's GPU repeatedly while the block runs. The usage that it yields is filled in when the block ends.

    Without a GPU the usage stays empty. amdgpu has both counters in sysfs (`gpu_busy_percent`, `mem_info_vram_used`),
    which everybody may read.
    """
    usage = Usage(busy=None, memory=None)
    if not slot.gpu:
        yield usage
        return
    before = usage_now(slot, machine)["memory"] or 0
    readings: list[Usage] = []
    over = threading.Event()

    def look() -> None:
        while True:
            readings.append(usage_now(slot, machine))
            if over.wait(LOOK_SECONDS):
                return

    thread = threading.Thread(target=look, name="gpu-usage", daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        over.set()
        thread.join()
        busy = [each["busy"] for each in readings if each["busy"] is not None]
        used = [each["memory"] for each in readings if each["memory"] is not None]
        usage["busy"] = sum(busy) / len(busy) if busy else None
        usage["memory"] = max(0, max(used) - before) if used else None


def usage_now(slot: Slot, machine: Machine = HERE) -> Usage:
    """Return how busy a slot's GPU is at this moment, and how many bytes of its memory are in use, by anybody."""
    if driver := driver_of(slot.maker):
        return driver.usage(machine, slot.gpu)
    folder = f"/sys/bus/pci/devices/{slot.bdf}"
    busy = _number(machine, f"{folder}/gpu_busy_percent")
    return {"busy": None if busy is None else busy / 100, "memory": _number(machine, f"{folder}/mem_info_vram_used")}


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
        # Last: it may wait while the GPU cools down.
        "processes": _others(lambda: (held := memory_held(machine, bdf)) and held.values()),
    }
    return found if monitors or found["processes"] else None


def _others(look: Callable[[], Collection[int] | None]) -> Processes | None:
    """Return how many processes hold memory of a GPU, and how many bytes in all.

    Processes of our own that have just ended are given time to disappear. Their pids would not identify them: KFD
    reports those of the host, and a worker in a container sees others.
    """
    until = time.monotonic() + RELEASE_SECONDS
    while (held := look()) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return None if held is None else {"count": len(held), "memory": sum(held)}


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
    return set(memory_held(machine, slot.bdf) or ()) if slot.bdf and slot.maker == "amd" else set()


def foreign_users(slots: Iterable[Slot], folder: str, machine: Machine = HERE) -> str:
    """Return which AMD GPU others than the farm use, and how much of its memory they hold; empty if none is used.

    A GPU whose lock in `folder` is taken is in use by the farm itself, and is not looked at.
    """
    for slot in slots:
        if not slot.bdf or slot.maker != "amd":
            continue
        found = None
        with suppress(OSError), unless_held(slot, folder) as ours:  # Attempts report a lock that cannot be opened.
            found = memory_held(machine, slot.bdf) if ours else None
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
