"""What a build's cells are compared with: their state in the manifest's build before, and the baselines of their gates.

Found once, when the build is planned, and kept in its plan: a report says the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farm.artifacts.refs import Refs, SnapshotCell
from farm.builds.cell_history import CellHistory
from farm.builds.known import KnownArtifacts
from farm.builds.plan import is_measured
from farm.builds.shadow import newest
from farm.errors import FarmFault
from farm.jobs.facts import ArtifactFacts, TurnsFacts
from farm.jobs.order import ChosenGates, WorkOrder
from farm.logging import get_logger
from farm.matrix.planned import Baseline, CellGates, CellPlan, PastState, Values
from farm.results.gates import MEASURES, runs_alike, turns_with, values_of

log = get_logger(__name__)


class Baselines:
    """Finds what cells are compared with."""

    def __init__(self, refs: Refs, known: KnownArtifacts, history: CellHistory) -> None:
        self._refs = refs
        self._known = known
        self._history = history

    def attach(
        self,
        namespace: str,
        manifest: str,
        cells: Sequence[CellPlan],
        chosen: ChosenGates | None,
        *,
        instead: Mapping[str, SnapshotCell] | None = None,
    ) -> list[str]:
        """Write into planned cells what they are compared with; return warnings about tags that name nothing.

        `instead` has the cells to compare with, by identifier, in place of those that their tags name.
        Where a gate on speed asks for it, the work order names the baseline's program, for turns with the new one or
        with the one that is there already (`farm.builds.plan.is_measured`). Hits keep no work order that they need not.
        """
        for cell in cells:
            if chosen:
                cell["gates"] = _laid_over(cell["gates"], chosen)
        before = self._before(namespace, manifest, [cell["identifier"] for cell in cells])
        limited = [cell for cell in cells if cell["gates"].get("limits")]
        tags = sorted({cell["gates"]["baseline"] for cell in limited})
        named = {tag: instead or self._named(namespace, tag) for tag in tags}
        entries = {cell["identifier"]: named[cell["gates"]["baseline"]].get(cell["identifier"]) for cell in limited}
        facts = self._known.facts(namespace, [entry["key"] for entry in entries.values() if entry])
        by_node = self._by_node(
            namespace, {identifier: entry["toolchain"] for identifier, entry in entries.items() if entry}
        )
        for cell in cells:
            cell["before"] = before.get(cell["identifier"])
        for cell in limited:
            entry = entries[cell["identifier"]]
            found = facts.get(entry["key"]) if entry else None
            baseline = _baseline(cell["gates"]["baseline"], found, by_node.get(cell["identifier"], {}))
            cell["baseline"] = baseline
        past = self._past_turns(namespace, limited)
        for cell in limited:
            _ask_for_turns(cell, cell["baseline"], past.get(cell["identifier"]))
        for cell in cells:
            if cell["facts"] and cell["order"] and not (is_measured(cell) or cell["order"].get("background")):
                cell["order"] = None
        return [f"the tag {tag} names no cell yet: nothing can be compared with it" for tag in tags if not named[tag]]

    def _named(self, namespace: str, tag: str) -> dict[str, SnapshotCell]:
        """Return the cells that a tag names, by identifier: of several toolchains the one that readers get."""
        return newest(self._refs.read_or_empty(namespace, tag)["cells"].values())

    def _before(self, namespace: str, manifest: str, identifiers: Sequence[str]) -> dict[str, PastState]:
        try:
            found = self._history.last(namespace, manifest, identifiers)
        except FarmFault as error:
            log.warning("what was before is not known", error=error.message)
            return {}
        return {
            name: {"state": past["state"], "kind": past["kind"], "build": past["build"]} for name, past in found.items()
        }

    def _past_turns(self, namespace: str, cells: Sequence[CellPlan]) -> dict[str, TurnsFacts]:
        """Return how hits compared with their baselines when an earlier build measured that, by identifier."""
        pairs = {
            cell["identifier"]: (cell["facts"]["key"], baseline["key"])
            for cell in cells
            if cell["facts"] and (baseline := cell.get("baseline")) and baseline["key"]
        }
        try:
            return self._history.turns(namespace, pairs) if pairs else {}
        except FarmFault as error:
            log.warning("how hits compared before is not known", error=error.message)
            return {}

    def _by_node(self, namespace: str, toolchains: Mapping[str, str]) -> dict[str, dict[str, Values]]:
        try:
            return self._history.by_node(namespace, toolchains) if toolchains else {}
        except FarmFault as error:
            log.warning("numbers of other nodes are not known", error=error.message)
            return {}


def _laid_over(gates: CellGates, chosen: ChosenGates) -> CellGates:
    limits = {**gates.get("limits", {}), **chosen.get("limits", {})}
    budgets = {**gates.get("budgets", {}), **chosen.get("budgets", {})}
    baseline = chosen.get("baseline") or gates.get("baseline") or "latest"
    laid: CellGates = {**gates, "undecided": gates.get("undecided", "warn"), "hits": gates.get("hits", "measure")}
    if limits:
        laid.update({"limits": limits, "baseline": baseline})
    if budgets:
        laid["budgets"] = budgets
    return laid


def _baseline(tag: str, facts: ArtifactFacts | None, by_node: Mapping[str, Values]) -> Baseline:
    if facts is None:
        return {"ref": tag, "key": "", "toolchain": "", "values": {}, "by_node": {}}
    return {
        "ref": tag,
        "key": facts["key"],
        "toolchain": str(facts["toolchain"]),
        "values": values_of(facts),
        "by_node": by_node,
        "runs_as": facts.get("runs_as", ""),
    }


def _ask_for_turns(cell: CellPlan, baseline: Baseline | None, past: TurnsFacts | None) -> None:
    """Let a miss take turns with its baseline, and a hit that has not yet, if a gate on speed asks for that."""
    limits = [limit for name, limit in cell["gates"]["limits"].items() if MEASURES[name].how == "in turns"]
    facts, order = cell["facts"], cell["order"]
    if not (limits and order and baseline and baseline["key"]) or baseline["key"] in (
        cell["key"],
        facts and facts["key"],
    ):
        return
    if facts:
        if past:
            baseline["turns"] = past
        if turns_with(baseline, facts) or runs_alike(facts, baseline):
            return
        if why := _unmeasured(cell, order):
            baseline["unmeasured"] = why
            return
        cell["reason"] = f"measured in turns with {baseline['ref']}'s"
    elif cell["state"] != "miss":
        return
    cell["order"] = {**order, "against": baseline["key"], "limit": min(limits)}


def _unmeasured(cell: CellPlan, order: WorkOrder) -> str:
    """Return why a hit is not measured now; empty if it is."""
    if cell["gates"].get("hits") == "list":
        return "`hits: list` leaves it unmeasured"
    if order.get("cross"):
        return "it is compiled where its GPU is not"
    return "" if cell["live_workers"] else f"no live worker serves {cell['pool']}"
