"""The revocation document: which keys and programs no longer count. Signed, numbered, and fresh for a bounded time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts.keys import REVOCATIONS
from farm.artifacts.storage import ArtifactStore
from farm.errors import Conflict, UsageError
from farm.extras.signing import bundles
from farm.extras.signing.statements import instant, written
from farm.files import read_plain, replacing

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from farm.extras.signing.trust import RevocationRules, TrustPolicy

PAYLOAD = "application/vnd.migraphx-farm.revocations.v1+json"
AHEAD = timedelta(minutes=10)
"""How far another clock may be ahead of this one."""


class Unusable(ValueError):
    """A revocation document that does not count: it is damaged, too old, or not signed by one of its signers."""


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A key that no longer counts; with `since`, what it signed before that time still does."""

    reason: str = ""
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Revocations:
    """What is revoked: keys by their ids, programs by their SHA-256, and why. `number` grows with each issue."""

    number: int
    issued: datetime
    keys: Mapping[str, RevokedKey] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, keyid: str, signed_on: datetime | None) -> str:
        """Return why a key does not count for what it signed at a time; empty if it does."""
        found = self.keys.get(keyid)
        if not found or (found.since and signed_on and signed_on < found.since):
            return ""
        since = f" from {found.since:%Y-%m-%d} on" if found.since else ""
        return f"its key is revoked{since}{f': {found.reason}' if found.reason else ''}"


def issue(
    path: Path, signer: CryptoSigner, now: datetime, keys: Mapping[str, RevokedKey], programs: Mapping[str, str]
) -> Revocations:
    """Write the next issue of a document, with these keys and programs too; return it. The first has number 1.

    Raises UsageError if the file is not such a document, or another key has signed it, OSError.
    """
    there = Revocations(0, now)
    if path.exists():
        try:
            bundle = bundles.read(read_plain(path, bundles.LARGEST))
            if not bundle.is_signed_by(signer.public_key):
                raise Unusable("another key has signed it")
            there = parse(bundle)
        except ValueError as error:
            hint = "name another file, or sign with the key that signed this one"
            raise UsageError(f"{path}: {error}", hint=hint) from None
    made = Revocations(there.number + 1, now, {**there.keys, **keys}, {**there.programs, **programs})
    with replacing(path) as part:
        part.write_bytes(write(made, signer) + b"\n")
    return made


def refresh(data: bytes, policy: TrustPolicy, now: datetime) -> bool:
    """Put a newer document into the file that a policy names, if it counts by this policy; say whether it did.

    Raises OSError if the file cannot be written.
    """
    rules = policy.document.revocations
    if rules is None:
        return False
    try:
        new = read(data, policy, rules, now)
    except Unusable:
        return False
    path = policy.folder / rules.file
    if new.number <= _number(path, policy, rules):
        return False
    with replacing(path) as part:
        part.write_bytes(data)
    return True


def _number(path: Path, policy: TrustPolicy, rules: RevocationRules) -> int:
    """Return the number of a document, however old; 0 for none, and for one that nobody in the policy has signed."""
    try:
        bundle = bundles.read(read_plain(path, bundles.LARGEST))
        signer = policy.signer_of(bundle.keyid, rules.signers)
        return parse(bundle).number if signer and bundle.is_signed_by(signer.key) else 0
    except (OSError, ValueError):
        return 0


def keep(artifacts: ArtifactStore, data: bytes) -> Revocations:
    """Store a document for all readers of a farm, and return it; they judge by their policies whether it counts.

    Raises UsageError for an invalid document, Conflict if the stored one has the same number or a higher one.
    """
    try:
        new = parse(bundles.read(data))
    except ValueError as error:
        raise UsageError(f"no revocation document: {error}", hint="`farm key revoke` makes one") from None
    there = artifacts.get_object(REVOCATIONS)
    number = 0
    with suppress(ValueError):  # One that is damaged is replaced.
        number = parse(bundles.read(there.data)).number if there else 0
    if new.number <= number:
        raise Conflict(f"the farm has number {number} already, and this is {new.number}")
    artifacts.put_object(REVOCATIONS, data, create=there is None, if_match=there.etag if there else "")
    return new


def write(revocations: Revocations, signer: CryptoSigner) -> bytes:
    """Return the signed document: a bundle, as statements are."""
    keys = {
        keyid: {"reason": key.reason, **({"since": written(key.since)} if key.since else {})}
        for keyid, key in revocations.keys.items()
    }
    document = {
        "schema": 1,
        "number": revocations.number,
        "issued": written(revocations.issued),
        "keys": keys,
        "programs": {digest: {"reason": reason} for digest, reason in revocations.programs.items()},
    }
    return bundles.sign(json.dumps(document, sort_keys=True).encode(), PAYLOAD, signer)


def parse(bundle: bundles.Bundle) -> Revocations:
    """Return what a revocation document says, without a check of its signer. Raises Unusable."""
    try:
        document: dict[str, Any] = json.loads(bundle.payload)
        if bundle.payload_type != PAYLOAD or document["schema"] != 1:
            raise Unusable("it is not a revocation document that is understood here")
        keys = {
            str(keyid): RevokedKey(str(each.get("reason", "")), instant(each["since"]) if "since" in each else None)
            for keyid, each in document["keys"].items()
        }
        programs = {str(digest): str(each.get("reason", "")) for digest, each in document["programs"].items()}
        return Revocations(int(document["number"]), instant(document["issued"]), keys, programs)
    except Unusable:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise Unusable(f"it is damaged: {type(error).__name__}") from None


def read(data: bytes, policy: TrustPolicy, rules: RevocationRules, now: datetime) -> Revocations:
    """Return a revocation document if it counts at this time. Raises Unusable with the reason."""
    try:
        bundle = bundles.read(data)
    except bundles.Malformed as error:
        raise Unusable(f"it is damaged: {error}") from None
    signer = policy.signer_of(bundle.keyid, rules.signers)
    if signer is None or not bundle.is_signed_by(signer.key):
        raise Unusable("none of its signers in the policy has signed it")
    found = parse(bundle)
    if wrong := signer.why_not("", found.issued, now) or found.why_not(bundle.keyid, found.issued):
        raise Unusable(wrong)
    if found.issued > now + AHEAD:
        raise Unusable(f"it is of {found.issued:%Y-%m-%d}, which is to come")
    if now - found.issued > timedelta(days=rules.max_days):
        raise Unusable(f"it is of {found.issued:%Y-%m-%d}, and may be {rules.max_days:g} days old")
    return found
