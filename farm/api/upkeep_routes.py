"""Upkeep over HTTP, for administrators: audit, garbage collection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from farm.api.auth import Admin, FarmDep
from farm.api.change_log import Change, read_changes
from farm.artifacts.ownership import Collected, collect
from farm.control.audit import Auditor
from farm.jobs.rows import Listed

router = APIRouter(tags=["upkeep"])


@router.get(
    "/audit",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
def audit(
    _: Admin, farm: FarmDep, deep: Annotated[bool, Query(description="Read and hash every blob.")] = False
) -> StreamingResponse:
    """Report where store, object storage and sidecars disagree: one JSON object per line, the counts in the last."""
    auditor = Auditor(farm.store, farm.artifacts, deep=deep)

    def lines() -> Iterator[str]:
        for finding in auditor.findings():
            yield json.dumps(finding.as_dict()) + "\n"
        yield json.dumps({"counts": auditor.counts}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


@router.get("/changes")
def changes(
    _: Admin,
    farm: FarmDep,
    day: Annotated[
        str, Query(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$", description="A day, UTC; empty: today.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Listed[Change]:
    """List who changed what on a day, the newest change first."""
    return {"items": list(read_changes(farm.artifacts, day or str(datetime.now(UTC).date()), limit))}


@router.post("/gc")
def gc(_: Admin, farm: FarmDep, dry_run: Annotated[bool, Query(description="Delete nothing.")] = False) -> Collected:
    """Mark the blobs that nothing has named for a day, and delete those that were marked a day ago."""
    found = collect(farm.artifacts, plans_kept=timedelta(days=farm.settings.keep_days), dry_run=dry_run)
    size = sum(entry.size for entry in found.deleted)
    return {"blobs": len(found.deleted), "bytes": size, "marked": len(found.marked)}
