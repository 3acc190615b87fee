"""Refs: movable names (`latest`, `prod`, `v3`) for snapshots, so that anyone can fetch an artifact by name.

A ref is a small document that one conditional put moves; a snapshot is a blob, so an old one never changes.
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NotRequired, cast

from typing_extensions import TypedDict

from farm.artifacts.storage import MAIN, Object, readable, until_moved
from farm.errors import ArtifactGone, Conflict, NotFound, UsageError
from farm.jobs.rows import Listed
from farm.runner.protocol import Default
from farm.spec import FileReference, PlainSize

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store
    from farm.logging import Logger


class SnapshotCell(TypedDict):
    """A cell that a ref names. `device` is an arch, `submitted` is in Unix seconds, `manifest` a manifest's name.

    `sidecar` is an object key; without it the artifact is of the ref's namespace. `superseded` (Unix seconds): since
    then another toolchain's program has its place, and only readers who name this toolchain get it. `latency` in
    seconds, `shared` and `error` as when it was made; older farms did not write them.
    """

    manifest: str
    submitted: float
    identifier: str
    model: str
    target: str
    precision: str
    shape: str
    sizes: Mapping[str, PlainSize]
    key: str
    device: str
    toolchain: str
    program: FileReference
    sidecar: NotRequired[str]
    seconds: NotRequired[float]
    superseded: NotRequired[float]
    latency: NotRequired[float | None]
    shared: NotRequired[bool]
    error: NotRequired[float | None]


Cells = Mapping[str, SnapshotCell]  # The entries of a snapshot, by `<identifier>@<device arch>@<toolchain>`.


class SnapshotDocument(TypedDict):
    """A snapshot as it is stored."""

    schema: int
    cells: Cells


class SignedParts(TypedDict):
    """What an extension signed about a ref: TUF's metadata, each as text, the farm's roots from the oldest on.

    `role` is the metadata of the role that the top-level `targets` entrust with this ref.
    """

    roots: list[str]
    targets: str
    role: str
    snapshot: str
    timestamp: str


class RefView(TypedDict):
    """Where a ref points: `generation` counts its moves, `snapshot` and `previous` are digests of blobs.

    A ref that is made again repeats none. `namespace` is the one that has it. `damaged` says why it cannot be read; it
    points nowhere then.
    """

    tag: str
    generation: int
    snapshot: str
    previous: str | None
    moved: str
    namespace: NotRequired[str]
    damaged: NotRequired[str]
    signed: NotRequired[SignedParts]


class ListedRefs(Listed[str]):
    """The tags of refs; `refs` says where each points, if it was asked for."""

    refs: NotRequired[Annotated[list[RefView] | None, Default(None)]]


class ShownRef(RefView, SnapshotDocument):
    """A ref with the cells that it names."""


TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NOWHERE = ""  # The snapshot of a ref that is deleted.
SNAPSHOT_LIMIT = 256 << 20  # Most bytes of a snapshot that are read: room for half a million cells.


@dataclass(frozen=True, slots=True)
class RefCommit:
    """A ref that is about to be written: where it points now (None: there is no such ref), and what will be written.

    `signed` is what the person who moves it has signed for an extension; empty if nothing.
    """

    namespace: str
    tag: str
    before: RefView | None
    after: RefView
    signed: str = ""


Commit = Callable[[RefCommit], RefView | None]
"""Returns what is written, in one put with the move: it may add to `after`. None if the ref has moved since it was
read. Raises FarmError to refuse the move."""


@dataclass(eq=False)
class Refs:
    """The refs of all namespaces in one store. Who moves some has `Farm.refs`: their moves are seen by extensions."""

    _artifacts: "S3Store"
    on_commit: Sequence[Commit] = ()
    on_committed: Sequence[Callable[[str, RefView], object]] = ()
    """They are called with each ref that was written, or deleted, and its namespace."""

    def list(self, namespace: str) -> Iterable[str]:
        """Return the tags of a namespace."""
        prefix = f"ns/{namespace}/refs/"
        return [key.removeprefix(prefix).removesuffix(".json") for key in self._artifacts.list_objects(prefix)]

    def readable(self, namespace: str) -> dict[str, str]:
        """Return the tags that readers in a namespace get, each with the namespace whose ref it is."""
        return {tag: source for source in readable(namespace) for tag in self.list(source)}  # Its own come last.

    def find(self, namespace: str, tag: str) -> RefView | None:
        """Return where a tag points; None if there is no such ref."""
        found = self._stored(namespace, tag)
        return parse_ref(tag, found) if found else None

    def require(self, namespace: str, tag: str) -> RefView:
        """Return where a tag points. Raises NotFound if there is no such ref."""
        if found := self.find(namespace, tag):
            return found
        raise NotFound(f"no ref {tag} in namespace {namespace}", hint="`farm ls refs` lists them")

    def _stored(self, namespace: str, tag: str) -> Object | None:
        return self._artifacts.get_object(ref_key(namespace, tag))

    def listed(self, namespace: str, tag: str) -> RefView | None:
        """Return a ref for a list, also one that cannot be read; None if there is no such ref."""
        try:
            ref = self.find(namespace, tag)
        except ArtifactGone as error:
            ref = {"tag": tag, "generation": 0, "snapshot": "", "previous": None, "moved": "", "damaged": error.message}
        return {**unsigned(ref), "namespace": namespace} if ref else None

    def read(self, namespace: str, tag: str) -> SnapshotDocument | None:
        """Return the snapshot that a tag points to; None without such a ref. Raises ArtifactGone if it is damaged."""
        ref = self.find(namespace, tag)
        return self.snapshot(ref["snapshot"]) if ref else None

    def snapshot(self, digest: str) -> SnapshotDocument:
        """Return the snapshot with this digest. Raises ArtifactGone when it is missing or damaged."""
        try:
            snapshot: SnapshotDocument = json.loads(self._artifacts.read_blob(digest, limit=SNAPSHOT_LIMIT))
            snapshot["cells"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "move the ref to another one"
            raise ArtifactGone(f"blob {digest} is not a snapshot: {error!r}", hint=hint) from None
        return snapshot

    def found(self, namespace: str, tag: str) -> tuple[str, RefView | None]:
        """Return the namespace whose ref readers in a namespace get, as `owner`, and where it points, as `find`."""
        own = None if namespace == MAIN else self.find(namespace, tag)
        return (namespace, own) if own else (MAIN, self.find(MAIN, tag))

    def owner(self, namespace: str, tag: str) -> str:
        """Return the namespace whose ref readers in a namespace get: its own if it has one, else `main`."""
        return namespace if namespace == MAIN or self._stored(namespace, tag) else MAIN

    def read_through(self, namespace: str, tag: str) -> SnapshotDocument:
        """Return what readers in a namespace get of a tag: the newest readable snapshot, or an empty one."""
        ref = self._readable_ref(tag, self._stored(self.owner(namespace, tag), tag))
        _, snapshot = self._readable_snapshot(ref) if ref else (None, None)
        return snapshot or {"schema": 1, "cells": {}}

    @staticmethod
    def _readable_ref(tag: str, found: Object | None) -> RefView | None:
        try:
            return parse_ref(tag, found) if found else None
        except ArtifactGone as error:
            _log().warning("ref unreadable, treated as absent", tag=tag, error=error.message)
            return None

    def _readable_snapshot(self, ref: RefView) -> tuple[str, SnapshotDocument] | tuple[None, None]:
        for digest in filter(None, (ref["snapshot"], ref["previous"])):
            try:
                return digest, self.snapshot(digest)
            except ArtifactGone as error:
                _log().warning("snapshot unreadable, the previous one counts", tag=ref["tag"], error=error.message)
        return None, None

    def move(
        self,
        namespace: str,
        tag: str,
        update: Callable[[Cells], Cells],
        *,
        generation: int | None = None,
        check: Callable[[Cells, Cells], Callable[[], object]] = lambda before, after: lambda: None,
        signed: str = "",
    ) -> RefView:
        """Move a ref to what `update` makes of the entries that it has now.

        `update` is called again if another writer was faster, so that no move is lost; with `generation` (0: there is
        no such ref) the ref moves only from that generation. If `update` changes nothing, the ref does not move, so a
        move may be repeated; what is `signed` is written all the same. An unreadable snapshot is replaced by the
        previous one, an unreadable ref by none.
        `check` gets the entries before and after, raises if it refuses the move, and returns what is called after it.

        Raises Conflict if the ref has another generation, StorageUnavailable if others never stop moving it.
        """

        def attempt() -> RefView | None:
            there = self._stored(namespace, tag)
            now = self._readable_ref(tag, there)
            source, before = self._readable_snapshot(now) if now else (None, None)
            cells = before["cells"] if before else {}
            after: SnapshotDocument = {"schema": 1, "cells": update(cells)}
            moved = now if now and after == before and source == now["snapshot"] else None
            if not moved:
                _require_generation(tag, now, generation)
            confirm = check(cells, after["cells"])
            if signed or not moved:
                if moved:
                    wanted = unsigned(moved)
                else:
                    digest, _ = self._artifacts.put_blob_bytes(canonical(after))
                    wanted = {**following(tag, now, digest), "previous": source}
                moved = self._write(there, RefCommit(namespace, tag, now, wanted, signed))
            if moved:
                confirm()
            return moved and unsigned(moved)

        return until_moved(ref_key(namespace, tag), attempt)

    def _write(self, there: Object | None, commit: RefCommit) -> RefView | None:
        """Write a ref, or delete one that moves to no snapshot; None if another writer was faster."""
        for each in self.on_commit:
            if (after := each(commit)) is None:
                return None
            commit = replace(commit, after=after)
        ref, key, etag = commit.after, ref_key(commit.namespace, commit.tag), there.etag if there else ""
        with suppress(Conflict):
            if ref["snapshot"] == NOWHERE:
                self._artifacts.delete_object(key, if_match=etag)
                ref = unsigned(ref)
            else:
                self._artifacts.put_object(key, stored_ref(ref), create=there is None, if_match=etag)
            for tell in self.on_committed:
                tell(commit.namespace, ref)
            said = "ref moved" if ref["snapshot"] else "ref deleted"
            _log().info(said, ref=key, generation=ref["generation"], snapshot=ref["snapshot"])
            return ref
        return None

    def source(self, namespace: str, tag: str, *, previous: bool = False) -> Cells:
        """Return the entries to which another ref can point: what a tag names, or with `previous` named before.

        A ref can only point to what a ref has named, so that only cells that passed their gates get a name.

        Raises NotFound without such a tag, ArtifactGone when its snapshot is missing.
        """
        found = self.require(namespace, tag)
        digest = found["previous"] if previous else found["snapshot"]
        if digest is None:
            raise NotFound(f"{tag} was never moved: it has no previous snapshot")
        return self.snapshot(digest)["cells"]

    def delete(self, namespace: str, tag: str, *, generation: int | None = None, signed: str = "") -> None:
        """Delete a tag; its artifacts stay while others name them. `generation` and `signed` as in `move`.

        It is committed as a move to no snapshot. Raises NotFound, Conflict if it has moved meanwhile.
        """
        found = self._stored(namespace, tag)
        if found is None:
            raise NotFound(f"no ref {tag} in namespace {namespace}", hint="`farm ls refs` lists them")
        now = self._readable_ref(tag, found)
        _require_generation(tag, now, generation)
        if not self._write(found, RefCommit(namespace, tag, now, following(tag, now, NOWHERE), signed)):
            raise Conflict(f"{tag} was changed meanwhile", hint=f"`farm tag {tag}` shows where it points now")


def _require_generation(tag: str, now: RefView | None, generation: int | None) -> None:
    there = now["generation"] if now else 0
    if generation is not None and there != generation:
        is_there = f"has generation {there}" if now else "does not exist"
        hint = f"`farm tag {tag}` shows where it points now"
        raise Conflict(f"{tag} {is_there}, not generation {generation}: somebody moved it", hint=hint)


def following(tag: str, now: RefView | None, snapshot: str) -> RefView:
    """Return a ref that moves at this moment from where it is `now` to a snapshot."""
    at = time.time()
    # A new one begins at the time in milliseconds: it repeats no generation of a ref that was deleted.
    number, previous = (now["generation"] + 1, now["snapshot"]) if now else (int(at * 1000), None)
    moved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return {"tag": tag, "generation": number, "snapshot": snapshot, "previous": previous, "moved": moved}


def parse_ref(tag: str, found: Object) -> RefView:
    """Return a ref as its object says. Raises ArtifactGone if it cannot be read."""
    try:
        document = json.loads(found.data)
        ref: RefView = {
            "tag": tag,
            "generation": int(document["generation"]),
            "snapshot": document["snapshot"],
            "previous": document["previous"],
            "moved": document.get("moved", ""),
        }
        return {**ref, "signed": document["signed"]} if document.get("signed") else ref
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        hint = f"`farm tag {tag} --delete` deletes it"
        raise ArtifactGone(f"the ref {found.key} cannot be read: {error!r:.200}", hint=hint) from None


def ref_key(namespace: str, tag: str) -> str:
    """Return the object key of a ref. Raises UsageError for what cannot be a tag."""
    if not TAG.fullmatch(tag):
        raise UsageError(f"{tag!r} cannot name a ref", hint="lower-case letters, digits, dot, dash and underscore")
    return f"ns/{namespace}/refs/{tag}.json"


def stored_ref(ref: RefView) -> bytes:
    """Return a ref as it is stored: its key has the names."""
    return canonical({"schema": 1, **{name: value for name, value in ref.items() if name not in ("tag", "namespace")}})


def unsigned(ref: RefView) -> RefView:
    """Return where a ref points, without what is signed about it."""
    return cast(RefView, {name: value for name, value in ref.items() if name != "signed"})


def canonical(value: object) -> bytes:
    """One spelling for one value, so that equal snapshots are one blob."""
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _log() -> "Logger":
    """Return the logger; clients import this module for its types, and need none."""
    from farm.logging import get_logger

    return get_logger(__name__)
