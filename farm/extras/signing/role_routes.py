"""The farm's roles over HTTP: readers get them, administrators let refs be signed by them, or not any more."""

from __future__ import annotations

import json

from fastapi import APIRouter

from farm.api import schemas
from farm.api.gate import Admin, FarmDep, ReaderCaller
from farm.errors import NotFound
from farm.extras.signing.signed_refs import publish, published, withdraw

router = APIRouter(tags=["artifacts"])


@router.get("/roles")
def roles(_: ReaderCaller, farm: FarmDep) -> schemas.Document:
    """Return the roles by which the farm's refs are signed: metadata of The Update Framework. 404 if they are not."""
    found = published(farm.artifacts)
    if found is None:
        raise NotFound("no roles are published: the farm signs no refs", hint="`farm key publish` publishes some")
    document: schemas.Document = json.loads(found.text())
    return document


@router.post("/roles/publish", status_code=204)
def publish_roles(document: schemas.Document, _: Admin, farm: FarmDep) -> None:
    """Let the refs of all namespaces be signed by these roles, within a minute. 409 unless they continue the others."""
    publish(farm.artifacts, json.dumps(document).encode())


@router.post("/roles/withdraw", status_code=204)
def withdraw_roles(_: Admin, farm: FarmDep) -> None:
    """Let the farm sign no refs. Readers whose policies ask for signed refs refuse them then."""
    withdraw(farm.artifacts)
    farm.store.signed.forget()
