"""Artifacts and refs over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from farm.api import schemas
from farm.api.auth import FarmDep, Reader
from farm.artifacts import sidecar_key
from farm.artifacts.refs import Refs
from farm.errors import ArtifactGone, NotFound

router = APIRouter(tags=["artifacts"])


@router.get("/artifacts/{key}")
def artifact(
    key: Annotated[str, Path(pattern=schemas.DIGEST, description="A cache key.")], caller: Reader, farm: FarmDep
) -> schemas.Document:
    """Return the sidecar of a whole artifact: what it is, how it was made, its blobs' digests. 410: it is damaged."""
    found = farm.artifacts.lookup(caller.readable, key)
    if found:
        return dict(found.sidecar)
    again = "`farm submit` compiles what is missing"
    if any(farm.artifacts.get_object(sidecar_key(namespace, key)) for namespace in caller.readable):
        raise ArtifactGone(f"the artifact {key} is damaged: its sidecar is unreadable or a blob is missing", hint=again)
    raise NotFound(f"no artifact has the key {key}", hint=again)


@router.get("/refs")
def refs(caller: Reader, farm: FarmDep) -> schemas.Items[str]:
    """List the tags of the namespace's refs."""
    return schemas.Items(items=sorted(Refs(farm.artifacts).list(caller.namespace)))


@router.get("/refs/{tag}")
def ref(tag: Annotated[str, Path(pattern=schemas.TAG)], caller: Reader, farm: FarmDep) -> schemas.Document:
    """Return a ref's snapshot: the cells that it names, with their cache keys and programs."""
    snapshot = Refs(farm.artifacts).read(caller.namespace, tag)
    if snapshot is None:
        raise NotFound(
            f"no ref {tag} in namespace {caller.namespace}", hint="`latest` is there after the first build that passed"
        )
    return {"tag": tag, **snapshot}
