"""What of a user's own databases fits one of the farm; the rest is refused, file by file, with the reason. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from farm.spec import Device
from farm.tuning.files import OBJECTS, MIOpenName, miopen_name
from farm.tuning.records import Place, Snapshot, Store, Table

MLIR = "gpu::mlir_op"
"""The operator whose problem names its device: arch, compute units, chiplets, problem, separated by tabs."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """What may be imported, and the files that may not, with the reason."""

    snapshot: Snapshot
    refused: Mapping[str, str]


def fitting(offered: Snapshot, known: Snapshot, device: Device, miopen: str = "") -> Fitting:
    """Choose what was measured on this kind of device, by the version of MIOpen that the database has.

    Where the database holds nothing of MIOpen yet, `miopen` is that version (`HIP.3_5_1_4dddc24`, from the files'
    names); without it, files of one version are taken, and of several none: MIOpen ignores what another one wrote.
    """
    taken: dict[Place, Table] = {}
    refused = {}
    arch = device.arch.partition(":")[0]
    versions = _versions(known, arch) or ({miopen} if miopen else _versions(offered, arch))
    forms = _forms(known) or _forms(offered)
    for (store, file), table in offered.tables.items():
        if store is Store.PROBLEM_CACHE:
            why = _other_device(file, table, device) or _other_form(file, forms)
        elif store in OBJECTS:
            why = "it is the farm's own, and is not imported"
        else:
            why = _other_miopen(file, arch, versions)
        if why:
            refused[file if miopen_name(file) else f"{store} {file}".strip()] = why
        else:
            taken[store, file] = table
    return Fitting(Snapshot(taken), refused)


_FORMS = {False: "in the form of ROCm 7.2 and older", True: "keyed by device"}


def _forms(snapshot: Snapshot) -> set[bool]:
    """Return of each form that the problem caches are in whether it names the device."""
    return {bool(file) for (store, file), table in snapshot.tables.items() if store is Store.PROBLEM_CACHE and table}


def _other_form(file: str, forms: set[bool]) -> str:
    mine = bool(file)
    if len(forms) > 1:
        return "the problem caches are of both forms: import that which this pool's toolchain reads"
    return "" if mine in forms else f"it is {_FORMS[mine]}, and this database is {_FORMS[not mine]}"


def _versions(snapshot: Snapshot, arch: str) -> set[str]:
    names = (miopen_name(file) for _, file in snapshot.tables)
    return {named.version for named in names if named and _is_of(named, arch)}


def _is_of(named: MIOpenName, arch: str) -> bool:
    return named.base.removeprefix("batchnorm_").startswith(arch)


def _other_miopen(file: str, arch: str, versions: set[str]) -> str:
    named = miopen_name(file)
    if named is None or not _is_of(named, arch):
        return f"it is not of {arch}"
    if len(versions) > 1:
        return f"the files are of several versions of MIOpen: choose one of {', '.join(sorted(versions))}"
    return "" if named.version in versions else f"it is of MIOpen {named.version}, not of {', '.join(versions)}"


def _other_device(key: str, table: Table, device: Device) -> str:
    found = set()
    if key:
        named = json.loads(key)
        found.add((str(named["gfx_name"]), str(named["cu_count"])))
    for problem in table:
        entry = json.loads(problem)
        if entry["name"] == MLIR and isinstance(entry["problem"], str):
            arch, units, *_ = [*entry["problem"].split("\t"), ""]
            if units.isdecimal():
                found.add((arch, units))
    for arch, units in sorted(found):
        other_units = device.compute_units is not None and units != str(device.compute_units)
        if arch.partition(":")[0] != device.arch.partition(":")[0] or other_units:
            return f"it is of {arch} with {units} compute units"
    return ""
