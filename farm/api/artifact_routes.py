"""Artifacts, refs and blobs over HTTP. A blob's bytes go straight to and from object storage, by presigned URL."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Body, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from farm.api import schemas
from farm.api.gate import FarmDep, ReaderCaller, Submitter
from farm.app import Farm
from farm.artifacts.inventory import lacking
from farm.artifacts.refs import ListedRefs, Refs, RefView, ShownRef
from farm.artifacts.s3 import client_parts
from farm.artifacts.storage import Missing, SignedSidecar, Upload, at_once, blob_key, readable, sidecar_key
from farm.artifacts.tokens import Token
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.wire.asked import BlobSize
from farm.wire.program import Sidecar

router = APIRouter(tags=["artifacts"])
blobs = APIRouter(tags=["blobs"])

MAX_PUT = 1 << 30  # Most bytes of a blob in one PUT: S3 takes 5 GiB, but a broken upload begins again from the start.

MAX_PERMISSIONS = 2000  # Parts of large blobs in one answer: each is signed, which takes a millisecond of a core.

BUILD = re.compile(schemas.BUILD_REFERENCE)

CacheKey = Annotated[str, Path(pattern=schemas.DIGEST, description="A cache key.")]
BlobDigest = Annotated[str, Path(pattern=schemas.DIGEST)]
Tag = Annotated[str, Path(pattern=schemas.TAG)]
Generation = Annotated[
    int | None,
    Query(ge=0, description="Only if the ref has this generation; 0: only if there is no such ref. Otherwise 409."),
]

IfMatch = Annotated[
    str | None,
    Header(pattern=r'^"[0-9]{1,18}"$', description="Only if the ref has this ETag, which is its generation."),
]


@router.get("/artifacts/{key}")
def artifact(key: CacheKey, caller: ReaderCaller, farm: FarmDep) -> schemas.Document:
    """Return the sidecar of a complete artifact. 410 if the artifact is damaged."""
    return dict(_found(key, caller, farm)[0])


@router.get("/artifacts/{key}/statements", response_model=schemas.Document)
def statements(key: CacheKey, caller: ReaderCaller, farm: FarmDep) -> SignedSidecar:
    """Return the sidecar of a complete artifact as it is stored, byte by byte, and what is signed about it.

    Each statement is a Sigstore bundle. The farm does not judge them: readers do, by their trust policies.
    """
    found, text = _found(key, caller, farm)
    namespaces = dict.fromkeys((found["namespace"], caller.namespace))
    return {
        "sidecar": text.decode(),
        "statements": [each.decode() for each in farm.artifacts.statements(namespaces, key)],
    }


_AGAIN = "`farm submit` compiles it"


def _found(key: str, caller: Token, farm: Farm) -> tuple[Sidecar, bytes]:
    """Return a complete artifact as `S3Store.stored`. Raises NotFound, ArtifactGone for one that is damaged."""
    if found := farm.artifacts.stored(readable(caller.namespace), key):
        return found
    if any(farm.artifacts.get_object(sidecar_key(namespace, key)) for namespace in readable(caller.namespace)):
        message = f"the artifact {key} is damaged: its sidecar is unreadable or a blob is missing"
        raise ArtifactGone(message, hint=_AGAIN)
    raise NotFound(f"no artifact has the key {key}", hint=_AGAIN)


@router.get("/refs")
def refs(caller: ReaderCaller, farm: FarmDep, moves: bool = False) -> ListedRefs:
    """List the tags of the namespace's refs and of `main`'s; with `moves` also where each points, and since when."""
    refs = Refs(farm.artifacts)
    namespaces = refs.readable(caller.namespace)
    tags = sorted(namespaces)
    if not moves:
        return {"items": tags}
    shown = [ref for ref in at_once(lambda tag: refs.listed(namespaces[tag], tag), tags) if ref]
    return {"items": [ref["tag"] for ref in shown], "refs": shown}


@router.get("/refs/{tag}", response_model=schemas.Document)
def ref(tag: Tag, caller: ReaderCaller, farm: FarmDep, response: Response) -> ShownRef:
    """Return where a ref points, and its snapshot: the cells with their cache keys and programs.

    A ref that the namespace does not have is `main`'s. A finished build's id, or a unique start of it, names the
    cells of it that passed.
    """
    refs = Refs(farm.artifacts)
    namespace, found = refs.found(caller.namespace, tag)
    if found is None and BUILD.fullmatch(tag):
        named = farm.build_finisher.snapshot(caller.namespace, tag)
        return {"tag": tag, "generation": 0, "snapshot": "", "previous": None, "moved": "", "schema": 1, "cells": named}
    if found is None:
        first = "`latest` exists after the first build that passed"
        hint = first if tag == "latest" else "`farm ls refs` lists them"
        raise NotFound(f"no ref {tag} in namespace {caller.namespace}", hint=hint)
    if namespace == caller.namespace:
        response.headers["ETag"] = f'"{found["generation"]}"'
    return {**found, **refs.snapshot(found["snapshot"]), "namespace": namespace}


@router.put("/refs/{tag}")
def point(
    tag: Tag,
    pointing: schemas.Pointing,
    caller: Submitter,
    farm: FarmDep,
    generation: Generation = None,
    if_match: IfMatch = None,
) -> RefView:
    """Point a ref to the snapshot of another ref (or before its last move), or to the cells of a build that passed.

    If the server has a trust policy, every artifact must pass it (410 with the reasons), and gets a verification
    summary. A ref that people sign needs what its promoter `signed` (403). Repeating the request is harmless; if a ref
    goes back to its own `previous`, only with `generation`.
    """
    generation = _condition(generation, if_match)
    refs, source = farm.refs, pointing.source
    if BUILD.fullmatch(source) and refs.find(caller.namespace, source) is None:
        wanted = farm.build_finisher.snapshot(caller.namespace, source)
    else:
        wanted = refs.source(caller.namespace, source, previous=pointing.previous)
    moved = refs.move(
        caller.namespace,
        tag,
        lambda _: wanted,
        generation=generation,
        check=lambda _, after: farm.check_named(caller.namespace, tag, list(after.values())),
        signed=pointing.signed,
    )
    farm.failures.taken(caller.namespace, {cell["key"] for cell in wanted.values()})
    return moved


@router.delete("/refs/{tag}", status_code=204)
def delete_ref(
    tag: Tag,
    caller: Submitter,
    farm: FarmDep,
    signed: Annotated[schemas.SignedMove, Body(embed=True)] = "",
    generation: Generation = None,
    if_match: IfMatch = None,
) -> None:
    """Delete a ref; the artifacts that it names stay. One that people sign needs what its promoter `signed` (403)."""
    farm.refs.delete(caller.namespace, tag, generation=_condition(generation, if_match), signed=signed)


def _condition(generation: int | None, if_match: str | None) -> int | None:
    """Return the generation that a ref must have. Raises UsageError if both conditions are given and differ."""
    if if_match is None:
        return generation
    matched = int(if_match.strip('"'))
    if generation not in (None, matched):
        raise UsageError("If-Match differs from generation", hint="send one of them")
    return matched


@blobs.post("/blobs")
def missing_blobs(
    blobs: Annotated[list[BlobSize], Body(embed=True, max_length=1000)], caller: Submitter, farm: FarmDep
) -> Missing:
    """Return which of these blobs are missing, each with the presigned PUTs that upload the missing parts.

    A single PUT accepts exactly the blob's bytes. A large blob is sent in parts; parts that are there already are left
    out, and a separate request finishes and checks the blob.
    """
    wanted = {blob["digest"]: blob["size"] for blob in blobs}
    missing = lacking(farm.artifacts, wanted)
    parts = sum(client_parts(wanted[digest]) for digest in missing if wanted[digest] > MAX_PUT)
    if parts > MAX_PERMISSIONS:
        said = f"these blobs need {parts} upload parts, more than the {MAX_PERMISSIONS} of one answer"
        raise UsageError(said, hint="ask for fewer blobs at once")
    uploads: list[Upload] = []
    for digest in missing:
        size = wanted[digest]
        large = size > MAX_PUT
        store = farm.artifacts
        puts = store.begin_upload(caller.namespace, digest, size) if large else [store.presign_put(digest, size)]
        uploads.append({"digest": digest, "size": size, "puts": puts, "finish": large})
    return {"missing": uploads}


@blobs.post("/blobs/{digest}/finish")
def finish_upload(
    digest: BlobDigest, size: Annotated[schemas.Size, Body(embed=True)], caller: Submitter, farm: FarmDep
) -> BlobSize:
    """Make a blob of the parts that were sent. It is read once and hashed, which takes a while. May be repeated."""
    farm.artifacts.finish_upload(caller.namespace, digest, size)
    return {"digest": digest, "size": size}


@blobs.get("/blobs/{digest}", response_model=schemas.Location, status_code=307, response_class=JSONResponse)
def blob(
    digest: BlobDigest,
    _: ReaderCaller,
    farm: FarmDep,
    filename: Annotated[str, Query(pattern=schemas.FILE_NAME, description="What to call the file.")] = "",
) -> JSONResponse:
    """Redirect to a blob's bytes (`curl -L`); the answer's body holds the same presigned URL as JSON."""
    if not farm.artifacts.has_blob(digest):
        raise NotFound(f"no blob {digest}")
    url = farm.artifacts.presign_get(blob_key(digest), filename=filename)
    return JSONResponse({"url": url}, status_code=307, headers={"Location": url})
