"""Stored manifests in object storage: a head for each, moved by conditional writes, and a document for each version.

A version is frozen: it names its models by digest, so that a build of it does not depend on who pushed it, and garbage
collection keeps what it names. Redis knows nothing of them (`docs/decisions/0042`).

A trigger fires in two writes. The first claims the occasion: it counts it (`fired`) and makes it `pending`, with the
time until which its build belongs to the control plane that wrote it. The second says what came of it. Both are
conditional, so an occasion is claimed once, and one that a dead control plane had claimed is taken over.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.artifacts.inventory import lacking
from farm.artifacts.storage import Object, folder_name, rewrite
from farm.artifacts.tokens import PERSON, Token
from farm.errors import ArtifactGone, Conflict, InputsMissing, NotAllowed, NotFound, UsageError
from farm.logging import get_logger
from farm.manifest.parsing import parse_manifest
from farm.manifest.values import runs_after
from farm.matrix.planned import FrozenManifest, ShownPlan, SubmissionDocument
from farm.results.report import BuildView
from farm.spec import digest_of
from farm.units import view_of
from farm.wire.asked import ChosenGates, Labels

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.manifest.entries import Manifest, TriggerEntry

LEASE = 300.0  # Seconds for which a claimed occasion belongs to the control plane that claimed it.
LATE = 600.0  # Seconds after which a run of a schedule counts as late, and says so.
MOST_MISSED = 1000  # Missed runs that are counted.


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
    last: TriggerRun = {"at": now, "why": pending["why"], "version": pending["version"], "build": build, "error": error}
    after: TriggerState = {**state, "pending": None, "last": last, "problem": ""}
    if state["kind"] == "source":
        after["seen"] = pending["seen"]
    elif not error:
        after["seen"] = [*(each for each in state["seen"] or () if each not in pending["seen"]), *pending["seen"]][-50:]
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
    later = takewhile(lambda when: when <= now, runs_after(state["text"], state["timezone"], due))
    missed = list(islice(later, MOST_MISSED))
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
    run = PendingRun(claim=claim, why=why, warning=warning, version=version, until=now + LEASE, seen=list(seen))
    return {**state, "fired": state["fired"] + 1, "pending": run, "problem": ""}


def _clock(state: TriggerState, when: float) -> str:
    from zoneinfo import ZoneInfo

    return f"{datetime.fromtimestamp(when, ZoneInfo(state['timezone'])):%Y-%m-%d %H:%M} {state['timezone']}"


log = get_logger(__name__)

KEPT = 100  # Versions of one manifest that are kept.


class ManifestHead(TypedDict):
    """The head of a stored manifest. `id` is another one if it was removed and pushed again."""

    schema: int
    id: str
    name: str
    version: int
    versions: list[ManifestVersion]
    triggers: NotRequired[list[TriggerState]]


class StoredManifests:
    """The stored manifests of all namespaces."""

    def __init__(self, farm: Farm) -> None:
        self._artifacts, self._now, self._builds = farm.artifacts, farm.store.now, farm.builds
        self._read: dict[str, tuple[str, ManifestHead | None]] = {}
        """ETags and heads that were read, by key: to look for triggers costs one listing."""

    def push(
        self, namespace: str, name: str, content: FrozenManifest, *, by: Token, version: int | None = None
    ) -> StoredManifest:
        """Store a version; with `version` only if that is the newest one there is (0: none). Repeating changes nothing.

        What equals the newest version makes no new one; from then on it belongs to the token that pushed it last.

        Raises ManifestError, NotAllowed if a person who has no token pushes triggers (who would fire them?),
        UsageError if the manifest has another name, InputsMissing for what was not uploaded,
        Conflict if another version is the newest.
        """
        manifest = parse_manifest(content["manifest"], content.get("file") or "manifest")
        if manifest.name != folder_name(name):
            hint = "a manifest is stored under its own name"
            raise UsageError(f"the manifest's name is {manifest.name}, not {name}", hint=hint)
        if manifest.triggers and by.name.startswith(PERSON):
            raise NotAllowed(
                f"{by.name} is signed in by the proxy, and triggers need a token that can be revoked",
                hint="push with a token (FARM_API_TOKEN): `farm token create` makes one",
            )
        models = [each.name for each in manifest.models if not each.source.s3]  # Those in buckets the farm reads.
        if missing := [each for each in models if each not in content["models"]]:
            hint = "push by `farm manifest push` or the client"
            raise UsageError(f"the model {missing[0]} was not frozen", hint=hint)
        sized: list[Mapping[str, object]] = [file for model in content["models"].values() for file in model["files"]]
        sized += [*content["data"].values(), *content["files"].values()]
        if absent := lacking(self._artifacts, {str(each["digest"]): int(str(each["size"])) for each in sized}):
            raise InputsMissing(
                f"{len(absent)} inputs of the manifest are not in object storage, the first is {absent[0]}",
                absent,
                hint="upload the missing inputs, then push again",
            )
        data = _json(content)
        digest = hashlib.sha256(data).hexdigest()
        written: set[str] = set()

        def change(head: ManifestHead | None) -> ManifestHead:
            if head and (same := head["versions"][-1])["digest"] == digest:
                # Also if the first of two requests was answered, and its answer lost.
                return {**head, "versions": [*head["versions"][:-1], {**same, "by": by.name, "token": by.digest}]}
            newest = head["version"] if head else 0
            if version not in (None, newest):
                there = f"is at version {newest}" if head else "does not exist"
                hint = f"`farm manifest show {name}` shows what is there now"
                raise Conflict(f"{name} {there}, not at version {version}: somebody changed it", hint=hint)
            added = ManifestVersion(version=newest + 1, digest=digest, pushed=self._now(), by=by.name, token=by.digest)
            if head is None:
                head = {"schema": 1, "id": secrets.token_hex(8), "name": name, "version": 0, "versions": []}
            after: ManifestHead = {**head, "version": added["version"], "versions": [*head["versions"], added][-KEPT:]}
            after["triggers"] = triggers_of(manifest, head.get("triggers", []), self._now())
            # Written first: a head never names a version that is not there.
            self._artifacts.put_object(key := _version_key(namespace, after, added), data)
            written.add(key)
            return after

        before, after = self.move(namespace, name, change)
        there = {_version_key(namespace, after, each) for each in after["versions"]}
        dropped = {_version_key(namespace, after, each) for each in before["versions"]} if before else set()
        for key in (written | dropped) - there:
            self._artifacts.delete_object(key)
        log.info("manifest stored", namespace=namespace, manifest=name, version=after["version"], by=by.name)
        return _shown(after)

    def move(
        self, namespace: str, name: str, change: Callable[[ManifestHead | None], ManifestHead]
    ) -> tuple[ManifestHead | None, ManifestHead]:
        """Replace a head by what `change` makes of it (None: there is none), and return it before and after.

        `change` is called again if another writer was faster. If it changes nothing, nothing is written.
        """
        moved: list[tuple[ManifestHead | None, ManifestHead]] = []

        def changed(there: Object | None) -> bytes:
            before = read_head(there) if there else None
            moved.append((before, change(before)))
            return _json(moved[-1][1])

        rewrite(self._artifacts, head_key(namespace, name), changed)
        return moved[-1]

    def list(self, namespace: str) -> list[StoredManifest]:
        """Return the stored manifests of a namespace by name."""
        return [_shown(head) for _, head in sorted(self.heads(namespace))]

    def heads(self, namespace: str) -> Iterator[tuple[str, ManifestHead]]:
        """Yield names and heads; one that cannot be read is left out, and logged."""
        for entry in self._artifacts.list_entries(_heads(namespace)):
            key = entry.key
            etag, head = self._read.get(key, ("", None))
            try:
                if (head is None or etag != entry.etag) and (found := self._artifacts.get_object(key)):
                    head = read_head(found)
                    self._read[key] = found.etag, head
                if head:
                    yield head["name"], head
            except ArtifactGone as error:
                log.error("stored manifest unreadable", key=key, error=error.message, hint=error.hint)

    def _found(self, namespace: str, name: str) -> Object:
        """Return a manifest's head as it is stored. Raises NotFound."""
        if found := self._artifacts.get_object(head_key(namespace, name)):
            return found
        hint = "`farm manifest ls` lists them, `farm manifest push FILE` stores one"
        raise NotFound(f"no manifest {name} is stored in namespace {namespace}", hint=hint)

    def show(self, namespace: str, name: str, version: int | None = None) -> ShownManifest:
        """Return a manifest with the content of one version, by default of the newest one. Raises NotFound."""
        head = read_head(self._found(namespace, name))
        number, content = self.content(namespace, head, version)
        return {**_shown(head), "shown": number, "content": content}

    def content(self, namespace: str, head: ManifestHead, version: int | None = None) -> tuple[int, FrozenManifest]:
        """Return a version's number and content. Raises NotFound for one that is not kept, ArtifactGone."""
        wanted = head["version"] if version is None else version
        known = {each["version"]: each for each in head["versions"]}
        if wanted not in known:
            hint = f"kept are {min(known)} to {max(known)} ({KEPT} at most)"
            raise NotFound(f"{head['name']} has no version {wanted}", hint=hint)
        found = self._artifacts.get_object(_version_key(namespace, head, known[wanted]))
        if found is None or hashlib.sha256(found.data).hexdigest() != known[wanted]["digest"]:
            hint = "push it again"
            raise ArtifactGone(f"version {wanted} of the manifest {head['name']} is missing or damaged", hint=hint)
        content: FrozenManifest = json.loads(found.data)
        return wanted, content

    def remove(self, namespace: str, name: str, version: int | None = None) -> None:
        """Remove a manifest with all its versions; with `version` only if that is the newest. Builds of it stay.

        Raises NotFound, Conflict.
        """
        found = self._found(namespace, name)
        folder = _versions(namespace, name)
        with suppress(ArtifactGone):  # A head that cannot be read goes with everything that is there.
            head = read_head(found)
            folder += f"{head['id']}/"
            if version not in (None, head["version"]):
                raise Conflict(f"{name} is at version {head['version']}, not at version {version}")
        self._artifacts.delete_object(found.key, if_match=found.etag)
        for key in list(self._artifacts.list_objects(folder)):
            self._artifacts.delete_object(key)
        log.info("manifest removed", namespace=namespace, manifest=name)

    # --- builds -----------------------------------------------------------------------------------------------------

    def build(
        self,
        namespace: str,
        name: str,
        wish: BuildWish,
        build_id: str,
        *,
        by: str,
        max_cells: int = 0,
        warnings: Sequence[str] = (),
        unattended: bool = False,
    ) -> BuildView:
        """Build a stored manifest. A known build id is answered with its build, whatever was pushed since.

        The build has the label `manifest`, `NAME@VERSION`. `max_cells`, `warnings` and `unattended` as in
        `BuildService.submit`.

        Raises NotFound, and as `BuildService.submit`.
        """
        request = digest_of({"manifest": name, **wish})
        if before := self._builds.accepted_before(namespace, build_id, request):
            return before
        submission = self._submission(namespace, name, wish, build_id)
        return self._builds.submit(
            namespace, submission, by=by, max_cells=max_cells, request=request, warnings=warnings, unattended=unattended
        )

    def plan(self, namespace: str, name: str, wish: BuildWish, build_id: str) -> ShownPlan:
        """Return what `build` would do now. Changes nothing. Raises NotFound, and as `BuildService.plan`."""
        return self._builds.plan(namespace, self._submission(namespace, name, wish, build_id))

    def _submission(self, namespace: str, name: str, wish: BuildWish, build_id: str) -> SubmissionDocument:
        number, content = self.content(namespace, read_head(self._found(namespace, name)), wish["version"])
        labels = {**content["labels"], **wish["labels"], "manifest": f"{name}@{number}"}
        whole: SubmissionDocument = {**content, "build_id": build_id, "labels": labels, "only": (), "fail_fast": False}
        return {**whole, "gates": wish["gates"]} if wish["gates"] else whole


def head_key(namespace: str, name: str) -> str:
    """Return the object key of a stored manifest's head."""
    return f"{_heads(namespace)}{name}.json"


def read_head(found: Object) -> ManifestHead:
    """Return a head as it was read. Raises ArtifactGone if it is damaged."""
    try:
        head: ManifestHead = json.loads(found.data)
        if not head["versions"] or not head["id"] or not head["name"]:
            raise ValueError("it is empty")
    except (ValueError, KeyError, TypeError) as error:
        hint = "`farm manifest rm` removes it; then push it again"
        raise ArtifactGone(f"the stored manifest {found.key} cannot be read: {error!r}", hint=hint) from None
    return head


def _heads(namespace: str) -> str:
    return f"ns/{namespace}/manifests/"


def _versions(namespace: str, name: str) -> str:
    return f"ns/{namespace}/manifest-versions/{name}/"


def _version_key(namespace: str, head: ManifestHead, version: ManifestVersion) -> str:
    """Two writers that store different versions of one number write different documents."""
    return f"{_versions(namespace, head['name'])}{head['id']}/{version['version']}-{version['digest'][:16]}.json"


def _shown(head: ManifestHead) -> StoredManifest:
    triggers = [view_of(TriggerView, state) for state in head.get("triggers", [])]
    return view_of(StoredManifest, {**head, "triggers": triggers})


def _json(value: object) -> bytes:
    """One spelling for one value, so that equal versions have one digest."""
    return json.dumps(value, sort_keys=True).encode()
