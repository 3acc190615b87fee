"""amd-smi: model names and partition modes, even if rocminfo and the kernel's files are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from farm.node.gpu_source import GpuReport

COMMAND = ("static", "--asic", "--bus", "--vram", "--partition", "--json")
SHORT_COMMAND = ("static", "--asic", "--json")
"""For releases that do not know all of the other's switches."""


def gpus(text: str) -> list[GpuReport]:
    """Return the GPUs of `amd-smi static`'s JSON: `{"gpu_data": [...]}`, and a bare list before ROCm 7.

    Fields without a value are `"N/A"`. Text that is no such JSON is not a GPU.
    """
    start = re.search(r"^[\[{]", text, re.MULTILINE)  # Python's own warnings may come before it.
    try:
        document = json.loads(text[start.start() :]) if start else []
    except (ValueError, RecursionError):
        return []
    rows = document.get("gpu_data") if isinstance(document, dict) else document
    listed = rows if isinstance(rows, list) else []
    return [_gpu(row) for row in listed if isinstance(row, dict) and isinstance(row.get("asic"), dict)]


def _gpu(row: Mapping[str, Any]) -> GpuReport:
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
