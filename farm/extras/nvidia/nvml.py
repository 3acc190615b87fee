"""NVML: what NVIDIA's driver reports of its GPUs, through the maintained binding (`nvidia-ml-py`).

The binding is imported only if the driver is loaded. UUIDs name cards and MIG slices. Only a whole card reports clocks,
temperatures and errors, so a slice reports those of its card.
"""

from __future__ import annotations

from typing import Any

from farm.node.gpus import Note
from farm.node.machine import Machine
from farm.wire.program import Conditions

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

    def device(self, uuid: str) -> Any:
        """Return the handle of a card or MIG slice; None for one that is gone."""
        return self.ask("DeviceGetHandleByUUID", uuid)

    def card(self, device: Any) -> Any:
        """Return the handle of the whole card that a device is, or is a slice of."""
        return self.ask("DeviceGetDeviceHandleFromMigDeviceHandle", device) or device

    def processes(self, device: Any) -> list[tuple[int, int]] | None:
        """Return process id and bytes of each process that has a context on a device; None if the driver does not say.

        The ids are those of the host, or 0. In a container the same processes have other ids.
        """
        found = self.ask("DeviceGetComputeRunningProcesses", device)
        return None if found is None else [(int(each.pid), int(each.usedGpuMemory or 0)) for each in found]

    def used(self, device: Any) -> int | None:
        """Return the bytes of a device's memory that are in use."""
        memory = self.ask("DeviceGetMemoryInfo", device)
        return None if memory is None else int(memory.used)

    def busy(self, device: Any) -> int | None:
        """Return the share of time, in percent, in which something ran on a device."""
        rates = self.ask("DeviceGetUtilizationRates", device)
        return None if rates is None else int(rates.gpu)

    def conditions(self, uuid: str) -> Conditions | None:
        """Return the state of a device at this moment, without its processes; None if the device is gone."""
        device = self.device(uuid)
        if device is None:
            return None
        card = self.card(device)
        clocks = {name: self.ask("DeviceGetClockInfo", card, number) for name, number in _CLOCKS.items()}
        temperature = self.ask("DeviceGetTemperature", card, _GPU_SENSOR)
        cap = self.ask("DeviceGetEnforcedPowerLimit", card)
        reasons = self.ask("DeviceGetCurrentClocksEventReasons", card)
        if reasons is None:
            reasons = self.ask("DeviceGetCurrentClocksThrottleReasons", card)
        return {
            "clocks": {name: float(value) for name, value in clocks.items() if value is not None},
            "temperatures": {} if temperature is None else {"gpu": float(temperature)},
            "power_cap": None if cap is None else cap / 1000,
            "throttled": None if reasons is None else bool(reasons & _THROTTLES),
            "clock_reasons": [name for bit, name in REASONS.items() if (reasons or 0) & bit],
            "ecc_errors": self.ask("DeviceGetTotalEccErrors", card, _UNCORRECTED, _SINCE_BOOT),
            "xids": self.xids(uuid, card),
            "processes": None,
        }

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
