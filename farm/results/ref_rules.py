"""The rules of refs: who may put which cell into which ref, and what a reader gets. Pure; `docs/refs.md` says them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from farm.artifacts.refs import SnapshotCell
from farm.artifacts.storage import sidecar_key
from farm.jobs.state import State
from farm.results.tradeoff import error_of
from farm.targets.pools import begins, version_of
from farm.units import grouped, view_of

if TYPE_CHECKING:
    from farm.artifacts.refs import Cells
    from farm.jobs.facts import ArtifactFacts
    from farm.jobs.rows import PlannedBuild
    from farm.matrix.planned import PlanDocument
    from farm.results.report import BuildView, JudgedCell, Report
    from farm.wire.program import Sidecar

LATEST = "latest"  # The ref that a finished build moves to the cells that passed.
PROD = "prod"  # The ref that production reads, by which it is decided which of several toolchains builds use.

UNNAMED_FOR = 30 * 86_400.0  # Seconds for which a manifest's submissions must leave an entry out before one drops it.

# --- who may be named, and as what ----------------------------------------------------------------------------------


def has_passed(cell: JudgedCell, refused: Collection[str] = ()) -> bool:
    """Whether a cell has an artifact and no gate says anything against it; `refused` are keys that it may not have."""
    facts = cell["facts"]
    passed = cell["state"] == State.SUCCEEDED and not cell["warning"]
    return passed and facts is not None and facts["key"] not in refused


def is_proven(facts: ArtifactFacts, published: str) -> bool:
    """Whether a program was shown to be faster than that with the key `published`, in turns on one device."""
    against = facts.get("against")
    return against is not None and (against["key"], against["verdict"]) == (published, "faster")


def submitted(build: PlannedBuild) -> float:
    """Return when the submission was made for which a planned build stands (Unix seconds, by the store's clock).

    A follow-up stands for the build that it follows.
    """
    return build.get("submitted") or build["created_at"]


def _named(manifest: str, when: float, cell: JudgedCell, facts: ArtifactFacts) -> SnapshotCell:
    # The key is the artifact's: if the tuning was cut short, it differs from the cell's.
    known = {**cell, **facts, "manifest": manifest, "submitted": when, "error": error_of(facts)}
    return view_of(SnapshotCell, known)


def entries_of(build: PlannedBuild | BuildView, when: float, cells: Iterable[JudgedCell]) -> dict[str, SnapshotCell]:
    """Return the cells of a build that have a program as the entries of a snapshot, submitted `when` (Unix seconds)."""
    named = (_named(build["name"], when, cell, cell["facts"]) for cell in cells if cell["facts"])
    return entries(build["namespace"], named)


def passed_entries(report: Report) -> dict[str, SnapshotCell]:
    """Return the cells of a finished build that passed, as a ref names them."""
    build = report["build"]
    return entries_of(build, build["created_at"], filter(has_passed, report["cells"]))


def entries(namespace: str, cells: Iterable[SnapshotCell]) -> dict[str, SnapshotCell]:
    """Return cells as the entries of a snapshot, by their names there."""
    return {
        f"{cell['identifier']}@{cell['device']}@{cell['toolchain']}": {
            **cell,
            "sidecar": cell.get("sidecar") or sidecar_key(namespace, cell["key"]),
        }
        for cell in cells
    }


# --- what `latest` becomes ------------------------------------------------------------------------------------------


def entered(there: Cells, new: Cells, is_given_up: Callable[[SnapshotCell], bool] = lambda entry: False) -> Cells:
    """Return entries with the `new` ones of a submission, and without those that `is_given_up` removes.

    An entry that was submitted later stays. Readers get a new one if it was submitted after what they get, and after
    what people have chosen in its place.
    """
    kept, current = dict(there), _current(there)
    moments = dict(sorted((_place(cell), cell.get("superseded", cell["submitted"])) for cell in there.values()))
    for name, cell in new.items():
        place, old = _place(cell), there.get(name)
        if old and old["submitted"] >= cell["submitted"]:
            continue
        kept[name], before = cell, current.get(place, name)
        if before != name and moments[place] < cell["submitted"]:
            kept[before] = {**there[before], "superseded": cell["submitted"]}
        elif before != name:
            kept[name] = {**cell, "superseded": moments[place]}
    kept = {name: cell for name, cell in kept.items() if name in new or not is_given_up(cell)}
    places = _current(kept)
    return {name: cell for name, cell in kept.items() if _place(cell) in places}


def given_up(planned: PlanDocument, passed: Sequence[JudgedCell]) -> Callable[[SnapshotCell], bool]:
    """Return a function that says if an entry's manifest gave it up: it was renamed, or another toolchain builds it.

    `planned` is a build's plan, `passed` its judged cells that `latest` may name. An entry whose cell did not pass now
    stays, and a build that may have some of the cells alone (a retry, or with `only`) drops nothing.
    """
    build = planned["build"]
    before = submitted(build) - UNNAMED_FOR
    waited_for = {cell["identifier"] for cell in planned["cells"]} - {cell["identifier"] for cell in passed}

    def is_given_up(entry: SnapshotCell) -> bool:
        return (
            not (build.get("retries") or build.get("only"))
            and entry.get("manifest") == build["name"]
            and entry["submitted"] < before
            and entry["identifier"] not in waited_for
        )

    return is_given_up


def replaced(there: Cells, faster: Cells, slower: Mapping[str, str]) -> Cells:
    """Return entries with a follow-up's `faster` programs in the place of those with the keys `slower`, by identifier.

    An entry with another key stays, and so does one that was submitted later.
    """
    changed = dict(there)
    for name, cell in faster.items():
        old = there.get(name)
        if old and old["key"] == slower[cell["identifier"]] and old["submitted"] <= cell["submitted"]:
            changed[name] = {**cell, "superseded": since} if (since := old.get("superseded")) else cell
    return changed


# --- what people choose ---------------------------------------------------------------------------------------------


def promoted(there: Cells, new: Cells, moment: float) -> Cells:
    """Return entries with the `new` ones, which readers get; what they got before is superseded since `moment`."""
    now = _current(there)
    if all(now.get(_place(cell)) == name and there[name]["key"] == cell["key"] for name, cell in new.items()):
        return there
    return {**_taken(there, new.values(), moment), **new}


def rolled_back(there: Cells, toolchain: str, moment: float) -> Cells:
    """Return entries of which readers get those again that another toolchain has made; `moment` as in `promoted`.

    `toolchain` is the start of its id. Without it, what readers lost last comes back: what a promotion or a rollback
    superseded, else what a later submission came before. Raises LookupError if there is nothing.
    """
    fitting = [name for name, cell in there.items() if begins(cell["toolchain"], toolchain)]
    has_it = {_place(there[name]) for name in fitting if not there[name].get("superseded")} if toolchain else set()
    lost = sorted((readers_order(there[name]), name) for name in fitting if _place(there[name]) not in has_it)
    lost = [each for each in lost if there[each[1]].get("superseded")]
    if not (lost or has_it):
        raise LookupError(toolchain)
    back = {_place(there[name]): name for (since, *_), name in lost if toolchain or since == lost[-1][0][0]}
    changed = _taken(there, [there[name] for name in back.values()], moment)
    for name in back.values():
        changed[name] = there[name].copy()
        changed[name].pop("superseded", None)
    return changed


def brought(before: Cells, after: Cells) -> list[SnapshotCell]:
    """Return the entries that readers get after a move and did not get before."""
    return [cell for name, cell in after.items() if not cell.get("superseded") and before.get(name) != cell]


# --- what readers get -----------------------------------------------------------------------------------------------


def readers_order(cell: SnapshotCell) -> tuple[float, float, tuple[int, ...]]:
    """Return the sort key by which readers get the last of several entries: what is not superseded, or was last.

    One shadow build may have several toolchains, so of one moment it is the newest.
    """
    return cell.get("superseded", inf), cell["submitted"], version_of(cell["toolchain"])


def last(cells: Iterable[SnapshotCell]) -> SnapshotCell:
    """Return the entry that readers get of several that fit them."""
    return sorted(cells, key=readers_order)[-1]


def given(cells: Iterable[SnapshotCell]) -> dict[str, SnapshotCell]:
    """Return what readers get who name no toolchain, by identifier."""
    return {cell["identifier"]: cell for cell in sorted(cells, key=readers_order) if not cell.get("superseded")}


def family(members: Iterable[tuple[SnapshotCell, Sidecar]]) -> list[tuple[SnapshotCell, Sidecar]]:
    """Return the members of one model file and toolchain: what readers get last, then the most, then the first."""
    # What a sidecar says may not be checked yet.
    families = grouped(members, lambda member: (member[0]["toolchain"], str(member[1]["spec"].get("model"))))
    return max(families.values(), key=lambda found: (max(readers_order(cell) for cell, _ in found), len(found)))


def _place(cell: SnapshotCell) -> tuple[str, str]:
    return cell["identifier"], cell["device"]


def _current(there: Cells) -> dict[tuple[str, str], str]:
    """Return the names of the entries that readers get, by their places: all others are superseded."""
    return {_place(cell): name for name, cell in there.items() if not cell.get("superseded")}


def _taken(there: Cells, by: Iterable[SnapshotCell], moment: float) -> dict[str, SnapshotCell]:
    """Return entries with those in the places of others superseded since a moment, if they were not before."""
    places = {_place(cell) for cell in by}
    return {
        name: {**cell, "superseded": moment} if _place(cell) in places and not cell.get("superseded") else cell
        for name, cell in there.items()
    }
