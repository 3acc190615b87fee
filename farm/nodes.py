"""Find what this node can compile for: its compilers, its GPUs, and the pools that follow from them.

Compilers are asked in child processes, so that a broken one cannot take the worker with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.child import Limits, classify, run_child
from farm.compilers import COMPILERS
from farm.pools import Pool, Target
from farm.settings import Settings
from farm.spec import Device

KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where the kernel describes GPUs, with or without ROCm's tools."""

PROBE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as found. `arch` is the full name with its feature bits where rocminfo told them.

    `memory` is in bytes; `uuid` (`GPU-…`, or the index) is what a child is pinned to.
    """

    index: int
    uuid: str
    arch: str
    compute_units: int
    xcc: int
    memory: int | None = None
    model: str = ""
    partition: str = ""

    @property
    def device(self) -> Device:
        """What of it changes a program."""
        return Device(arch=self.arch, compute_units=self.compute_units, xcc=self.xcc)


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found on a node. `notes` says in words what cannot be used, and why."""

    pools: list[Pool] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def survey(settings: Settings, *, kfd: Path = KFD) -> Findings:
    """Look at compilers and GPUs, and return what they amount to."""
    findings = Findings(gpus=find_gpus(kfd))
    if os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        findings.notes.append("HSA_OVERRIDE_GFX_VERSION is set: GPUs are not used, since rocMLIR fails under it")
        findings.gpus.clear()
    for name in COMPILERS:
        found = probe(name, settings)
        if not found.get("available"):
            findings.notes.append(f"{name}: {found.get('reason', 'not usable')}")
            continue
        findings.pools.extend(_pools(name, found, findings))
    return findings


def probe(compiler: str, settings: Settings) -> Mapping[str, Any]:
    """Ask a child what it finds of a compiler; a child that fails is an answer too (`available` false)."""
    migraphx = compiler == "migraphx"
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        try:
            end = run_child(
                {
                    "action": "probe",
                    "compiler": compiler,
                    "search": [settings.migraphx_path] if migraphx and settings.migraphx_path else [],
                },
                python=settings.migraphx_python if migraphx else "",
                log_path=Path(folder) / "log.txt",
                limits=Limits(time=PROBE_SECONDS),
            )
        except OSError as error:
            return {"available": False, "reason": f"cannot start {settings.migraphx_python}: {error}"}
    failure = classify(end)
    if failure or end.result is None:
        return {"available": False, "reason": failure.message if failure else "no answer"}
    return end.result


def _pools(compiler: str, found: Mapping[str, Any], findings: Findings) -> list[Pool]:
    devices: list[tuple[str, Device, int | None]] = [
        (name, Device(arch=name), None) for name in found["targets"] if name != "gpu"
    ]
    if "gpu" in found["targets"]:
        kinds = {gpu.device: gpu for gpu in findings.gpus}
        devices += [(short_arch(gpu.arch), device, gpu.memory) for device, gpu in kinds.items()]
        if not kinds:
            findings.notes.append(f"{compiler}: its GPU target loads, but no GPU was found under {KFD}")
    elif findings.gpus:
        findings.notes.append(f"{compiler}: {(found.get('missing') or {}).get('gpu', 'no GPU target')}")
    return [
        Pool(
            target=Target(compiler, name),
            toolchain=found["toolchain"],
            device=device,
            recipe=COMPILERS[compiler].recipe,
            libraries=found["libraries"],
            features=tuple(found["features"]),
            cpu_family=found["cpu_family"],
            memory=memory,
        )
        for name, device, memory in devices
    ]


# --- GPUs ------------------------------------------------------------------------------------------------------


def short_arch(arch: str) -> str:
    """Return an arch without its feature bits: `gfx942:sramecc+:xnack-` -> `gfx942`."""
    return arch.partition(":")[0]


def find_gpus(kfd: Path = KFD, rocminfo: str | None = None) -> list[Gpu]:
    """Return the GPUs of this node, from the kernel's topology; rocminfo adds feature bits and UUIDs."""
    found = [_from_topology(folder) for folder in sorted(_folders(kfd), key=lambda path: int(path.name))]
    gpus = [gpu for gpu in found if gpu]
    told = parse_rocminfo(_rocminfo() if rocminfo is None else rocminfo) if gpus else []
    # rocminfo lists agents in the kernel's order; without it, or under a partial view, the kernel's word stands.
    agents = told if len(told) == len(gpus) else [{}] * len(gpus)
    return [
        Gpu(
            index=index,
            uuid=agent.get("uuid") or str(index),
            arch=agent.get("arch") or gpu["arch"],
            compute_units=gpu["compute_units"],
            xcc=gpu["xcc"],
            memory=gpu["memory"],
            model=agent.get("model", ""),
        )
        for index, (gpu, agent) in enumerate(zip(gpus, agents, strict=True))
    ]


def _folders(kfd: Path) -> list[Path]:
    return [path for path in kfd.iterdir() if path.name.isdigit()] if kfd.is_dir() else []


def _from_topology(folder: Path) -> dict[str, Any] | None:
    """Return what the kernel says of one node; None for a CPU, or where it may not be read."""
    properties = _numbers(folder / "properties")
    version = properties.get("gfx_target_version", 0)
    if not version:
        return None
    # Decimal MMmmss, of which the last part is written in hex: 90010 is gfx90a.
    arch = f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
    banks = _folders(folder / "mem_banks")
    sizes = [bank for path in banks if (bank := _numbers(path / "properties")).get("heap_type") in (1, 2)]
    return {
        "arch": arch,
        "compute_units": properties.get("simd_count", 0) // (properties.get("simd_per_cu", 0) or 1),
        "xcc": properties.get("num_xcc", 1),
        "memory": sum(bank.get("size_in_bytes", 0) for bank in sizes) or None,
    }


def _numbers(path: Path) -> dict[str, int]:
    """Read a file of `name value` lines; what cannot be read is empty."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def parse_rocminfo(text: str) -> list[dict[str, str]]:
    """Return arch (with feature bits), UUID and marketing name of each GPU agent, in order."""
    agents = []
    for agent in re.split(r"^\*+\s*\nAgent \d+\s*\n\*+\s*$", text, flags=re.MULTILINE)[1:]:
        isa = re.search(r"Name:\s+amdgcn-amd-amdhsa--(gfx\S+)", agent)
        if not re.search(r"Device Type:\s+GPU", agent) or not isa:
            continue
        uuid = re.search(r"Uuid:\s+(GPU-(?!XX)\S+)", agent)
        model = re.search(r"Marketing Name:[ \t]*(\S.*?)[ \t]*$", agent, re.MULTILINE)
        agents.append({"arch": isa[1], "uuid": uuid[1] if uuid else "", "model": model[1] if model else ""})
    return agents


def _rocminfo() -> str:
    """Return rocminfo's output; empty where it is not installed or fails."""
    program = next((path for path in _rocm_programs("rocminfo") if path), "")
    if not program:
        return ""
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _rocm_programs(name: str) -> Sequence[str]:
    """Return where a program of ROCm may be: ROCM_PATH, the usual places, PATH; empty where it is not."""
    roots = [os.environ.get("ROCM_PATH", ""), "/opt/rocm/core", "/opt/rocm"]
    return [*(shutil.which(name, path=f"{root}/bin") or "" for root in roots if root), shutil.which(name) or ""]
