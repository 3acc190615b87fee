"""Stored manifests and their triggers: what is kept, what people see of it, and when a trigger fires. Pure.

A trigger fires in two writes. The first claims the occasion: it counts it (`fired`) and makes it `pending`, with the
time until which its build belongs to the control plane that wrote it. The second says what came of it. Both are
conditional, so an occasion is claimed once, and one that a dead control plane had claimed is taken over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.manifest.values import runs_after
from farm.matrix.planned import FrozenManifest, SubmissionDocument
from farm.wire.asked import ChosenGates, Labels

if TYPE_CHECKING:
    from farm.manifest.entries import Manifest, TriggerEntry

LEASE = 300.0
"""Seconds for which a claimed occasion belongs to the control plane that claimed it."""

LATE = 600.0
"""Seconds after which a run of a schedule counts as late, and says so."""

MOST_MISSED = 1000
"""Missed runs that are counted."""


# --- documents --------------------------------------------------------------------------------------------------


class ManifestVersion(TypedDict):
    """One version of a stored manifest. `digest` is that of its content, `pushed` is in Unix seconds.

    `by` is the name of the token that pushed it, `token` the SHA-256 of its secret.
    """

    version: int
    digest: str
    pushed: float
    by: str
    token: NotRequired[str]


@with_config(ConfigDict(extra="forbid"))
class BuildWish(TypedDict):
    """What to build of a stored manifest: a version (default: the newest), labels, and gates laid over its own."""

    version: Annotated[int | None, Field(ge=1, default=None)]
    labels: Annotated[Labels, Field(default={})]
    gates: Annotated[ChosenGates | None, Field(default=None)]


class TriggerRun(TypedDict):
    """What came of a trigger: the build that it made of a version at a time (Unix seconds), or why it made none."""

    at: float
    why: str
    version: int
    build: str
    error: str


class TriggerView(TypedDict):
    """A trigger of a stored manifest.

    `text` is what it waits for: a schedule, an object, a target. `next` is when a schedule is due (Unix seconds).
    `problem` says what keeps it from firing now, `last` what came of it when it last fired.
    """

    kind: str
    text: str
    timezone: str
    next: float | None
    problem: str
    last: TriggerRun | None


class StoredManifest(TypedDict):
    """A stored manifest: its newest version is `version`; `versions` has those that are kept, the oldest first."""

    name: str
    version: int
    versions: list[ManifestVersion]
    triggers: list[TriggerView]


class ShownManifest(StoredManifest):
    """A stored manifest with the content of one version: `shown` is its number."""

    shown: int
    content: FrozenManifest


class PendingRun(TypedDict):
    """A claimed occasion: why it fires, which version it builds, and until when somebody does so (Unix seconds).

    `claim` is another text for each claim: storage takes equal bytes for the same write, repeated.
    """

    claim: str
    why: str
    warning: str
    version: int
    until: float
    seen: list[str]


class TriggerState(TriggerView):
    """A trigger as its manifest's head keeps it.

    `seen`: the object's version, or the toolchains, that were built (None: not looked yet); `tried`: those for which it
    fired last, so that a build that was refused is not tried again until something changes. `fired` counts.
    """

    seen: list[str] | None
    tried: list[str]
    fired: int
    pending: PendingRun | None


def as_submission(content: FrozenManifest, build_id: str, labels: Mapping[str, str]) -> SubmissionDocument:
    """Return the submission that a version's content stands for, with these labels in addition."""
    labels = {**content["labels"], **labels}
    return {**content, "build_id": build_id, "labels": labels, "only": (), "fail_fast": False}


# --- when a trigger fires ---------------------------------------------------------------------------------------


def triggers_of(manifest: Manifest, before: Sequence[TriggerState], now: float) -> list[TriggerState]:
    """Return the triggers of a manifest; one that was there `before` goes on, a new one begins `now`."""
    known = {_identity(state): state for state in before}
    new = (_new(entry, now) for entry in manifest.triggers)
    return list({_identity(state): known.get(_identity(state), state) for state in new}.values())


def claimed(state: TriggerState, now: float, version: int, found: Collection[str] | None, claim: str) -> TriggerState:
    """Return a trigger as it is after a look; if it fires, with a `pending` run that it did not have before.

    `found` is what is there now: the object's version, the toolchains in use; None if that is not known.
    """
    pending = state["pending"]
    if pending:
        over = pending["until"] <= now
        return {**state, "pending": {**pending, "claim": claim, "until": now + LEASE}} if over else state
    if state["kind"] == "schedule":
        return _scheduled(state, now, version, claim)
    if found is None:
        return state
    there = sorted(found)
    if state["seen"] is None:
        return {**state, "seen": there, "problem": ""}
    if state["kind"] == "source":
        new = [] if there == state["seen"] else there
        why = f"{state['text']} has changed"
    else:
        new = [each for each in there if each not in state["seen"]]
        why = f"{state['text']} has a new toolchain: {', '.join(new)}"
    if not new or there == state["tried"]:
        return {**state, "problem": ""}
    return _pending({**state, "tried": there}, now, version, claim, why, seen=there)


def ended(state: TriggerState, now: float, build: str, error: str) -> TriggerState:
    """Return a trigger whose pending run made a build, or was refused."""
    pending = state["pending"]
    if pending is None:
        return state
    last: TriggerRun = {
        "at": now,
        "why": pending["why"],
        "version": pending["version"],
        "build": build,
        "error": error,
    }
    after: TriggerState = {**state, "pending": None, "last": last, "problem": ""}
    if state["kind"] == "source" or not error:
        after["seen"] = pending["seen"] if state["kind"] == "source" else _joined(state["seen"], pending["seen"])
    if state["kind"] == "schedule":
        after["next"] = next(runs_after(state["text"], state["timezone"], now), None)
    return after


def postponed(state: TriggerState, now: float, problem: str, seconds: float) -> TriggerState:
    """Return a trigger whose pending run could not be made yet: it is tried again after some seconds."""
    pending = state["pending"]
    return {**state, "problem": problem, "pending": {**pending, "until": now + seconds}} if pending else state


def _identity(state: TriggerState) -> tuple[str, str, str]:
    return state["kind"], state["text"], state["timezone"]


def _new(entry: TriggerEntry, now: float) -> TriggerState:
    schedule = entry.schedule
    return {
        "kind": entry.kind,
        "text": schedule or entry.source or entry.toolchain,
        "timezone": entry.timezone if schedule else "",
        "next": next(runs_after(schedule, entry.timezone, now), None) if schedule else None,
        "seen": None,
        "tried": [],
        "fired": 0,
        "problem": "",
        "pending": None,
        "last": None,
    }


def _scheduled(state: TriggerState, now: float, version: int, claim: str) -> TriggerState:
    due = state["next"]
    if due is None or now < due:
        return state
    missed = list(_until(state, due, now))
    latest = missed[-1] if missed else due
    warning = ""
    if missed:
        number = f"{len(missed)}{'' if len(missed) < MOST_MISSED else ' or more'}"
        warning = f"the farm was away: this build is for the run of {_clock(state, latest)} and {number} before it"
    elif now - due > LATE:
        warning = f"the farm was away: this build is for the run of {_clock(state, due)}"
    following = next(runs_after(state["text"], state["timezone"], now), None)
    why = f"due at {_clock(state, latest)} ({state['text']})"
    return _pending({**state, "next": following}, now, version, claim, why, warning=warning)


def _pending(
    state: TriggerState, now: float, version: int, claim: str, why: str, *, warning: str = "", seen: Sequence[str] = ()
) -> TriggerState:
    """Return a trigger that fires now."""
    run: PendingRun = {
        "claim": claim,
        "why": why,
        "warning": warning,
        "version": version,
        "until": now + LEASE,
        "seen": list(seen),
    }
    return {**state, "fired": state["fired"] + 1, "pending": run, "problem": ""}


def _until(state: TriggerState, due: float, now: float) -> Iterator[float]:
    """Yield the runs after the first one that is due, up to now."""
    for number, when in enumerate(runs_after(state["text"], state["timezone"], due)):
        if when > now or number == MOST_MISSED:
            return
        yield when


def _clock(state: TriggerState, when: float) -> str:
    from zoneinfo import ZoneInfo

    return f"{datetime.fromtimestamp(when, ZoneInfo(state['timezone'])):%Y-%m-%d %H:%M} {state['timezone']}"


def _joined(before: list[str] | None, new: list[str]) -> list[str]:
    return [*(each for each in before or [] if each not in new), *new][-50:]
