"""The ROCm installation of a node: which of several is used, why, and the versions in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from farm.node.machine import Machine


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
            return Rocm(shown, because, _version(machine, shown), _miopen(machine, shown))
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


def _version(machine: Machine, root: str) -> str:
    """`.info/version` has `7.2.4`, or `7.2.4-93` from packages."""
    return machine.text(f"{root}/.info/version").partition("-")[0]


def _miopen(machine: Machine, root: str) -> str:
    header = machine.text(f"{root}/include/miopen/version.h")
    parts = [re.search(rf"#define MIOPEN_VERSION_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    numbers = [part[1] for part in parts if part]
    if len(numbers) == len(parts):
        return ".".join(numbers)
    library = next(iter(sorted(machine.path(f"{root}/lib").glob("libMIOpen.so.*.*"))), None)
    return library.name.removeprefix("libMIOpen.so.") if library else ""
