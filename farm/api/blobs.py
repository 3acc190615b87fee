"""Blobs over HTTP: the bytes themselves go straight to and from object storage, by presigned URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse

from farm.api import schemas
from farm.api.auth import FarmDep, Reader, Submitter
from farm.artifacts import blob_key
from farm.errors import NotFound

router = APIRouter(tags=["blobs"])

ASKING = 8
"""Requests to object storage at once, for one list of blobs."""


@router.post("/blobs", response_model=schemas.Missing)
def missing_blobs(query: schemas.Blobs, _: Submitter, farm: FarmDep) -> schemas.Missing:
    """Say which of these blobs are missing, each with a presigned PUT that accepts exactly its bytes."""
    wanted = {blob.digest: blob.size for blob in query.blobs}
    with ThreadPoolExecutor(ASKING) as threads:
        there = threads.map(lambda item: farm.artifacts.has_blob(*item), wanted.items())
        absent = [item for item, present in zip(wanted.items(), there, strict=True) if not present]
    uploads = []
    for digest, size in absent:
        request = farm.artifacts.presign_put(digest, size)
        uploads.append(schemas.Upload(digest=digest, size=size, url=request.url, headers=dict(request.headers)))
    return schemas.Missing(missing=uploads)


@router.get("/blobs/{digest}", response_model=schemas.Location, status_code=307, response_class=JSONResponse)
def blob(
    digest: Annotated[str, Path(pattern=schemas.DIGEST)],
    _: Reader,
    farm: FarmDep,
    filename: Annotated[str, Query(pattern=schemas.FILE_NAME, description="What to call the file.")] = "",
) -> JSONResponse:
    """Redirect to a blob's bytes (`curl -L`); the answer's body holds the same presigned URL as JSON."""
    if not farm.artifacts.has_blob(digest):
        raise NotFound(f"no blob {digest}")
    url = farm.artifacts.presign_get(blob_key(digest), filename=filename)
    return JSONResponse({"url": url}, status_code=307, headers={"Location": url})
