"""The trust policy of a reader, a TOML file: whose statements count for which namespace. And the judgement by it.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from farm.errors import Untrusted, UsageError
from farm.extras.signing import statements
from farm.extras.signing.signed_refs import LARGEST as ROLES_LIMIT
from farm.extras.signing.signed_refs import Roles
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
    named = {name for rules in document.namespaces.values() for name in rules.signers}
    if unknown := sorted(named - document.signers.keys()):
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


AHEAD = timedelta(minutes=10)  # How far another clock may be ahead of this one.


class Standing(StrEnum):
    """How a check ended. What is `ignored` counts neither for nor against the artifact."""

    OK = "ok"
    IGNORED = "ignored"
    REFUSED = "refused"


class TrustCheck(NamedTuple):
    """One line of `farm verify`."""

    verdict: Standing
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AtHand:
    """What is judged: the SHA-256 of the program and of the sidecar as they are here, and where they are from.

    `tag` is the ref by which the reader asked for it.
    """

    namespace: str
    program: str
    sidecar: str
    tag: str = ""


class Accepted(NamedTuple):
    """A statement that counts, and its bundle as it was read."""

    statement: statements.Statement
    bundle: bytes


class Checks(NamedTuple):
    """The checks, in their order, and the statements that count."""

    checks: list[TrustCheck]
    accepted: list[Accepted]

    @property
    def refused(self) -> list[TrustCheck]:
        """The checks that end in a refusal."""
        return [check for check in self.checks if check.verdict is Standing.REFUSED]

    def require(self, what: str) -> None:
        """Raise Untrusted, with the reasons, unless nothing was refused."""
        if self.refused:
            ignored = [check for check in self.checks if check.verdict is Standing.IGNORED]
            reasons = "; ".join(f"{check.name}: {check.text}" for check in [*self.refused, *ignored][:5])
            raise Untrusted(f"{what} is refused by the trust policy: {reasons}")


def judge(policy: TrustPolicy, found: AtHand, given: Sequence[bytes], now: datetime) -> Checks:
    """Judge an artifact by the bundles that came with it."""
    rules = policy.document.namespaces.get(found.namespace)
    if rules is None:
        text = f"it says nothing of the namespace {found.namespace}"
        return Checks([TrustCheck(Standing.REFUSED, "policy", text)], [])
    checks: list[TrustCheck] = []
    accepted: list[Accepted] = []
    for data in given[: statements.MOST]:
        check, statement = _check(policy, rules, found, data, now)
        checks.append(check)
        if statement:
            accepted.append(Accepted(statement, data))
    if len(given) > statements.MOST:
        checks.append(TrustCheck(Standing.REFUSED, "statements", f"{len(given)} are more than {statements.MOST}"))
    checks += _lacking(rules, found, accepted)
    return Checks(checks, accepted)


def _check(
    policy: TrustPolicy, rules: NamespaceRules, found: AtHand, data: bytes, now: datetime
) -> tuple[TrustCheck, statements.Statement | None]:
    """Judge one bundle; return the line about it, and the statement if it counts."""
    try:
        bundle = statements.read_bundle(data)
        signer = policy.signer_of(bundle.keyid, rules.signers)
        if signer is None:
            known = policy.signer_of(bundle.keyid, tuple(policy.signers))
            who = f"{known.name}, who may not sign for {found.namespace}" if known else ""
            text = f"signed by {who or f'the unknown key {bundle.keyid[:16]}'}"
            return TrustCheck(Standing.IGNORED, "statement", text), None
        if not bundle.is_signed_by(signer.key):
            raise statements.Malformed(f"it was changed after {signer.name} signed it, or somebody else did")
        if bundle.payload_type != statements.IN_TOTO:
            raise statements.Malformed(f"{bundle.payload_type[:80]!r} is not a statement")
        statement = statements.read(bundle.payload)
    except statements.Malformed as error:
        return TrustCheck(Standing.REFUSED, "statement", str(error)), None
    kind, signed_on = statement.kind, statement.signed_on
    sidecar, verdict = statement.subjects.get(statements.SIDECAR), Standing.IGNORED
    if found.program not in statement.subjects.values() or sidecar not in (None, found.sidecar):
        why = "about another program"
    elif signed_on and signed_on > now + AHEAD:
        why = f"it is of {signed_on:%Y-%m-%d}, which is to come"
    elif not (why := signer.why_not(kind, signed_on, now)):
        if kind or statement.predicate_type not in statements.RETIRED.union(rules.ignore):
            verdict = Standing.REFUSED
        not_understood = f"{signer.name} says something that is not understood here: {statement.predicate_type}"
        why = _content(statement, rules) if kind else not_understood
    if why:
        return TrustCheck(verdict, kind or "statement", why), None
    when = f" on {signed_on:%Y-%m-%d}" if signed_on else ""
    return TrustCheck(Standing.OK, kind, f"signed by {signer.name}{when}{_said(statement)}"), statement


def _content(statement: statements.Statement, rules: NamespaceRules) -> str:
    """Return why what a statement says is refused; empty if it is not."""
    if statement.kind == "provenance":
        builder = _builder(statement)
        if rules.builders and builder not in rules.builders:
            return f"made by {builder or 'nobody'}, which is not a builder of the policy"
        if statements.SIDECAR not in statement.subjects:
            return "it does not name the sidecar"
    if statement.kind == "summary" and statement.predicate.get("verificationResult") != "PASSED":
        return "the artifact did not pass"
    return ""


def _builder(statement: statements.Statement) -> str:
    run = statement.predicate.get("runDetails")
    builder = run.get("builder") if isinstance(run, Mapping) else None
    return str(builder.get("id", "")) if isinstance(builder, Mapping) else ""


def _said(statement: statements.Statement) -> str:
    if statement.kind == "provenance":
        return f", made by {_builder(statement)}"
    if statement.kind == "summary":
        return f", for {statement.predicate.get('resourceUri', '')}"
    gates = statement.predicate.get("gates")
    return f", passed the gates of {gates.get('build', '')}" if isinstance(gates, Mapping) else ""


def _lacking(rules: NamespaceRules, found: AtHand, accepted: Iterable[Accepted]) -> Iterator[TrustCheck]:
    """Yield a refusal for each statement that is needed and not there."""
    there = [each.statement for each in accepted]
    if rules.unsigned and not there:
        yield TrustCheck(Standing.OK, "policy", f"programs of {found.namespace} may be unsigned")
        return
    for kind in dict.fromkeys(rules.require):
        if not any(statement.kind == kind for statement in there):
            yield TrustCheck(Standing.REFUSED, kind, "no statement of a trusted signer is there")
    if found.tag and found.tag in rules.promoted:
        wanted = statements.resource_of(found.namespace, found.tag)
        summaries = [statement for statement in there if statement.kind == "summary"]
        if not any(statement.predicate.get("resourceUri") == wanted for statement in summaries):
            yield TrustCheck(Standing.REFUSED, "summary", f"nobody trusted says that it may be {found.tag}")
