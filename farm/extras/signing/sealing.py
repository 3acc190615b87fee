"""Sealing: the server's part of signed refs. Each ref's object carries all that a reader needs to check it.

A ref is a repository of The Update Framework (TUF) with one target, the document of where it points. One conditional
put writes document and metadata, so that they fit together whoever moves a ref, and nothing old remains.

A server builds on what it reads from object storage: a move keeps the entries of before, and a ref is signed again each
day. So that storage does not choose what is signed next, versions are remembered in Redis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from farm.artifacts.refs import NOWHERE, RefCommit, RefView, SignedParts, parse_ref, ref_key, stored_ref, unsigned
from farm.errors import Conflict, FarmError, FarmFault, NotAllowed
from farm.extras.signing.roles import (
    PLACE,
    SERVER,
    Roles,
    lasts,
    next_version,
    published,
    role_signed,
    target_of,
    versions,
)
from farm.extras.signing.signing_keys import signers_of
from farm.extras.signing.trust import clock
from farm.logging import get_logger

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner
    from tuf.api.metadata import DelegatedRole, Role

    from farm.app import Farm
    from farm.settings import Settings

log = get_logger(__name__)

DAY = 1.0
"""Days for which a ref's snapshot and timestamp hold."""
RENEWED = timedelta(hours=18)
"""A timestamp that ends sooner is renewed."""
WARNED = timedelta(days=30)
"""What people have signed is named in the log when it ends sooner."""
SCAN_SECONDS = 3600.0
"""Between two looks at all refs, unless the roles have changed."""
ROLES = "roles"
"""The name of the farm's roles among those of refs, which have a namespace."""
_HINT = "if it came back from a backup, `farm key withdraw` and `farm key publish` take its refs as they are"


@dataclass(frozen=True, slots=True)
class Sealer:
    """Signs refs with a server's keys, by the published roles."""

    roles: Roles
    keys: Mapping[str, CryptoSigner]

    @classmethod
    def of(cls, roles: Roles, settings: Settings) -> Sealer:
        """Return what signs by the settings. Raises UsageError for a bad key."""
        return cls(roles, signers_of(settings))

    def seal(self, commit: RefCommit, now: datetime) -> RefView:
        """Return a ref with its metadata.

        A promoter's ref is taken as he signed it, or keeps his signature if it stays as it was.

        Raises NotAllowed without it, Conflict if he signed something else, FarmFault if a key is missing here.
        """
        from tuf.api.metadata import Metadata, MetaFile, Snapshot, Timestamp

        version, path = next_version(commit.before, now), f"{commit.namespace}/{commit.tag}"
        role, root, ref = self.roles.role_of(path), self.roles.root, commit.after
        if role.name == SERVER:
            data = role_signed(path, target_of(ref), version, self._key(role, "server"), now)
        else:
            ref, data = self._promoted(commit, path, role)
        top = self.roles.targets.encode()
        # Whatever signed it before stays named, since a reader who has seen it refuses a snapshot without it.
        meta = {f"{name}.json": MetaFile(number) for name, number in versions(commit.before).items()}
        meta["targets.json"] = MetaFile.from_data(self.roles.top.version, top, ["sha256"])
        meta[f"{role.name}.json"] = MetaFile.from_data(Metadata.from_bytes(data).signed.version, data, ["sha256"])
        snapshot = Metadata(Snapshot(version, expires=lasts(DAY, now), meta=meta))
        snapshot.sign(self._key(root.roles["snapshot"], "server"))
        text = snapshot.to_bytes()
        whole = MetaFile.from_data(version, text, ["sha256"])
        timestamp = Metadata(Timestamp(version, expires=lasts(DAY, now), snapshot_meta=whole))
        timestamp.sign(self._key(root.roles["timestamp"], "timestamp"))
        signed: SignedParts = {
            "roots": list(self.roles.roots),
            "targets": self.roles.targets,
            "role": data.decode(),
            "snapshot": text.decode(),
            "timestamp": timestamp.to_bytes().decode(),
        }
        return {**unsigned(ref), "signed": signed}

    def _key(self, role: Role, what: str) -> CryptoSigner:
        for keyid in role.keyids:
            if keyid in self.keys:
                return self.keys[keyid]
        setting = "`timestamp_key` or `signing_key`" if what == "timestamp" else "`signing_key`"
        raise FarmFault(f"this server has no {what} key of the farm's roles", hint=f"{setting} must name one")

    def _promoted(self, commit: RefCommit, path: str, role: DelegatedRole) -> tuple[RefView, bytes]:
        """Return the ref that a promoter signed, and his metadata."""
        from tuf.api.exceptions import RepositoryError
        from tuf.api.metadata import Metadata

        ref, before = commit.after, commit.before
        try:
            if commit.signed:
                given = json.loads(commit.signed)
                ref, data = {**ref, **given["ref"], "tag": commit.tag}, str(given["role"]).encode()
                # A new ref begins by the promoter's clock, and has none before it.
                moved = ref["generation"] != commit.after["generation"] if before else ref["previous"] is not None
                if moved or ref["snapshot"] != commit.after["snapshot"]:
                    raise Conflict(f"{path} is not what was signed", hint="somebody moved it, or its source: try again")
            elif before and "signed" in before and unsigned(before) == unsigned(ref):
                data = before["signed"]["role"].encode()
            else:
                hint = "`farm tag` with a promoter's key as `signing_key` moves or deletes it"
                raise NotAllowed(f"{path} is signed by its promoters", hint=hint)
            metadata = Metadata[Any].from_bytes(data)
            self.roles.top.verify_delegate(role.name, metadata.signed_bytes, metadata.signatures)
            metadata.signed.targets[path].verify_length_and_hashes(target_of(ref))
            if metadata.signed.version < versions(before).get(role.name, 0):
                raise Conflict(f"{path} was signed later than this", hint="try again")
        except (RepositoryError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise NotAllowed(f"{path} is not signed by one of its promoters: {error}") from None
        return ref, data


def commit(farm: Farm, move: RefCommit) -> RefView | None:
    """Sign a ref that is about to be written, if the farm's refs are signed; see `Extension.on_commit`."""
    roles = published(farm.artifacts)
    if roles is None:
        return unsigned(move.after)
    if move.before and not is_own(farm, roles, move.namespace, move.before):
        return None
    return Sealer.of(roles, farm.settings).seal(move, clock())


class Renewals:
    """Keeps the refs of all namespaces signed as the published roles say: what is due is signed again."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._seen: tuple[str, float] = ("", 0.0)

    def step(self) -> None:
        """Look at all refs if the roles have changed, or an hour has passed."""
        there = self._farm.artifacts.get_object(PLACE)
        etag, last = self._seen
        now = (there.etag if there else "", time.monotonic())
        if now[0] != etag or (there and now[1] - last > SCAN_SECONDS):
            self.renew()
            self._seen = now

    def renew(self, now: datetime | None = None) -> int:
        """Sign what is due; without roles, take off what was signed. Return how many refs were written."""
        roles, at = published(self._farm.artifacts), now or clock()
        sealer = Sealer.of(roles, self._farm.settings) if roles else None
        for name, each in (("root", roles.root), ("targets", roles.top)) if roles else ():
            _warn(name, each.expires, at)
        return sum(self._renewed(namespace, tag, sealer, at) for namespace, tag in self._all())

    def _all(self) -> Iterator[tuple[str, str]]:
        for namespace in self._farm.artifacts.list_folders("ns/"):
            yield from ((namespace, tag) for tag in self._farm.refs.list(namespace))

    def _renewed(self, namespace: str, tag: str, sealer: Sealer | None, now: datetime) -> bool:
        store = self._farm.artifacts
        there = store.get_object(ref_key(namespace, tag))
        if there is None:
            return False
        try:
            ref = parse_ref(tag, there)
            if _is_as_it_should_be(ref, sealer.roles if sealer else None, now):
                return False
            move = RefCommit(namespace, tag, ref, unsigned(ref))
            if sealer and not is_own(self._farm, sealer.roles, namespace, ref):
                return False
            sealed = sealer.seal(move, now) if sealer else move.after
            if "signed" in sealed:
                _warn(f"{namespace}/{tag}", _ends(sealed["signed"]["role"]), now)
            store.put_object(there.key, stored_ref(sealed), if_match=there.etag)
            remember(self._farm, namespace, sealed)
            return True
        except Conflict:
            return False  # Who moved it has signed it.
        except FarmError as error:
            log.warning("a ref stays as it is signed", ref=there.key, error=error.message, hint=error.hint)
            return False


def _warn(what: str, ends: datetime, now: datetime) -> None:
    if ends - now < WARNED:
        log.warning("what is signed ends soon: readers refuse it then", what=what, ends=ends.isoformat())


def _ends(metadata: str) -> datetime:
    from tuf.api.metadata import Metadata

    ends: datetime = Metadata.from_bytes(metadata.encode()).signed.expires
    return ends


def _is_as_it_should_be(ref: RefView, roles: Roles | None, now: datetime) -> bool:
    signed = ref.get("signed")
    if roles is None or signed is None:
        return roles is None and signed is None
    try:
        same = (signed["roots"], signed["targets"]) == (list(roles.roots), roles.targets)
        return same and _ends(signed["timestamp"]) - now > RENEWED
    except Exception:  # Whatever is wrong with it, it is signed again.
        return False


# --- what a server remembers of refs that it has signed --------------------------------------------------------------


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
