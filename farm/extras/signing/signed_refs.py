"""Signed refs: whose keys sign them (roles), the server's part of it (sealing), and the reader's and promoter's.

The Update Framework (TUF) says how. Root and top-level targets are signed offline, by `farm key roles`, and published
once for all namespaces: they entrust NAMESPACE/prod to its promoters and every other ref to the server's key, so that a
new namespace needs no new signature. A ref is a repository with one target, the document of where it points; its object
carries all that a reader needs to check it. One conditional put writes document and metadata, so that they fit together
whoever moves a ref, and nothing old remains.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts import refs
from farm.artifacts.storage import MAIN
from farm.errors import ArtifactGone, Conflict, FarmError, FarmFault, NotAllowed, NotFound, Untrusted, UsageError
from farm.extension import Loop
from farm.extras.signing.signing_keys import clock, signers_of
from farm.logging import get_logger
from farm.results.ref_rules import PROD

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, Key
    from tuf.api.metadata import DelegatedRole, Metadata, Role, Root, Targets
    from tuf.ngclient import FetcherInterface

    from farm.app import Farm
    from farm.artifacts.s3 import S3Store
    from farm.client.client import FarmClient

PLACE = f"ns/{MAIN}/roles.json"  # The object key of the published roles: where everybody who reads artifacts may read.
SERVER = "refs"  # The role of the server's key: every ref that no promoter signs.
LARGEST = 1 << 20
YEAR = 365.0  # Days for which a ref's role holds.
LARGEST_VERSION = 1 << 53  # Above it is none that a farm gives, in milliseconds.
KEPT_ROOTS = 64  # The newest roots that are kept: a reader with an older one takes the file of roles again.


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
        if new := given.get(name):
            for keyid in list(root.roles[name].keyids):
                root.revoke_key(keyid, name)
            for key in new:
                root.add_key(key, name)
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


def published(artifacts: S3Store) -> Roles | None:
    """Return the roles by which the refs of a farm are signed; None if they are not. Raises UsageError."""
    found = artifacts.get_object(PLACE)
    return Roles.read(found.data) if found else None


def publish(artifacts: S3Store, data: bytes) -> Roles:
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


def withdraw(artifacts: S3Store) -> None:
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
    return refs.canonical({name: ref[name] for name in ("generation", "snapshot", "previous", "moved")})


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


# --- the server's part: it builds on what it reads from object storage, and so remembers versions in Redis ---

log = get_logger(__name__)

DAY = 1.0  # Days for which a ref's snapshot and timestamp hold.
RENEWED = timedelta(hours=18)  # A timestamp that ends sooner is renewed.
WARNED = timedelta(days=30)  # What people have signed is named in the log when it ends sooner.
SCAN_SECONDS = 3600.0  # Between two looks at all refs, unless the roles have changed.
ROLES = "roles"  # The name of the farm's roles among those of refs, which have a namespace.
_HINT = "if it came back from a backup, `farm key withdraw` and `farm key publish` take its refs as they are"


@dataclass(frozen=True, slots=True)
class Sealer:
    """Signs refs with a server's keys, by the published roles."""

    roles: Roles
    keys: Mapping[str, CryptoSigner]

    def seal(self, commit: refs.RefCommit, now: datetime) -> refs.RefView:
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
        signed: refs.SignedParts = {
            "roots": list(self.roles.roots),
            "targets": self.roles.targets,
            "role": data.decode(),
            "snapshot": text.decode(),
            "timestamp": timestamp.to_bytes().decode(),
        }
        return {**refs.unsigned(ref), "signed": signed}

    def _key(self, role: Role, what: str) -> CryptoSigner:
        for keyid in role.keyids:
            if keyid in self.keys:
                return self.keys[keyid]
        setting = "`timestamp_key` or `signing_key`" if what == "timestamp" else "`signing_key`"
        raise FarmFault(f"this server has no {what} key of the farm's roles", hint=f"{setting} must name one")

    def _promoted(self, commit: refs.RefCommit, path: str, role: DelegatedRole) -> tuple[refs.RefView, bytes]:
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
            elif before and "signed" in before and refs.unsigned(before) == refs.unsigned(ref):
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


def commit(farm: Farm, move: refs.RefCommit) -> refs.RefView | None:
    """Sign a ref that is about to be written, if the farm's refs are signed; see `Extension.on_commit`."""
    roles = published(farm.artifacts)
    if roles is None:
        return refs.unsigned(move.after)
    if move.before and not is_own(farm, roles, move.namespace, move.before):
        return None
    return Sealer(roles, signers_of(farm.settings)).seal(move, clock())


def loops(farm: Farm) -> list[Loop]:
    """Return the loop that keeps refs signed."""
    return [Loop("signed refs", Renewals(farm).step, 30.0)]


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
        sealer = Sealer(roles, signers_of(self._farm.settings)) if roles else None
        for name, each in (("root", roles.root), ("targets", roles.top)) if roles else ():
            _warn(name, each.expires, at)
        namespaces = self._farm.artifacts.list_folders("ns/")
        tags = ((namespace, tag) for namespace in namespaces for tag in self._farm.refs.list(namespace))
        return sum(self._renewed(namespace, tag, sealer, at) for namespace, tag in tags)

    def _renewed(self, namespace: str, tag: str, sealer: Sealer | None, now: datetime) -> bool:
        store = self._farm.artifacts
        there = store.get_object(refs.ref_key(namespace, tag))
        if there is None:
            return False
        try:
            ref = refs.parse_ref(tag, there)
            if _is_as_it_should_be(ref, sealer.roles if sealer else None, now):
                return False
            move = refs.RefCommit(namespace, tag, ref, refs.unsigned(ref))
            if sealer and not is_own(self._farm, sealer.roles, namespace, ref):
                return False
            sealed = sealer.seal(move, now) if sealer else move.after
            if "signed" in sealed:
                _warn(f"{namespace}/{tag}", _ends(sealed["signed"]["role"]), now)
            store.put_object(there.key, refs.stored_ref(sealed), if_match=there.etag)
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


def _is_as_it_should_be(ref: refs.RefView, roles: Roles | None, now: datetime) -> bool:
    signed = ref.get("signed")
    if roles is None or signed is None:
        return roles is None and signed is None
    try:
        same = (signed["roots"], signed["targets"]) == (list(roles.roots), roles.targets)
        return same and _ends(signed["timestamp"]) - now > RENEWED
    except Exception:  # Whatever is wrong with it, it is signed again.
        return False


# --- what a server remembers of refs that it has signed --------------------------------------------------------------


def remember(farm: Farm, namespace: str, ref: refs.RefView) -> None:
    """Remember the version of a ref that was written; forget one that was deleted."""
    path = f"{namespace}/{ref['tag']}"
    if "signed" in ref:
        farm.store.signed.remember(path, _version(ref))
    elif ref["snapshot"] == refs.NOWHERE:
        farm.store.signed.forget(path)


def is_own(farm: Farm, roles: Roles, namespace: str, found: refs.RefView) -> bool:
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
        there = farm.artifacts.get_object(refs.ref_key(namespace, found["tag"]))
        if there and _version(refs.parse_ref(found["tag"], there)) < known:
            raise FarmFault(f"object storage answers with an older ref {path} than was signed", hint=_HINT)
        return False
    if known and not _is_signed(roles, path, found):
        raise FarmFault(f"object storage answers with a ref {path} that this farm has not signed", hint=_HINT)
    return True


def _version(ref: refs.RefView) -> int:
    return versions(ref, "timestamp").get("timestamp", 0)


def _is_signed(roles: Roles, path: str, ref: refs.RefView) -> bool:
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


# --- the reader's part: TUF's client, which gets all metadata with the ref, and is not made for several processes ---


def signed_ref(roles: Roles, memory: Path, path: str, ask: Callable[[], refs.ShownRef]) -> refs.ShownRef:
    """Return what `ask` answers about the ref `NAMESPACE/TAG`, if the roles that a reader trusts have signed it.

    What was seen is remembered in `memory`. If another reader there has seen a newer one since `ask` was answered, it
    asks again while the others wait. Raises Untrusted.
    """
    from tuf.api.exceptions import BadVersionNumberError, DownloadError, RepositoryError

    found = ask()
    place = memory / hashlib.sha256(f"{roles.roots[0]}\n{path}".encode()).hexdigest()[:32]
    with _turn(place) as folder:
        try:
            try:
                _require(roles, folder, path, found)
            except BadVersionNumberError:
                found = ask()
                _require(roles, folder, path, found)
        except BadVersionNumberError as error:
            raise Untrusted(f"the ref {path} is older than one that was seen here: {error}") from None
        except (RepositoryError, DownloadError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise Untrusted(f"the ref {path} is refused: {error}") from None
    return found


def _require(roles: Roles, folder: Path, path: str, found: refs.ShownRef) -> None:
    """Check a ref by what a folder remembers of it. Raises Untrusted, what TUF's client raises, ValueError, …"""
    from tuf.ngclient import Updater

    if "signed" not in found:
        hint = "a build has no signature: name a ref" if not found["generation"] else "the farm signs it in a minute"
        raise Untrusted(f"the ref {path} is not signed", hint=hint)
    digest = hashlib.sha256(refs.canonical({"schema": found["schema"], "cells": found["cells"]})).hexdigest()
    if digest != found["snapshot"]:
        raise Untrusted(f"the ref {path} names other cells than were signed", hint="the next move mends it")
    root = roles.roots[-1].encode()
    updater = Updater(str(folder), "signed:", fetcher=_carried(found["signed"]), bootstrap=root)
    target = updater.get_targetinfo(path)
    # TUF's client knows the newest root of the policy, but not its targets: older ones name a promoter of old.
    if json.loads((folder / "targets.json").read_bytes())["signed"]["version"] < roles.top.version:
        hint = "if yours are not published yet, `farm key publish` does it"
        raise Untrusted(f"the ref {path} comes with older roles than your trust policy has", hint=hint)
    if target is None:
        raise Untrusted(f"what is signed is not the ref {path}")
    target.verify_length_and_hashes(target_of(found))


def _carried(signed: refs.SignedParts) -> FetcherInterface:
    """Return what brings the metadata that came with a ref, by the names that TUF's client asks for."""
    from tuf.api.exceptions import DownloadHTTPError
    from tuf.ngclient import FetcherInterface

    parts = {"targets": signed["targets"], "snapshot": signed["snapshot"], "timestamp": signed["timestamp"]}
    parts |= {f"{json.loads(root)['signed']['version']}.root": root for root in signed["roots"]}

    class Carried(FetcherInterface):
        """Answers from a ref's object: whatever is none of the top-level parts is its role."""

        def _fetch(self, url: str) -> Iterator[bytes]:
            name = url.rpartition("/")[2].removesuffix(".json")
            name = name if name.endswith(".root") else re.sub(r"^[0-9]+\.", "", name)
            if name.endswith(".root") and name not in parts:
                raise DownloadHTTPError("there is no newer root", 404)
            return iter([parts.get(name, signed["role"]).encode()])

    return Carried()


@contextmanager
def _turn(place: Path) -> Iterator[Path]:
    """Yield the folder that remembers a ref, to one process at a time; a copy of it where nothing can be written."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (place / "lock").open("a")
    except OSError:
        with tempfile.TemporaryDirectory() as scratch:
            for file in place.rglob("*.json"):
                copy = Path(scratch) / file.relative_to(place)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
            yield Path(scratch)
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def promise(
    client: FarmClient, signer: CryptoSigner, path: str, source: str, *, previous: bool
) -> tuple[str, int] | None:
    """Return what a promoter signs so that a ref, `NAMESPACE/TAG`, is moved, and the generation from which it moves.

    None if the ref is not his. Without a `source` it is deleted. What it named before is signed as such only if this
    client trusts it.
    """
    try:
        role = Roles.read(json.dumps(client.transport.get("/v1/roles", dict[str, Any])).encode()).role_of(path)
    except NotFound:
        return None
    if role.name != path or signer.public_key.keyid not in role.keyids:
        return None
    namespace, _, tag = path.partition("/")
    snapshot = _chosen(client, source, previous=previous) if source else refs.NOWHERE
    now, trusted = _now(client, namespace, tag)
    at, generation = clock(), now["generation"] if now else 0
    ref = refs.following(tag, now, snapshot)
    if not trusted:
        ref["previous"] = None
    if now and now["snapshot"] == snapshot:  # It stays, and is signed for another year.
        kept = {"previous": now["previous"], "moved": now["moved"]} if trusted else {"previous": None}
        ref = {**ref, "generation": generation, **kept}  # type: ignore[typeddict-item]
    data = role_signed(path, target_of(ref), next_version(now, at), signer, at)
    return json.dumps({"ref": refs.unsigned(ref), "role": data.decode()}), generation


def _chosen(client: FarmClient, source: str, *, previous: bool) -> str:
    """Return the digest of the snapshot that a ref or a build names, or named before."""
    chosen = client.refs.get(source)
    cells = refs.canonical({"schema": chosen["schema"], "cells": chosen["cells"]})
    snapshot = chosen["previous"] if previous else chosen["snapshot"] or hashlib.sha256(cells).hexdigest()
    if snapshot is None:
        raise NotFound(f"{source} was never moved: it has no previous snapshot")
    return snapshot


def _now(client: FarmClient, namespace: str, tag: str) -> tuple[refs.ShownRef | None, bool]:
    """Return where a ref points, and whether this client trusts the answer; None if there is no such ref."""
    found, trusted = None, True
    with suppress(NotFound, ArtifactGone):
        try:
            found = client.refs.get(tag)
        except Untrusted:
            found, trusted = client.refs.unchecked(tag), False
    return (found, trusted) if found and found.get("namespace", namespace) == namespace else (None, False)
