"""Stored manifests over HTTP."""

from __future__ import annotations

import secrets
from typing import Annotated, cast

from fastapi import APIRouter, Header, Path, Query, Request, Response

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.builds.stored_builds import build_id_of
from farm.jobs.rows import Listed
from farm.matrix.planned import ShownPlan
from farm.matrix.stored import BuildWish, FrozenDocument, ShownManifest, StoredManifest
from farm.results.report import AcceptedBuild

router = APIRouter(tags=["manifests"])

ManifestName = Annotated[str, Path(pattern=schemas.MANIFEST)]
NewestVersion = Annotated[
    int | None,
    Query(ge=0, description="Only if this is the newest version; 0: only if there is no such manifest. Otherwise 409."),
]


@router.get("/manifests", response_model=schemas.Items[StoredManifest])
def manifests(caller: ReaderCaller, farm: FarmDep) -> Listed[StoredManifest]:
    """List the stored manifests of the namespace."""
    return {"items": farm.stored_manifests.list(caller.namespace)}


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
    return farm.stored_manifests.show(caller.namespace, name, version)


@router.put("/manifests/{name}", response_model=StoredManifest)
def push(
    name: ManifestName,
    content: schemas.FrozenManifest,
    caller: Submitter,
    farm: FarmDep,
    version: NewestVersion = None,
) -> StoredManifest:
    """Store a version of a manifest. What is the newest version already makes no other one, but is the caller's now."""
    document = cast(FrozenDocument, content.model_dump())
    return farm.stored_manifests.push(caller.namespace, name, document, by=caller.name, version=version)


@router.delete("/manifests/{name}", status_code=204)
def remove(name: ManifestName, caller: Submitter, farm: FarmDep, version: NewestVersion = None) -> None:
    """Remove a manifest with all its versions; builds of it stay."""
    farm.stored_manifests.remove(caller.namespace, name, version)


@router.post("/manifests/{name}/plan", response_model=schemas.PlanView)
def plan_stored(name: ManifestName, wish: schemas.StoredBuild, caller: Submitter, farm: FarmDep) -> ShownPlan:
    """Say what building a stored manifest would do. Changes nothing."""
    build_id = build_id_of(caller.namespace, name, secrets.token_hex(16))
    return farm.stored_builds.plan(caller.namespace, name, cast(BuildWish, wish.model_dump()), build_id)


@router.post("/manifests/{name}/builds", response_model=schemas.Build, status_code=201)
def build_stored(
    name: ManifestName,
    wish: schemas.StoredBuild,
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
) -> AcceptedBuild:
    """Build a stored manifest. 409 if the `Idempotency-Key` was used with another body."""
    build_id = build_id_of(caller.namespace, name, idempotency_key or secrets.token_hex(16))
    build = farm.stored_builds.build(
        caller.namespace,
        name,
        cast(BuildWish, wish.model_dump()),
        build_id,
        by=caller.name,
        max_cells=caller.max_cells,
    )
    response.headers["Location"] = request.url_for("get_build", build_id=build["id"]).path
    return build
