"""What a node asks NVIDIA's driver, as `farm.node.gpus.GpuDriver` has it."""

from __future__ import annotations

from collections.abc import Callable

from farm.extras.nvidia.nvidia_gpus import find_nvidia_gpus
from farm.extras.nvidia.nvml import gauges as _gauges
from farm.extras.nvidia.nvml import open_nvml
from farm.node.gpus import Gpu, Note
from farm.node.machine import Machine
from farm.wire.program import Conditions


def find(machine: Machine) -> tuple[list[Gpu], list[Note]]:
    """Return the GPUs that can be used, and notes on GPUs that cannot be used."""
    return find_nvidia_gpus(machine)


def gauges(machine: Machine, pin: str) -> tuple[Callable[[], int | None], Callable[[], int | None]]:
    """Return what reads how busy a GPU is, in percent, and how many bytes of its memory are in use."""
    return _gauges(machine, pin)


def conditions(machine: Machine, pin: str) -> Conditions | None:
    """Return the state of a GPU at this moment, without its processes."""
    nvml, _ = open_nvml(machine)
    return nvml.conditions(pin) if nvml else None


def held(machine: Machine, pin: str) -> list[int] | None:
    """Return the bytes of memory of each process that has a context on a GPU, which may be 0."""
    nvml, _ = open_nvml(machine)
    found = nvml.processes(nvml.device(pin)) if nvml else None
    return None if found is None else [memory for _, memory in found]
