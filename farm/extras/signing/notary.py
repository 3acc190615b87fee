"""The notary: signs what the farm says about its programs, and keeps it in object storage, near their sidecars."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from farm import __version__
from farm.artifacts.refs import SnapshotCell
from farm.artifacts.storage import Object, Sign, at_once, rewrite, sidecar_key, statements_key
from farm.client.fetching import bundle_lines
from farm.errors import ArtifactGone
from farm.extras.signing import statements
from farm.extras.signing.signing_keys import clock, load_signer, signers_of
from farm.extras.signing.trust import AtHand, TrustPolicy, judge, load_policy
from farm.results.ref_rules import has_passed
from farm.settings import Settings
from farm.units import grouped
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from farm.app import Farm
    from farm.artifacts.s3 import S3Store
    from farm.results.report import JudgedCell, Report

KEPT = 32  # The newest verdicts of gates, and summaries, that are kept of an artifact for each key.
JSON_LINES = "application/jsonl"


@dataclass(frozen=True, slots=True)
class Notary:
    """Signs with the farm's key. `name` is the URI by which its statements call it."""

    signer: CryptoSigner
    name: str = statements.BUILDER
    now: Callable[[], datetime] = clock

    @classmethod
    def from_settings(cls, settings: Settings) -> Notary | None:
        """Return the notary of a process that has a key; None if it has none. Raises UsageError for a bad key."""
        if not settings.signing_key:
            return None
        return cls(load_signer(Path(settings.signing_key).expanduser()), settings.builder_id or statements.BUILDER)

    def attest(self, artifacts: S3Store, sidecar: Sidecar, text: bytes) -> None:
        """Sign and keep what an attempt says about its program, before its sidecar (`text`, as it is stored) is there.

        A sidecar that comes first elsewhere has statements of its own; these are then about nothing.
        """
        digest = hashlib.sha256(text).hexdigest()
        subjects = statements.subjects_of(sidecar, digest)
        said = [
            self.sign("provenance", subjects, statements.provenance(sidecar, self.name)),
            self.sign("test-results", subjects, statements.test_results(sidecar)),
        ]
        add(artifacts, sidecar["namespace"], sidecar["key"], said)

    def sign(self, kind: str, subjects: Mapping[str, str], predicate: Mapping[str, object]) -> bytes:
        """Return a statement, signed."""
        text = statements.payload(kind, subjects, dict(predicate), self.now())
        return statements.sign_bundle(text, statements.IN_TOTO, self.signer)


def start(farm: Farm) -> None:
    """Read the keys and the policy of a server: a wrong one ends its start. Raises UsageError."""
    signers_of(farm.settings)
    if farm.settings.trust_policy:
        farm.part(Promotions.of)


def publishing(settings: Settings) -> Sign | None:
    """Return what signs the programs of a worker; None if it has no key. Raises UsageError for a bad key."""
    notary = Notary.from_settings(settings)
    return notary.attest if notary else None


def attest_build(farm: Farm, report: Report) -> None:
    """Sign what a build's gates made of the cells that passed them. Raises UsageError for a bad key."""
    notary = Notary.from_settings(farm.settings)
    build = report["build"]

    def sign(cell: JudgedCell) -> None:
        if notary and (facts := cell["facts"]):
            program, tolerance = facts["program"], cell["gate"]["tolerance"]
            predicate = statements.gate_results(build["id"], tolerance, cell.get("compared", []), notary.name)
            said = notary.sign("test-results", {program["path"]: program["digest"]}, predicate)
            add(farm.artifacts, build["namespace"], facts["key"], [said])

    at_once(sign, [cell for cell in report["cells"] if has_passed(cell)])


def facts_of(farm: Farm, namespace: str, made: Sidecar) -> list[tuple[str, str]]:
    """Return in a line who signed an artifact, as its statements say; `farm verify` names what is wrong with them."""
    found = []
    namespaces = dict.fromkeys((made["namespace"], namespace))
    for data in farm.artifacts.statements(namespaces, made["key"])[: statements.MOST]:
        with suppress(statements.Malformed):
            bundle = statements.read_bundle(data)
            statement = statements.read(bundle.payload)
            when = f" on {statement.signed_on:%Y-%m-%d %H:%M} UTC" if statement.signed_on else ""
            found.append(f"{(statement.kind or statement.predicate_type)[:100]} by key `{bundle.keyid}`{when}")
    if not found:
        return [("signed", "nobody signed it: the digests prove which bytes these are, not who made them")]
    check = f"`farm verify {made['blobs']['program']['path']}` checks them by your trust policy"
    return [("signed", f"{'; '.join(found)}. That is what the statements say; {check}")]


def add(artifacts: S3Store, namespace: str, key: str, new: Sequence[bytes]) -> None:
    """Keep bundles about the artifacts of a cache key; each takes the place of an older one that says the same."""

    def added(there: Object | None) -> bytes:
        return bundle_lines(_newest([*(there.data.splitlines() if there else []), *new]))

    rewrite(artifacts, statements_key(namespace, key), added, content_type=JSON_LINES)


def _newest(given: Iterable[bytes]) -> list[bytes]:
    """Return the last of the bundles that say the same, and no more than `KEPT` of a kind and key that can go on."""
    found: dict[tuple[object, ...], bytes] = {}
    for data in given:
        try:
            bundle = statements.read_bundle(data)
            statement = statements.read(bundle.payload)
        except ValueError:
            continue  # No reader would take it.
        gates, resource = statement.predicate.get("gates"), statement.predicate.get("resourceUri")
        about = str(gates.get("build") if isinstance(gates, dict) else resource or "")
        same = (bundle.keyid, statement.predicate_type, bool(about), about, *sorted(statement.subjects.items()))
        found.pop(same, None)
        found[same] = data
    series = grouped(found, lambda same: same[:3])
    old = {same for (*_, goes_on), all_of_it in series.items() if goes_on for same in all_of_it[:-KEPT]}
    return [data for same, data in found.items() if same not in old]


@dataclass(frozen=True, slots=True)
class Promotions:
    """Checks what a ref is to name by a server's policy, and signs that it passed, if the server has a key."""

    artifacts: S3Store
    policy: TrustPolicy
    notary: Notary | None

    @classmethod
    def of(cls, farm: Farm) -> Self:
        """Return the promotions of a server that has a policy. Raises UsageError for a bad key or policy."""
        policy = load_policy(Path(farm.settings.trust_policy).expanduser())
        return cls(farm.artifacts, policy, Notary.from_settings(farm.settings))

    def check(self, namespace: str, tag: str, cells: Iterable[SnapshotCell]) -> Callable[[], object]:
        """Check the artifacts of cells before a tag names them; what is returned signs a summary of each afterwards.

        Raises Untrusted for the first that the server's policy refuses, ArtifactGone.
        """
        named = statements.resource_of(namespace, tag)
        signs = at_once(lambda cell: self._checked(namespace, named, cell), cells)
        return lambda: at_once(lambda sign: sign(), signs)

    def _checked(self, namespace: str, resource: str, cell: SnapshotCell) -> Callable[[], object]:
        place = cell.get("sidecar") or sidecar_key(namespace, cell["key"])
        found = self.artifacts.get_object(place)
        if found is None:
            raise ArtifactGone(f"{cell['identifier']}: its sidecar {place} is gone")
        owner, program = place.split("/")[1], cell["program"]
        digest = hashlib.sha256(found.data).hexdigest()
        at_hand = AtHand(owner, program["digest"], digest)
        judged = judge(self.policy, at_hand, self.artifacts.statements([owner], cell["key"]), clock())
        judged.require(cell["identifier"])
        others = [each for each in judged.accepted if each.statement.kind != "summary"]
        inputs = [hashlib.sha256(each.bundle).hexdigest() for each in others]

        def sign() -> None:
            if notary := self.notary:
                subjects, policy = {program["path"]: program["digest"], statements.SIDECAR: digest}, self.policy.digest
                said = statements.summary(notary.name, resource, policy, inputs, __version__, notary.now())
                add(self.artifacts, namespace, cell["key"], [notary.sign("summary", subjects, said)])

        return sign


def check(farm: Farm, namespace: str, tag: str, cells: Sequence[SnapshotCell]) -> Callable[[], object]:
    """Let a ref name what passes the server's trust policy, and then sign that it does. Raises as `Promotions`."""
    return farm.part(Promotions.of).check(namespace, tag, cells)
