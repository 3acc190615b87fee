"""AMD GPUs of a node: the reports of the kernel, rocminfo and amd-smi, joined. Some GPUs cannot be used."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from farm.node import kfd
from farm.node.gpu_reports import (
    AMD_SMI,
    SHORT_AMD_SMI,
    GpuReport,
    of_amd_smi,
    of_rocminfo,
    same_gpu,
    whole_card,
)
from farm.node.gpus import Gpu, Note
from farm.node.machine import Machine

SPOOF = "HSA_OVERRIDE_GFX_VERSION"
CHOICE = "ROCR_VISIBLE_DEVICES"


def find_amd_gpus(machine: Machine, programs: Sequence[str]) -> tuple[list[Gpu], list[Note]]:
    """Return the GPUs that can be used, and notes on those that cannot; `programs` are folders of ROCm's programs.

    The kernel's files decide which GPUs there are. rocminfo adds feature bits, amd-smi adds model names and partition
    modes. If the kernel reports nothing, rocminfo's list counts, then amd-smi's.
    """
    sources = {
        "the kernel": kfd.gpus(machine),
        "rocminfo": of_rocminfo(_ask(machine, "rocminfo", programs, ())),
    }
    if not all(gpu.model and gpu.partition for gpu in sources["rocminfo"]) or not sources["rocminfo"]:
        sources["amd-smi"] = of_amd_smi(_ask(machine, "amd-smi", programs, AMD_SMI, SHORT_AMD_SMI))
    name, base = next(((name, report) for name, report in sources.items() if report), ("", []))
    others = {source: report for source, report in sources.items() if source != name and report}
    notes = [*_unseen(machine, base), *_counts(name, base, others)]
    uuids = Counter(gpu.uuid for gpu in base)
    found: list[Gpu] = []
    for index, report in enumerate(base):
        whole, said = _completed(report, others)
        gpu, report_notes = _usable(machine, index, whole, said, alone=uuids[report.uuid] == 1)
        notes += report_notes
        found += [gpu] if gpu else []
    found, left_out = _allowed(found, machine.environ.get(CHOICE))
    notes += left_out
    if machine.environ.get(SPOOF) and found:
        text = f"{SPOOF} is set: a GPU that poses as another gives programs that fail (rocMLIR) or are wrong"
        return [], [*notes, Note("GPUs", text, f"start the worker without {SPOOF}")]
    return found, notes


def _allowed(found: Sequence[Gpu], choice: str | None) -> tuple[list[Gpu], list[Note]]:
    """Keep the GPUs that the worker's environment leaves visible, by index or UUID."""
    if choice is None:
        return list(found), []
    names = [name.strip() for name in choice.split(",")]
    kept = [gpu for gpu in found if {str(gpu.index), gpu.uuid} & set(names)]
    text = f"{CHOICE}={choice} leaves {len(kept)} of {len(found)} to this worker"
    return kept, [Note("GPUs", text, broken=False)] if len(kept) < len(found) else []


def _ask(machine: Machine, name: str, folders: Sequence[str], *commands: Sequence[str]) -> str:
    """Return the output of the first command that the program knows; empty if there is no such program."""
    program = machine.program(name, folders)
    answers = (machine.ask(program, *command) for command in commands) if program else iter(())
    return next(filter(None, answers), "")


def _unseen(machine: Machine, base: Sequence[GpuReport]) -> list[Note]:
    """GPUs that the machine has and this process does not see."""
    notes = []
    if nodes := kfd.hidden(machine):
        text = f"the kernel hides node {', '.join(map(str, nodes))} from this process, or its description is empty"
        notes.append(
            Note("GPUs", text, "give the container the device (--device /dev/dri/renderD…), if it should use it", False)
        )
    if not base and machine.path("/sys/module/amdgpu").is_dir() and not machine.path("/dev/kfd").exists():
        notes.append(Note("GPUs", "the amdgpu driver is loaded, but there is no /dev/kfd", _CONTAINER))
    return notes


_CONTAINER = "start the container with --device /dev/kfd --device /dev/dri"


def _counts(name: str, base: Sequence[GpuReport], others: dict[str, list[GpuReport]]) -> list[Note]:
    return [
        Note("GPUs", f"{name} has {len(base)}, {source} {len(report)}: the value of {name} is used", broken=False)
        for source, report in others.items()
        if len(report) != len(base)
    ]


def _completed(report: GpuReport, others: dict[str, list[GpuReport]]) -> tuple[GpuReport, dict[str, GpuReport]]:
    """Fill the gaps of a report from other sources; return it with the reports of these sources."""
    said = {source: one for source, list_ in others.items() if (one := _about(report, list_))}
    whole = report
    for one in said.values():
        gaps = {
            name: value for name in GpuReport.__slots__ if (value := getattr(one, name)) and not getattr(whole, name)
        }
        if ":" in one.arch and one.arch.partition(":")[0] == whole.arch:
            gaps["arch"] = one.arch
        whole = replace(whole, **gaps)
    return whole, said


def _about(report: GpuReport, others: Iterable[GpuReport]) -> GpuReport | None:
    matches = [one for one in others if same_gpu(report, one)]
    return matches[0] if len(matches) == 1 else None


def _usable(
    machine: Machine, index: int, report: GpuReport, said: dict[str, GpuReport], *, alone: bool
) -> tuple[Gpu | None, list[Note]]:
    subject = f"GPU {index}" + (f" ({report.bdf})" if report.bdf else "")
    notes = []
    for source, one in said.items():
        short = one.arch.partition(":")[0]
        if short and short != report.arch.partition(":")[0]:
            text = f"{source} calls it {one.arch}, which it is not: the kernel says {report.arch}"
            return None, [Note(subject, text, f"look for {SPOOF} in the environment, and remove it")]
        if one.compute_units not in (None, report.compute_units):
            text = f"{source} counts {one.compute_units} compute units, the kernel {report.compute_units}, which stands"
            notes.append(Note(subject, text, "a mask of compute units (HSA_CU_MASK, ROC_GLOBAL_CU_MASK) may be set"))
    if not report.arch or not report.compute_units:
        missing = "architecture" if not report.arch else "number of compute units"
        fix = "install rocminfo, or a newer driver" if not said else "look at the kernel's log (dmesg | grep amdgpu)"
        return None, [*notes, Note(subject, f"nothing says its {missing}", fix)]
    if note := _closed(machine, subject, report):
        return None, [*notes, note]
    if ":" not in report.arch and report.arch.startswith("gfx9"):
        text = f"feature bits of {report.arch} are unknown (sramecc, xnack): programs are keyed by the bare name"
        notes.append(Note(subject, text, "install rocminfo", False))
    gpu = Gpu(
        index=index,
        uuid=report.uuid,
        arch=report.arch,
        compute_units=report.compute_units,
        xcc=report.xcc,
        memory=report.memory,
        model=report.model,
        partition=_partition(machine, report) or report.partition,
        bdf=report.bdf,
        cpus=_cpus(machine, report),
        driver=_driver(machine),
        alone=alone,
    )
    return gpu, notes


def _closed(machine: Machine, subject: str, report: GpuReport) -> Note | None:
    """Return a note if this process may not open the GPU's devices."""
    names = ["/dev/kfd", *([f"/dev/dri/renderD{report.render}"] if report.render else [])]
    for name in names:
        path = machine.path(name)
        if not path.exists():
            return Note(subject, f"{name} is not there", _CONTAINER)
        if not os.access(path, os.R_OK | os.W_OK):
            group = "render" if report.node is not None else "video"
            fix = f"add this user to the group that owns it (usermod -aG {group},video $USER), and log in again"
            return Note(subject, f"this user may not open {name}", fix)
    return None


def _partition(machine: Machine, report: GpuReport) -> str:
    folders = [f"/sys/class/drm/renderD{report.render}/device"] if report.render else []
    folders += [f"/sys/bus/pci/devices/{whole_card(report.bdf)}"] if report.bdf else []
    return next(filter(None, (machine.text(f"{folder}/current_compute_partition") for folder in folders)), "")


def _driver(machine: Machine) -> str:
    """Return the version of amdgpu; the kernel's own driver has the kernel's version."""
    kernel = machine.text("/proc/sys/kernel/osrelease")
    return machine.text("/sys/module/amdgpu/version") or (f"Linux {kernel}" if kernel else "")


def _cpus(machine: Machine, report: GpuReport) -> str:
    """Return the CPUs near a GPU: those of its PCI device, else those of the CPU node that KFD links it to."""
    near = machine.text(f"/sys/bus/pci/devices/{whole_card(report.bdf)}/local_cpulist") if report.bdf else ""
    if near or report.node is None:
        return near
    node = kfd.numa_node(machine, report.node)
    return "" if node is None else machine.text(f"/sys/devices/system/node/node{node}/cpulist")
