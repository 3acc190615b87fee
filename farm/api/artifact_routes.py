"""Artifacts and refs over HTTP."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path, Query

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.artifacts import sidecar_key
from farm.artifacts.refs import Refs, RefView, ShownRef, snapshot_cell
from farm.errors import ArtifactGone, NotFound

router = APIRouter(tags=["artifacts"])

BUILD = re.compile(schemas.BUILD_ID)

Tag = Annotated[str, Path(pattern=schemas.TAG)]
Generation = Annotated[
    int | None,
    Query(ge=0, description="Only if the ref has this generation; 0: only if there is no such ref. Otherwise 409."),
]


@router.get("/artifacts/{key}")
def artifact(
    key: Annotated[str, Path(pattern=schemas.DIGEST, description="A cache key.")], caller: ReaderCaller, farm: FarmDep
) -> schemas.Document:
    """Return the sidecar of a complete artifact. 410 if the artifact is damaged."""
    found = farm.artifacts.lookup(caller.readable, key)
    if found:
        return dict(found.sidecar)
    again = "`farm submit` compiles it"
    if any(farm.artifacts.get_object(sidecar_key(namespace, key)) for namespace in caller.readable):
        raise ArtifactGone(f"the artifact {key} is damaged: its sidecar is unreadable or a blob is missing", hint=again)
    raise NotFound(f"no artifact has the key {key}", hint=again)


@router.get("/refs")
def refs(caller: ReaderCaller, farm: FarmDep) -> schemas.Items[str]:
    """List the tags of the namespace's refs."""
    return schemas.Items(items=sorted(Refs(farm.artifacts).list(caller.namespace)))


@router.get("/refs/{tag}", response_model=schemas.Document)
def ref(tag: Tag, caller: ReaderCaller, farm: FarmDep) -> ShownRef:
    """Return where a ref points, and its snapshot: the cells with their cache keys and programs.

    A finished build's id names the cells of it that passed.
    """
    refs = Refs(farm.artifacts)
    found = refs.find(caller.namespace, tag)
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
    return {**found.as_dict(), **refs.snapshot(found.snapshot)}


@router.put("/refs/{tag}", response_model=RefView)
def point(
    tag: Tag, pointing: schemas.Pointing, caller: Submitter, farm: FarmDep, generation: Generation = None
) -> RefView:
    """Point a ref to the snapshot of another ref (or before its last move), or to the cells of a build that passed.

    Repeating the request is harmless; if a ref goes back to its own `previous`, only with `generation`.
    """
    refs, source = Refs(farm.artifacts), pointing.source
    if BUILD.fullmatch(source) and refs.find(caller.namespace, source) is None:
        cells = farm.build_finisher.snapshot(caller.namespace, source)
        return refs.name_cells(caller.namespace, tag, cells, generation=generation).as_dict()
    moved = refs.point(caller.namespace, tag, source, previous=pointing.previous, generation=generation)
    return moved.as_dict()


@router.delete("/refs/{tag}", status_code=204)
def delete_ref(tag: Tag, caller: Submitter, farm: FarmDep, generation: Generation = None) -> None:
    """Delete a ref; the artifacts that it names stay."""
    Refs(farm.artifacts).delete(caller.namespace, tag, generation=generation)
