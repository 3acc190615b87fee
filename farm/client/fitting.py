"""Which artifact fits a machine: the reasons against each, and which is best of those that run there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farm.artifacts.refs import SnapshotCell
from farm.errors import NotFound
from farm.models.shapes import BATCH, PACK
from farm.results.ref_rules import last, readers_order
from farm.targets.compilers import compilers
from farm.targets.pools import Pool
from farm.wire.program import Sidecar

MOST_REASONS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """An artifact that runs here: `why` it was chosen, or comes after another; `rank` is smaller for what is better."""

    cell: SnapshotCell
    sidecar: Sidecar
    why: str
    rank: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fits:
    """The best artifact for a machine, what comes next, and why others do not run there, by their identifiers."""

    best: Fit
    next: Fit | None
    others: dict[str, str]


def why_not(cell: SnapshotCell, pools: Iterable[Pool]) -> str:
    """Return why a cell's program cannot run with any of these pools; empty if it may, as far as the ref tells."""
    compiler, _, device = cell["target"].partition("/")
    here = [pool for pool in pools if pool.target.compiler == compiler]
    if not here:
        return f"{compiler} cannot be used here"
    there = [pool for pool in here if _same_device(cell, device, pool)]
    if not there:
        found = sorted({pool.device.arch if pool.target.maker else pool.target.device for pool in here})
        return f"it is for {cell['device']}, here is {', '.join(found)}"
    if all(_toolchain_rank(cell["toolchain"], pool.toolchain) is None for pool in there):
        return f"{cell['toolchain']} made it, here is {', '.join(sorted({pool.toolchain for pool in there}))}"
    return ""


def best_fit(found: Sequence[tuple[SnapshotCell, Sidecar]], pools: Sequence[Pool], batch: int | None = None) -> Fits:
    """Return the best of the artifacts of one model and precision, by their cells and sidecars.

    A GPU comes first, then what no other toolchain's program has superseded, then of one cell what was submitted last,
    as for all readers, then what this very toolchain made, then
    the smallest program that takes `batch` samples (the largest if none does, or if nobody says how many there are),
    then the fastest.

    Raises NotFound with the reasons if none runs here.
    """
    running, others = [], {}
    for cell, sidecar in found:
        reasons = [reason for pool in pools for reason in [_against(cell, sidecar, pool)] if reason]
        good = [pool for pool in pools if not why_not(cell, [pool]) and not _against(cell, sidecar, pool)]
        if good:
            running.append((cell, sidecar, good))
        else:
            others[cell["identifier"]] = why_not(cell, pools) or reasons[0]
    if not running:
        raise nothing_fits(others)
    of_cell: dict[str, list[SnapshotCell]] = {}
    for cell, _, _ in running:
        of_cell.setdefault(cell["identifier"], []).append(cell)
    fits = [
        min(
            (_fit(cell, sidecar, pool, batch, last(of_cell[cell["identifier"]])) for pool in good),
            key=lambda fit: fit.rank,
        )
        for cell, sidecar, good in running
    ]
    best, *after = sorted(fits, key=lambda fit: fit.rank)
    return Fits(best, after[0] if after else None, others)


def nothing_fits(reasons: dict[str, str]) -> NotFound:
    """Return the error for a model without an artifact for this machine."""
    shown = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:MOST_REASONS])
    more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    return NotFound(f"no artifact runs here: {shown}{more}", hint="`farm doctor` says what this machine has")


def may_run(cells: Iterable[SnapshotCell], *, packed: bool = False) -> list[SnapshotCell]:
    """Return the cells to look at; if `packed`, programs that were compiled for packs take the place of their twins."""
    listed = list(cells)
    if not packed:
        return [cell for cell in listed if not cell["shape"].endswith(PACK)]
    made = {cell["identifier"] for cell in listed}
    return [cell for cell in listed if f"{cell['identifier']}{PACK}" not in made]


def batches(cell: SnapshotCell) -> tuple[int, int]:
    """Return the smallest and the largest batch that a cell's program takes; 1 if its model names none."""
    size = cell["sizes"].get(BATCH, 1)
    return (int(size["min"]), int(size["max"])) if isinstance(size, dict) else (int(size), int(size))


def _same_device(cell: SnapshotCell, device: str, pool: Pool) -> bool:
    if compilers()[pool.target.compiler].maker(pool.target.device) is None:
        return pool.target.device == device
    here, there = pool.device.arch, cell["device"]
    if device.endswith(":any"):
        there = there.partition(":")[0]
    # An arch that names no features was read without them.
    return here == there or (here.partition(":")[0] == there.partition(":")[0] and ":" not in min(here, there, key=len))


def _against(cell: SnapshotCell, sidecar: Sidecar, pool: Pool) -> str:
    """Return what the sidecar says against a pool of the right device; empty if nothing."""
    if why_not(cell, [pool]):
        return ""
    device = sidecar["spec"].get("device")
    units, family = (device.get("compute_units"), device.get("cpu_family")) if device else (None, None)
    if units and pool.device.compute_units and units != pool.device.compute_units:
        return f"it is tuned for {units} compute units, here are {pool.device.compute_units}"
    if family and family != pool.cpu_family:
        return f"it is tuned for CPUs of the family {family}, here is {pool.cpu_family or 'another'}"
    return ""


def _fit(cell: SnapshotCell, sidecar: Sidecar, pool: Pool, batch: int | None, given: SnapshotCell) -> Fit:
    toolchain = _toolchain_rank(cell["toolchain"], pool.toolchain) or 0
    smallest, largest = batches(cell)
    latency = sidecar["measurements"]["latency"]["median"] if sidecar["measurements"]["latency"] else None
    on_gpu = pool.target.maker is not None
    takes = batch is not None and largest >= batch
    rank = (
        not on_gpu,
        bool(cell.get("superseded")),
        readers_order(cell) < readers_order(given),
        toolchain,
        not takes,
        # A range takes the batch as it is; of fixed batches the smallest wastes least.
        (max(smallest, batch or 0) if takes else -largest),
        latency / largest if latency is not None else float("inf"),
    )
    made = ("this toolchain made it", "another build of this release made it", "an older release made it")[toolchain]
    words = [f"for {cell['device']}, which is here", made]
    if cell.get("superseded"):
        words.append("another toolchain's program has its place in the ref, and does not run here")
    if batch is not None:
        words.append(f"takes batch {largest}" if takes else f"takes {largest} of {batch} samples at once")
    return Fit(cell, sidecar, ", ".join(words), rank)


_RELEASE = re.compile(r"onnxruntime([0-9]+)\.([0-9]+)")


def _toolchain_rank(made_by: str, here: str) -> int | None:
    """0: the same; 1: another build of the same release; 2: an older release whose programs are read; None: no use."""
    if made_by == here:
        return 0
    one, other = (name.rpartition("-")[0].removesuffix("-cross") for name in (made_by, here))
    if one == other:
        return 1
    releases = [_RELEASE.match(name) for name in (made_by, here)]
    if not all(releases):
        return None
    then, now = ([int(part) for part in found.groups()] for found in releases if found)
    return 2 if then <= now else None
