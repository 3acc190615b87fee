"""Turns a manifest and frozen inputs into a Plan: hits, misses and why, pools, missing workers. Writes nothing."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from farm.artifacts.refs import SnapshotCell
from farm.jobs.estimate import Estimate
from farm.jobs.facts import ArtifactFacts
from farm.jobs.order import WorkOrder
from farm.matrix.cells import Cell
from farm.matrix.planned import CellPlan, ShownCell
from farm.results.accuracy import judge_fallback
from farm.spec import FileReference, SpecDocument, changes
from farm.wire.program import ConversionRecord

EXPLAINED = 50
"""Number of misses in one plan for which the last artifact's spec is read, to say what changed."""

FIRST = "first compile"
"""Why a cell is compiled that no ref names yet."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell and its plan: nothing to do (`hit`), wait for a job (`joined`) or compile (`miss`)."""

    cell: Cell
    state: str
    reason: str
    facts: ArtifactFacts | None
    live_workers: int
    estimate: Estimate | None

    def as_dict(self) -> ShownCell:
        """Return the cell as people and scripts see it."""
        cell = self.cell
        return {
            "identifier": cell.identifier,
            "model": cell.model,
            "target": cell.target,
            "precision": cell.precision,
            "shape": cell.shape,
            "sizes": cell.sizes,
            "key": cell.key,
            "pool": cell.pool,
            "emulated": list(cell.emulated),
            "state": self.state,
            "reason": self.reason,
            "live_workers": self.live_workers,
            "expected_seconds": self.estimate.expected if self.estimate else None,
            "estimate": self.estimate.as_dict() if self.estimate else None,
            "expected": cell.expected is not None,
            "line": cell.line,
            "warnings": list(cell.warnings),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a submission would do."""

    cells: tuple[PlannedCell, ...]
    warnings: tuple[str, ...]

    @property
    def conversions(self) -> dict[str, ConversionRecord]:
        """How models were converted from other formats, by name."""
        models = {planned.cell.model: planned.cell.order["model"] for planned in self.cells}
        return {name: record for name, model in models.items() if (record := model.get("conversion"))}

    @property
    def digest(self) -> str:
        """SHA-256 of what the farm decided: each cell's cache key and pool, whatever is a hit by now."""
        return plan_digest((each.cell.identifier, each.cell.key, each.cell.pool) for each in self.cells)

    @property
    def needed_blobs(self) -> dict[str, int]:
        """See `needed_blobs`."""
        return needed_blobs((planned.state, planned.cell.order) for planned in self.cells)


def make_plan(
    cells: Sequence[Cell],
    *,
    known: Mapping[str, ArtifactFacts],
    running: Iterable[str],
    last: Mapping[str, SnapshotCell],
    read_spec: Callable[[str], SpecDocument | None],
    live_workers: Mapping[str, int],
    estimates: Mapping[str, Estimate | None],
) -> Plan:
    """Plan every cell.

    `known` are the facts of whole artifacts, by the `job` of a cell; `running` are the jobs that have not ended. `last`
    is the last cell that passed, by identifier; `read_spec` returns the spec behind a key. `live_workers` are numbers
    by pool; `estimates` say, by identifier, how long the compiles take of cells that are not known.
    """
    unfinished = set(running)
    explained = 0
    planned = []
    for cell in cells:
        facts = known.get(cell.job)
        before = last.get(cell.identifier)
        state = "hit" if facts else "joined" if cell.job in unfinished else "miss"
        reason = FIRST if state == "miss" else ""
        if state == "miss" and before:
            explained += 1
            spec = read_spec(before["key"]) if explained <= EXPLAINED else None
            reason = "; ".join(changes(spec, cell.spec)) if spec else "the cache key changed"
        planned.append(
            PlannedCell(
                cell,
                state,
                reason,
                facts,
                live_workers.get(cell.pool, 0),
                None if facts else estimates.get(cell.identifier),
            )
        )
    return Plan(tuple(planned), (*_warnings(cells, live_workers), *_undebugged(planned), *_left(planned)))


def _warnings(cells: Sequence[Cell], live_workers: Mapping[str, int]) -> Iterable[str]:
    for pool in sorted({cell.pool for cell in cells}):
        if not live_workers.get(pool):
            waiting = sum(cell.pool == pool for cell in cells)
            yield f"no live worker serves {pool}: {_cells(waiting)} would wait (start `farm worker` on a node with it)"
    emulated = Counter((cell.target, part) for cell in cells for part in cell.emulated)
    for (target, part), count in emulated.items():
        yield f"{target} has no units for {part}: {_cells(count)} can only round to it, and compute no faster"
    for pool in sorted({cell.pool for cell in cells if cell.order.get("cross")}):
        yield f"{pool} compiles without the GPU: its programs are not tuned, verified or measured"
    warned: dict[str, list[str]] = {}
    for cell in cells:
        for text in cell.warnings:
            warned.setdefault(text, []).append(cell.identifier)
    for text, names in warned.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: {text}"
    owner: dict[str, str] = {}
    for cell in cells:
        first = owner.setdefault(cell.job, cell.identifier)
        if first != cell.identifier:
            yield f"{cell.identifier} is the same compile as {first}; they share the job"


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _undebugged(planned: Sequence[PlannedCell]) -> Iterable[str]:
    """Warn if `debug` has no effect: it is not part of the key, so existing programs are not compiled again."""
    idle = [each.cell.identifier for each in planned if each.state != "miss" and each.cell.order.get("debug")]
    if idle:
        yield (
            f"`debug` shows nothing for what is compiled already or just now ({_cells(len(idle))}, "
            f"such as {idle[0]}); another `salt` compiles it again"
        )


def _left(planned: Sequence[PlannedCell]) -> Iterable[str]:
    """Name the nodes of known programs for which a GPU's provider has no kernel; not if the manifest allows them."""
    warned: dict[str, list[str]] = {}
    for each in planned:
        found = judge_fallback(each.facts) if each.facts else None
        if found and each.cell.gates.get("fallback", "allow") != "allow":
            warned.setdefault(found.message, []).append(each.cell.identifier)
    for text, names in warned.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"


def plan_digest(cells: Iterable[tuple[str, str, str]]) -> str:
    """Return the SHA-256 of cells' identifiers, cache keys and pools."""
    return hashlib.sha256(json.dumps(list(cells)).encode()).hexdigest()


def needed_blobs(cells: Iterable[tuple[str, WorkOrder | None]]) -> dict[str, int]:
    """Return digest and size of every input that a miss, or the follow-up of a hit, has to fetch.

    `cells` are planned states with their work orders; a hit may have none.
    """
    needed: dict[str, int] = {}
    for state, order in cells:
        if order and (state != "hit" or order.get("background")):
            needed |= {file["digest"]: file["size"] for file in input_files(order)}
    return needed


def is_measured(cell: CellPlan) -> bool:
    """Whether a planned hit still takes turns with its baseline: a job of its own, that compiles nothing."""
    facts, order = cell["facts"], cell["order"]
    if not (facts and order) or order.get("limit") is None:
        return False
    against = facts.get("against")
    return not against or against["key"] != order["against"]


def is_unfinished(cell: CellPlan) -> bool:
    """Whether a planned cell has a job."""
    return not cell["facts"] or is_measured(cell)


def input_files(order: WorkOrder) -> list[FileReference]:
    """Return the blobs that a work order needs: the model's files, data, and the files of environment variables."""
    data = [file for file in (order["calibration"], order["samples"]) if file]
    return [*order["model"]["files"], *data, *order.get("env", {}).values()]
