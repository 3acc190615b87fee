"""The trust policy of a reader: whose statements count for which namespace. A TOML file on the reader's machine.

[signers.farm-2026]
key = "farm-2026.pub"
signs_until = 2027-01-31T00:00:00Z

[namespaces.main]
signers = ["farm-2026"]
require = ["provenance", "test-results"]
promoted = ["prod"]

[refs]
roles = "roles.json"
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from farm.errors import UsageError
from farm.extras.signing.roles import LARGEST as ROLES_LIMIT
from farm.extras.signing.roles import Roles
from farm.extras.signing.signing_keys import load_public
from farm.files import NotPlain, read_plain

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

Kind = Literal["provenance", "test-results", "summary"]
_LARGEST = 1 << 20


_STRICT = ConfigDict(extra="forbid", frozen=True)


class SignerRules(BaseModel):
    """Whose key counts, for which kinds of statements, and when. A summary counts only by a key that is named for it.

    `signs_from` and `signs_until` bound the time that a statement gives; after `trusted_until`, by the reader's clock,
    nothing that the key signed counts.
    """

    model_config = _STRICT

    key: Annotated[str, Field(min_length=1)]
    signs: tuple[Kind, ...] = ("provenance", "test-results")
    signs_from: AwareDatetime | None = None
    signs_until: AwareDatetime | None = None
    trusted_until: AwareDatetime | None = None


class NamespaceRules(BaseModel):
    """What the artifacts of a namespace need.

    With `unsigned`, artifacts without statements are taken. `promoted` are refs that need a verification summary;
    `builders` are the builders that may have made a program (empty: any); `ignore` are predicate types that are not
    known here and do not matter.
    """

    model_config = _STRICT

    signers: tuple[str, ...] = ()
    require: tuple[Kind, ...] = ("provenance",)
    promoted: tuple[str, ...] = ()
    builders: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    unsigned: bool = False


class RefRules(BaseModel):
    """Refs count if they are signed by the farm's roles, whose file this is."""

    model_config = _STRICT

    roles: Annotated[str, Field(min_length=1)]


class PolicyDocument(BaseModel):
    """A trust policy as it stands in its file."""

    model_config = _STRICT

    signers: Mapping[str, SignerRules] = {}
    namespaces: Mapping[str, NamespaceRules] = {}
    refs: RefRules | None = None


@dataclass(frozen=True, slots=True)
class KnownSigner:
    """A signer of a policy, with its key."""

    name: str
    key: SSlibKey
    rules: SignerRules

    def why_not(self, kind: str, signed_on: datetime | None, now: datetime) -> str:
        """Return why a statement of a kind and a time does not count, though this signer signed it; empty if it does.

        `kind` is empty if it is not known.
        """
        rules = self.rules
        if kind and kind not in rules.signs:
            return f"{self.name} may not sign {kind}"
        if rules.trusted_until and now > rules.trusted_until:
            return f"the key of {self.name} expired on {rules.trusted_until:%Y-%m-%d}"
        if (rules.signs_from or rules.signs_until) and signed_on is None:
            return f"it does not say when it was signed, and {self.name} signs in a certain time only"
        if rules.signs_from and signed_on and signed_on < rules.signs_from:
            return f"it was signed on {signed_on:%Y-%m-%d}, and {self.name} signs from {rules.signs_from:%Y-%m-%d} on"
        if rules.signs_until and signed_on and signed_on > rules.signs_until:
            return f"it was signed on {signed_on:%Y-%m-%d}, and {self.name} signed until {rules.signs_until:%Y-%m-%d}"
        return ""


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """A trust policy with its keys, and the roles that sign refs. `digest` is the SHA-256 of its file."""

    document: PolicyDocument
    signers: Mapping[str, KnownSigner]
    digest: str = ""
    roles: Roles | None = None

    def signer_of(self, keyid: str, names: tuple[str, ...]) -> KnownSigner | None:
        """Return the signer among `names` whose key has this id."""
        return next((self.signers[name] for name in names if self.signers[name].key.keyid == keyid), None)


def load_policy(path: Path) -> TrustPolicy:
    """Read a trust policy and the keys that it names. Raises UsageError with what is wrong and where."""
    try:
        data = read_plain(path, _LARGEST)
        document = PolicyDocument.model_validate(tomllib.loads(data.decode()))
    except NotPlain as error:
        raise UsageError(f"cannot read the trust policy {path}: {error.strerror}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UsageError(f"the trust policy {path}: {wrong}", hint="docs/security.md has an example") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the trust policy {path}: {error}") from None
    unknown = sorted(_named(document) - document.signers.keys())
    if unknown:
        raise UsageError(f"the trust policy {path} names {', '.join(unknown)}, and no such [signers.…]")
    folder = path.absolute().parent
    signers = {
        name: KnownSigner(name, load_public(folder / rules.key), rules) for name, rules in document.signers.items()
    }
    ids = [signer.key.keyid for signer in signers.values()]
    if len(set(ids)) < len(ids):
        raise UsageError(f"the trust policy {path} has two signers with one key")
    roles = load_roles(folder / document.refs.roles) if document.refs else None
    return TrustPolicy(document, signers, hashlib.sha256(data).hexdigest(), roles)


def load_roles(path: Path) -> Roles:
    """Read a file of roles. Raises UsageError."""
    try:
        return Roles.read(read_plain(path, ROLES_LIMIT))
    except OSError as error:
        raise UsageError(f"cannot read the roles {path}: {error.strerror or error}") from None


def policy_of_keys(keys: list[Path], namespace: str) -> TrustPolicy:
    """Return the policy of somebody who names no file: an owner of one of these keys may sign what workers sign."""
    # By their ids: files in two folders may have one name.
    loaded = {(key := load_public(path)).keyid: (path, key) for path in keys}
    signers = {keyid: KnownSigner(path.stem, key, SignerRules(key=path.name)) for keyid, (path, key) in loaded.items()}
    rules = NamespaceRules(signers=tuple(signers))
    given = {keyid: signer.rules for keyid, signer in signers.items()}
    return TrustPolicy(PolicyDocument(signers=given, namespaces={namespace: rules}), signers)


def clock() -> datetime:
    """Return the time here."""
    return datetime.now(UTC)


def _named(document: PolicyDocument) -> set[str]:
    return {name for rules in document.namespaces.values() for name in rules.signers}
