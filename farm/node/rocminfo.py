"""rocminfo: what ROCm's runtime reports of the GPUs. Only this source knows the feature bits of an architecture."""

from __future__ import annotations

import re

from farm.node.gpu_source import GpuReport, pci_address


def gpus(text: str) -> list[GpuReport]:
    """Return the GPU agents of rocminfo's output. `Node` is KFD's number; `BDFID` leaves the PCI domain out."""
    agents = re.split(r"^\*+[ \t]*\nAgent \d+[ \t]*\n\*+[ \t]*$", text, flags=re.MULTILINE)[1:]
    return [_gpu(agent) for agent in agents if re.search(r"^\s*Device Type:\s+GPU", agent, re.MULTILINE)]


def _gpu(agent: str) -> GpuReport:
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
