"""Artifacts and refs over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from farm.api import schemas
from farm.api.auth import Admin, Caller, FarmDep, ReaderCaller, Submitter
from farm.app import Farm
from farm.artifacts import REVOCATIONS, Artifact, sidecar_key
from farm.artifacts.refs import Refs, RefView, ShownRef, SnapshotCell, snapshot_cell
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.signing.bundles import SignedSidecar
from farm.signing.notary import stored
from farm.signing.revocations import keep

router = APIRouter(tags=["artifacts"])

BUILD = re.compile(schemas.BUILD_ID)

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
def artifact(
    key: Annotated[str, Path(pattern=schemas.DIGEST, description="A cache key.")], caller: ReaderCaller, farm: FarmDep
) -> schemas.Document:
    """Return the sidecar of a complete artifact. 410 if the artifact is damaged."""
    return dict(_found(key, caller, farm).sidecar)


@router.get("/artifacts/{key}/statements", response_model=schemas.Document)
def statements(
    key: Annotated[str, Path(pattern=schemas.DIGEST, description="A cache key.")], caller: ReaderCaller, farm: FarmDep
) -> SignedSidecar:
    """Return the sidecar of a complete artifact as it is stored, byte by byte, and what is signed about it.

    Each statement is a Sigstore bundle. The farm does not judge them: readers do, by their trust policies.
    """
    found = _found(key, caller, farm)
    there = farm.artifacts.get_object(sidecar_key(found.namespace, key))
    if there is None:
        raise ArtifactGone(f"the sidecar of {key} is gone", hint=_AGAIN)
    namespaces = dict.fromkeys((found.namespace, caller.namespace))
    return {
        "sidecar": there.data.decode(),
        "statements": [each.decode() for each in stored(farm.artifacts, namespaces, key)],
    }


_AGAIN = "`farm submit` compiles it"


def _found(key: str, caller: Caller, farm: Farm) -> Artifact:
    """Return a complete artifact. Raises NotFound, ArtifactGone for one that is damaged."""
    found = farm.artifacts.lookup(caller.readable, key)
    if found:
        return found
    if any(farm.artifacts.get_object(sidecar_key(namespace, key)) for namespace in caller.readable):
        message = f"the artifact {key} is damaged: its sidecar is unreadable or a blob is missing"
        raise ArtifactGone(message, hint=_AGAIN)
    raise NotFound(f"no artifact has the key {key}", hint=_AGAIN)


@router.get("/revocations")
def revocations(_: ReaderCaller, farm: FarmDep) -> schemas.Document:
    """Return the newest revocation document, a signed Sigstore bundle. 404 if there is none."""
    found = farm.artifacts.get_object(REVOCATIONS)
    if found is None:
        raise NotFound("no revocation document is published", hint="`farm key publish` does")
    document: schemas.Document = json.loads(found.data)
    return document


@router.post("/revocations/issue", status_code=204)
def issue(document: schemas.Document, _: Admin, farm: FarmDep) -> None:
    """Publish a signed revocation document. 409 unless its number is higher than that of the published one."""
    keep(farm.artifacts, json.dumps(document).encode())


@router.get("/refs")
def refs(caller: ReaderCaller, farm: FarmDep) -> schemas.Items[str]:
    """List the tags of the namespace's refs, and of `main`'s."""
    refs = Refs(farm.artifacts)
    return schemas.Items(items=sorted({tag for namespace in caller.readable for tag in refs.list(namespace)}))


@router.get("/refs/{tag}", response_model=schemas.Document)
def ref(tag: Tag, caller: ReaderCaller, farm: FarmDep, response: Response) -> ShownRef:
    """Return where a ref points, and its snapshot: the cells with their cache keys and programs.

    A ref that the namespace does not have is `main`'s. A finished build's id names the cells of it that passed.
    """
    refs = Refs(farm.artifacts)
    # One's own come first: they are what one moves.
    found, namespace = next(
        ((found, each) for each in reversed(caller.readable) if (found := refs.find(each, tag))), (None, "")
    )
    if found is None and BUILD.fullmatch(tag):
        cells = farm.build_finisher.snapshot(caller.namespace, tag)
        named = dict(snapshot_cell(caller.namespace, cell) for cell in cells)
        return {
            "tag": tag,
            "generation": 0,
            "snapshot": "",
            "previous": None,
            "moved": "",
            "schema": 1,
            "cells": named,
        }
    if found is None:
        first = "`latest` exists after the first build that passed"
        hint = first if tag == "latest" else "`farm ls refs` lists them"
        raise NotFound(f"no ref {tag} in namespace {caller.namespace}", hint=hint)
    if namespace == caller.namespace:
        response.headers["ETag"] = f'"{found.generation}"'
    return {**found.as_dict(), **refs.snapshot(found.snapshot), "namespace": namespace}


@router.put("/refs/{tag}", response_model=RefView)
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
    summary. Repeating the request is harmless; if a ref goes back to its own `previous`, only with `generation`.
    """
    generation = _condition(generation, if_match)
    refs, source = Refs(farm.artifacts), pointing.source

    def check(cells: Iterable[SnapshotCell]) -> None:
        farm.promotions.check(caller.namespace, tag, cells)

    if BUILD.fullmatch(source) and refs.find(caller.namespace, source) is None:
        cells = farm.build_finisher.snapshot(caller.namespace, source)
        check(cells)
        return refs.name_cells(caller.namespace, tag, cells, generation=generation).as_dict()
    moved = refs.point(caller.namespace, tag, source, previous=pointing.previous, generation=generation, check=check)
    return moved.as_dict()


@router.delete("/refs/{tag}", status_code=204)
def delete_ref(
    tag: Tag, caller: Submitter, farm: FarmDep, generation: Generation = None, if_match: IfMatch = None
) -> None:
    """Delete a ref; the artifacts that it names stay."""
    Refs(farm.artifacts).delete(caller.namespace, tag, generation=_condition(generation, if_match))


def _condition(generation: int | None, if_match: str | None) -> int | None:
    """Return the generation that a ref must have. Raises UsageError if both conditions are given and differ."""
    if if_match is None:
        return generation
    matched = int(if_match.strip('"'))
    if generation not in (None, matched):
        raise UsageError("If-Match differs from generation", hint="send one of them")
    return matched
