"""Which work orders the control plane has planned: a list for each build, where workers may read and not write.

Orders reach workers through Redis, in which every worker writes. A worker runs only what is in the list of its build:
so one that was taken over makes others compile nothing, and under no other name, than what somebody has submitted
(`docs/decisions/0054`).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable

from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import WORKERS_WRITE, build_key
from farm.errors import Untrusted
from farm.jobs.state import WorkOrder
from farm.spec import canonical_json
from farm.wire.asked import BUILD_ID, TAG

BYTES = hashlib.sha256().digest_size  # Of each entry of a list.
_MOST_LISTS = 16  # Lists that a process keeps in memory.

_lists: dict[str, frozenset[bytes]] = {}
_change = threading.Lock()  # All attempts of a worker process share the lists.


def keep(artifacts: S3Store, namespace: str, build_id: str, planned: Iterable[tuple[str, WorkOrder]]) -> None:
    """Write the list of a build: its cache keys with their orders. Repeating it changes nothing."""
    digests = sorted({_digest(namespace, key, order) for key, order in planned})
    artifacts.put_object(_list_key(namespace, build_id), b"".join(digests), content_type="application/octet-stream")


def is_kept(artifacts: S3Store, namespace: str, build_id: str) -> bool:
    """Whether a build has its list: those of releases before had none."""
    return any(True for _ in artifacts.list_objects(_list_key(namespace, build_id)))


def require_planned(artifacts: S3Store, namespace: str, build_id: str, key: str, order: WorkOrder) -> None:
    """Raise Untrusted for an order that is not in the list of its build. Raises as `get_object`."""
    place = _list_key(namespace, build_id)
    # By another name it would be a place where workers may write, such as below a namespace's artifacts.
    named = re.fullmatch(TAG, namespace) and namespace not in WORKERS_WRITE and re.fullmatch(BUILD_ID, build_id)
    planned = _lists.get(place) if named else frozenset()
    if planned is None:
        found = artifacts.get_object(place)
        data = found.data if found else b""
        planned = frozenset(data[start : start + BYTES] for start in range(0, len(data), BYTES))
        if found:
            with _change:
                while len(_lists) >= _MOST_LISTS:
                    del _lists[next(iter(_lists))]
                _lists[place] = planned
    if _digest(namespace, key, order) not in planned:
        hint = "who may write in Redis has changed it: look at the workers' users; submit again"
        raise Untrusted(f"the control plane has not planned this work order for build {build_id}", hint=hint)


def _list_key(namespace: str, build_id: str) -> str:
    return build_key(namespace, build_id, "orders")


def _digest(namespace: str, key: str, order: WorkOrder) -> bytes:
    """Return the digest of all that decides what an order makes, and where: `hit` only says that it is measured."""
    content = {name: value for name, value in order.items() if name != "hit"}
    return hashlib.sha256(canonical_json([namespace, key, content]).encode()).digest()
