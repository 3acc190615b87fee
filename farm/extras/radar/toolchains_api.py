"""What a client asks about toolchains, `client.toolchains`; and bisecting: the first one under which a cell fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from farm.artifacts.refs import RefView, SnapshotCell
from farm.client.transport import Api, build_named
from farm.errors import Conflict, NotFound, UsageError
from farm.extras.radar.radar import RadarCell, RadarDocument
from farm.jobs.rows import ToolchainLine
from farm.jobs.state import Fault, policy_of
from farm.results.gates import DECIDED
from farm.results.ref_rules import given
from farm.results.report import BuildView
from farm.targets.pools import begins
from farm.units import grouped
from farm.wire.asked import ChosenGates

if TYPE_CHECKING:
    from farm.client.client import FarmClient


class ToolchainsApi(Api):
    """The toolchains of each target, and what a ref gives readers of them."""

    def all(self, ref: str = "prod") -> list[ToolchainLine]:
        """Return the toolchains of each target, the oldest first, with what a ref names of them."""
        return self._transport.items("/v1/toolchains", ToolchainLine, ref=ref)

    def shadow(
        self,
        ref: str = "prod",
        toolchain: str = "",
        *,
        cells: Sequence[str] = (),
        gates: ChosenGates | None = None,
        against: str = "",
        defaults: bool = True,
        new_id: str = "",
    ) -> BuildView:
        """Create a build that compiles what a ref names under another toolchain, and return it. It moves no ref.

        `toolchain` is the start of its id; without it, it is the newest that has a worker. `cells` are patterns of
        identifiers (all if there are none), `gates` are laid over those that the cells have, `against` is an ended
        build to compare with in place of the ref. Without `defaults` only `gates` count, not those of the manifest.

        Raises NotFound if no such toolchain is known.
        """
        from farm.client.freezing import new_build_id

        body = {
            "build_id": new_id or new_build_id(),
            "ref": ref,
            "toolchain": toolchain,
            "cells": list(cells),
            "gates": gates,
            "against": against,
            "defaults": defaults,
        }
        return self._transport.post("/v1/toolchains/shadows", BuildView, body, timeout=300.0)

    def radar(self, build_id: str) -> RadarDocument:
        """Return what a shadow build found. Raises NotFound for another build."""
        return self._transport.get(f"/v1/builds/{build_named(build_id)}/radar", RadarDocument)

    def promote(self, build_id: str, *, force: bool = False) -> RefView:
        """Let the ref of a shadow build give readers its programs, and return the ref.

        Raises GateFailed if something speaks against it, unless `force` is set; Conflict if the ref has moved since.
        """
        whole_id = self._transport.get(f"/v1/builds/{build_named(build_id)}", BuildView)["id"]
        return self._transport.post("/v1/toolchains/promote", RefView, {"build_id": whole_id, "force": force})

    def roll_back(self, ref: str = "prod", toolchain: str = "", *, generation: int | None = None) -> RefView:
        """Let a ref give readers the programs of a toolchain that it has kept, by default the one before.

        With `generation` only if the ref has that one. Raises NotFound, Conflict.
        """
        before = None if toolchain else self._client.refs.get(ref)
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would swap the programs again.
            generation = before["generation"]
        query = "" if generation is None else f"?generation={generation}"
        body = {"ref": ref, "toolchain": toolchain}
        try:
            return self._transport.post(f"/v1/toolchains/rollback{query}", RefView, body)
        except Conflict:
            if not before:
                raise
            now, swapped = self._client.refs.get(ref), (generation, before["snapshot"], before["cells"].keys())
            if (now["generation"] - 1, now["previous"], now["cells"].keys()) != swapped:
                raise
            return now  # It was us: the answer to the first request was lost.


class TryVerdict(StrEnum):
    """What a try says about a toolchain: `skipped` ones cannot be judged, as the versions of `git bisect skip`."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


class Tried(TypedDict):
    """One toolchain that was tried: `compiled` is false if its program was there already, `build` is empty if known."""

    toolchain: str
    verdict: str
    text: str
    build: str
    compiled: bool


class BisectedCell(TypedDict):
    """What was found of a cell: `first_bad` is empty if there are no `suspects`, or several."""

    identifier: str
    first_bad: str
    last_good: str
    suspects: list[str]
    text: str
    compiles: int
    tried: list[Tried]


OnStep = Callable[[str, Tried], None]  # Called after each try, with the cell's identifier.


@dataclass
class Bisection:
    """The search of one cell among toolchains. As far as is known, the last one is wrong and the first one is not.

    Tries the two ends if nobody knows them, then at most log2 of the rest, rounded up; more if some cannot be judged.
    """

    identifier: str
    toolchains: Sequence[str]
    tried: list[Tried] = field(default_factory=list)

    def note(
        self, toolchain: str, verdict: TryVerdict, text: str = "", build: str = "", *, compiled: bool = False
    ) -> None:
        """Take what a try said."""
        self.tried.append(
            {"toolchain": toolchain, "verdict": verdict.value, "text": text, "build": build, "compiled": compiled}
        )

    def next(self) -> str | None:
        """Return the toolchain to try; None if the search is over."""
        ends = self._ends()
        if open_end := next((end for end in ends if self._verdict(end) is None), None):
            return open_end
        if [self._verdict(end) for end in ends] != [TryVerdict.GOOD, TryVerdict.BAD]:
            return None
        # In the middle of the longest stretch that is not judged, so that a row of broken ones costs few tries.
        stretches: list[list[str]] = [[]]
        for toolchain in self._around()[1:-1]:
            if self._verdict(toolchain) is None:
                stretches[-1].append(toolchain)
            else:
                stretches.append([])
        longest = max(stretches, key=len)
        return longest[(len(longest) - 1) // 2] if longest else None

    @property
    def suspects(self) -> Sequence[str]:
        """The toolchains that may be the first wrong one, when the search is over; empty if nothing was found."""
        over = self.next() is None and [self._verdict(end) for end in self._ends()] == [TryVerdict.GOOD, TryVerdict.BAD]
        return self._around()[1:] if over else []

    def found(self) -> BisectedCell:
        """Return what the search found, when it is over."""
        suspects = list(self.suspects)
        said = {tried["toolchain"]: tried["text"] for tried in self.tried}
        return {
            "identifier": self.identifier,
            "first_bad": suspects[0] if len(suspects) == 1 else "",
            "last_good": self._around()[0] if suspects else "",
            "suspects": suspects,
            "text": said.get(suspects[-1], "") if suspects else self._why_none(),
            "compiles": sum(tried["compiled"] for tried in self.tried),
            "tried": self.tried,
        }

    def _why_none(self) -> str:
        if self._verdict(self.toolchains[0]) is TryVerdict.BAD:
            return f"it is wrong under {self.toolchains[0]} already"
        if self._verdict(self.toolchains[-1]) is TryVerdict.GOOD:
            return f"nothing is wrong under {self.toolchains[-1]}"
        return "too few toolchains could be judged"

    def _verdict(self, toolchain: str) -> TryVerdict | None:
        """Return what the last try of a toolchain said; None if there was none."""
        said = [tried["verdict"] for tried in self.tried if tried["toolchain"] == toolchain]
        return TryVerdict(said[-1]) if said else None

    def _ends(self) -> list[str]:
        """Return the first and the last toolchain that are not skipped; nothing if all are."""
        left = [each for each in self.toolchains if self._verdict(each) is not TryVerdict.SKIPPED]
        return [left[0], left[-1]] if left else []

    def _around(self) -> Sequence[str]:
        """Return the toolchains from the last good one to the first bad one after it."""
        verdicts = [self._verdict(each) for each in self.toolchains]
        bad = verdicts.index(TryVerdict.BAD)
        good = max(place for place, verdict in enumerate(verdicts[:bad]) if verdict is TryVerdict.GOOD)
        return self.toolchains[good : bad + 1]


def bisect(
    client: FarmClient,
    cells: Sequence[str],
    *,
    ref: str = "prod",
    good: str = "",
    bad: str = "",
    gates: ChosenGates | None = None,
    on_step: OnStep = lambda cell, tried: None,
) -> list[BisectedCell]:
    """Return the first toolchain under which each cell of a ref (by its identifier) fails, or misses one of `gates`.

    `good` and `bad` are starts of ids of toolchains that are known to be so. Without `good` the search begins at the
    toolchain of the ref's own program, which counts as good; without `bad` the newest with a worker is tried first.
    Speed is compared with the first good one, on one node. Tries under one toolchain share a build, and nothing that
    readers see moves.

    Raises NotFound without such a cell or toolchain, UsageError if no two toolchains are left.
    """
    named = given(client.ls(ref))
    if absent := [cell for cell in cells if cell not in named]:
        raise NotFound(f"{ref} has no cell {absent[0]}", hint=f"`farm ls --ref {ref}` lists them")
    lines = ToolchainsApi.of(client).all(ref)
    searches = [_search(cell, named[cell]["target"], named[cell]["toolchain"], lines, good, bad) for cell in cells]
    against = _first_good(client, ref, searches, named) if gates else {}
    while wanted := _wanted(searches, against):
        builds = [
            ToolchainsApi.of(client).shadow(
                ref, version, cells=[search.identifier for search in asking], gates=gates, against=base, defaults=False
            )["id"]
            for (version, base), asking in wanted.items()
        ]
        for build in builds:
            _wait(client, build)
        for build, ((version, _), asking) in zip(builds, wanted.items(), strict=True):
            radar = ToolchainsApi.of(client).radar(build)
            for search in asking:
                _take(search, version, radar)
                on_step(search.identifier, search.tried[-1])
    return [search.found() for search in searches]


def verdict_on(cell: RadarCell) -> TryVerdict:
    """Return what a cell of a shadow build says about its toolchain, by the gates that were asked for.

    What ended by the farm's fault, and numbers that could not be compared surely, say nothing.
    """
    if cell["passes"]:
        decided = all(row["outcome"] in DECIDED for row in cell["compared"])
        return TryVerdict.GOOD if decided else TryVerdict.SKIPPED
    if not cell["kind"] or policy_of(cell["kind"]).fault is Fault.FARM:
        return TryVerdict.SKIPPED
    return TryVerdict.BAD


def _search(cell: str, target: str, own: str, lines: Sequence[ToolchainLine], good: str, bad: str) -> Bisection:
    there = [
        line["toolchain"] for line in lines if line["target"] == target and (line["live_workers"] or line["named"])
    ]
    own_place = there.index(own) if own in there[:-1] else 0
    first = _place(there, good) if good else own_place
    last = _place(there, bad) if bad else len(there) - 1
    versions = there[first : last + 1]
    if len(versions) < 2:
        raise UsageError(
            f"{cell}: there is nothing between {good or 'its own'} and {bad or 'the newest'} toolchain",
            hint=f"{target} has {', '.join(there) or 'none with a worker'}",
        )
    search = Bisection(cell, versions)
    if good or own == versions[0]:
        search.note(versions[0], TryVerdict.GOOD, "it is known" if good else "the ref names its program")
    if bad:
        search.note(versions[-1], TryVerdict.BAD, "it is known")
    return search


def _place(versions: Sequence[str], start: str) -> int:
    found = [place for place, version in enumerate(versions) if begins(version, start)]
    if not found:
        raise NotFound(f"no toolchain {start}", hint=f"known are {', '.join(versions) or 'none'}")
    return found[-1]


def _first_good(
    client: FarmClient, ref: str, searches: Sequence[Bisection], named: Mapping[str, SnapshotCell]
) -> dict[str, str]:
    """Make the first toolchain's programs, with which speed is compared; return the build of each cell that needs one.

    A cell whose program the ref names is compared with that.
    """
    starts = (each for each in searches if named[each.identifier]["toolchain"] != each.toolchains[0])
    found: dict[str, str] = {}
    for version, asking in grouped(starts, lambda each: each.toolchains[0]).items():
        names = [search.identifier for search in asking]
        build = ToolchainsApi.of(client).shadow(ref, version, cells=names, defaults=False)["id"]
        _wait(client, build)
        radar = ToolchainsApi.of(client).radar(build)
        for search in asking:
            if any(cell["identifier"] == search.identifier and cell["passes"] for cell in radar["cells"]):
                found[search.identifier] = build
            search.tried = [tried for tried in search.tried if tried["toolchain"] != version]
            _take(search, version, radar)
    return found


def _wanted(searches: Sequence[Bisection], against: Mapping[str, str]) -> dict[tuple[str, str], list[Bisection]]:
    """Return which toolchains are to be tried next, compared with which build, with the searches that ask for each."""
    wanted: dict[tuple[str, str], list[Bisection]] = {}
    for search in searches:
        if (version := search.next()) is not None:
            wanted.setdefault((version, against.get(search.identifier, "")), []).append(search)
    return wanted


def _take(search: Bisection, version: str, radar: RadarDocument) -> None:
    cell = next((cell for cell in radar["cells"] if cell["identifier"] == search.identifier), None)
    if cell:
        search.note(version, verdict_on(cell), cell["text"], radar["build"], compiled=not cell["hit"])
        return
    left = next((each for each in radar["left_out"] if each["identifier"] == search.identifier), None)
    verdict = TryVerdict.BAD if left and left["breaks"] else TryVerdict.SKIPPED
    search.note(version, verdict, left["text"] if left else "", radar["build"])


def _wait(client: FarmClient, build: str) -> None:
    for _ in client.watch(build):
        pass
