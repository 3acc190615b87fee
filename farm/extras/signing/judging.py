"""What a reader accepts: one check a line, of an artifact that is at hand, by a trust policy. Asks no server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from farm.errors import Untrusted
from farm.extras.signing import bundles
from farm.extras.signing.statements import RETIRED, SIDECAR, NoStatement, Statement, read, resource_of
from farm.extras.signing.trust import KnownSigner, NamespaceRules, TrustPolicy

AHEAD = timedelta(minutes=10)
"""How far another clock may be ahead of this one."""


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

    statement: Statement
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
    for data in given[: bundles.MOST]:
        check, statement = _check(policy, rules, found, data, now)
        checks.append(check)
        if statement:
            accepted.append(Accepted(statement, data))
    if len(given) > bundles.MOST:
        checks.append(TrustCheck(Standing.REFUSED, "statements", f"{len(given)} are more than {bundles.MOST}"))
    checks += _lacking(rules, found, accepted)
    return Checks(checks, accepted)


class _NotCounted(Exception):
    """A bundle that does not count, and why; `kind` is that of its statement, as far as it was read."""

    def __init__(self, verdict: Standing, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.check = TrustCheck(verdict, kind or "statement", text)


def _check(
    policy: TrustPolicy, rules: NamespaceRules, found: AtHand, data: bytes, now: datetime
) -> tuple[TrustCheck, Statement | None]:
    """Judge one bundle; return the line about it, and the statement if it counts."""
    try:
        signer, statement = _opened(policy, rules, found.namespace, data)
        _require_valid(signer, rules, found, statement, now)
    except _NotCounted as error:
        return error.check, None
    when = f" on {statement.signed_on:%Y-%m-%d}" if statement.signed_on else ""
    return TrustCheck(Standing.OK, statement.kind, f"signed by {signer.name}{when}{_said(statement)}"), statement


def _opened(policy: TrustPolicy, rules: NamespaceRules, namespace: str, data: bytes) -> tuple[KnownSigner, Statement]:
    """Return who signed a bundle, and the statement in it."""
    try:
        bundle = bundles.read(data)
    except bundles.Malformed as error:
        raise _NotCounted(Standing.REFUSED, str(error)) from None
    signer = policy.signer_of(bundle.keyid, rules.signers)
    if signer is None:
        known = policy.signer_of(bundle.keyid, tuple(policy.signers))
        who = f"{known.name}, who may not sign for {namespace}" if known else f"the unknown key {bundle.keyid[:16]}"
        raise _NotCounted(Standing.IGNORED, f"signed by {who}")
    if not bundle.is_signed_by(signer.key):
        raise _NotCounted(Standing.REFUSED, f"it was changed after {signer.name} signed it, or somebody else did")
    if bundle.payload_type != bundles.IN_TOTO:
        raise _NotCounted(Standing.REFUSED, f"{bundle.payload_type[:80]!r} is not a statement")
    try:
        return signer, read(bundle.payload)
    except NoStatement as error:
        raise _NotCounted(Standing.REFUSED, str(error)) from None


def _require_valid(
    signer: KnownSigner, rules: NamespaceRules, found: AtHand, statement: Statement, now: datetime
) -> None:
    """Raise _NotCounted unless a statement, which this signer has signed, is about this artifact, timely and good."""
    kind = statement.kind
    sidecar, when = statement.subjects.get(SIDECAR), statement.signed_on
    if found.program not in statement.subjects.values() or sidecar not in (None, found.sidecar):
        raise _NotCounted(Standing.IGNORED, "about another program", kind)
    if when and when > now + AHEAD:
        raise _NotCounted(Standing.IGNORED, f"it is of {when:%Y-%m-%d}, which is to come", kind)
    if why := signer.why_not(kind, when, now):
        raise _NotCounted(Standing.IGNORED, why, kind)
    if not kind:
        known = statement.predicate_type in RETIRED.union(rules.ignore)
        verdict = Standing.IGNORED if known else Standing.REFUSED
        text = f"{signer.name} says something that is not understood here: {statement.predicate_type}"
        raise _NotCounted(verdict, text)
    if why := _content(statement, rules):
        raise _NotCounted(Standing.REFUSED, why, kind)


def _content(statement: Statement, rules: NamespaceRules) -> str:
    """Return why what a statement says is refused; empty if it is not."""
    if statement.kind == "provenance":
        builder = _builder(statement)
        if rules.builders and builder not in rules.builders:
            return f"made by {builder or 'nobody'}, which is not a builder of the policy"
        if SIDECAR not in statement.subjects:
            return "it does not name the sidecar"
    if statement.kind == "summary" and statement.predicate.get("verificationResult") != "PASSED":
        return "the artifact did not pass"
    return ""


def _builder(statement: Statement) -> str:
    run = statement.predicate.get("runDetails")
    builder = run.get("builder") if isinstance(run, Mapping) else None
    return str(builder.get("id", "")) if isinstance(builder, Mapping) else ""


def _said(statement: Statement) -> str:
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
        wanted = resource_of(found.namespace, found.tag)
        summaries = [statement for statement in there if statement.kind == "summary"]
        if not any(statement.predicate.get("resourceUri") == wanted for statement in summaries):
            yield TrustCheck(Standing.REFUSED, "summary", f"nobody trusted says that it may be {found.tag}")
