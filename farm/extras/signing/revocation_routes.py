"""The revocation document over HTTP: administrators publish one, and clients take over what is newer."""

from __future__ import annotations

import json

from fastapi import APIRouter

from farm.api import schemas
from farm.api.auth import Admin, FarmDep, ReaderCaller
from farm.artifacts.keys import REVOCATIONS
from farm.errors import NotFound
from farm.extras.signing.revocations import keep

router = APIRouter(tags=["artifacts"])


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
