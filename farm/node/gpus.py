"""The GPUs of a node, of every maker, and notes on GPUs that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

from farm import entry_points
from farm.node.machine import Machine
from farm.spec import Device
from farm.targets.compilers import Maker
from farm.wire.program import Conditions, GpuFields


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the operator of a node: what cannot be used, why, and what to do.

    `broken`: it should work here, but does not.
    """

    subject: str
    text: str
    fix: str = ""
    broken: bool = True

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.subject}: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as found, or the part of one that its driver shows as a device.

    `arch` is AMD's full name with the feature bits if rocminfo reports them, or NVIDIA's compute capability with the
    model (`sm_90:h200`). `index` counts the maker's GPUs of the node. `memory` is in bytes, `cpus` the CPUs of its NUMA
    node as the kernel writes lists (`0-47,96-143`), `driver` the version of the maker's kernel module.
    """

    index: int
    uuid: str
    arch: str
    compute_units: int
    xcc: int | None = None
    memory: int | None = None
    model: str = ""
    partition: str = ""
    bdf: str = ""
    cpus: str = ""
    driver: str = ""
    alone: bool = True
    """Whether no other GPU of the node has its UUID, as partitions of one card do."""
    maker: Maker = "amd"

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
        return {
            "model": self.model or None,
            "partition": self.partition or None,
            "memory": self.memory or None,
            "driver": self.driver or None,
        }

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


class GpuDriver(Protocol):
    """How a node asks the driver of a maker's GPUs; an extension adds it. `pin` is that of a `Gpu`."""

    def find(self, machine: Machine) -> tuple[list[Gpu], list[Note]]:
        """Return the GPUs that can be used, and notes on GPUs that cannot be used."""

    def gauges(self, machine: Machine, pin: str) -> tuple[Callable[[], int | None], Callable[[], int | None]]:
        """Return what reads how busy a GPU is, in percent, and how many bytes of its memory are in use."""

    def conditions(self, machine: Machine, pin: str) -> Conditions | None:
        """Return the state of a GPU at this moment, without its processes; None if it is gone."""

    def held(self, machine: Machine, pin: str) -> list[int] | None:
        """Return the bytes of memory that each process holds of a GPU; None if the driver does not say."""


@cache
def driver_of(maker: str) -> GpuDriver | None:
    """Return how to ask the driver of a maker's GPUs, if an extension adds that."""
    return cast("GpuDriver | None", entry_points.find(entry_points.GPUS, maker))
