"""Seeds: what tuning learnt under the toolchain before, as candidates that are measured again under a new one.

Nothing of it is believed, but it shortens the search for ONNX Runtime, whose rows are times of whole option sets. Only
the sets that were the fastest for a model's slices are timed under the new toolchain. The rows of such a search have
keys of their own, so that they never end a full one.

MIGraphX takes a known solution without measuring it, whatever its release, and MIOpen ignores databases of another
version. So for them nothing is carried over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from farm.artifacts import ArtifactStore, readable
from farm.errors import ArtifactGone
from farm.jobs.order import WorkOrder
from farm.runner.documents import SlicePart
from farm.spec import Device
from farm.targets.compilers import COMPILERS, OFF
from farm.targets.pools import stem_of, version_of
from farm.tuning.database import TuningDatabase, device_name, mode_name
from farm.tuning.records import RecordStore

MARGIN = 0.1
"""A candidate is measured again if it took at most this share more than the best one."""
MOST = 4
"""The most candidates that are measured again."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """The rows of an earlier toolchain: by slice, the seconds that each candidate took."""

    toolchain: str
    rows: Mapping[str, Mapping[str, float]]

    def shortlist(self, slices: Iterable[SlicePart]) -> tuple[str, ...]:
        """Return the candidates worth measuring for a model of these slices, the best one first.

        Empty if a slice has no row, or if these would be all that were tried.
        """
        known = [(self.rows.get(piece["key"], {}), piece["count"]) for piece in slices]
        common = set.intersection(*(set(times) for times, _ in known)) if known else set()
        totals = {name: sum(times[name] * count for times, count in known) for name in common}
        ordered = sorted(totals, key=lambda name: (totals[name], name))
        best = [name for name in ordered if totals[name] <= totals[ordered[0]] * (1 + MARGIN)][:MOST]
        return tuple(best) if len(best) < len(ordered) else ()


def seeds_of(artifacts: ArtifactStore, namespace: str, order: WorkOrder) -> Seeds | None:
    """Return what the newest toolchain before a work order's learnt on its device in its mode; None without any.

    Raises FarmFault if storage is away, ArtifactGone for a damaged database.
    """
    spec = order["spec"]
    if not COMPILERS[spec["compiler"]["name"]].tuning_seeds:
        return None
    for toolchain in _earlier(artifacts, namespace, order):
        found = database_of(artifacts, namespace, order, toolchain).since(frozenset()).snapshot
        table = found.tables.get((RecordStore.ONNXRUNTIME, ""), {})
        if rows := {key: times for key, (value, _) in table.items() if (times := _times(value))}:
            return Seeds(toolchain, rows)
    return None


def announced(artifacts: ArtifactStore, namespace: str, orders: Iterable[WorkOrder]) -> list[str]:
    """Return what becomes of the tuning of earlier toolchains where these work orders find an empty database."""
    first = {
        database_of(artifacts, namespace, order, order["spec"]["toolchain"]).name: order
        for order in orders
        if order["spec"]["tuning"]["mode"] != OFF and not order["spec"]["device"]["arch"].endswith(":any")
    }
    said = []
    for order in first.values():
        target, new = order["target"], order["spec"]["toolchain"]
        earlier = _earlier(artifacts, namespace, order)
        if not earlier or any(database_of(artifacts, name, order, new).exists() for name in readable(namespace)):
            continue
        if not COMPILERS[order["spec"]["compiler"]["name"]].tuning_seeds:
            said.append(
                f"{target}: the tuning of {earlier[0]} is not carried over to {new}: MIGraphX would take its solutions "
                "without measuring them, and MIOpen ignores databases of another version"
            )
            continue
        try:
            seeds = seeds_of(artifacts, namespace, order)
        except ArtifactGone as error:
            said.append(f"{target}: no tuning is carried over from {earlier[0]}: {error.message}")
        else:
            if seeds:
                count = len(seeds.rows)
                rows = f"{count} tuning row{'s' * (count != 1)}"
                said.append(f"{target}: {rows} carried over from {seeds.toolchain}, to be proven")
    return said


def database_of(artifacts: ArtifactStore, namespace: str, order: WorkOrder, toolchain: str) -> TuningDatabase:
    """Return the tuning database of a work order under a toolchain."""
    device, mode = device_name(Device(**order["spec"]["device"])), mode_name(order["spec"]["tuning"])
    return TuningDatabase(artifacts, namespace, _stem(order, toolchain), device, mode)


def _stem(order: WorkOrder, toolchain: str) -> str:
    """Not the pool's whole name: what else a pool is, the device says, or it changes nothing that is learnt."""
    return stem_of(order["target"], order["spec"]["device"]["compute_units"], toolchain)


def _earlier(artifacts: ArtifactStore, namespace: str, order: WorkOrder) -> Sequence[str]:
    """Return the earlier toolchains that have such a database, the newest first."""
    start, own = _stem(order, ""), version_of(order["spec"]["toolchain"])
    names = {pool for name in readable(namespace) for pool in artifacts.list_folders(f"ns/{name}/tuning/")}
    earlier = [
        toolchain
        for pool in names
        if pool.startswith(start) and version_of(toolchain := pool.removeprefix(start)) < own
    ]
    there = (
        toolchain
        for toolchain in sorted(earlier, key=version_of, reverse=True)
        if any(database_of(artifacts, name, order, toolchain).exists() for name in readable(namespace))
    )
    return list(there)


def _times(value: str) -> dict[str, float]:
    """Read a row; what is no time of a candidate is left out."""
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: seconds for name, seconds in pairs if isinstance(seconds, int | float) and 0 < seconds < math.inf}
