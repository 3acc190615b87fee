"""Toolchains: shadow builds of what a ref names under another one, and which one a ref gives to readers.

The ref's snapshot holds the choice: an entry that is `superseded` is only for those who name its toolchain. Promoting
and rolling back are one conditional write of the ref each, and keep the programs of both toolchains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.artifacts.refs import Cells, RefView, SnapshotCell
from farm.artifacts.sidecar import facts as facts_of
from farm.artifacts.storage import at_once, readable
from farm.builds.plan import is_unfinished, plan_digest
from farm.client.fetching import read_work_order
from farm.errors import ArtifactGone, Conflict, FarmError, FarmFault, GateFailed, NotFound, QuotaExceeded, UsageError
from farm.extension import Loop
from farm.extras.radar.radar import KnownWork, RadarDocument, lacking, pool_for, radar_of, shadow_cell
from farm.jobs.rows import ToolchainLine
from farm.jobs.state import job_key, keys_of
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, NotShadowed, PlanDocument, ShadowedCell, ShadowNotes
from farm.results import ref_rules
from farm.results.report import BuildView
from farm.spec import digest_of
from farm.targets.pools import Pool, version_of
from farm.units import grouped
from farm.wire.asked import BUILD_ID, TAG, BuildId, ChosenGates, ToolchainStart
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from farm.app import Farm

log = get_logger(__name__)

RADAR_SECONDS = 30.0  # Seconds between two looks for toolchains that have appeared.
REPRODUCTION_LIMIT = 8 << 20  # Most bytes of a reproduction that are read.


def loops(farm: Farm) -> list[Loop]:
    """Return the loop that looks for new toolchains, if the farm has a radar: one of its own, it plans whole builds."""
    if not farm.settings.radar:
        return []
    step = partial(farm.part(Toolchains).follow, farm.settings.radar)
    return [Loop("radar", step, RADAR_SECONDS, first=RADAR_SECONDS)]


@with_config(ConfigDict(extra="forbid"))
class ShadowBuild(TypedDict):
    """A build of what a ref names under another toolchain; `toolchain` empty: the newest that has a worker.

    `cells` are patterns of identifiers, none means all. `against`: an ended build to compare with in place of the ref.
    """

    build_id: BuildId
    ref: Annotated[str, Field(pattern=TAG, default="prod")]
    toolchain: ToolchainStart
    cells: Annotated[Sequence[Annotated[str, Field(max_length=500)]], Field(max_length=1000, default=[])]
    gates: Annotated[ChosenGates | None, Field(default=None)]
    against: Annotated[str, Field(pattern=rf"^$|{BUILD_ID}", default="")]
    defaults: Annotated[bool, Field(description="also the limits of the manifest and the usual ones", default=True)]


class Toolchains:
    """What the farm's toolchains make of the cells that refs name."""

    def __init__(self, farm: Farm) -> None:
        self._store, self._artifacts, self._known = farm.store, farm.artifacts, farm.known
        self._admission, self._reader, self._finisher = farm.admission, farm.build_reader, farm.build_finisher
        self._check_named = farm.check_named
        self._refs, self._known_failures, self._baselines = farm.refs, farm.failures, farm.baselines
        self._tried: set[str] = set()
        """What `follow` has started, or could not start."""

    def lines(self, namespace: str, ref: str) -> list[ToolchainLine]:
        """Return the toolchains of each target, the oldest first, with what a ref names of them."""
        cells = list(self._refs.read_through(namespace, ref)["cells"].values())
        live: dict[tuple[str, str], int] = {(cell["target"], cell["toolchain"]): 0 for cell in cells}
        rows = [(row["name"], Pool.from_dict(row["pool"])) for row in self._store.workers.pools()]
        places = {name: (str(pool.target), pool.toolchain) for name, pool in rows}
        live |= dict.fromkeys(places.values(), 0)
        for worker in self._store.workers.list():
            # One worker may serve several pools of a toolchain.
            for place in {places[name] for name in worker["pools"] if name in places}:
                live[place] += 1
        return [
            {
                "target": target,
                "toolchain": toolchain,
                "live_workers": live[target, toolchain],
                "named": sum(not cell.get("superseded") for cell in found),
                "superseded": sum(bool(cell.get("superseded")) for cell in found),
            }
            for target, toolchain in sorted(live, key=lambda place: (place[0], version_of(place[1]), place[1]))
            for found in [[cell for cell in cells if (cell["target"], cell["toolchain"]) == (target, toolchain)]]
        ]

    # --- the shadow build ---------------------------------------------------------------------------------------

    def shadow(self, namespace: str, wish: ShadowBuild, *, by: str, max_cells: int = 0) -> BuildView:
        """Accept a build that compiles the cells of a ref under another toolchain, and return it.

        It moves no ref. Its tuning goes on from the databases of its own pools. Repeating it is harmless.

        Raises NotFound without such a ref or toolchain, UsageError if no input is left, QuotaExceeded, Conflict.
        """
        build_id = wish["build_id"]
        text = f"# A shadow of {wish['ref']} under another toolchain: {wish['toolchain'] or 'the newest'}\n".encode()
        request = digest_of({name: value for name, value in wish.items() if name != "build_id"})
        if not self._admission.is_accepted(namespace, build_id, text, request):
            document = self._plan(namespace, wish, by)
            document["build"]["request"] = request
            self._admission.check_quotas(namespace, by, sum(map(is_unfinished, document["cells"])), max_cells)
            self._admission.accept(document, text)
            log.info("shadow build submitted", build=build_id, ref=wish["ref"], cells=len(document["cells"]), by=by)
        return self._reader.get(namespace, build_id)

    def follow(self, ref: str) -> list[str]:
        """Start a shadow build in each namespace for a newer toolchain that has a worker now; return their ids.

        Each toolchain is tried once for each ref. Repeating it is harmless.
        """
        started = []
        for namespace in self._artifacts.list_folders("ns/"):
            newer = _newer(self.lines(namespace, ref)) if self._refs.find(namespace, ref) else []
            for toolchain in newer:
                name = f"{namespace} {ref} {toolchain}"
                build_id = self._artifacts.build_id_of("shadow", name)
                if name in self._tried:
                    continue
                # Its documents alone say nothing: storage or the store may have gone away in between.
                known = self._admission.is_whole(build_id) or self._reader.read_report(namespace, build_id)
                self._tried.add(name)  # Also if a mistake of ours ends it: the next look goes on with the others.
                if known:
                    continue
                wish = ShadowBuild(
                    build_id=build_id, ref=ref, toolchain=toolchain, cells=[], gates=None, against="", defaults=True
                )
                try:
                    self.shadow(namespace, wish, by="radar")
                    started.append(build_id)
                except FarmError as error:
                    if isinstance(error, FarmFault | QuotaExceeded):  # It may be possible later.
                        self._tried.discard(name)
                    if isinstance(error, FarmFault):
                        raise
                    log.warning("no shadow build", namespace=namespace, toolchain=toolchain, error=error.message)
        return started

    def _plan(self, namespace: str, wish: ShadowBuild, by: str) -> PlanDocument:
        ref = self._refs.require(namespace, wish["ref"])
        self._known.require_index(namespace)
        patterns = wish["cells"] or ["*"]
        named = ref_rules.given(self._refs.snapshot(ref["snapshot"])["cells"].values())
        chosen = [cell for name, cell in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        pools = self._store.workers.pools()
        there = [(Pool.from_dict(pool["pool"]), pool["live_workers"]) for pool in pools]
        cells, left_out, before = self._cells(namespace, wish, chosen, there)
        if not cells:
            known = sorted({pool["pool"]["toolchain"] for pool in pools}, key=version_of)
            what = f"the toolchain {wish['toolchain']}" if wish["toolchain"] else "a newer toolchain with a worker"
            why = f": {left_out[0]['identifier']}: {left_out[0]['text']}" if left_out else ""
            hint = f"known are {', '.join(known) or 'none'}"
            raise NotFound(f"no cell of {wish['ref']} can be compiled by {what}{why}", hint=hint)
        keys = {cell["identifier"]: keys_of(order, cell["key"]) for cell in cells if (order := cell["order"])}
        facts = self._known.whole(namespace, keys)
        live = {pool["name"]: pool["live_workers"] for pool in pools}
        shared = {cell["identifier"]: job_key(cell["order"], cell["key"]) for cell in cells}
        running = set(self._store.jobs.unfinished(namespace, [shared[name] for name in shared if name not in facts]))
        for cell in cells:
            name = cell["identifier"]
            cell["facts"], cell["live_workers"] = facts.get(name), live.get(cell["pool"], 0)
            cell["state"] = "hit" if name in facts else "joined" if shared[name] in running else "miss"
            if name in facts:
                cell["reason"] = ""
        self._known.require_inputs(cells, wish["ref"], "; or leave their cells out")
        ended = self._finisher.snapshot(namespace, wish["against"]) if wish["against"] else {}
        instead = {cell["identifier"]: cell for cell in ended.values()} or None
        gates: ChosenGates = wish["gates"] or {"baseline": "", "limits": {}, "budgets": {}}
        warnings = self._baselines.attach(namespace, "", cells, {**gates, "baseline": wish["ref"]}, instead=instead)
        label = wish["toolchain"] or ", ".join(sorted({cell["under"] for cell in before.values()}))
        notes = ShadowNotes(
            ref=wish["ref"], generation=ref["generation"], toolchain=label, before=before, left_out=left_out
        )
        return {
            "schema": 1,
            "build": {
                "id": wish["build_id"],
                "namespace": namespace,
                "name": f"{wish['ref']} under {label}"[:200],
                "labels": {},
                "created_by": by,
                "created_at": self._store.next_moment(),
                "cells": len(cells),
                "hits": sum(cell["state"] == "hit" for cell in cells),
                "max_parallel": None,
                "fail_fast": False,
                "warnings": warnings,
                "plan": plan_digest(cells),
                "shadows": wish["ref"],
            },
            "cells": cells,
            "shadow": notes,
        }

    def _cells(
        self, namespace: str, wish: ShadowBuild, chosen: Sequence[SnapshotCell], pools: Sequence[tuple[Pool, int]]
    ) -> tuple[list[CellPlan], list[NotShadowed], dict[str, ShadowedCell]]:
        """Return the cells of a shadow build, those that it leaves out, and what each is compared with."""
        works = at_once(lambda cell: self._work(namespace, cell), chosen)
        cells: list[CellPlan] = []
        left_out: list[NotShadowed] = []
        before: dict[str, ShadowedCell] = {}
        for cell, (work, error) in zip(chosen, works, strict=True):
            name = cell["identifier"]
            if work is None:
                text = "how it was made is no longer known: submit its manifest again"
                left_out.append({"identifier": name, "text": text, "breaks": False})
                continue
            order = work.order
            pool = pool_for(order["spec"], order["target"], pools, wish["toolchain"], cross="cross" in order)
            if pool is None:
                text = f"{order['target']} has no other toolchain {wish['toolchain']}".rstrip()
                left_out.append({"identifier": name, "text": text, "breaks": False})
            elif lacks := lacking(order["spec"], pool):
                left_out.append({"identifier": name, "text": lacks, "breaks": True})
            else:
                key, toolchain = cell["key"], cell["toolchain"]
                before[name] = ShadowedCell(key=key, toolchain=toolchain, under=pool.toolchain, error=error)
                cells.append(shadow_cell(cell, work, pool, wish["ref"], defaults=wish["defaults"]))
        return cells, left_out, before

    def _work(self, namespace: str, cell: SnapshotCell) -> tuple[KnownWork | None, float | None]:
        """Return how a program was made, from its build's plan, else its reproduction; and its largest error."""
        sidecar = self._artifacts.lookup(readable(namespace), cell["key"])
        if sidecar is None:
            return None, None
        error = max(facts_of(sidecar)["errors"].values(), default=None)
        build = str(sidecar.get("build") or "")
        try:
            planned = self._reader.read_plan(sidecar["namespace"], build) if build else None
        except NotFound:  # It is kept for `keep_days`.
            planned = None
        for each in planned["cells"] if planned else ():
            if each["order"] and cell["key"] in keys_of(each["order"], each["key"]):
                return KnownWork(each["order"], each["limits"], each["gates"], each["priority"], each["line"]), error
        return self._from_reproduction(sidecar["namespace"], build, sidecar), error

    def _from_reproduction(self, namespace: str, build: str, sidecar: Sidecar) -> KnownWork | None:
        if not (blob := sidecar["blobs"].get("reproduction")):
            return None
        try:
            # Workers write it: what is planned from it has to be the compile that its program's key names.
            data = self._artifacts.read_blob(blob["digest"], limit=REPRODUCTION_LIMIT)
            document = read_work_order(data, sidecar, f"the work order {blob['digest']}")
        except (ArtifactGone, UsageError):
            return None
        report = self._reader.read_report(namespace, build) if build else None
        judged = next((each for each in report["cells"] if each["key"] == document["key"]), None) if report else None
        gates = (
            judged["gate"] if judged else {"tolerance": {}, "weak": "warn", "on_fail": "fail", "unverifiable": "warn"}
        )
        return KnownWork(document["order"], document["limits"], gates, 0, judged["line"] if judged else 0)

    def radar(self, namespace: str, build_id: str) -> RadarDocument:
        """Return what a shadow build found. Raises NotFound for another build."""
        report = self._reader.report(namespace, build_id)
        notes = report.get("shadow")
        if notes is None:
            raise NotFound(f"build {report['build']['id']} is not a shadow build", hint="see `farm toolchain radar`")
        return radar_of(report, notes)

    # --- what readers get ---------------------------------------------------------------------------------------

    def promote(self, namespace: str, build_id: str, *, force: bool = False) -> RefView:
        """Let a ref give readers what a shadow build made; keep the programs before for those who name their toolchain.

        One conditional write of the ref: if somebody has moved it since the shadow build was planned, nothing changes.
        Repeating it is harmless. With `force` the cells that passed are taken although others did not.

        Raises GateFailed if something speaks against it, Conflict if the ref has moved, Untrusted if the server's trust
        policy refuses a program.
        """
        found = self.radar(namespace, build_id)
        if found["state"] != "reported":
            raise Conflict(f"build {found['build']} has not ended", hint=f"`farm watch {found['build']}`")
        if not found["promotable"] and not force:
            hint = "`farm toolchain report` lists what speaks against it; --force takes the cells that passed"
            raise GateFailed(f"{found['ref']} stays: {found['why']}", hint=hint)
        report = self._reader.report(namespace, found["build"])
        build, moment = report["build"], report["build"]["created_at"]
        passing = {cell["identifier"] for cell in found["cells"] if cell["passes"]}
        new = ref_rules.entries_of(build, moment, (cell for cell in report["cells"] if cell["identifier"] in passing))
        if not new:
            raise GateFailed(f"{found['ref']} stays: no cell passed", hint="`farm toolchain report` lists why")
        moved = self._refs.move(
            namespace,
            found["ref"],
            lambda there: ref_rules.promoted(there, new, moment),
            generation=found["generation"],
            check=lambda _, after: self._check_named(namespace, found["ref"], [after[name] for name in new]),
        )
        self._known_failures.taken(namespace, {cell["key"] for cell in new.values()})
        return moved

    def choose(self, namespace: str, ref: str, toolchain: str, *, generation: int | None = None) -> RefView:
        """Let a ref give readers the programs of another toolchain that it still has: this rolls back.

        `toolchain` is the start of its id; empty: the one that was superseded last. One conditional write; the programs
        that readers get until then are kept for those who name their toolchain.

        Raises NotFound without such a ref, or if it has no program of that toolchain, Conflict.
        """
        now = self._refs.require(namespace, ref)
        moment = self._store.next_moment()

        def update(there: Cells) -> Cells:
            try:
                return ref_rules.rolled_back(there, toolchain, moment)
            except LookupError:
                known = ", ".join(sorted({cell["toolchain"] for cell in there.values()}, key=version_of))
                what = f"of {toolchain}" if toolchain else "of a toolchain before"
                raise NotFound(f"{ref} has kept no program {what}", hint=f"it has {known}") from None

        return self._refs.move(
            namespace,
            ref,
            update,
            generation=now["generation"] if generation is None else generation,
            check=lambda before, after: self._check_named(namespace, ref, ref_rules.brought(before, after)),
        )


def _newer(lines: Iterable[ToolchainLine]) -> list[str]:
    """Return the newest live toolchain of each target that is newer than what readers get."""
    newer = set[str]()
    for found in grouped(lines, itemgetter("target")).values():
        named = [version_of(line["toolchain"]) for line in found if line["named"]]
        live = [(version_of(line["toolchain"]), line["toolchain"]) for line in found if line["live_workers"]]
        if named and live and max(live)[0] > max(named):
            newer.add(max(live)[1])
    return sorted(newer)
