"""What a source reports of GPUs: rocminfo, amd-smi, and the kernel (`kfd.py`).

Each source knows different fields and names a GPU in its own way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AMD_SMI = ("static", "--asic", "--bus", "--vram", "--partition", "--json")
SHORT_AMD_SMI = ("static", "--asic", "--json")
"""For releases that do not know all of the other's switches."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU as one source reports it. A field that the source does not report is None or empty.

    `node` is KFD's number of the node, `bdf` the PCI address (`0000:05:00.0`; partitions of a card differ in the
    function), `uuid` is `GPU-` and 16 hex digits, which the partitions of a card share. `memory` is in bytes.
    """

    node: int | None = None
    bdf: str = ""
    uuid: str = ""
    arch: str = ""
    compute_units: int | None = None
    xcc: int | None = None
    memory: int | None = None
    model: str = ""
    partition: str = ""
    render: int | None = None


def same_gpu(one: GpuReport, other: GpuReport) -> bool:
    """Whether two sources speak of one GPU: by the first name that both know, and not by the order of lists."""
    for name in ("node", "bdf", "uuid"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine not in (None, "") and theirs not in (None, ""):
            return bool(mine == theirs)
    return False


def pci_address(domain: int, location: int) -> str:
    """Return a PCI address from KFD's `domain` and `location_id` (rocminfo's BDFID): bus, device, function."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def whole_card(bdf: str) -> str:
    """Return the address of the card that a partition belongs to: function 0."""
    return bdf[:-1] + "0" if bdf else ""


def of_rocminfo(text: str) -> list[GpuReport]:
    """Return the GPU agents of rocminfo's output: it alone knows the feature bits of an architecture.

    `Node` is KFD's number; `BDFID` leaves the PCI domain out.
    """
    agents = re.split(r"^\*+[ \t]*\nAgent \d+[ \t]*\n\*+[ \t]*$", text, flags=re.MULTILINE)[1:]
    return [_of_agent(agent) for agent in agents if re.search(r"^\s*Device Type:\s+GPU", agent, re.MULTILINE)]


def _of_agent(agent: str) -> GpuReport:
    node, bdf, units = (_number(agent, name) for name in ("Node", "BDFID", "Compute Unit"))
    uuid, short = _value(agent, "Uuid"), _value(agent, "Name")
    # An agent also lists the generic arch that it belongs to (gfx9-4-generic).
    names = re.findall(r"Name:\s+amdgcn-amd-amdhsa--(gfx\S+)", agent)
    memory = re.search(r"Segment:\s+GLOBAL; FLAGS: COARSE GRAINED\s+Size:\s+([0-9]{1,18})\(0x[0-9a-f]+\) KB", agent)
    return GpuReport(
        node=node,
        bdf=pci_address(0, bdf) if bdf else "",
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-f]{16}", uuid) else "",
        arch=next((name for name in names if name.partition(":")[0] == short), short),
        compute_units=units,
        memory=int(memory[1]) * 1024 if memory else None,
        model=_value(agent, "Marketing Name"),
    )


def _value(agent: str, name: str) -> str:
    found = re.search(rf"^  {name}:[ \t]*(\S.*?)?[ \t]*$", agent, re.MULTILINE)
    return (found[1] or "") if found else ""


def _number(agent: str, name: str) -> int | None:
    found = re.match(r"[0-9]{1,18}", _value(agent, name))
    return int(found[0]) if found else None


def of_amd_smi(text: str) -> list[GpuReport]:
    """Return the GPUs of `amd-smi static`'s JSON: `{"gpu_data": [...]}`, and a bare list before ROCm 7.

    It has model names and partition modes, even if rocminfo and the kernel's files are missing.

    Fields without a value are `"N/A"`. Other text names no GPU.
    """
    start = re.search(r"^[\[{]", text, re.MULTILINE)  # Python's own warnings may come before it.
    try:
        document = json.loads(text[start.start() :]) if start else []
    except (ValueError, RecursionError):
        return []
    rows = document.get("gpu_data") if isinstance(document, dict) else document
    listed = rows if isinstance(rows, list) else []
    return [_of_row(row) for row in listed if isinstance(row, dict) and isinstance(row.get("asic"), dict)]


def _of_row(row: Mapping[str, Any]) -> GpuReport:
    asic, bus, partition, vram = (_mapping(row.get(name)) for name in ("asic", "bus", "partition", "vram"))
    serial = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", str(asic.get("asic_serial")))
    units, size = asic.get("num_compute_units"), _mapping(vram.get("size"))
    mode = str(partition.get("accelerator_partition") or partition.get("compute_partition") or "")
    return GpuReport(
        bdf=_known(bus.get("bdf")).lower(),
        uuid=f"GPU-{serial[1].lower():0>16}" if serial else "",
        arch=_known(asic.get("target_graphics_version")),
        compute_units=units if isinstance(units, int) else None,
        memory=size["value"] * 2**20 if isinstance(size.get("value"), int) and size.get("unit") == "MB" else None,
        model=_known(asic.get("market_name")),
        partition=mode if re.fullmatch("[STDQC]PX", mode) else "",
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _known(value: Any) -> str:
    return "" if value in (None, "N/A") else str(value)
