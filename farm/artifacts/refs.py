"""Refs: movable names (`latest`, `prod`, `v3`) for snapshots, so that anyone can fetch an artifact by name.

A ref is a small document that one conditional put moves; a snapshot is a blob, so an old one never changes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NotRequired, cast

from typing_extensions import TypedDict

from farm.artifacts.keys import MAIN
from farm.artifacts.storage import ArtifactStore, Object, until_moved
from farm.errors import ArtifactGone, Conflict, NotFound, UsageError
from farm.jobs.rows import Listed
from farm.runner.bounds import Default
from farm.spec import FileReference, PlainSize

if TYPE_CHECKING:
    from farm.logging import Logger


class SnapshotCell(TypedDict):
    """A cell that a ref names. `device` is an arch, `submitted` is in Unix seconds, `manifest` a manifest's name.

    `sidecar` is an object key; without it the artifact is of the ref's namespace. `superseded` (Unix seconds): since
    then another toolchain's program has its place, and only readers who name this toolchain get it.
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


Cells = Mapping[str, SnapshotCell]
"""The entries of a snapshot, by `<identifier>@<device arch>@<toolchain>`."""


class SnapshotDocument(TypedDict):
    """A snapshot as it is stored."""

    schema: int
    cells: Cells


class RefView(TypedDict):
    """Where a ref points: `generation` counts its moves, `snapshot` and `previous` are digests of blobs."""

    tag: str
    generation: int
    snapshot: str
    previous: str | None
    moved: str


class ListedRef(RefView):
    """A ref, and the namespace that has it; `damaged` says why it cannot be read, and then it points nowhere."""

    namespace: str
    damaged: NotRequired[str]


class ListedRefs(Listed[str]):
    """The tags of refs; `refs` says where each points, if it was asked for."""

    refs: NotRequired[Annotated[list[ListedRef] | None, Default(None)]]


class ShownRef(RefView, SnapshotDocument):
    """A ref with the cells that it names, and the namespace that has it."""

    namespace: NotRequired[str]


TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SNAPSHOT_LIMIT = 256 << 20
"""Most bytes of a snapshot that are read: room for half a million cells."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a name points. `snapshot` and `previous` are digests of blobs; `generation` counts the moves."""

    tag: str
    generation: int
    snapshot: str
    previous: str | None
    moved: str
    etag: str

    def as_dict(self) -> RefView:
        """Return the ref as plain JSON."""
        return {
            "tag": self.tag,
            "generation": self.generation,
            "snapshot": self.snapshot,
            "previous": self.previous,
            "moved": self.moved,
        }


class Refs:
    """The refs of all namespaces in one store."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts

    def list(self, namespace: str) -> Iterable[str]:
        """Return the tags of a namespace."""
        prefix = f"ns/{namespace}/refs/"
        return [key.removeprefix(prefix).removesuffix(".json") for key in self._artifacts.list_objects(prefix)]

    def find(self, namespace: str, tag: str) -> Ref | None:
        """Return where a tag points; None if there is no such ref."""
        found = self._artifacts.get_object(ref_key(namespace, tag))
        return _parse_ref(tag, found) if found else None

    def listed(self, namespace: str, tag: str) -> ListedRef | None:
        """Return a ref for a list, also one that cannot be read; None if there is no such ref."""
        try:
            ref = self.find(namespace, tag)
        except ArtifactGone as error:
            nowhere = RefView(tag=tag, generation=0, snapshot="", previous=None, moved="")
            return ListedRef(**nowhere, namespace=namespace, damaged=error.message)
        if ref is None:
            return None
        return cast("ListedRef", {**ref.as_dict(), "namespace": namespace})

    def read(self, namespace: str, tag: str) -> SnapshotDocument | None:
        """Return the snapshot that a tag points to; None if there is no such ref.

        Raises ArtifactGone when the snapshot is missing or damaged.
        """
        ref = self.find(namespace, tag)
        return self.snapshot(ref.snapshot) if ref else None

    def snapshot(self, digest: str) -> SnapshotDocument:
        """Return the snapshot with this digest. Raises ArtifactGone when it is missing or damaged."""
        try:
            snapshot: SnapshotDocument = json.loads(self._artifacts.read_blob(digest, limit=SNAPSHOT_LIMIT))
            snapshot["cells"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactGone(
                f"blob {digest} is not a snapshot: {error!r}", hint="move the ref to another one"
            ) from None
        return snapshot

    def read_or_empty(self, namespace: str, tag: str) -> SnapshotDocument:
        """Return the first readable snapshot: the one that a tag points to, the previous one, or an empty one."""
        ref = self._readable_ref(tag, self._artifacts.get_object(ref_key(namespace, tag)))
        _, snapshot = self._readable_snapshot(ref) if ref else (None, None)
        return snapshot or {"schema": 1, "cells": {}}

    def owner(self, namespace: str, tag: str) -> str:
        """Return the namespace whose ref readers in a namespace get: its own if it has one, else `main`."""
        is_own = namespace == MAIN or self._artifacts.get_object(ref_key(namespace, tag))
        return namespace if is_own else MAIN

    def read_through(self, namespace: str, tag: str) -> SnapshotDocument:
        """Return what readers in a namespace get of a tag, or an empty snapshot."""
        return self.read_or_empty(self.owner(namespace, tag), tag)

    @staticmethod
    def _readable_ref(tag: str, found: Object | None) -> Ref | None:
        try:
            return _parse_ref(tag, found) if found else None
        except ArtifactGone as error:
            _log().warning("ref unreadable, treated as absent", tag=tag, error=error.message)
            return None

    def _readable_snapshot(self, ref: Ref) -> tuple[str, SnapshotDocument] | tuple[None, None]:
        """Return digest and content of the newest readable snapshot of a ref."""
        for digest in filter(None, (ref.snapshot, ref.previous)):
            try:
                return digest, self.snapshot(digest)
            except ArtifactGone as error:
                _log().warning("snapshot unreadable, the previous one counts", tag=ref.tag, error=error.message)
        return None, None

    def move(
        self,
        namespace: str,
        tag: str,
        update: Callable[[Cells], Cells],
        *,
        generation: int | None = None,
        check: Callable[[Cells, Cells], Callable[[], object]] = lambda before, after: lambda: None,
    ) -> Ref:
        """Move a ref to what `update` makes of the entries that it has now.

        `update` is called again if another writer was faster, so that no move is lost; with `generation` (0: there is
        no such ref) the ref moves only from that generation. If `update` changes nothing, the ref does not move, so a
        move may be repeated. An unreadable snapshot is replaced by the previous one, an unreadable ref by none.
        `check` gets the entries before and after, raises if it refuses the move, and returns what is called after it.

        Raises Conflict if the ref has another generation, StorageUnavailable if others never stop moving it.
        """
        key = ref_key(namespace, tag)

        def attempt() -> Ref | None:
            there = self._artifacts.get_object(key)
            now = self._readable_ref(tag, there)
            source, before = self._readable_snapshot(now) if now else (None, None)
            cells = before["cells"] if before else {}
            after: SnapshotDocument = {"schema": 1, "cells": update(cells)}
            moved = now if now and after == before and source == now.snapshot else None
            if not moved:
                _require_generation(tag, now, generation)
            confirm = check(cells, after["cells"])
            moved = moved or self._put(key, tag, there, now, source, after)
            if moved:
                confirm()
            return moved

        return until_moved(key, attempt)

    def _put(
        self, key: str, tag: str, there: Object | None, now: Ref | None, source: str | None, after: SnapshotDocument
    ) -> Ref | None:
        """Write a snapshot, and let a ref point to it; None if another writer was faster."""
        digest, _ = self._artifacts.put_blob_bytes(_json(after))
        number = now.generation + 1 if now else 1
        moved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        document = {"schema": 1, "generation": number, "snapshot": digest, "previous": source, "moved": moved}
        with suppress(Conflict):
            etag = self._artifacts.put_object(
                key, _json(document), create=there is None, if_match=there.etag if there else ""
            )
            _log().info("ref moved", ref=key, generation=number, snapshot=digest)
            return Ref(tag, number, digest, source, moved, etag)
        return None

    def source(self, namespace: str, tag: str, *, previous: bool = False) -> Cells:
        """Return the entries to which another ref can point: what a tag names, or with `previous` named before.

        A ref can only point to what a ref has named, so that only cells that passed their gates get a name.

        Raises NotFound without such a tag, ArtifactGone when its snapshot is missing.
        """
        found = self.find(namespace, tag)
        if found is None:
            raise NotFound(f"no ref {tag} in namespace {namespace}", hint="`farm ls refs` lists them")
        digest = found.previous if previous else found.snapshot
        if digest is None:
            raise NotFound(f"{tag} was never moved: it has no previous snapshot")
        return self.snapshot(digest)["cells"]

    def delete(self, namespace: str, tag: str, *, generation: int | None = None) -> None:
        """Delete a tag; its artifacts stay while others name them. `generation` as in `move`.

        Raises NotFound, Conflict if it has moved meanwhile.
        """
        found = self._artifacts.get_object(ref_key(namespace, tag))
        if found is None:
            raise NotFound(f"no ref {tag} in namespace {namespace}", hint="`farm ls refs` lists them")
        if generation is not None:
            _require_generation(tag, self.find(namespace, tag), generation)
        self._artifacts.delete_object(found.key, if_match=found.etag)
        _log().info("ref deleted", ref=found.key)


def _require_generation(tag: str, now: Ref | None, generation: int | None) -> None:
    there = now.generation if now else 0
    if generation is not None and there != generation:
        is_there = f"has generation {there}" if now else "does not exist"
        raise Conflict(
            f"{tag} {is_there}, not generation {generation}: somebody moved it",
            hint=f"`farm tag {tag}` shows where it points now",
        )


def _parse_ref(tag: str, found: Object) -> Ref:
    try:
        document = json.loads(found.data)
        return Ref(
            tag=tag,
            generation=int(document["generation"]),
            snapshot=document["snapshot"],
            previous=document["previous"],
            moved=document.get("moved", ""),
            etag=found.etag,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactGone(
            f"the ref {found.key} cannot be read: {error!r}", hint=f"`farm tag {tag} --delete` deletes it"
        ) from None


def ref_key(namespace: str, tag: str) -> str:
    """Return the object key of a ref. Raises UsageError for what cannot be a tag."""
    if not TAG.fullmatch(tag):
        raise UsageError(f"{tag!r} cannot name a ref", hint="lower-case letters, digits, dot, dash and underscore")
    return f"ns/{namespace}/refs/{tag}.json"


def _json(value: object) -> bytes:
    """One spelling for one value, so that equal snapshots are one blob."""
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _log() -> Logger:
    """Return the logger; clients import this module for its types, and need none."""
    from farm.logging import get_logger

    return get_logger(__name__)
