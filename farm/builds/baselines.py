"""What a build's cells are compared with: their state in the manifest's build before, and the baselines of their gates.

Found once, when the build is planned, and kept in its plan: a report says the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from farm.artifacts.refs import Refs
from farm.builds.cell_history import CellHistory
from farm.builds.known import KnownArtifacts
from farm.errors import FarmFault
from farm.logging import get_logger
from farm.results.gates import MEASURES, Baseline, Values, values_of

log = get_logger(__name__)

Document = dict[str, Any]


class Before(TypedDict):
    """How a cell ended in the manifest's newest build that had it."""

    state: str
    kind: str
    build: str


class GateChoice(TypedDict, total=False):
    """Gates of a command line, for every cell: laid over those of the manifest."""

    baseline: str
    limits: Mapping[str, float]
    budgets: Mapping[str, float]


class Baselines:
    """Finds what cells are compared with."""

    def __init__(self, refs: Refs, known: KnownArtifacts, history: CellHistory) -> None:
        self._refs = refs
        self._known = known
        self._history = history

    def attach(self, namespace: str, manifest: str, cells: Sequence[Document], chosen: GateChoice | None) -> list[str]:
        """Write into planned cells what they are compared with; return warnings about tags that name nothing.

        Where a gate on speed asks for it, the work order names the baseline's program, for turns with the new one.
        """
        for cell in cells:
            if chosen:
                cell["gates"] = _laid_over(cell["gates"], chosen)
        before = self._before(namespace, manifest, [cell["identifier"] for cell in cells])
        limited = [cell for cell in cells if cell["gates"].get("limits")]
        tags = sorted({cell["gates"]["baseline"] for cell in limited})
        named = {tag: self._named(namespace, tag) for tag in tags}
        entries = {id(cell): named[cell["gates"]["baseline"]].get(cell["identifier"]) or {} for cell in limited}
        facts = self._known.facts(namespace, [entry["key"] for entry in entries.values() if entry])
        by_node = self._by_node(
            namespace, {cell["identifier"]: entries[id(cell)]["toolchain"] for cell in limited if entries[id(cell)]}
        )
        for cell in cells:
            cell["before"] = before.get(cell["identifier"])
        for cell in limited:
            found = facts.get(entries[id(cell)].get("key", ""))
            cell["baseline"] = _baseline(cell["gates"]["baseline"], found, by_node.get(cell["identifier"], {}))
            _ask_for_turns(cell)
        return [f"the tag {tag} names no cell yet: nothing can be compared with it" for tag in tags if not named[tag]]

    def _named(self, namespace: str, tag: str) -> dict[str, Mapping[str, Any]]:
        """Return the cells that a tag names, by identifier: of several toolchains the newest submission's."""
        cells = self._refs.read_or_empty(namespace, tag)["cells"].values()
        return {cell["identifier"]: cell for cell in sorted(cells, key=lambda cell: cell.get("submitted", 0.0))}

    def _before(self, namespace: str, manifest: str, identifiers: Sequence[str]) -> dict[str, Before]:
        try:
            found = self._history.last(namespace, manifest, identifiers)
        except FarmFault as error:
            log.warning("what was before is not known", error=error.message)
            return {}
        return {
            name: {"state": past["state"], "kind": past["kind"], "build": past["build"]} for name, past in found.items()
        }

    def _by_node(self, namespace: str, toolchains: Mapping[str, str]) -> dict[str, dict[str, Values]]:
        try:
            return self._history.by_node(namespace, toolchains) if toolchains else {}
        except FarmFault as error:
            log.warning("numbers of other nodes are not known", error=error.message)
            return {}


def _laid_over(gates: Document, chosen: GateChoice) -> Document:
    limits = {**gates.get("limits", {}), **chosen.get("limits", {})}
    budgets = {**gates.get("budgets", {}), **chosen.get("budgets", {})}
    baseline = chosen.get("baseline") or gates.get("baseline") or "latest"
    return {
        **gates,
        **({"limits": limits, "baseline": baseline} if limits else {}),
        **({"budgets": budgets} if budgets else {}),
        "undecided": gates.get("undecided", "warn"),
    }


def _baseline(tag: str, facts: Mapping[str, Any] | None, by_node: Mapping[str, Values]) -> Baseline:
    if facts is None:
        return {"ref": tag, "key": "", "toolchain": "", "values": {}, "by_node": {}}
    toolchain = str(facts["toolchain"])
    return {"ref": tag, "key": facts["key"], "toolchain": toolchain, "values": values_of(facts), "by_node": by_node}


def _ask_for_turns(cell: Document) -> None:
    """Let a miss take turns with its baseline, if a gate on speed asks for that."""
    limits = [limit for name, limit in cell["gates"]["limits"].items() if MEASURES[name].how == "in turns"]
    key = cell["baseline"]["key"]
    if limits and cell["order"] and cell["state"] == "miss" and key not in ("", cell["key"]):
        cell["order"] = {**cell["order"], "against": key, "limit": min(limits)}
