"""Find what this node can compile for: its ROCm, its compilers, its GPUs, and the pools that follow from them.

Each compiler is probed in a child process, so that a broken one cannot end the worker. Then the node is shared out: a
slot for each GPU and a few for its CPU targets, with the CPUs near to each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from farm import entry_points
from farm.compiling.attempt import FreeSlots, Installation, Slot, installation_of
from farm.compiling.child_process import ask_once
from farm.compiling.failures import ChildLimits, Failure
from farm.node.amd_gpus import Rocm, find_amd_gpus, find_rocm
from farm.node.gpus import HERE, Gpu, Machine, Note, driver_of
from farm.runner.documents import ProbeAnswer, Request
from farm.settings import Settings
from farm.spec import Device
from farm.targets.compilers import compilers
from farm.targets.pools import Pool, Target, bare, understand_target
from farm.units import grouped

PROBE_SECONDS = 120.0

CROSS = "-cross"
"""Ends the label of a toolchain that compiles for GPUs which are not there.

It has neither the libraries' kernels (MIOpen, rocBLAS, hipBLASLt) nor tuning, so the same MIGraphX makes another
program on the GPU.
"""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings on a node. `versions` are recorded with the worker; `notes` say what cannot be used, and why.

    `migraphx_path` is the folder to import MIGraphX from: the setting, else the one in ROCm's root; empty: none.
    """

    pools: list[Pool] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    rocm: Rocm | None = None
    versions: dict[str, str] = field(default_factory=dict)
    migraphx_path: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain JSON, without the pools."""
        return {
            "rocm": asdict(self.rocm) if self.rocm else None,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "versions": self.versions,
            "notes": [asdict(note) for note in self.notes],
        }


def survey(settings: Settings, machine: Machine = HERE) -> Findings:
    """Look at ROCm, compilers and GPUs, and return the findings."""
    rocm = find_rocm(machine, settings.migraphx_python)
    gpus, notes = find_amd_gpus(machine, [f"{rocm.root}/bin"] if rocm else [])
    for maker in entry_points.modules(entry_points.GPUS):
        if driver := driver_of(maker):
            others, more = driver.find(machine)
            gpus, notes = [*gpus, *others], [*notes, *more]
    libraries = machine.path(f"{rocm.root}/lib") if rocm else None
    has_module = libraries is not None and any(libraries.glob("migraphx*.so"))  # MIGraphX's Python module
    path = settings.migraphx_path or (str(libraries) if has_module else "")
    known = {"rocm": rocm.version, "miopen": rocm.miopen} if rocm else {}
    versions = {name: text for name, text in known.items() if text}
    findings = Findings(gpus=gpus, notes=notes, rocm=rocm, versions=versions, migraphx_path=path)
    makers = {gpu.maker for gpu in gpus}
    added = [
        (compiler.name, kind.pattern)
        for compiler in compilers().values()
        for kind in compiler.devices
        if kind.module and (kind.maker is None or kind.maker in makers)
    ]
    for name, device in [*_OWN, *added]:
        found = probe(name, settings.model_copy(update={"migraphx_path": path}), rocm=rocm, device=device)
        if not found.get("available"):
            # A node without GPUs need not have what compiles for them.
            kind = compilers()[name].device(device) if device else None
            broken = not kind.optional if kind else name == "migraphx" and "amd" in makers
            subject = f"{name}/{device}" if device else name
            findings.notes.append(
                Note(subject, found.get("reason", "not usable"), found.get("fix") or _INSTALL.get(name, ""), broken)
            )
            continue
        findings.versions[name] = found["version"]
        findings.pools.extend(_pools(name, found, findings))
        findings.pools.extend(_cross_pools(name, found, settings, findings))
    return findings


_OWN = [("onnxruntime", ""), ("migraphx", "")]  # The farm's own compilers, which need no extension.
_INSTALL = {
    "onnxruntime": "pip install 'migraphx-farm[worker]', or [cuda] for NVIDIA GPUs",
    "migraphx": "install ROCm's package migraphx, and set migraphx_python and migraphx_path (docs/running.md)",
}


def with_other_toolchains(settings: Settings, findings: Findings) -> Settings:
    """Add the pools of the setting `other_toolchains` to the findings.

    The returned settings say which toolchain is where. An installation without a compiler that is new here is noted.
    """
    known = {pool.toolchain for pool in findings.pools}
    added = {(pool.target.compiler, pool.target.device) for pool in findings.pools if pool.target.kind.module}
    entries: list[str] = []
    for text in settings.other_toolchains:
        _, installation = installation_of(text)
        reasons: list[str] = []
        for name, device in [("migraphx", "")] if installation.folder else [*_OWN, *sorted(added)]:
            found = probe(name, settings, rocm=findings.rocm, device=device, installation=installation)
            if not found.get("available"):
                reasons.append(found.get("reason", "not usable"))
            elif found["toolchain"] not in known:
                known.add(found["toolchain"])
                findings.pools.extend(_pools(name, found, findings))
                entries.append(f"{found['toolchain']}={':'.join(filter(None, installation))}")
        if not any(entry.endswith(f"={text}") for entry in entries):
            why = "; ".join(reasons) or "its compilers are served already"
            findings.notes.append(Note("other_toolchains", f"{text}: {why}", "install the compiler for it"))
    return settings.model_copy(update={"other_toolchains": tuple(entries)})


def probe(
    compiler: str,
    settings: Settings,
    *,
    rocm: Rocm | None = None,
    device: str = "",
    installation: Installation | None = None,
) -> ProbeAnswer:
    """Probe a compiler in a child; `device` is one that has libraries of its own (`cuda`).

    `installation` is asked instead of the node's own. If the child fails, `available` is false.
    """
    if installation is None and compiler == "migraphx":
        installation = Installation(settings.migraphx_python, settings.migraphx_path)
    python, path = installation or Installation("")
    search, version = [path] if path else [], rocm.version if rocm else ""
    request = Request(action="probe", compiler=compiler, device=device, search=search, rocm=version)
    try:
        found = ask_once(request, ChildLimits(time=PROBE_SECONDS), python=python)
    except OSError as error:
        fix = "set migraphx_python (or other_toolchains) to an interpreter that is there"
        return ProbeAnswer(available=False, reason=f"cannot start {python}: {error}", fix=fix)
    if isinstance(found, Failure):
        return ProbeAnswer(available=False, reason=found.message)
    answer: ProbeAnswer = found
    return answer


def _pools(compiler: str, found: ProbeAnswer, findings: Findings) -> Iterator[Pool]:
    """Yield the pools that a compiler serves here, without GPUs that are older than its libraries support."""
    for name in found["targets"]:
        maker = "amd" if name == "gpu" else compilers()[compiler].device(name).maker
        if maker is None:
            yield _pool(compiler, found, name, Device(arch=name))
        for device, gpu in {gpu.device: gpu for gpu in findings.gpus if gpu.maker == maker}.items():
            arch, lowest = bare(gpu.arch), found.get("lowest", 0)
            capability = int(arch.removeprefix("sm_")) if maker == "nvidia" else lowest
            if capability < lowest:
                text = f"{found['label']} serves no compute capability below {lowest / 10}, this is {capability / 10}"
                fix = "install an onnxruntime-gpu for an older CUDA, whose libraries still have the card"
                findings.notes.append(Note(gpu.name, text, fix))
                continue
            yield _pool(compiler, found, arch if name == "gpu" else name, device, memory=gpu.memory)
    has_gpu = any(gpu.maker == "amd" for gpu in findings.gpus)
    if "gpu" in found["targets"] and not has_gpu and "gpu_arch" not in found["features"]:
        findings.notes.append(Note(compiler, "its GPU target loads, but there is no GPU to use", broken=False))
    elif "gpu" not in found["targets"] and has_gpu and compiler == "migraphx":
        reason = (found.get("missing") or {}).get("gpu", "no GPU target")
        fix = "install MIGraphX for GPUs (ROCm's package migraphx); a build without HIP has no such target"
        findings.notes.append(Note(compiler, reason, fix))


def _cross_pools(compiler: str, found: ProbeAnswer, settings: Settings, findings: Findings) -> Iterator[Pool]:
    """Pools for the operator's `cross_targets`: GPUs that this node compiles for without having them."""
    wanted = settings.cross_targets if compiler == "migraphx" else ()
    if wanted and "gpu_arch" not in found["features"]:
        text = f"MIGraphX {found['version']} compiles only for GPUs that are there: cross_targets is not served"
        findings.notes.append(Note(compiler, text, "install a MIGraphX whose get_target takes gpu_arch"))
        return
    for text in wanted:
        try:
            choice = understand_target(text)
        except ValueError as error:
            findings.notes.append(Note("cross_targets", str(error), "name profiles (mi300x) or archs (gfx1201)"))
            continue
        if not choice.served.device.startswith("gfx"):
            findings.notes.append(Note("cross_targets", f"`{text}` is not a GPU", "name profiles or archs of GPUs"))
            continue
        device = choice.profile.device if choice.profile else Device(choice.served.device)
        memory = choice.profile.memory if choice.profile else None
        yield _pool(compiler, found, choice.served.device, device, memory=memory, untuned=True)


def _pool(
    compiler: str, found: ProbeAnswer, name: str, device: Device, *, memory: int | None = None, untuned: bool = False
) -> Pool:
    label, _, build = found["toolchain"].rpartition("-")
    return Pool(
        target=Target(compiler, name),
        toolchain=f"{label}{CROSS}-{build}" if untuned else found["toolchain"],
        device=device,
        recipe=compilers()[compiler].recipe,
        libraries=found["libraries"],
        features=tuple(found["features"]),
        cpu_family=found["cpu_family"],
        memory=memory,
        untuned=untuned,
    )


def share_out(pools: Sequence[Pool], gpus: Sequence[Gpu], settings: Settings, machine: Machine) -> list[SlotKind]:
    """Return the kinds of slots of a node that have a pool to serve.

    There is one slot for each GPU. CPU targets get `cpu_slots` slots; by default one for each core, or one for each
    NUMA node if the node has GPUs. If there are several NUMA nodes, the children of a slot stay on the CPUs near it.
    """
    usable = os.sched_getaffinity(0)
    nodes = "/sys/devices/system/node"
    names = sorted(path.name for path in machine.path(nodes).glob("node[0-9]*"))
    near = [cpu_list(machine.text(f"{nodes}/{name}/cpulist")) & usable for name in names]
    numa = [cpus for cpus in near if cpus]
    numa = numa if len(numa) > 1 else []
    models = grouped(gpus, lambda gpu: gpu.device)
    on_cpu = tuple(pool for pool in pools if pool.untuned or pool.device not in models)
    on_gpu = grouped((pool for pool in pools if pool not in on_cpu), lambda pool: pool.device)
    cpu_slots = settings.cpu_slots or (max(1, len(numa)) if on_gpu else len(usable)) if on_cpu else 0
    total = cpu_slots + sum(len(models[device]) for device in on_gpu)
    threads = settings.threads or max(1, len(usable) // max(1, total))
    bound = usable if numa else set[int]()
    kinds = [
        SlotKind(
            _kind_name(device),
            tuple(on_gpu[device]),
            tuple(
                Slot(gpu.pin, gpu.lock, tuple(sorted(cpu_list(gpu.cpus) & bound)), gpu.bdf, gpu.maker, gpu.described)
                for gpu in alike
            ),
            threads,
        )
        for device, alike in models.items()
        if device in on_gpu
    ]
    if on_cpu:
        kinds.append(SlotKind("cpu", on_cpu, tuple(_cpu_slots(cpu_slots, numa)), threads))
    return kinds


def _kind_name(device: Device) -> str:
    """Return the name for workers of a GPU model; NVIDIA has several models of one architecture."""
    arch = device.arch.replace(":", "-") if device.arch.startswith("sm_") else bare(device.arch)
    return f"{arch}-{device.compute_units}cu"


@contextmanager
def one_slot(pool: Pool, gpus: Sequence[Gpu], settings: Settings) -> Iterator[Slot]:
    """Hold a slot that serves a pool while the block runs, once it is free."""
    [kind] = share_out([pool], gpus, settings, HERE)
    with FreeSlots(kind.slots, settings.lock_dir).one(threading.Event()) as slot:
        assert slot, "nobody cancels the wait"
        yield slot


def _cpu_slots(count: int, numa: Sequence[set[int]]) -> list[Slot]:
    """Spread slots evenly over the NUMA nodes; a slot never spans nodes unless there are fewer slots than nodes."""
    slots = []
    for index in range(count):
        first = index * len(numa) // count
        share = numa[first : max((index + 1) * len(numa) // count, first + 1)]
        slots.append(Slot(cpus=tuple(sorted(set().union(*share)))))
    return slots


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
