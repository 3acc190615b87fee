"""What of a user's own databases fits one of the farm; the rest is refused, file by file, with the reason. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farm.errors import UsageError
from farm.spec import Device
from farm.targets.pools import bare, same_arch
from farm.tuning.formats import OBJECTS, MIOpenName, miopen_name
from farm.tuning.records import Place, RecordStore, Snapshot, Table

MLIR = "gpu::mlir_op"
"""The operator whose problem names its device: arch, compute units, chiplets, problem, separated by tabs."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """What may be imported, and the files that may not, with the reason."""

    snapshot: Snapshot
    refused: Mapping[str, str]


def fitting(offered: Snapshot, known: Snapshot, device: Device, toolchain: str, miopen: str = "") -> Fitting:
    """Choose what this kind of device measured, and this toolchain reads.

    Which version of MIOpen that has, its own jobs have shown; else `miopen` says (`HIP.3_5_1_4dddc24`, from the files'
    names), or what was imported before, or the files, which must be of one then. The form of its problem cache is known
    from MIGraphX's version, else from its own jobs alone: on a file of the wrong form they would all fail. Raises
    UsageError if the files are of several versions and nothing says which.
    """
    arch = bare(device.arch)
    of_jobs = [place for place, table in known.tables.items() if any(source.job for _, source in table.values())]
    ours = [place for place in offered.tables if not _other_miopen_device(place, device)]
    versions = _versions(of_jobs, arch) or _chosen(_versions(ours, arch), _versions(known.tables, arch), miopen)
    form = _form_of(toolchain)
    forms = {form} if form else {_form(file) for store, file in of_jobs if store is RecordStore.PROBLEM_CACHE}
    taken: dict[Place, Table] = {}
    refused = {}
    for (store, file), table in offered.tables.items():
        if store is RecordStore.PROBLEM_CACHE:
            why = _other_device(file, table, device) or _other_form(file, forms)
        elif store in OBJECTS:
            why = "it is the farm's own, and is not imported"
        else:
            why = _other_miopen_device((store, file), device) or _other_miopen(file, versions)
        if why:
            refused[label((store, file))] = why
        else:
            taken[store, file] = table
    return Fitting(Snapshot(taken), refused)


def label(place: Place) -> str:
    """Return what people call a table: MIOpen's by its file, others by store and device."""
    store, file = place
    return file if miopen_name(file) else f"{store} {file}".strip()


# --- the problem cache's form ---------------------------------------------------------------------------------------

_PLAIN, _KEYED = "in the form of ROCm 7.2 and older", "keyed by device"


def _form_of(toolchain: str) -> str | None:
    """Return the form that a toolchain reads; None if its version does not say.

    MIGraphX 2.15 (ROCm 7.2) names no device. 2.16 is the number of development before and after the change.
    """
    said = re.search(r"migraphx(\d+)\.(\d+)", toolchain)
    version = (int(said[1]), int(said[2])) if said else (2, 16)
    return None if version == (2, 16) else _PLAIN if version < (2, 16) else _KEYED


def _form(file: str) -> str:
    return _KEYED if file else _PLAIN


def _other_form(file: str, forms: set[str]) -> str:
    mine = _form(file)
    if not forms:
        return (
            f"it is {mine}, and whether this pool's toolchain reads that its version does not say (MIGraphX 2.16 was "
            "that of development before and after the change): let a job tune there first, which shows it"
        )
    return "" if mine in forms else f"it is {mine}, and this pool's toolchain reads what is {', '.join(sorted(forms))}"


# --- MIOpen's version and device ------------------------------------------------------------------------------------

_UNITS = re.compile(r"(?:_(?:no)?sramecc)?(?:_(?:no)?xnack)?(?:_(?P<decimal>\d+)|(?P<hexadecimal>[0-9a-f]+))")
"""What follows the architecture in a name: features, and compute units, up to 64 in decimals, more in hexadecimals."""


def _chosen(offered: set[str], imported: set[str], miopen: str) -> set[str]:
    listed = ", ".join(sorted(offered))
    if miopen:
        if offered and miopen not in offered:
            raise UsageError(
                f"no file is of MIOpen {miopen}", hint=f"nothing was imported; --miopen takes one of {listed}"
            )
        return {miopen}
    if not imported and len(offered) > 1:
        raise UsageError(
            f"the files are of several versions of MIOpen: choose one with --miopen, of {listed}",
            hint="nothing was imported; a job that tunes in this pool shows which it has",
        )
    return imported or offered


def _versions(places: Iterable[Place], arch: str) -> set[str]:
    names = (miopen_name(file) for _, file in places)
    return {named.version for named in names if named and named.version and _is_of(named, arch)}


def _is_of(named: MIOpenName, arch: str) -> bool:
    return named.base.removeprefix("batchnorm_").startswith(arch)


def _other_miopen(file: str, versions: set[str]) -> str:
    named = miopen_name(file)
    version = named.version if named else ""
    if not version:
        return "its name has no version of MIOpen"
    return "" if version in versions else f"it is of MIOpen {version}, not of {', '.join(sorted(versions))}"


def _other_miopen_device(place: Place, device: Device) -> str:
    """Say that a file of MIOpen's is of another device, by its name; what that does not tell is let through."""
    named, arch = miopen_name(place[1]), bare(device.arch)
    if named is None:
        return ""
    if not _is_of(named, arch):
        return f"it is not of {arch}"
    said = _UNITS.fullmatch(named.base.removeprefix("batchnorm_").removeprefix(arch))
    if said is None or device.compute_units is None:
        return ""
    units = int(said["decimal"]) if said["decimal"] else int(said["hexadecimal"], 16)
    if units in _counts(device):
        return ""
    return f"it is of {arch} with {units} compute units, not {device.compute_units}"


# --- the problem cache's device -------------------------------------------------------------------------------------


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
        if not same_arch(arch, device.arch) or (device.compute_units and units not in map(str, _counts(device))):
            return f"it is of {arch[:80]} with {units[:80]} compute units"
    return ""


def _counts(device: Device) -> set[int]:
    """Return what libraries may name as a device's compute units: HIP counts RDNA's by twos (work group processors)."""
    units = device.compute_units or 0
    return {units, units // 2} if device.arch.startswith("gfx1") else {units}
