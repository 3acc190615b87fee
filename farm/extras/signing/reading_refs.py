"""Reading signed refs: the client's part of The Update Framework (TUF), and that of a promoter, who signs some.

All of a ref's metadata comes with the ref, so TUF's client downloads nothing by itself. It is not made for several
processes: they take turns here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts.refs import NOWHERE, ShownRef, SignedParts, canonical, following, unsigned
from farm.errors import ArtifactGone, NotFound, Untrusted
from farm.extras.signing.roles import Roles, next_version, role_signed, target_of
from farm.extras.signing.trust import clock

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner
    from tuf.ngclient import FetcherInterface

    from farm.client.client import FarmClient


def signed_ref(roles: Roles, memory: Path, path: str, ask: Callable[[], ShownRef]) -> ShownRef:
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


def _require(roles: Roles, folder: Path, path: str, found: ShownRef) -> None:
    """Check a ref by what a folder remembers of it. Raises Untrusted, what TUF's client raises, ValueError, …"""
    from tuf.ngclient import Updater

    if "signed" not in found:
        hint = "a build has no signature: name a ref" if not found["generation"] else "the farm signs it in a minute"
        raise Untrusted(f"the ref {path} is not signed", hint=hint)
    digest = hashlib.sha256(canonical({"schema": found["schema"], "cells": found["cells"]})).hexdigest()
    if digest != found["snapshot"]:
        raise Untrusted(f"the ref {path} names other cells than were signed", hint="the next move mends it")
    root = roles.roots[-1].encode()
    updater = Updater(str(folder), "signed:", fetcher=_carried(found["signed"]), bootstrap=root)
    target = updater.get_targetinfo(path)
    # TUF's client knows the newest root of the policy, but not its targets: older ones name a promoter of old.
    if json.loads((folder / "targets.json").read_bytes())["signed"]["version"] < roles.top.version:
        raise Untrusted(
            f"the ref {path} comes with older roles than your trust policy has",
            hint="if yours are not published yet, `farm key publish` does it",
        )
    if target is None:
        raise Untrusted(f"what is signed is not the ref {path}")
    target.verify_length_and_hashes(target_of(found))


def _carried(signed: SignedParts) -> FetcherInterface:
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
    snapshot = _chosen(client, source, previous=previous) if source else NOWHERE
    now, trusted = _now(client, namespace, tag)
    at, generation = clock(), now["generation"] if now else 0
    ref = following(tag, now, snapshot)
    if not trusted:
        ref["previous"] = None
    if now and now["snapshot"] == snapshot:  # It stays, and is signed for another year.
        kept = {"previous": now["previous"], "moved": now["moved"]} if trusted else {"previous": None}
        ref = {**ref, "generation": generation, **kept}  # type: ignore[typeddict-item]
    data = role_signed(path, target_of(ref), next_version(now, at), signer, at)
    return json.dumps({"ref": unsigned(ref), "role": data.decode()}), generation


def _chosen(client: FarmClient, source: str, *, previous: bool) -> str:
    """Return the digest of the snapshot that a ref or a build names, or named before."""
    chosen = client.refs.get(source)
    cells = canonical({"schema": chosen["schema"], "cells": chosen["cells"]})
    snapshot = chosen["previous"] if previous else chosen["snapshot"] or hashlib.sha256(cells).hexdigest()
    if snapshot is None:
        raise NotFound(f"{source} was never moved: it has no previous snapshot")
    return snapshot


def _now(client: FarmClient, namespace: str, tag: str) -> tuple[ShownRef | None, bool]:
    """Return where a ref points, and whether this client trusts the answer; None if there is no such ref."""
    found, trusted = None, True
    with suppress(NotFound, ArtifactGone):
        try:
            found = client.refs.get(tag)
        except Untrusted:
            found, trusted = client.refs.unchecked(tag), False
    return (found, trusted) if found and found.get("namespace", namespace) == namespace else (None, False)
