"""What one source reports of one GPU. Each source knows different fields and names the GPU in its own way."""

from __future__ import annotations

from dataclasses import dataclass


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
