"""What a server remembers of refs that it has signed: object storage is not to choose what it signs next.

A server builds on what it reads: a move keeps the entries of before, and a ref is signed again each day. It reads refs
from object storage, and remembers their versions in Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farm.artifacts.refs import NOWHERE, RefView, parse_ref, ref_key
from farm.errors import FarmFault
from farm.extras.signing.roles import Roles, target_of, versions

if TYPE_CHECKING:
    from farm.app import Farm

ROLES = "roles"
"""The name of the farm's roles among those of refs, which have a namespace."""


def remember(farm: Farm, namespace: str, ref: RefView) -> None:
    """Remember the version of a ref that was written; forget one that was deleted."""
    path = f"{namespace}/{ref['tag']}"
    if "signed" in ref:
        farm.store.signed.remember(path, _version(ref))
    elif ref["snapshot"] == NOWHERE:
        farm.store.signed.forget(path)


def is_own(farm: Farm, roles: Roles, namespace: str, found: RefView) -> bool:
    """Require that a ref is what this farm has signed last, as far as it remembers: then it may build on it.

    Likewise the roles. False if it has moved since it was read. Raises FarmFault: object storage has changed or repeats
    one.
    """
    memory, age, path = farm.store.signed, roles.root.version + roles.top.version, f"{namespace}/{found['tag']}"
    if age < memory.version(ROLES):
        raise FarmFault("object storage answers with older roles than were published", hint=_HINT)
    memory.remember(ROLES, age)
    known = memory.version(path)
    if known and _version(found) < known:
        there = farm.artifacts.get_object(ref_key(namespace, found["tag"]))
        if there and _version(parse_ref(found["tag"], there)) < known:
            raise FarmFault(f"object storage answers with an older ref {path} than was signed", hint=_HINT)
        return False
    if known and not _is_signed(roles, path, found):
        raise FarmFault(f"object storage answers with a ref {path} that this farm has not signed", hint=_HINT)
    return True


def _version(ref: RefView) -> int:
    return versions(ref, "timestamp").get("timestamp", 0)


_HINT = "if it came back from a backup, `farm key withdraw` and `farm key publish` take its refs as they are"


def _is_signed(roles: Roles, path: str, ref: RefView) -> bool:
    """Whether keys of the published roles, or of roles that they continue, have signed a ref; it may have expired."""
    from tuf.api.exceptions import RepositoryError
    from tuf.api.metadata import Metadata

    try:
        carried = ref["signed"]
        text = {name: carried[name].encode() for name in ("targets", "role", "snapshot", "timestamp")}
        part = {name: Metadata[Any].from_bytes(each) for name, each in text.items()}
        root = Metadata[Any].from_bytes(carried["roots"][-1].encode()).signed
        for name in ("targets", "snapshot", "timestamp"):
            root.verify_delegate(name, part[name].signed_bytes, part[name].signatures)
        part["timestamp"].signed.snapshot_meta.verify_length_and_hashes(text["snapshot"])
        listed, targets = part["snapshot"].signed.meta, part["targets"].signed
        listed["targets.json"].verify_length_and_hashes(text["targets"])
        role = next(iter(targets.delegations.get_roles_for_target(path)))[0]
        listed[f"{role}.json"].verify_length_and_hashes(text["role"])
        targets.verify_delegate(role, part["role"].signed_bytes, part["role"].signatures)
        part["role"].signed.targets[path].verify_length_and_hashes(target_of(ref))
        return carried["roots"][-1] in roles.roots
    except (RepositoryError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return False
