"""Blobs over HTTP: the bytes themselves go straight to and from object storage, by presigned URL."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.artifacts import blob_key
from farm.artifacts.ownership import lacking
from farm.artifacts.s3 import client_parts
from farm.artifacts.storage import Missing, Put, Upload
from farm.errors import NotFound, UsageError

router = APIRouter(tags=["blobs"])

MAX_PUT = 1 << 30
"""Most bytes of a blob that one PUT sends. S3 takes 5 GiB, but a broken upload starts again from the beginning."""

MAX_PERMISSIONS = 2000
"""Parts of large blobs in one answer: each is signed, which takes a millisecond of a core."""


@router.post("/blobs", response_model=Missing)
def missing_blobs(query: schemas.BlobsView, caller: Submitter, farm: FarmDep) -> Missing:
    """Return which of these blobs are missing, each with the presigned PUTs that upload the missing parts.

    A single PUT accepts exactly the blob's bytes. A large blob is sent in parts; parts that are there already are left
    out, and a separate request finishes and checks the blob.
    """
    wanted = {blob.digest: blob.size for blob in query.blobs}
    missing = lacking(farm.artifacts, wanted)
    parts = sum(client_parts(wanted[digest]) for digest in missing if wanted[digest] > MAX_PUT)
    if parts > MAX_PERMISSIONS:
        hint = "ask for fewer blobs at once"
        raise UsageError(
            f"these blobs need {parts} upload parts, more than the {MAX_PERMISSIONS} of one answer", hint=hint
        )
    uploads: list[Upload] = []
    for digest in missing:
        size = wanted[digest]
        large = size > MAX_PUT
        permissions = (
            farm.artifacts.begin_upload(caller.namespace, digest, size)
            if large
            else [farm.artifacts.presign_put(digest, size)]
        )
        puts = [Put(url=put.url, headers=dict(put.headers), start=put.start, size=put.size) for put in permissions]
        uploads.append({"digest": digest, "size": size, "puts": puts, "finish": large})
    return {"missing": uploads}


@router.post("/blobs/{digest}/finish", response_model=schemas.BlobQuery)
def finish_upload(
    digest: Annotated[str, Path(pattern=schemas.DIGEST)], query: schemas.Finish, caller: Submitter, farm: FarmDep
) -> schemas.BlobQuery:
    """Make a blob of the parts that were sent. It is read once and hashed, which takes a while. May be repeated."""
    farm.artifacts.finish_upload(caller.namespace, digest, query.size)
    return schemas.BlobQuery(digest=digest, size=query.size)


@router.get("/blobs/{digest}", response_model=schemas.Location, status_code=307, response_class=JSONResponse)
def blob(
    digest: Annotated[str, Path(pattern=schemas.DIGEST)],
    _: ReaderCaller,
    farm: FarmDep,
    filename: Annotated[str, Query(pattern=schemas.FILE_NAME, description="What to call the file.")] = "",
) -> JSONResponse:
    """Redirect to a blob's bytes (`curl -L`); the answer's body holds the same presigned URL as JSON."""
    if not farm.artifacts.has_blob(digest):
        raise NotFound(f"no blob {digest}")
    url = farm.artifacts.presign_get(blob_key(digest), filename=filename)
    return JSONResponse({"url": url}, status_code=307, headers={"Location": url})
