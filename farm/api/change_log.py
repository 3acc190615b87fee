"""The log of changes: who changed what, when. One small object for each change, which only administrators read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from fastapi.concurrency import run_in_threadpool
from starlette.types import Scope
from typing_extensions import TypedDict

from farm.artifacts.s3 import S3Store
from farm.control.retention import CHANGES
from farm.errors import FarmError
from farm.logging import get_logger

log = get_logger(__name__)

_NOTHING = ("/v1/plan", "/v1/blobs", "/ui/sign-", "/v1/health")
"""Starts of paths whose requests change nothing but bytes that are named by their hash."""


class Change(TypedDict):
    """One change. `at` in Unix seconds, `by` a token's name, `path` with its parameters; bodies are not kept."""

    at: float
    by: str
    role: str
    namespace: str
    method: str
    path: str
    status: int


def may_change(scope: Scope) -> bool:
    """Whether a request may change something."""
    method, path = scope["method"], scope["path"]
    # A ref, a token or a manifest may be named plan: only POST asks for one.
    plans = method == "POST" and path.endswith("/plan")
    return method in ("POST", "PUT", "DELETE", "PATCH") and not path.startswith(_NOTHING) and not plans


async def write_change(artifacts: S3Store, scope: Scope, status: int) -> None:
    """Write down a request that has succeeded, if its caller is known."""
    caller = scope.get("state", {}).get("caller")
    if caller is None:
        return
    query = scope["query_string"].decode(errors="replace")
    change: Change = {
        "at": time.time(),
        "by": caller.name,
        "role": caller.role.name.lower(),
        "namespace": caller.namespace,
        "method": scope["method"],
        "path": f"{scope['path']}?{query}" if query else scope["path"],
        "status": status,
    }
    log.info("change", **change)
    await run_in_threadpool(_write, artifacts, change)


def _write(artifacts: S3Store, change: Change) -> None:
    day = datetime.fromtimestamp(change["at"], UTC).date()
    name = f"{CHANGES}{day}/{int(change['at'] * 1000)}-{secrets.token_hex(4)}.json"
    try:
        artifacts.put_object(name, json.dumps(change).encode())
    except FarmError as error:
        # It is in the server's log.
        log.error("a change is not in the log of changes", error=error.message)


def read_changes(artifacts: S3Store, day: str, limit: int) -> Iterator[Change]:
    """Yield the changes of a day (ISO, UTC), the newest first."""
    for name in sorted(artifacts.list_objects(f"{CHANGES}{day}/"), reverse=True)[:limit]:
        if found := artifacts.get_object(name):
            change: Change = json.loads(found.data)
            yield change
