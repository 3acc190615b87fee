"""Index: the facts of every complete artifact of a namespace, read from object storage after Redis was lost.

Reading ten thousand sidecars takes half a minute; listing them takes two seconds. So the facts are also kept
in one object, the checkpoint, and only sidecars whose ETag it does not have are read. It is a cache and may
be deleted.
"""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from farm.artifacts import sidecar as sidecars
from farm.artifacts.storage import BLOBS, ArtifactStore, artifacts_prefix, at_once
from farm.jobs.facts import ArtifactFacts
from farm.logging import get_logger

log = get_logger(__name__)

SCHEMA = 2
FEW = 500
"""Up to this number of blobs, asking for each is faster than listing all."""


class Known(NamedTuple):
    """The checkpoint's entry for one readable sidecar: its facts, and the blobs that it needs."""

    etag: str
    facts: ArtifactFacts
    blobs: list[tuple[str, int]]


def rebuild(artifacts: ArtifactStore, namespace: str) -> Iterator[tuple[str, ArtifactFacts]]:
    """Yield key and facts of every complete artifact of a namespace, and update its checkpoint."""
    prefix = artifacts_prefix(namespace)
    listed = {entry.key: entry.etag for entry in artifacts.list_entries(prefix)}
    checkpoint = _read_checkpoint(artifacts, namespace)
    known = {key: found for key, found in checkpoint.items() if listed.get(key) == found.etag}
    changed = [key for key in listed if key not in known]
    read = at_once(lambda key: _read(artifacts, key), changed)
    known |= {key: found for key, found in zip(changed, read, strict=True) if found}
    if known != checkpoint:
        _write_checkpoint(artifacts, namespace, known)
    sizes = _blob_sizes(artifacts, {blob for found in known.values() for blob in found.blobs})
    whole = [found for found in known.values() if all(sizes.get(digest) == size for digest, size in found.blobs)]
    log.info("artifacts indexed", namespace=namespace, sidecars=len(listed), read=len(changed), whole=len(whole))
    for found in whole:
        yield found.facts["key"], found.facts


def without_program(artifacts: ArtifactStore, found: Mapping[str, ArtifactFacts]) -> list[str]:
    """Return the names of the artifacts (name: facts) whose program is gone, or has another size."""
    programs = {name: (facts["program"]["digest"], facts["program"]["size"]) for name, facts in found.items()}
    sizes = _blob_sizes(artifacts, set(programs.values()))
    return [name for name, (digest, size) in programs.items() if sizes.get(digest) != size]


def _read(artifacts: ArtifactStore, key: str) -> Known | None:
    found = artifacts.get_object(key)
    if found is None:
        return None
    try:
        sidecar = sidecars.read(found.data)
    except ValueError:
        log.warning("sidecar unreadable", key=key)
        return None
    facts = sidecars.facts(sidecar)
    if facts["sidecar"] != key:
        log.warning("sidecar misplaced", key=key)
        return None
    return Known(found.etag, facts, [(blob["digest"], blob["size"]) for blob in sidecars.required(sidecar["blobs"])])


def _blob_sizes(artifacts: ArtifactStore, wanted: Collection[tuple[str, int]]) -> dict[str, int]:
    """Return the sizes of the wanted blobs that exist."""
    if len(wanted) <= FEW:
        there = at_once(lambda blob: artifacts.has_blob(*blob), wanted)
        return {digest: size for (digest, size), is_there in zip(wanted, there, strict=True) if is_there}
    folders = Counter(digest[:2] for digest, _ in wanted)
    listings = at_once(lambda folder: list(artifacts.list_entries(f"{BLOBS}{folder}/")), folders)
    return {entry.key.rpartition("/")[2]: entry.size for listing in listings for entry in listing}


LARGEST_CHECKPOINT = 1 << 30
"""Most bytes of an unpacked checkpoint; a larger one is ignored, and all sidecars are read again."""


def _checkpoint_key(namespace: str) -> str:
    return f"ns/{namespace}/index/checkpoint.json.gz"


def _read_checkpoint(artifacts: ArtifactStore, namespace: str) -> dict[str, Known]:
    found = artifacts.get_object(_checkpoint_key(namespace))
    if found is None:
        return {}
    try:
        with gzip.open(io.BytesIO(found.data)) as unpacked:
            text = unpacked.read(LARGEST_CHECKPOINT)
        if len(text) == LARGEST_CHECKPOINT:
            raise ValueError(f"{LARGEST_CHECKPOINT} bytes or more when unpacked")
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            return {}
        return {
            key: Known(etag, facts, [(digest, size) for digest, size in blobs])
            for key, (etag, facts, blobs) in document["sidecars"].items()
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint unreadable", namespace=namespace, error=repr(error))
        return {}


def _write_checkpoint(artifacts: ArtifactStore, namespace: str, known: Mapping[str, Known]) -> None:
    text = json.dumps({"schema": SCHEMA, "sidecars": known}).encode()
    data = gzip.compress(text, compresslevel=1)
    artifacts.put_object(_checkpoint_key(namespace), data, content_type="application/gzip")
