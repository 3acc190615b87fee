"""The client without a farm's API: refs, sidecars and programs from object storage, with keys or by a public URL."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self, cast
from urllib.parse import quote

from farm.artifacts.refs import RefView, ShownRef, ref_key
from farm.artifacts.sidecar import validate
from farm.artifacts.storage import MAIN, SignedSidecar, blob_key, build_key, readable, sidecar_key, statements_key
from farm.client.client import FarmClient
from farm.client.fetching import ReaderTrust
from farm.client.transfers import KeptAnswers
from farm.client.transport import Transport, retry
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.results.ref_rules import passed_entries
from farm.wire.checking import checked, unexpected
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
        absent = NotFound(f"no ref {tag} in {self._here}", hint=_ELSEWHERE)
        try:
            namespace, content = self._first(lambda each: ref_key(each, tag), absent, readable(self._namespace)[::-1])
        except NotFound:
            if re.fullmatch("(b-)?[0-9a-f]{1,16}", tag):
                return self._build_as_ref(tag)
            raise
        found = _parsed(content, f"the ref {tag}")
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
        absent = NotFound(f"no finished build {name} in {self._here}", hint=_ELSEWHERE)
        _, content = self._first(lambda each: build_key(each, name, "report.json"), absent, [self._namespace])
        try:
            cells = passed_entries(_parsed(content, f"the report of build {name}"))
        except (LookupError, TypeError, AttributeError):
            raise ArtifactGone(f"the report of build {name} cannot be read in {self._here}") from None
        if not cells:
            raise NotFound(f"no cell of build {name} passed")
        view: RefView = {"tag": name, "generation": 0, "snapshot": "", "previous": None, "moved": ""}
        shown: ShownRef = {**view, "namespace": self._namespace, "schema": 1, "cells": cells}
        return checked(shown, ShownRef, self._here, strict=True)

    def sidecar(self, key: str) -> Sidecar:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        try:
            return validate(_parsed(self._sidecar(key)[1], f"the artifact {key}"))
        except UsageError as error:
            raise ArtifactGone(f"the artifact {key}: {error.message}") from None

    def statements(self, key: str) -> SignedSidecar:
        namespace, sidecar = self._sidecar(key)
        found = []
        for each in dict.fromkeys((namespace, self._namespace)):
            with suppress(ArtifactGone):
                found += self.content(statements_key(each, key)).splitlines()
        try:
            return {"sidecar": sidecar.decode(), "statements": [each.decode() for each in found]}
        except UnicodeDecodeError:
            raise unexpected(self.url, f"what it has of the artifact {key} is not text") from None

    def _sidecar(self, key: str) -> tuple[str, bytes]:
        absent = NotFound(f"no artifact has the key {key} in {self._here}", hint="`farm submit` compiles it")
        return self._first(lambda each: sidecar_key(each, key), absent, readable(self._namespace))

    def _first(self, key_of: Callable[[str], str], absent: NotFound, namespaces: list[str]) -> tuple[str, bytes]:
        """Return the first namespace that has an object, and the object. Raises `absent` if none has it."""
        for namespace in namespaces:
            with suppress(ArtifactGone):
                return namespace, self.content(key_of(namespace))
        raise absent

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


_ELSEWHERE = "FARM_NAMESPACE names another namespace"


def _parsed(content: bytes, what: str) -> Any:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ArtifactGone(f"{what} cannot be read", hint="is that a farm's object storage?")
    return document
