"""A family: one model, target and precision at several shapes, with an index that says which file serves what. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from farm.models import BATCH

Document = dict[str, Any]

INDEX = "family.json"
"""File name of the index. `docs/object-storage.md` describes its fields."""


def family_index(ref: str, members: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Document:
    """Return the index of a family whose members are (a ref's cell, its sidecar), all of one toolchain and device.

    The members are in the order in which a serving program asks them: by the largest batch that they take.
    """
    pairs = sorted(members, key=lambda pair: (_batch(pair[0])["max"], pair[0]["shape"]))
    cell = pairs[0][0]
    return {
        "schema": 1,
        "ref": ref,
        **{name: cell[name] for name in ("model", "target", "precision", "device", "toolchain")},
        "members": [_member(cell, sidecar) for cell, sidecar in pairs],
    }


def _member(cell: Mapping[str, Any], sidecar: Mapping[str, Any]) -> Document:
    measured = sidecar.get("measurements") or {}
    folder, program = cell["shape"], sidecar["blobs"]["program"]
    return {
        "shape": cell["shape"],
        "sizes": cell.get("sizes", {}),
        "batch": _batch(cell),
        "program": f"{folder}/{program['path']}",
        "sidecar": f"{folder}/artifact.json",
        "key": cell["key"],
        "inputs": [{name: port[name] for name in ("name", "dtype", "shape")} for port in sidecar.get("inputs", [])],
        "latency": (measured.get("latency") or {}).get("median"),
        "throughput": measured.get("throughput"),
        "points": measured.get("points", []),
        "shared": bool(measured.get("shared")),
    }


def _batch(cell: Mapping[str, Any]) -> Document:
    """Return the batches that a cell's program takes, `{"min", "max"}`; 1 where its model names no batch."""
    size = cell.get("sizes", {}).get(BATCH, 1)
    return {name: size[name] for name in ("min", "max")} if isinstance(size, Mapping) else {"min": size, "max": size}
