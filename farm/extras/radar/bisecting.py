"""Bisecting: finds for each of some cells the first toolchain under which it fails or gets slow, with few compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import TypedDict

from farm.errors import NotFound, UsageError
from farm.extras.radar.bisection import Bisection, TryVerdict, verdict_on
from farm.extras.radar.radar import RadarDocument
from farm.extras.radar.toolchains_api import ToolchainsApi
from farm.jobs.rows import ToolchainLine
from farm.results.ref_rules import given
from farm.targets.pools import begins
from farm.wire.asked import ChosenGates

if TYPE_CHECKING:
    from farm.client.client import FarmClient


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


class Step(NamedTuple):
    """One try, as it is announced."""

    identifier: str
    tried: Tried


OnStep = Callable[[Step], None]
"""Called after each try."""


@dataclass
class _Search:
    """The search of one cell."""

    identifier: str
    versions: Sequence[str]
    search: Bisection
    tried: list[Tried] = field(default_factory=list)

    def note(self, version: int, verdict: TryVerdict, text: str, build: str, *, compiled: bool) -> Step:
        self.search.judge(version, verdict)
        self.tried.append(
            {
                "toolchain": self.versions[version],
                "verdict": verdict.value,
                "text": text,
                "build": build,
                "compiled": compiled,
            }
        )
        return Step(self.identifier, self.tried[-1])

    def found(self) -> BisectedCell:
        suspects = [self.versions[version] for version in self.search.suspects]
        last_good = self.search.last_good
        said = {tried["toolchain"]: tried["text"] for tried in self.tried}
        text = said.get(suspects[-1], "") if suspects else self._why_none()
        return {
            "identifier": self.identifier,
            "first_bad": suspects[0] if len(suspects) == 1 else "",
            "last_good": self.versions[last_good] if last_good is not None else "",
            "suspects": suspects,
            "text": text,
            "compiles": sum(tried["compiled"] for tried in self.tried),
            "tried": self.tried,
        }

    def _why_none(self) -> str:
        judged = [self.search.judged.get(version) for version in (0, len(self.versions) - 1)]
        if judged[0] is TryVerdict.BAD:
            return f"it is wrong under {self.versions[0]} already"
        if judged[1] is TryVerdict.GOOD:
            return f"nothing is wrong under {self.versions[-1]}"
        return "too few toolchains could be judged"


def bisect(
    client: FarmClient,
    cells: Sequence[str],
    *,
    ref: str = "prod",
    good: str = "",
    bad: str = "",
    gates: ChosenGates | None = None,
    on_step: OnStep = lambda step: None,
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
    while wanted := _wanted(searches):
        builds = {
            (version, base): ToolchainsApi.of(client).shadow(
                ref,
                version,
                cells=[search.identifier for search in asking],
                gates=gates,
                against=base,
                defaults=False,
            )["id"]
            for version, group in wanted.items()
            for base, asking in _by_baseline(group, against).items()
        }
        for build in builds.values():
            _wait(client, build)
        for (version, base), build in builds.items():
            radar = ToolchainsApi.of(client).radar(build)
            for search in _by_baseline(wanted[version], against)[base]:
                on_step(_take(search, version, radar))
    return [search.found() for search in searches]


def _search(cell: str, target: str, own: str, lines: Sequence[ToolchainLine], good: str, bad: str) -> _Search:
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
    search = _Search(cell, versions, Bisection(len(versions)))
    if good or own == versions[0]:
        search.note(0, TryVerdict.GOOD, "it is known" if good else "the ref names its program", "", compiled=False)
    if bad:
        search.note(len(versions) - 1, TryVerdict.BAD, "it is known", "", compiled=False)
    return search


def _place(versions: Sequence[str], start: str) -> int:
    found = [place for place, version in enumerate(versions) if begins(version, start)]
    if not found:
        raise NotFound(f"no toolchain {start}", hint=f"known are {', '.join(versions) or 'none'}")
    return found[-1]


def _first_good(
    client: FarmClient, ref: str, searches: Sequence[_Search], named: Mapping[str, object]
) -> dict[str, str]:
    """Make the first toolchain's programs, with which speed is compared; return the build of each cell that needs one.

    A cell whose program the ref names is compared with that.
    """
    starts: dict[str, list[_Search]] = {}
    for search in searches:
        if not _is_own(named[search.identifier], search.versions[0]):
            starts.setdefault(search.versions[0], []).append(search)
    found: dict[str, str] = {}
    for version, asking in starts.items():
        names = [search.identifier for search in asking]
        build = ToolchainsApi.of(client).shadow(ref, version, cells=names, defaults=False)["id"]
        _wait(client, build)
        radar = ToolchainsApi.of(client).radar(build)
        for search in asking:
            cell = next((each for each in radar["cells"] if each["identifier"] == search.identifier), None)
            if cell and cell["passes"]:
                found[search.identifier] = build
            compiled = cell is not None and not cell["hit"]
            verdict = verdict_on(cell) if cell else TryVerdict.SKIPPED
            search.tried = [tried for tried in search.tried if tried["toolchain"] != version]
            search.note(0, verdict, cell["text"] if cell else "it was left out", build, compiled=compiled)
    return found


def _is_own(cell: object, version: str) -> bool:
    return isinstance(cell, Mapping) and cell["toolchain"] == version


def _wanted(searches: Sequence[_Search]) -> dict[str, list[_Search]]:
    """Return which toolchains are to be tried next, with the searches that ask for each."""
    wanted: dict[str, list[_Search]] = {}
    for search in searches:
        if (version := search.search.next()) is not None:
            wanted.setdefault(search.versions[version], []).append(search)
    return wanted


def _by_baseline(searches: Sequence[_Search], against: Mapping[str, str]) -> dict[str, list[_Search]]:
    found: dict[str, list[_Search]] = {}
    for search in searches:
        found.setdefault(against.get(search.identifier, ""), []).append(search)
    return found


def _take(search: _Search, version: str, radar: RadarDocument) -> Step:
    place = search.versions.index(version)
    cell = next((cell for cell in radar["cells"] if cell["identifier"] == search.identifier), None)
    if cell:
        return search.note(place, verdict_on(cell), cell["text"], radar["build"], compiled=not cell["hit"])
    left = next((each for each in radar["left_out"] if each["identifier"] == search.identifier), None)
    verdict = TryVerdict.BAD if left and left["breaks"] else TryVerdict.SKIPPED
    return search.note(place, verdict, left["text"] if left else "", radar["build"], compiled=False)


def _wait(client: FarmClient, build: str) -> None:
    for _ in client.watch(build):
        pass
