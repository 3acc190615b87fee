"""Which build, job or worker a request is about."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import Scope

_NAMED = re.compile(r"/(build|job|worker)s/([A-Za-z0-9@._-]{1,100})(?=/|$)")
_BUILD = re.compile(r"b-[0-9a-f]{16}")


def ids_of(scope: Scope) -> dict[str, str]:
    """Return the ids in a request's path, and the id that a new build will have, by what they are of."""
    ids: dict[str, str] = dict(_NAMED.findall(scope["path"]))
    new = Headers(scope=scope).get("idempotency-key", "")
    return {**ids, "build": new} if _BUILD.fullmatch(new) else ids
