"""NVIDIA GPUs of a node, as the driver reports them: whole cards, or the MIG slices of a card.

This is the `farm.node.gpus.GpuDriver`. MIG is found as it is and never changed. Every device is pinned by its UUID:
numbers depend on what a process sees. The driver is asked through NVML's maintained binding (`nvidia-ml-py`), which is
imported only if the driver is loaded. Only a whole card reports clocks, temperatures and errors, so a slice reports
those of its card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from farm.node.gpus import Gpu, Machine, Note, Usage, closed, visible
from farm.wire.program import Conditions

CHOICE = "CUDA_VISIBLE_DEVICES"

_CORES = {60: 64, 70: 64, 72: 64, 75: 64, 80: 64}
"""CUDA cores of one multiprocessor by compute capability, if they are not 128."""
_PROHIBITED = 2


def find(machine: Machine) -> tuple[list[Gpu], list[Note]]:
    """Return the GPUs that can be used, and notes on GPUs that cannot be used."""
    nvml, note = open_nvml(machine)
    if nvml is None:
        return [], [note] if note else []
    found: list[Gpu] = []
    notes: list[Note] = []
    for index in range(nvml.ask("DeviceGetCount") or 0):
        card = nvml.ask("DeviceGetHandleByIndex", index)
        if card is None:
            text = "the driver lists the card and does not answer for it: it fell off the bus, or is in a bad state"
            notes.append(Note(f"NVIDIA GPU {index}", text, "look at the kernel's log (dmesg | grep -i xid)"))
        elif note := _closed(machine, nvml, index, card):
            notes.append(note)
        else:
            found += _devices(machine, nvml, index, card, notes)
    found, left_out = visible(machine, CHOICE, found, "NVIDIA GPUs", _is_meant)
    return found, notes + left_out


def _is_meant(gpu: Gpu, name: str) -> bool:
    """Whether a name that a variable has is this GPU's: the card's number, or the start of its UUID."""
    return name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))


def _closed(machine: Machine, nvml: Nvml, index: int, card: Any) -> Note | None:
    """Return a note if this process may not use a card."""
    subject = f"NVIDIA GPU {index}"
    if nvml.ask("DeviceGetComputeMode", card) == _PROHIBITED:
        return Note(subject, "its compute mode is Prohibited", f"nvidia-smi -i {index} -c DEFAULT, if it shall be used")
    minor = nvml.ask("DeviceGetMinorNumber", card)
    names = ["/dev/nvidiactl", "/dev/nvidia-uvm", *([] if minor is None else [f"/dev/nvidia{minor}"])]
    # A sealed child cannot start the program that makes it.
    fix = "nvidia-modprobe -u -c=0 makes it; a container gets it by --gpus"
    return closed(machine, subject, names, fix, "give the user the group that owns it")


def _devices(machine: Machine, nvml: Nvml, index: int, card: Any, notes: list[Note]) -> Iterator[Gpu]:
    """Yield the slices of a card, or the card if it is not cut into any."""
    mode = nvml.ask("DeviceGetMigMode", card)
    is_cut = bool(mode) and mode[0] == 1
    devices = [("", card)]
    if is_cut:
        places = range(nvml.ask("DeviceGetMaxMigDeviceCount", card) or 0)
        slices = ((f", slice {place}", nvml.ask("DeviceGetMigDeviceHandleByIndex", card, place)) for place in places)
        devices = [(name, device) for name, device in slices if device is not None]
    if not devices:
        text = "MIG is on, and no slice is made: nothing can run on it"
        notes.append(Note(f"NVIDIA GPU {index}", text, f"nvidia-smi mig -i {index} -cgi …, or switch MIG off"))
    capability, cores = nvml.ask("DeviceGetCudaComputeCapability", card), nvml.ask("DeviceGetNumGpuCores", card)
    whole = cores // _CORES.get(capability[0] * 10 + capability[1], 128) if capability and cores else None
    bus = nvml.ask("DeviceGetPciInfo", card)
    text = bus.busId.decode() if bus and isinstance(bus.busId, bytes) else bus.busId if bus else ""
    domain, _, rest = text.lower().partition(":")
    bdf = f"{int(domain, 16):04x}:{rest}" if rest else ""  # As the kernel writes it; NVML's domain has 8 digits.
    cpus = machine.text(f"/sys/bus/pci/devices/{bdf}/local_cpulist") if bdf else ""
    if not cpus and (node := nvml.ask("DeviceGetNumaNodeId", card)) is not None:
        cpus = machine.text(f"/sys/devices/system/node/node{node}/cpulist")
    for name, device in devices:
        model, uuid = str(nvml.ask("DeviceGetName", device) or ""), str(nvml.ask("DeviceGetUUID", device) or "")
        units = nvml.number("DeviceGetAttributes_v2", device, "multiprocessorCount") if is_cut else whole
        missing = {"UUID": uuid, "compute capability": capability, "number of multiprocessors": units, "name": model}
        if silent := [what for what, value in missing.items() if not value]:
            text = f"the driver does not tell its {' and '.join(silent)}"
            notes.append(Note(f"NVIDIA GPU {index}{name}", text, "install a newer driver, or look at nvidia-smi -q"))
            continue
        yield Gpu(
            index=index,
            uuid=uuid,
            arch=f"sm_{capability[0]}{capability[1]}:{model_slug(model)}",
            compute_units=units or 0,
            memory=nvml.number("DeviceGetMemoryInfo", device, "total"),
            model=model,
            partition=model.partition(" MIG ")[2],
            bdf=bdf,
            cpus=cpus,
            driver=str(nvml.ask("SystemGetDriverVersion") or ""),
            maker="nvidia",
        )


def model_slug(model: str) -> str:
    """Return a model's name as it is in keys and targets: `NVIDIA H100 80GB HBM3` is `h100-80gb-hbm3`.

    A MIG slice's name has its profile: `NVIDIA H200 MIG 1g.18gb` is `h200-mig-1g.18gb`.
    """
    short = re.sub(r"\b(nvidia|geforce|tesla|quadro|graphics|gpu)\b", " ", model.lower())
    return re.sub(r"[^a-z0-9.]+", "-", short).strip("-")


def usage(machine: Machine, pin: str) -> Usage:
    """Return the share of time in which a device is busy at this moment, and the bytes of its memory in use."""
    nvml, _ = open_nvml(machine)
    device = nvml.ask("DeviceGetHandleByUUID", pin) if nvml else None
    if nvml is None or device is None:
        return {"busy": None, "memory": None}
    busy = nvml.number("DeviceGetUtilizationRates", device, "gpu")
    memory = nvml.number("DeviceGetMemoryInfo", device, "used")
    return {"busy": None if busy is None else busy / 100, "memory": memory}


def conditions(machine: Machine, pin: str) -> Conditions | None:
    """Return the state of a device at this moment, without its processes; None if the device is gone."""
    nvml, _ = open_nvml(machine)
    device = nvml.ask("DeviceGetHandleByUUID", pin) if nvml else None
    if nvml is None or device is None:
        return None
    card = nvml.ask("DeviceGetDeviceHandleFromMigDeviceHandle", device) or device
    clocks = {name: nvml.ask("DeviceGetClockInfo", card, number) for name, number in _CLOCKS.items()}
    temperature = nvml.ask("DeviceGetTemperature", card, _GPU_SENSOR)
    cap = nvml.ask("DeviceGetEnforcedPowerLimit", card)
    reasons = nvml.ask("DeviceGetCurrentClocksEventReasons", card)
    if reasons is None:
        reasons = nvml.ask("DeviceGetCurrentClocksThrottleReasons", card)
    return {
        "clocks": {name: float(value) for name, value in clocks.items() if value is not None},
        "temperatures": {} if temperature is None else {"gpu": float(temperature)},
        "power_cap": None if cap is None else cap / 1000,
        "throttled": None if reasons is None else bool(reasons & _THROTTLES),
        "clock_reasons": [name for bit, name in REASONS.items() if (reasons or 0) & bit],
        "ecc_errors": nvml.ask("DeviceGetTotalEccErrors", card, _UNCORRECTED, _SINCE_BOOT),
        "xids": nvml.xids(pin, card),
        "processes": None,
    }


def held(machine: Machine, pin: str) -> list[int] | None:
    """Return the bytes of memory of each process that has a context on a GPU, which may be 0."""
    nvml, _ = open_nvml(machine)
    device = nvml.ask("DeviceGetHandleByUUID", pin) if nvml else None
    found = nvml.ask("DeviceGetComputeRunningProcesses", device) if nvml else None
    return None if found is None else [int(each.usedGpuMemory or 0) for each in found]


# --- NVML -------------------------------------------------------------------------------------------------------------

REASONS = {
    0x1: "gpu_idle", 0x2: "applications_clocks", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake", 0x100: "display_clocks",
}  # fmt: skip
"""Why clocks are what they are: `nvmlClocksEventReason…` of nvml.h."""
_THROTTLES = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
_CLOCKS = {"sm": 1, "mem": 2}
_UNCORRECTED, _SINCE_BOOT, _GPU_SENSOR, _XID_EVENTS = 1, 0, 0, 0x8

INSTALL = "pip install 'migraphx-farm[cuda]'"


class Nvml:
    """An open NVML: what a card or its driver does not answer is None."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self._events: dict[str, Any] = {}

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of `nvml<name>`; None if the driver refuses, does not know, or lacks the function."""
        try:
            return getattr(self.binding, f"nvml{name}")(*arguments)
        except (self.binding.NVMLError, AttributeError):
            return None

    def number(self, name: str, device: Any, field: str) -> int | None:
        """Return a number of an answer about a device."""
        answer = self.ask(name, device)
        return None if answer is None else int(getattr(answer, field))

    def xids(self, uuid: str, card: Any) -> list[int]:
        """Return the errors that the driver has reported of a card since this process last asked; none the first time.

        https://docs.nvidia.com/deploy/xid-errors has what the numbers mean.
        """
        if uuid not in self._events:
            self._events[uuid] = self.ask("EventSetCreate")
            self.ask("DeviceRegisterEvents", card, _XID_EVENTS, self._events[uuid])
        found = []
        while self._events[uuid] and (event := self.ask("EventSetWait_v2", self._events[uuid], 0)):
            found.append(int(event.eventData))
        return found


_OPEN: dict[Any, Nvml] = {}


def open_nvml(machine: Machine) -> tuple[Nvml | None, Note | None]:
    """Return NVML if the machine has NVIDIA's driver, which this process may see; a note if it has GPUs and no NVML."""
    if not any(machine.path(name).exists() for name in ("/dev/nvidiactl", "/proc/driver/nvidia/version")):
        return None, _driverless(machine)
    try:
        binding = machine.nvml()
    except ImportError:
        return None, Note("NVIDIA GPUs", "the driver is loaded, but nvidia-ml-py, which asks it, is missing", INSTALL)
    if binding in _OPEN:
        return _OPEN[binding], None
    try:
        binding.nvmlInit()
    except binding.NVMLError as error:
        fix = "install the driver's library libnvidia-ml.so.1 of the same version (containers get it from the host)"
        return None, Note("NVIDIA GPUs", f"the driver's library does not open: {error}", fix)
    _OPEN[binding] = Nvml(binding)
    return _OPEN[binding], None


def _driverless(machine: Machine) -> Note | None:
    """Return the note for a machine that has an NVIDIA GPU but no driver for it."""
    folder = machine.path("/sys/bus/pci/devices")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    cards = [
        name
        for name in sorted(names)
        if machine.text(f"/sys/bus/pci/devices/{name}/vendor") == "0x10de"
        and machine.text(f"/sys/bus/pci/devices/{name}/class").startswith("0x03")
    ]
    if not cards:
        return None
    text = f"{', '.join(cards)}: the NVIDIA driver is not loaded, or not in this container"
    return Note("NVIDIA GPUs", text, "install it (nvidia-smi shows the cards), or start the container with --gpus all")
