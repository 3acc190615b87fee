"""Stored manifests over HTTP."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.extras.triggers.stored import BuildWish, ShownManifest, StoredManifest
from farm.extras.triggers.stored_builds import StoredBuilds, build_id_of
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.jobs.rows import Listed
from farm.matrix.planned import FrozenManifest, ShownPlan
from farm.results.report import BuildView

router = APIRouter(tags=["manifests"])

ManifestName = Annotated[str, Path(pattern=schemas.MANIFEST)]
NewestVersion = Annotated[
    int | None,
    Query(ge=0, description="Only if this is the newest version; 0: only if there is no such manifest. Otherwise 409."),
]


@router.get("/manifests")
def manifests(caller: ReaderCaller, farm: FarmDep) -> Listed[StoredManifest]:
    """List the stored manifests of the namespace."""
    return {"items": farm.part(StoredManifests).list(caller.namespace)}


@router.get("/manifests/{name}", response_model=schemas.Document)
def manifest(
    name: ManifestName,
    caller: ReaderCaller,
    farm: FarmDep,
    version: Annotated[
        int | None, Query(ge=1, description="The version to show; the newest, if none is given.")
    ] = None,
) -> ShownManifest:
    """Return a stored manifest: its versions, and the content of one."""
    return farm.part(StoredManifests).show(caller.namespace, name, version)


@router.put("/manifests/{name}")
def push(
    name: ManifestName,
    content: FrozenManifest,
    caller: Submitter,
    farm: FarmDep,
    version: NewestVersion = None,
) -> StoredManifest:
    """Store a version of a manifest. What equals the newest version makes no new one, but the caller owns it now."""
    return farm.part(StoredManifests).push(caller.namespace, name, content, by=caller.name, version=version)


@router.delete("/manifests/{name}", status_code=204)
def remove(name: ManifestName, caller: Submitter, farm: FarmDep, version: NewestVersion = None) -> None:
    """Remove a manifest with all its versions; builds of it stay."""
    farm.part(StoredManifests).remove(caller.namespace, name, version)


@router.post("/manifests/{name}/plan")
def plan_stored(name: ManifestName, wish: BuildWish, caller: Submitter, farm: FarmDep) -> ShownPlan:
    """Say what building a stored manifest would do. Changes nothing."""
    build_id = build_id_of(caller.namespace, name, secrets.token_hex(16))
    return farm.part(StoredBuilds).plan(caller.namespace, name, wish, build_id)


@router.post("/manifests/{name}/builds", status_code=201)
def build_stored(
    name: ManifestName,
    wish: BuildWish,
    caller: Submitter,
    farm: FarmDep,
    request: Request,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=r"^[!-~][ -~]{0,254}$", description="Any text: the same one again is answered with the same build."
        ),
    ] = None,
) -> BuildView:
    """Build a stored manifest. 409 if the `Idempotency-Key` was used with another body."""
    build_id = build_id_of(caller.namespace, name, idempotency_key or secrets.token_hex(16))
    build = farm.part(StoredBuilds).build(
        caller.namespace,
        name,
        wish,
        build_id,
        by=caller.name,
        max_cells=caller.max_cells,
    )
    response.headers["Location"] = request.url_for("get_build", build_id=build["id"]).path
    return build
