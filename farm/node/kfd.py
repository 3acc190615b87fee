"""KFD: how the kernel describes GPUs, with or without ROCm's tools (`/sys/class/kfd`)."""

from __future__ import annotations

from farm.node.gpu_reports import GpuReport, pci_address
from farm.node.machine import Machine

NODES = "/sys/class/kfd/kfd/topology/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"

_MEMORY_HEAPS = (1, 2)
"""`heap_type` of a GPU's own memory: visible to the host, and not."""


def gpus(machine: Machine) -> list[GpuReport]:
    """Return the GPUs that this process may see, in ROCr's order. Nodes that may not be read are skipped."""
    found = [(node, machine.numbers(f"{NODES}/{node}/properties")) for node in machine.numbered(NODES)]
    return [_gpu(machine, node, properties) for node, properties in found if _is_gpu(properties)]


def hidden(machine: Machine) -> list[int]:
    """Return the nodes whose description may not be read, as a container sees the GPUs that it was not given."""
    return [node for node in machine.numbered(NODES) if not machine.numbers(f"{NODES}/{node}/properties")]


def numa_node(machine: Machine, node: int) -> int | None:
    """Return the CPU node that a GPU's node is nearest to, by its links; None if there is none."""
    folder = f"{NODES}/{node}/io_links"
    links = [machine.numbers(f"{folder}/{link}/properties") for link in machine.numbered(folder)]
    near = sorted((link.get("weight", 0), link["node_to"]) for link in links if "node_to" in link)
    return next((to for _, to in near if machine.numbers(f"{NODES}/{to}/properties").get("cpu_cores_count")), None)


def held(machine: Machine, bdf: str) -> dict[int, int] | None:
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


def _is_gpu(properties: dict[str, int]) -> bool:
    return bool(properties.get("simd_count") or properties.get("gfx_target_version"))


def _address(properties: dict[str, int]) -> str:
    location = properties.get("location_id")
    return pci_address(properties.get("domain", 0), location) if location else ""


def _gpu(machine: Machine, node: int, properties: dict[str, int]) -> GpuReport:
    simd, per_unit = properties.get("simd_count"), properties.get("simd_per_cu")
    unique, render = properties.get("unique_id"), properties.get("drm_render_minor")
    banks = f"{NODES}/{node}/mem_banks"
    heaps = [machine.numbers(f"{banks}/{bank}/properties") for bank in machine.numbered(banks)]
    own = [heap.get("size_in_bytes", 0) for heap in heaps if heap.get("heap_type") in _MEMORY_HEAPS]
    return GpuReport(
        node=node,
        bdf=_address(properties),
        uuid=f"GPU-{unique:016x}" if unique else "",
        arch=arch_of(properties.get("gfx_target_version", 0)),
        compute_units=simd // per_unit if simd and per_unit else None,
        xcc=properties.get("num_xcc"),
        memory=sum(own) or None,
        render=render or None,
    )


def arch_of(version: int) -> str:
    """Return the arch of a `gfx_target_version`: decimal MMmmss, the last part written in hex; empty for 0.

    90010 is gfx90a, 90402 is gfx942, 110000 is gfx1100.
    """
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}" if version else ""
