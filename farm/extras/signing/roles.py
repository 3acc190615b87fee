"""Roles: whose keys sign the refs of a farm, as The Update Framework (TUF) says it: root and top-level targets.

Both are signed offline, by `farm key roles`, and published once for all namespaces. The targets entrust NAMESPACE/prod
to its promoters and every other ref to the server's key, so that a new namespace needs no new signature.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from farm.artifacts.refs import canonical
from farm.artifacts.storage import MAIN
from farm.errors import Conflict, NotFound, UsageError
from farm.results.ref_rules import PROD

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, Key
    from tuf.api.metadata import DelegatedRole, Metadata, Root, Targets

    from farm.artifacts.storage import ArtifactStore

PLACE = f"ns/{MAIN}/roles.json"
"""The object key of the published roles: where everybody who reads artifacts may read."""
SERVER = "refs"
"""The role of the server's key: every ref that no promoter signs."""
LARGEST = 1 << 20
YEAR = 365.0
"""Days for which a ref's role holds."""
LARGEST_VERSION = 1 << 53
"""Above it is none that a farm gives, in milliseconds."""
KEPT_ROOTS = 64
"""The newest roots that are kept: a reader with an older one takes the file of roles again."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a farm, as text: its roots from the oldest on, each signed by the one before, and the targets."""

    roots: tuple[str, ...]
    targets: str

    @classmethod
    def read(cls, data: bytes) -> Roles:
        """Read roles, and check that each part is signed by the one before. Raises UsageError for anything else."""
        from tuf.api.exceptions import RepositoryError
        from tuf.api.metadata import Root, Targets

        try:
            document = json.loads(data)
            found = cls(tuple(map(str, document["roots"])), str(document["targets"]))
            chain = [_parsed(root, Root.type) for root in found.roots]
            for older, newer in pairwise([chain[0], *chain]):
                if newer is not chain[0] and newer.signed.version != older.signed.version + 1:
                    raise ValueError(f"root {newer.signed.version} follows {older.signed.version}")
                for delegator in (older, newer):
                    delegator.signed.verify_delegate(Root.type, newer.signed_bytes, newer.signatures)
            targets = _parsed(found.targets, Targets.type)
            chain[-1].signed.verify_delegate(Targets.type, targets.signed_bytes, targets.signatures)
        except (RepositoryError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"these are not roles: {error}", hint="`farm key roles` makes them") from None
        return found

    def text(self) -> bytes:
        """Return them as they are stored, and given to readers."""
        return json.dumps({"roots": self.roots, "targets": self.targets}, indent=1).encode() + b"\n"

    @property
    def root(self) -> Root:
        """The newest root."""
        root: Root = _parsed(self.roots[-1], "root").signed
        return root

    @property
    def top(self) -> Targets:
        """The top-level targets."""
        targets: Targets = _parsed(self.targets, "targets").signed
        return targets

    def role_of(self, path: str) -> DelegatedRole:
        """Return the role that signs a ref, `NAMESPACE/TAG`."""
        delegations = self.top.delegations
        assert delegations and delegations.roles
        name = next(iter(delegations.get_roles_for_target(path)))[0]
        return delegations.roles[name]


def _parsed(text: str, kind: str) -> Metadata[Any]:
    from tuf.api.metadata import Metadata

    found: Metadata[Any] = Metadata.from_bytes(text.encode())
    if found.signed.type != kind:
        raise ValueError(f"{found.signed.type} in the place of {kind}")
    return found


def issue(
    there: Roles | None,
    by: Iterable[CryptoSigner],
    keys: Mapping[str, Sequence[Key]],
    promoters: Mapping[str, Sequence[Key]],
    expires: datetime,
) -> Roles:
    """Return roles with these keys in the place of earlier ones: of `root`, `targets`, `server`, `timestamp`.

    `promoters` has keys by namespaces; a namespace without any goes back to the server. Root and targets are issued
    again if one of their keys is among those that sign. Raises UsageError if a key is missing.
    """
    from tuf.api.metadata import Metadata, Root

    signers = {signer.public_key.keyid: signer for signer in by}
    if there is None and (missing := [name for name in ("root", "targets", "server") if not keys.get(name)]):
        raise UsageError(f"the first roles need keys of {', '.join(missing)}", hint="`farm key new` makes them")
    before = there.root if there else None
    root = deepcopy(before) if before else Root(expires=expires, consistent_snapshot=True)
    given = {**keys, "snapshot": keys.get("server", ())}
    if root.roles["timestamp"].keyids == root.roles["snapshot"].keyids:
        given.setdefault("timestamp", given["snapshot"])  # One key for both, until somebody gives another.
    for name in ("root", "targets", "snapshot", "timestamp"):
        _replace(root, name, given.get(name, ()))
    changed = before is not None and root != before
    of_root = {*root.roles[Root.type].keyids, *(before.roles[Root.type].keyids if before else ())} & signers.keys()
    if (changed or before is None) and not of_root:
        raise UsageError("these changes need the key of root", hint="name it: --by root.key")
    roots = list(there.roots) if there else []
    if of_root:
        root.version, root.expires = before.version + 1 if before else 1, expires
        signed = Metadata(root)
        for keyid in sorted(of_root):
            signed.sign(signers[keyid], append=True)
        roots.append(signed.to_bytes().decode())
    targets = _targets(there, {keyid: signers[keyid] for keyid in root.roles["targets"].keyids if keyid in signers},
                       keys.get("server", ()), promoters, expires)  # fmt: skip
    return Roles.read(Roles(tuple(roots[-KEPT_ROOTS:]), targets).text())


def _replace(root: Root, name: str, keys: Sequence[Key]) -> None:
    if keys:
        for keyid in list(root.roles[name].keyids):
            root.revoke_key(keyid, name)
        for key in keys:
            root.add_key(key, name)


def _targets(
    there: Roles | None,
    signers: Mapping[str, CryptoSigner],
    server: Sequence[Key],
    promoters: Mapping[str, Sequence[Key]],
    expires: datetime,
) -> str:
    """Return the top-level targets, signed: those that are there if none of their keys is here, and nothing changes."""
    from tuf.api.metadata import DelegatedRole, Delegations, Metadata, Targets

    if there and not signers and not (server or promoters):
        return there.targets
    if not signers:
        raise UsageError("these changes need the key of targets", hint="name it: --by targets.key")
    old = there.top.delegations if there else None
    keyring, held = dict(old.keys if old else {}), dict((old.roles if old else None) or {})
    for namespace, keys in promoters.items():
        path = f"{namespace}/{PROD}"
        held.pop(path, None)
        if keys:
            held[path] = DelegatedRole(path, [key.keyid for key in keys], 1, True, [path])
    if server:
        held[SERVER] = DelegatedRole(SERVER, [key.keyid for key in server], 1, True, ["*/*"])
    held[SERVER] = held.pop(SERVER)  # The first that fits a ref counts: this one fits all.
    keyring |= {key.keyid: key for keys in (server, *promoters.values()) for key in keys}
    used = {keyid for role in held.values() for keyid in role.keyids}
    delegations = Delegations({keyid: key for keyid, key in keyring.items() if keyid in used}, held)
    signed = Metadata(Targets(there.top.version + 1 if there else 1, expires=expires, delegations=delegations))
    for signer in signers.values():
        signed.sign(signer, append=True)
    return str(signed.to_bytes().decode())


def published(artifacts: ArtifactStore) -> Roles | None:
    """Return the roles by which the refs of a farm are signed; None if they are not. Raises UsageError."""
    found = artifacts.get_object(PLACE)
    return Roles.read(found.data) if found else None


def publish(artifacts: ArtifactStore, data: bytes) -> Roles:
    """Let the refs of a farm be signed by these roles, which continue those that are there.

    Raises UsageError for what is not roles, Conflict if they do not continue the published ones.
    """
    new, there = Roles.read(data), artifacts.get_object(PLACE)
    old = Roles.read(there.data) if there else new
    continues = set(old.roots) & set(new.roots) and old.roots[-1] in new.roots
    if not continues or new.top.version < old.top.version:
        raise Conflict("the farm has other roles, or newer ones", hint="`farm key withdraw` lets it forget them")
    artifacts.put_object(PLACE, new.text(), create=there is None, if_match=there.etag if there else "")
    return new


def withdraw(artifacts: ArtifactStore) -> None:
    """Let the refs of a farm be unsigned. Raises NotFound if they are."""
    if artifacts.get_object(PLACE) is None:
        raise NotFound("no roles are published: the farm signs no refs")
    artifacts.delete_object(PLACE)


def lasts(days: float, now: datetime) -> datetime:
    """Return when something ends that holds for so many days: whole seconds, as TUF writes them."""
    return (now + timedelta(days=days)).replace(microsecond=0)


# --- what is signed of a ref ------------------------------------------------------------------------------------------


def target_of(ref: Mapping[str, Any]) -> bytes:
    """Return the document that is signed of a ref; its names are the target's path."""
    return canonical({name: ref[name] for name in ("generation", "snapshot", "previous", "moved")})


def role_signed(path: str, document: bytes, version: int, signer: CryptoSigner, now: datetime) -> bytes:
    """Return the metadata of a role that names one ref, `NAMESPACE/TAG`, signed for a year."""
    from tuf.api.metadata import Metadata, TargetFile, Targets

    target = TargetFile.from_data(path, document, ["sha256"])
    metadata = Metadata(Targets(version, expires=lasts(YEAR, now), targets={path: target}))
    metadata.sign(signer)
    return bytes(metadata.to_bytes())


def next_version(ref: Mapping[str, Any] | None, now: datetime) -> int:
    """Return the version of what is signed next about a ref: milliseconds, so that it also grows if the ref was lost.

    It is above those of the ref's parts, by whatever clock they were made.
    """
    known = [*versions(ref).values(), *versions(ref, "timestamp").values()]
    return max([int(now.timestamp() * 1000), *(number + 1 for number in known)])


def versions(ref: Mapping[str, Any] | None, part: str = "snapshot") -> dict[str, int]:
    """Return the versions that a part of a signed ref names, by roles, and its own; none if it cannot be read."""
    try:
        said = json.loads(ref["signed"][part])["signed"] if ref else {"meta": {}}
        found = {str(name).removesuffix(".json"): int(each["version"]) for name, each in said["meta"].items()}
        found |= {part: int(said["version"])} if part == "timestamp" else {}
        return {name: number for name, number in found.items() if 0 < number < LARGEST_VERSION}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
