"""What a build's cells are compared with: their state in the manifest's build before, and the baselines of their gates.

Found once, when the build is planned, and kept in its plan: a report says the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import TypeVar

from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.storage import readable
from farm.builds.build_index import BuildIndex, Reach, StandIn
from farm.builds.plan import FIRST, is_measured
from farm.builds.planner import KnownArtifacts
from farm.errors import ArtifactGone, FarmFault, NotFound, UsageError, suggestion
from farm.jobs.facts import ArtifactFacts, TurnsFacts
from farm.jobs.order import WorkOrder
from farm.jobs.state import State
from farm.logging import get_logger
from farm.matrix.planned import UNKNOWN, Baseline, CellGates, CellPlan, PastState, Values
from farm.results.gates import MEASURES, runs_alike, turns_with, values_of
from farm.results.ref_rules import LATEST, given
from farm.wire.asked import ChosenGates

log = get_logger(__name__)

T = TypeVar("T")


class Baselines:
    """Finds what cells are compared with."""

    def __init__(self, refs: Refs, known: KnownArtifacts, index: BuildIndex) -> None:
        self._refs = refs
        self._known = known
        self._index = index

    def attach(
        self,
        namespace: str,
        manifest: str,
        cells: Sequence[CellPlan],
        chosen: ChosenGates | None,
        *,
        instead: Mapping[str, SnapshotCell] | None = None,
        unattended: bool = False,
    ) -> list[str]:
        """Write into planned cells what they are compared with; return warnings about tags that do not exist yet.

        `instead` has the cells to compare with, by identifier, in place of those that their tags name. Nobody waits
        for an `unattended` build: if it has no baseline, its cells say that they cannot be judged.
        Where a gate on speed asks for it, the work order names the baseline's program, for turns with the new one or
        with the one that is there already (`farm.builds.plan.is_measured`). Hits keep no work order that they need not.

        Raises UsageError for a tag that does not exist, unless it is `latest` or a first run, ArtifactGone for one that
        cannot be read.
        """
        for cell in cells:
            if chosen:
                cell["gates"] = _laid_over(cell["gates"], chosen)
        limited = [cell for cell in cells if cell["gates"].get("limits")]
        asked = {chosen["baseline"]} - {""} if chosen else set()
        tags = sorted(asked | {cell["gates"]["baseline"] for cell in limited})
        first = bool(chosen and chosen.get("first"))
        named, absent, warnings = (
            self._named(namespace, tags, first=first, unattended=unattended)
            if instead is None
            else (dict.fromkeys(tags, instead), {}, [])
        )
        entries = {cell["identifier"]: named[cell["gates"]["baseline"]].get(cell["identifier"]) for cell in limited}
        facts = self._known.facts(namespace, [entry["key"] for entry in entries.values() if entry])
        reach = self._reach(namespace, {manifest, *(entry.get("manifest", "") for entry in entries.values() if entry)})
        before = self._before(namespace, manifest, [cell["identifier"] for cell in cells], reach)
        once = [cell for cell in limited if any(MEASURES[name].how == "once" for name in cell["gates"]["limits"])]
        stand_ins = {
            cell["identifier"]: StandIn(
                entry.get("manifest", ""),
                entry["toolchain"],
                cell["facts"]["key"] if cell["facts"] else cell["key"],
                found["created"],
            )
            for cell in once
            if (entry := entries[cell["identifier"]]) and (found := facts.get(entry["key"]))
        }
        # What is not read yet may be nearer in time.
        by_node = _known(lambda: self._index.by_node(namespace, stand_ins)) if reach.is_whole else {}
        for cell in cells:
            cell["before"] = past_state = before.get(cell["identifier"])
            if past_state and past_state["state"] == State.FAILED and cell["reason"] == FIRST:
                cell["reason"] = f"failed last time: {past_state['kind']}"
        for cell in limited:
            entry = entries[cell["identifier"]]
            found = facts.get(entry["key"]) if entry else None
            tag = cell["gates"]["baseline"]
            key = entry["key"] if entry else ""
            cell["baseline"] = baseline = _baseline(tag, key, found, by_node.get(cell["identifier"], {}))
            if tag in absent:
                baseline["absent"] = absent[tag]
            if found and not reach.is_whole:
                baseline["unread"] = str(reach)
        past = self._past_turns(namespace, limited)
        for cell in limited:
            _ask_for_turns(cell, cell["baseline"], past.get(cell["identifier"]))
        for cell in cells:
            if cell["facts"] and cell["order"] and not (is_measured(cell) or cell["order"].get("background")):
                cell["order"] = None
        if unknown := sum(past["state"] == UNKNOWN for past in before.values()):
            warnings.append(f"{reach}: it is not known how {unknown} of the cells ended before")
        return warnings

    def _named(
        self, namespace: str, tags: Sequence[str], *, first: bool, unattended: bool
    ) -> tuple[Mapping[str, Mapping[str, SnapshotCell]], dict[str, str], list[str]]:
        """Return the cells that tags name, why some tags cannot judge, and warnings. Raises as `attach`."""
        named, absent, warnings = dict[str, Mapping[str, SnapshotCell]](), dict[str, str](), list[str]()
        for tag in tags:
            named[tag] = {}
            try:
                named[tag] = self._read(namespace, tag)
            except (NotFound, ArtifactGone) as error:
                if isinstance(error, NotFound) and (first or tag == LATEST):
                    warnings.append(f"{error.message}: this is a first run, nothing is compared with it")
                elif unattended:
                    absent[tag] = error.message
                    warnings.append(f"cannot judge: {error.message}")
                elif isinstance(error, ArtifactGone):
                    raise
                else:
                    hint = "; ".join(filter(None, (error.hint, "`--first` if this is the first run")))
                    raise UsageError(f"the gates have no baseline: {error.message}", hint=hint) from None
        return named, absent, warnings

    def _read(self, namespace: str, tag: str) -> Mapping[str, SnapshotCell]:
        """Return the cells that a tag names, by identifier: of several toolchains the one that readers get.

        Raises NotFound if neither the namespace nor `main` has the tag, ArtifactGone.
        """
        if found := self._refs.read(self._refs.owner(namespace, tag), tag):
            return given(found["cells"].values())
        known = {other for each in readable(namespace) for other in self._refs.list(each)}
        raise NotFound(f"the tag {tag} does not exist in namespace {namespace}", hint=suggestion(tag, known))

    def _reach(self, namespace: str, manifests: Collection[str]) -> Reach:
        try:
            return self._index.catch_up(namespace, manifests)
        except FarmFault as error:
            log.warning("what was before is not known", error=error.message)
            return Reach(inf, 0.0)

    def _before(
        self, namespace: str, manifest: str, identifiers: Sequence[str], reach: Reach
    ) -> Mapping[str, PastState]:
        """Return how cells ended before; a cell whose past is not read yet is neither new nor fixed."""
        unknown: PastState = {"state": UNKNOWN, "kind": str(reach), "build": ""}
        known = _known(lambda: self._index.last(namespace, manifest, identifiers, reach.since))
        found: dict[str, PastState] = {
            name: {
                "state": past["state"],
                "kind": past["kind"],
                "build": past["build"],
                "rules": past.get("rules", "{}"),
            }
            for name, past in known.items()
        }
        return found if reach.is_whole else {**dict.fromkeys(identifiers, unknown), **found}

    def _past_turns(self, namespace: str, cells: Sequence[CellPlan]) -> Mapping[str, TurnsFacts]:
        """Return how hits compared with their baselines when an earlier build measured that, by identifier."""
        pairs = {
            cell["identifier"]: (cell["facts"]["key"], baseline["key"])
            for cell in cells
            if cell["facts"] and (baseline := cell.get("baseline")) and baseline["key"]
        }
        return _known(lambda: self._index.turns(namespace, pairs)) if pairs else {}


def _known(question: Callable[[], Mapping[str, T]]) -> Mapping[str, T]:
    """Return what the index answers; nothing if it cannot be used."""
    try:
        return question()
    except FarmFault as error:
        log.warning("what was before is not known", error=error.message)
        return {}


def _laid_over(gates: CellGates, chosen: ChosenGates) -> CellGates:
    laid: CellGates = {**gates, "undecided": gates.get("undecided", "warn"), "hits": gates.get("hits", "measure")}
    limits = {**laid.pop("limits", {}), **chosen.get("limits", {})}
    budgets = {**laid.pop("budgets", {}), **chosen.get("budgets", {})}
    if on := {name: limit for name, limit in limits.items() if limit is not None}:
        laid["limits"], laid["baseline"] = on, chosen.get("baseline") or gates.get("baseline") or LATEST
    if on := {name: budget for name, budget in budgets.items() if budget is not None}:
        laid["budgets"] = on
    return laid


def _baseline(tag: str, key: str, facts: ArtifactFacts | None, by_node: Mapping[str, Values]) -> Baseline:
    if facts is None:
        return {"ref": tag, "key": key, "toolchain": "", "values": {}, "by_node": {}}
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
    if not (limits and order and baseline and baseline["values"]) or baseline["key"] in (
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
