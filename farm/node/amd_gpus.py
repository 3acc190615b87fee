"""AMD GPUs of a node and its ROCm: the reports of the kernel, rocminfo and amd-smi, joined. Some GPUs cannot be used.

Each source knows different fields and names a GPU in its own way.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm.node.gpus import NODES, Gpu, Machine, Note, closed, kernel_gpus, pci_address, visible, whole_card

SPOOF = "HSA_OVERRIDE_GFX_VERSION"
CHOICE = "ROCR_VISIBLE_DEVICES"


def find_amd_gpus(machine: Machine, programs: Sequence[str]) -> tuple[list[Gpu], list[Note]]:
    """Return the GPUs that can be used, and notes on those that cannot; `programs` are folders of ROCm's programs.

    The kernel's files decide which GPUs there are. rocminfo adds feature bits, amd-smi adds model names and partition
    modes. If the kernel reports nothing, rocminfo's list counts, then amd-smi's.
    """
    sources = {"the kernel": kernel_gpus(machine), "rocminfo": of_rocminfo(_ask(machine, "rocminfo", programs, ()))}
    if not all(gpu.model and gpu.partition for gpu in sources["rocminfo"]) or not sources["rocminfo"]:
        sources["amd-smi"] = of_amd_smi(_ask(machine, "amd-smi", programs, AMD_SMI, SHORT_AMD_SMI))
    name, base = next(((name, report) for name, report in sources.items() if report), ("", []))
    others = {source: report for source, report in sources.items() if source != name and report}
    notes = _unseen(machine, base)
    counts = [(source, len(listed)) for source, listed in others.items() if len(listed) != len(base)]
    for source, count in counts:
        text = f"{name} has {len(base)}, {source} {count}: the value of {name} is used"
        notes.append(Note("GPUs", text, broken=False))
    uuids = Counter(gpu.uuid for gpu in base)
    found: list[Gpu] = []
    for index, report in enumerate(base):
        whole, said = _completed(report, others)
        gpu, report_notes = _usable(machine, replace(whole, index=index, alone=uuids[report.uuid] == 1), said)
        notes += report_notes
        found += [gpu] if gpu else []
    found, left_out = visible(machine, CHOICE, found, "GPUs", lambda gpu, name: name in (str(gpu.index), gpu.uuid))
    notes += left_out
    if machine.environ.get(SPOOF) and found:
        text = f"{SPOOF} is set: a GPU that poses as another gives programs that fail (rocMLIR) or are wrong"
        return [], [*notes, Note("GPUs", text, f"start the worker without {SPOOF}")]
    return found, notes


def _ask(machine: Machine, name: str, folders: Sequence[str], *commands: Sequence[str]) -> str:
    """Return the output of the first command that the program knows; empty if there is no such program."""
    program = machine.program(name, folders)
    answers = (machine.ask(program, *command) for command in commands) if program else iter(())
    return next(filter(None, answers), "")


def _unseen(machine: Machine, base: Sequence[Gpu]) -> list[Note]:
    notes = []
    # So a container sees the GPUs that it was not given.
    if nodes := [node for node in machine.numbered(NODES) if not machine.numbers(f"{NODES}/{node}/properties")]:
        text = f"the kernel hides node {', '.join(map(str, nodes))} from this process, or its description is empty"
        fix = "give the container the device (--device /dev/dri/renderD…), if it should use it"
        notes.append(Note("GPUs", text, fix, broken=False))
    if not base and machine.path("/sys/module/amdgpu").is_dir() and not machine.path("/dev/kfd").exists():
        notes.append(Note("GPUs", "the amdgpu driver is loaded, but there is no /dev/kfd", _CONTAINER))
    return notes


_CONTAINER = "start the container with --device /dev/kfd --device /dev/dri"


def _completed(report: Gpu, others: dict[str, list[Gpu]]) -> tuple[Gpu, dict[str, Gpu]]:
    """Fill the gaps of a report from other sources; return it with the reports of these sources."""
    matches = {source: [one for one in reports if same_gpu(report, one)] for source, reports in others.items()}
    said = {source: found[0] for source, found in matches.items() if len(found) == 1}
    whole = report
    for one in said.values():
        gaps = {name: value for name in Gpu.__slots__ if (value := getattr(one, name)) and not getattr(whole, name)}
        if ":" in one.arch and one.arch.partition(":")[0] == whole.arch:
            gaps["arch"] = one.arch
        whole = replace(whole, **gaps)
    return whole, said


def _usable(machine: Machine, report: Gpu, said: dict[str, Gpu]) -> tuple[Gpu | None, list[Note]]:
    subject = report.name + (f" ({report.bdf})" if report.bdf else "")
    notes = []
    for source, one in said.items():
        short = one.arch.partition(":")[0]
        if short and short != report.arch.partition(":")[0]:
            text = f"{source} calls it {one.arch}, which it is not: the kernel says {report.arch}"
            return None, [Note(subject, text, f"look for {SPOOF} in the environment, and remove it")]
        if one.compute_units not in (0, report.compute_units):
            text = f"{source} counts {one.compute_units} compute units, the kernel {report.compute_units}, which stands"
            notes.append(Note(subject, text, "a mask of compute units (HSA_CU_MASK, ROC_GLOBAL_CU_MASK) may be set"))
    if not report.arch or not report.compute_units:
        missing = "architecture" if not report.arch else "number of compute units"
        fix = "install rocminfo, or a newer driver" if not said else "look at the kernel's log (dmesg | grep amdgpu)"
        return None, [*notes, Note(subject, f"nothing says its {missing}", fix)]
    group = "render" if report.node is not None else "video"
    fix = f"add this user to the group that owns it (usermod -aG {group},video $USER), and log in again"
    devices = ["/dev/kfd", *([f"/dev/dri/renderD{report.render}"] if report.render else [])]
    if note := closed(machine, subject, devices, _CONTAINER, fix):
        return None, [*notes, note]
    if ":" not in report.arch and report.arch.startswith("gfx9"):
        text = f"feature bits of {report.arch} are unknown (sramecc, xnack): programs are keyed by the bare name"
        notes.append(Note(subject, text, "install rocminfo", False))
    kernel = machine.text("/proc/sys/kernel/osrelease")
    folders = [f"/sys/class/drm/renderD{report.render}/device"] if report.render else []
    folders += [f"/sys/bus/pci/devices/{whole_card(report.bdf)}"] if report.bdf else []
    partitions = (machine.text(f"{folder}/current_compute_partition") for folder in folders)
    gpu = replace(
        report,
        partition=next(filter(None, partitions), report.partition),
        cpus=_cpus(machine, report),
        # The kernel's own driver has the kernel's version.
        driver=machine.text("/sys/module/amdgpu/version") or (f"Linux {kernel}" if kernel else ""),
    )
    return gpu, notes


def _cpus(machine: Machine, report: Gpu) -> str:
    """Return the CPUs near a GPU: those of its PCI device, else those of the CPU node that KFD links it to."""
    near = machine.text(f"/sys/bus/pci/devices/{whole_card(report.bdf)}/local_cpulist") if report.bdf else ""
    if near or report.node is None:
        return near
    folder = f"{NODES}/{report.node}/io_links"
    links = [machine.numbers(f"{folder}/{link}/properties") for link in machine.numbered(folder)]
    nodes = [
        node for _, node in sorted((link.get("weight", 0), link["node_to"]) for link in links if "node_to" in link)
    ]
    nearest = (node for node in nodes if machine.numbers(f"{NODES}/{node}/properties").get("cpu_cores_count"))
    return next((machine.text(f"/sys/devices/system/node/node{node}/cpulist") for node in nearest), "")


AMD_SMI = ("static", "--asic", "--bus", "--vram", "--partition", "--json")
SHORT_AMD_SMI = ("static", "--asic", "--json")  # For releases that do not know all of the other's switches.


def same_gpu(one: Gpu, other: Gpu) -> bool:
    """Whether two sources speak of one GPU: by the first name that both know, and not by the order of lists."""
    for name in ("node", "bdf", "uuid"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine not in (None, "") and theirs not in (None, ""):
            return bool(mine == theirs)
    return False


def of_rocminfo(text: str) -> list[Gpu]:
    """Return the GPU agents of rocminfo's output: it alone knows the feature bits of an architecture.

    `Node` is KFD's number; `BDFID` leaves the PCI domain out.
    """
    agents = re.split(r"^\*+[ \t]*\nAgent \d+[ \t]*\n\*+[ \t]*$", text, flags=re.MULTILINE)[1:]
    return [_of_agent(agent) for agent in agents if re.search(r"^\s*Device Type:\s+GPU", agent, re.MULTILINE)]


def _of_agent(agent: str) -> Gpu:
    node, bdf, units = (_number(agent, name) for name in ("Node", "BDFID", "Compute Unit"))
    uuid, short = _value(agent, "Uuid"), _value(agent, "Name")
    # An agent also lists the generic arch that it belongs to (gfx9-4-generic).
    names = re.findall(r"Name:\s+amdgcn-amd-amdhsa--(gfx\S+)", agent)
    memory = re.search(r"Segment:\s+GLOBAL; FLAGS: COARSE GRAINED\s+Size:\s+([0-9]{1,18})\(0x[0-9a-f]+\) KB", agent)
    return Gpu(
        node=node,
        bdf=pci_address(0, bdf) if bdf else "",
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-f]{16}", uuid) else "",
        arch=next((name for name in names if name.partition(":")[0] == short), short),
        compute_units=units or 0,
        memory=int(memory[1]) * 1024 if memory else None,
        model=_value(agent, "Marketing Name"),
    )


def _value(agent: str, name: str) -> str:
    found = re.search(rf"^  {name}:[ \t]*(\S.*?)?[ \t]*$", agent, re.MULTILINE)
    return (found[1] or "") if found else ""


def _number(agent: str, name: str) -> int | None:
    found = re.match(r"[0-9]{1,18}", _value(agent, name))
    return int(found[0]) if found else None


def of_amd_smi(text: str) -> list[Gpu]:
    """Return the GPUs of `amd-smi static`'s JSON: `{"gpu_data": [...]}`, and a bare list before ROCm 7.

    It alone has partition modes where the kernel's files are missing. Other text names no GPU.
    """
    start = re.search(r"^[\[{]", text, re.MULTILINE)  # Python's own warnings may come before it.
    try:
        document = json.loads(text[start.start() :]) if start else []
    except (ValueError, RecursionError):
        return []
    rows = document.get("gpu_data") if isinstance(document, dict) else document
    listed = rows if isinstance(rows, list) else []
    return [_of_row(row) for row in listed if isinstance(row, dict) and isinstance(row.get("asic"), dict)]


def _of_row(row: Mapping[str, Any]) -> Gpu:
    asic, bus, partition, vram = (_mapping(row.get(name)) for name in ("asic", "bus", "partition", "vram"))
    serial = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", str(asic.get("asic_serial")))
    units, size = asic.get("num_compute_units"), _mapping(vram.get("size"))
    mode = str(partition.get("accelerator_partition") or partition.get("compute_partition") or "")
    return Gpu(
        bdf=_known(bus.get("bdf")).lower(),
        uuid=f"GPU-{serial[1].lower():0>16}" if serial else "",
        arch=_known(asic.get("target_graphics_version")),
        compute_units=units if isinstance(units, int) else 0,
        memory=size["value"] * 2**20 if isinstance(size.get("value"), int) and size.get("unit") == "MB" else None,
        model=_known(asic.get("market_name")),
        partition=mode if re.fullmatch("[STDQC]PX", mode) else "",
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _known(value: Any) -> str:
    return "" if value in (None, "N/A") else str(value)


@dataclass(frozen=True, slots=True)
class Rocm:
    """An installation: its root, why it was chosen, and the versions of ROCm and MIOpen (empty if not known)."""

    root: str
    because: str
    version: str = ""
    miopen: str = ""

    def __str__(self) -> str:
        """One line for people."""
        versions = [f"ROCm {self.version or 'of unknown version'}", f"MIOpen {self.miopen}" if self.miopen else ""]
        return f"{', '.join(filter(None, versions))} at {self.root} ({self.because})"


def find_rocm(machine: Machine, python: str = "") -> Rocm | None:
    """Return the installation to use: ROCM_PATH, `rocm-sdk path --root`, /opt/rocm/core*, /opt/rocm; None without one.

    `python` is the interpreter that imports MIGraphX; the wheels of ROCm put `rocm-sdk` next to it.
    """
    for root, because in _roots(machine, python):
        folder = Path(root) if Path(root).is_relative_to(machine.root) else machine.path(root)
        if folder.is_dir():
            shown = f"/{folder.relative_to(machine.root)}"
            version = machine.text(f"{shown}/.info/version").partition("-")[0]  # `7.2.4`, or `7.2.4-93` from packages
            return Rocm(shown, because, version, _miopen(machine, shown))
    return None


def _roots(machine: Machine, python: str) -> list[tuple[str, str]]:
    found = [(machine.environ.get("ROCM_PATH", ""), "ROCM_PATH names it")]
    neighbours = [str(Path(python).parent)] if "/" in python else []
    if sdk := machine.program("rocm-sdk", neighbours):
        found.append((machine.ask(sdk, "path", "--root").strip(), f"{sdk} path --root names it"))
    cores = [str(path) for path in machine.path("/opt/rocm").glob("core*") if path.is_dir()]
    newest = sorted(cores, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    found += [(root, "the newest /opt/rocm/core*") for root in newest[:1]]
    found.append(("/opt/rocm", "the usual place"))
    return [(root, because) for root, because in found if root]


def _miopen(machine: Machine, root: str) -> str:
    header = machine.text(f"{root}/include/miopen/version.h")
    parts = [re.search(rf"#define MIOPEN_VERSION_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    numbers = [part[1] for part in parts if part]
    if len(numbers) == len(parts):
        return ".".join(numbers)
    library = next(iter(sorted(machine.path(f"{root}/lib").glob("libMIOpen.so.*.*"))), None)
    return library.name.removeprefix("libMIOpen.so.") if library else ""
