"""Devices: the profiles that are shipped in `configs/devices.toml`, and the names of GPU architectures."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from farm.files import configs_folder
from farm.spec import Device
from farm.units import parse_size


@dataclass(frozen=True, slots=True)
class Profile:
    """A device that a manifest may name: its memory is in bytes."""

    name: str
    device: Device
    memory: int


@cache
def profiles() -> Mapping[str, Profile]:
    """Return the shipped device profiles by name: whole cards, and each way in which one can be split."""
    document = tomllib.loads((configs_folder() / "devices.toml").read_text(encoding="utf-8"))
    ways = [
        (f"{name}-{mode}" if mode else name, row, parts)
        for name, row in document.items()
        for mode, parts in {"": 1, **row.get("partitions", {})}.items()
    ]
    return {
        name: Profile(
            name,
            Device(row["arch"], row["compute_units"] // parts, row["xcc"] // parts if "xcc" in row else None),
            parse_size(row["memory"]) // parts,
        )
        for name, row, parts in ways
    }


def same_arch(one: str, other: str) -> bool:
    """Whether two names of an architecture can be of one GPU: no feature bit that both name differs."""
    named, wanted = ({bit[:-1]: bit[-1] for bit in arch.split(":")[1:]} for arch in (one, other))
    return bare(one) == bare(other) and all(named[name] == wanted[name] for name in named.keys() & wanted.keys())


def bare(arch: str) -> str:
    """Return the name of an architecture without its feature bits."""
    return arch.partition(":")[0]
