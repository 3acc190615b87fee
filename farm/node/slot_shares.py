"""Share a node out: a slot for each GPU and a few for its CPU targets, with the CPUs near to each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from farm.compiling.attempt import FreeSlots, Slot
from farm.node.gpus import Gpu
from farm.node.machine import HERE, Machine
from farm.settings import Settings
from farm.spec import Device
from farm.targets.pools import Pool


def share_out(pools: Sequence[Pool], gpus: Sequence[Gpu], settings: Settings, machine: Machine) -> list[SlotKind]:
    """Return the kinds of slots of a node that have a pool to serve.

    There is one slot for each GPU. CPU targets get `cpu_slots` slots; by default one for each core, or one for each
    NUMA node if the node has GPUs. If there are several NUMA nodes, the children of a slot stay on the CPUs near it.
    """
    usable = os.sched_getaffinity(0)
    numa = [cpus for cpus in _numa_nodes(machine) if cpus & usable]
    numa = [cpus & usable for cpus in numa] if len(numa) > 1 else []
    models = {gpu.device: [other for other in gpus if other.device == gpu.device] for gpu in gpus}
    on_gpu = {device: tuple(pool for pool in pools if pool.device == device and not pool.untuned) for device in models}
    on_cpu = tuple(pool for pool in pools if not any(pool in served for served in on_gpu.values()))
    cpu_slots = settings.cpu_slots or (max(1, len(numa)) if any(on_gpu.values()) else len(usable)) if on_cpu else 0
    total = cpu_slots + sum(len(models[device]) for device, served in on_gpu.items() if served)
    threads = settings.threads or max(1, len(usable) // max(1, total))
    kinds = [
        SlotKind(
            name=_kind_name(device),
            pools=served,
            slots=tuple(_gpu_slot(gpu, usable, several=bool(numa)) for gpu in models[device]),
            threads=threads,
        )
        for device, served in on_gpu.items()
        if served
    ]
    if on_cpu:
        kinds.append(SlotKind("cpu", on_cpu, tuple(_cpu_slots(cpu_slots, numa)), threads))
    return kinds


def _kind_name(device: Device) -> str:
    """Return the name for workers of a GPU model; NVIDIA has several models of one architecture."""
    arch = device.arch.replace(":", "-") if device.arch.startswith("sm_") else device.arch.partition(":")[0]
    return f"{arch}-{device.compute_units}cu"


@contextmanager
def one_slot(pool: Pool, gpus: Sequence[Gpu], settings: Settings) -> Iterator[tuple[Slot, Gpu | None]]:
    """Hold a slot of this node that serves a pool while the block runs, and give it with its GPU, if it has one.

    Waits for a GPU that others use; Ctrl-C ends the wait.
    """
    [kind] = share_out([pool], gpus, settings, HERE)
    with FreeSlots(kind.slots, settings.lock_dir).one(threading.Event()) as slot:
        assert slot, "nobody cancels the wait"
        yield slot, next((gpu for gpu in gpus if slot.gpu and gpu.pin == slot.gpu), None)


def _gpu_slot(gpu: Gpu, usable: set[int], *, several: bool) -> Slot:
    near = cpu_list(gpu.cpus) & usable if several else set()
    return Slot(
        gpu=gpu.pin, lock=gpu.lock, cpus=tuple(sorted(near)), bdf=gpu.bdf, maker=gpu.maker, device=gpu.described
    )


def _cpu_slots(count: int, numa: Sequence[set[int]]) -> list[Slot]:
    """Spread slots evenly over the NUMA nodes; a slot never spans nodes unless there are fewer slots than nodes."""
    slots = []
    for index in range(count):
        first = index * len(numa) // count
        share = numa[first : max((index + 1) * len(numa) // count, first + 1)]
        slots.append(Slot(cpus=tuple(sorted(set().union(*share)))))
    return slots


def _numa_nodes(machine: Machine) -> list[set[int]]:
    """Return the CPUs of each NUMA node that has some."""
    folder = machine.path("/sys/devices/system/node")
    names = sorted(path.name for path in folder.glob("node[0-9]*"))
    lists = [cpu_list(machine.text(f"/sys/devices/system/node/{name}/cpulist")) for name in names]
    return [cpus for cpus in lists if cpus]


def cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list as the kernel writes it (`0-3,8`)."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


@dataclass(frozen=True, slots=True)
class SlotKind:
    """The slots of one kind on a node (each GPU model, CPU), and the pools that any of them serves.

    `threads` is what the compiler of one attempt uses.
    """

    name: str
    pools: tuple[Pool, ...]
    slots: tuple[Slot, ...]
    threads: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the kind as plain JSON."""
        return {**asdict(self), "pools": [pool.as_dict() for pool in self.pools]}
