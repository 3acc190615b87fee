"""The client without a farm's API: refs, sidecars and programs from object storage, with keys or by a public URL."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast
from urllib.parse import quote

from farm.artifacts.refs import RefView, ShownRef, ref_key
from farm.artifacts.sidecar import validate
from farm.artifacts.storage import MAIN, SignedSidecar, blob_key, build_key, readable, sidecar_key, statements_key
from farm.client.client import FarmClient
from farm.client.transfers import KeptAnswers
from farm.client.transport import Transport, retry
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.results.ref_rules import passed_entries
from farm.wire.checking import checked, unexpected

if TYPE_CHECKING:
    from farm.client.fetching import ReaderTrust
    from farm.wire.program import Sidecar

LARGEST_DOCUMENT = 256 << 20
"""Bytes of a ref, a snapshot, a report or a sidecar that are read at most: room for half a million cells."""


class StorageClient(FarmClient):
    """Reads the refs and artifacts of one namespace. Whatever else a farm can do raises UsageError."""

    def __init__(
        self,
        address: str,
        url_of: Callable[[str], str],
        *,
        namespace: str = "",
        cache: Path | None = None,
        trust: ReaderTrust | None = None,
    ) -> None:
        """`url_of` gives the URL of an object's key; `address` is how people know the storage."""
        namespace = namespace or MAIN
        self.transport = _StorageTransport(address, url_of, namespace)
        self.url = address
        self.kept = KeptAnswers(cache, f"{address} {namespace}")
        self.cache, self.trust = cache, trust

    @classmethod
    def below(cls, url: str, **options: Any) -> Self:
        """Read what can be read without keys below a URL. Raises UsageError for anything else."""
        if not re.match(r"https?://[^/]", url):
            hint = "such as https://storage.example/farm"
            raise UsageError(f"{url!r} is not an address of object storage", hint=hint)
        base = url.rstrip("/")
        return cls(url, lambda key: f"{base}/{quote(key)}", **options)


class _StorageTransport(Transport):
    """Reads objects by their keys, and asks no farm anything."""

    def __init__(self, address: str, url_of: Callable[[str], str], namespace: str) -> None:
        super().__init__("http://storage.invalid", "", namespace="", timeout=30.0)
        self.url = address
        self._url_of, self._namespace = url_of, namespace
        self._here = f"namespace {namespace} of {address}"

    def request(self, method: str, path: str, *, limit: int = 0, **options: Any) -> NoReturn:
        raise self._unasked(path)

    def lines(self, path: str, *, timeout: float, **options: Any) -> NoReturn:
        raise self._unasked(path)

    def _unasked(self, path: str) -> UsageError:
        return UsageError(f"{path} is for the farm's API, and {self.url} is its storage", hint="set FARM_API_URL")

    def ref(self, tag: str) -> ShownRef:
        """Return a ref, or a finished build by its whole id, with the cells that it names. Raises as FarmClient.

        A ref that the namespace does not have is `main`'s.
        """
        for namespace in reversed(readable(self._namespace)):
            with suppress(NotFound):
                found = self._document(ref_key(namespace, tag), f"no ref {tag} in {self._here}")
                break
        else:
            if re.fullmatch("(b-)?[0-9a-f]{1,16}", tag):
                return self._build_as_ref(tag)
            raise NotFound(f"no ref {tag} in {self._here}", hint="FARM_NAMESPACE names another namespace")
        digest = str(found.get("snapshot"))
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ArtifactGone(f"the ref {tag} of namespace {namespace} of {self.url} cannot be read")
        snapshot = self.content(blob_key(digest))
        if hashlib.sha256(snapshot).hexdigest() != digest:
            raise ArtifactGone(f"the snapshot of {tag} is damaged in {self._here}", hint="the next build mends it")
        shown = {"tag": tag, **found, **_parsed(snapshot, f"the snapshot of {tag}"), "namespace": namespace}
        checked(shown, ShownRef, self._here, strict=True)  # As it came: its digest is signed.
        return cast("ShownRef", shown)

    def _build_as_ref(self, build_id: str) -> ShownRef:
        if len(build_id.removeprefix("b-")) != 16:
            raise UsageError(f"{build_id}: without the farm's API a build has its whole id", hint="b- and 16 digits")
        name = f"b-{build_id.removeprefix('b-')}"
        key = build_key(self._namespace, name, "report.json")
        report: Any = self._document(key, f"no finished build {name} in {self._here}")
        try:
            cells = passed_entries(report)
        except (LookupError, TypeError, AttributeError):
            raise ArtifactGone(f"the report of build {name} cannot be read in {self._here}") from None
        if not cells:
            raise NotFound(f"no cell of build {name} passed")
        view: RefView = {"tag": name, "generation": 0, "snapshot": "", "previous": None, "moved": ""}
        shown: ShownRef = {**view, "namespace": self._namespace, "schema": 1, "cells": cells}
        return checked(shown, ShownRef, self._here, strict=True)

    def sidecar(self, key: str) -> Sidecar:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        absent = f"no artifact has the key {key} in {self._here}"
        for namespace in readable(self._namespace):
            with suppress(NotFound):
                found = self._document(sidecar_key(namespace, key), absent)
                try:
                    return validate(found)
                except UsageError as error:
                    raise ArtifactGone(f"the artifact {key}: {error.message}") from None
        raise NotFound(absent, hint="`farm submit` compiles it")

    def statements(self, key: str) -> SignedSidecar:
        for namespace in readable(self._namespace):
            with suppress(ArtifactGone):
                text = self._text(sidecar_key(namespace, key))
                found = list[str]()
                for each in dict.fromkeys((namespace, self._namespace)):
                    with suppress(ArtifactGone):
                        found += self._text(statements_key(each, key)).splitlines()
                return {"sidecar": text, "statements": found}
        raise NotFound(f"no artifact has the key {key} in {self._here}", hint="`farm submit` compiles it")

    def _text(self, key: str) -> str:
        """Return a small object's text. Raises as `content`, UsageError for other bytes."""
        try:
            return self.content(key).decode()
        except UnicodeDecodeError:
            raise unexpected(self.url, f"{key} is not text") from None

    def _document(self, key: str, absent: str) -> Any:
        """Return an object's JSON. Raises NotFound with the sentence `absent`, ArtifactGone for anything else."""
        try:
            content = self.content(key)
        except ArtifactGone:
            raise NotFound(absent, hint="FARM_NAMESPACE names another namespace") from None
        return _parsed(content, key)

    def location(self, digest: str, name: str) -> str:
        """Return the URL of a blob's bytes."""
        return self._url_of(blob_key(digest))

    def content(self, key: str) -> bytes:
        """Return a small object. Raises ArtifactGone without it, StorageUnavailable, UsageError for a large one."""
        data = bytearray()

        def write(piece: bytes) -> None:
            data.extend(piece)
            if len(data) > LARGEST_DOCUMENT:
                raise UsageError(f"{self.url} has more than {LARGEST_DOCUMENT >> 20} MiB as {key}")

        def once() -> None:
            data.clear()
            self.read(self._url_of(key), key, 0, 0, write, whole=True)

        retry(once)
        return bytes(data)


def _parsed(content: bytes, what: str) -> Any:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ArtifactGone(f"{what} cannot be read", hint="is that a farm's object storage?")
    return document
