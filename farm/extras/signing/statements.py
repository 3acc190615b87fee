"""Statements (in-toto v1) about programs, and the bundles (Sigstore) that carry them with one signature. Asks nobody.

When it was signed, by the signer's clock, is a field of ours in the predicate (`SIGNED_ON`), named as SLSA asks of
extensions. The statement itself has the four fields of in-toto's: strict readers refuse any other.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from farm.artifacts.sidecar import required
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Key, Signer

TYPE = "https://in-toto.io/Statement/v1"
SIDECAR = "artifact.json"
"""The name of the sidecar among the subjects: its digest is that of the object in storage, and of the fetched file."""

KINDS = {
    "provenance": "https://slsa.dev/provenance/v1",
    "test-results": "urn:migraphx-farm:test-results:v1",
    "summary": "https://slsa.dev/verification_summary/v1",
}
"""The kinds of statements, with their predicate types. in-toto's own test-result has no place for a number."""

RETIRED = frozenset({"urn:migraphx-farm:pack:v1"})
"""Predicate types that earlier releases signed: nobody reads them, and they say nothing against a program."""

BUILD_TYPE = "urn:migraphx-farm:compile:v1"
BUILDER = "urn:migraphx-farm:builder"  # Who made a program, unless the setting `builder_id` says more.
SIGNED_ON = "farm_signedOn"
GATES_PASSED = "FARM_GATES_PASSED"

Json = dict[str, Any]


class Malformed(ValueError):
    """Bytes that are not a bundle, or not a statement of in-toto's in version 1; or of a kind that is not read here."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement as it was read: `subjects` are the SHA-256 of what it is about, by their names."""

    subjects: Mapping[str, str]
    predicate_type: str
    predicate: Json
    signed_on: datetime | None

    @property
    def kind(self) -> str:
        """Its kind; empty for a predicate type that is not known here."""
        return next((kind for kind, uri in KINDS.items() if uri == self.predicate_type), "")


def read(payload: bytes) -> Statement:
    """Read a statement; fields that are not known here are ignored, as in-toto asks. Raises Malformed."""
    try:
        document = json.loads(payload)
        if document["_type"] != TYPE:
            raise Malformed(f"its type is {str(document['_type'])[:80]!r}")
        subjects = {str(each.get("name", "")): str(each["digest"].get("sha256", "")) for each in document["subject"]}
        if not subjects or len(subjects) < len(document["subject"]):
            raise Malformed("it has no subject, or two of one name")
        predicate = document.get("predicate") or {}
        if not isinstance(predicate, dict):
            raise TypeError
        when = predicate.get(SIGNED_ON)
        signed_on = instant(when) if when is not None else None
        return Statement(subjects, str(document["predicateType"]), predicate, signed_on)
    except Malformed:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise Malformed(f"no statement: {type(error).__name__}") from None


def payload(kind: str, subjects: Mapping[str, str], predicate: Json, when: datetime) -> bytes:
    """Return a statement as the bytes that are signed."""
    named = [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()]
    document = {
        "_type": TYPE,
        "subject": named,
        "predicateType": KINDS[kind],
        "predicate": {**predicate, SIGNED_ON: written(when)},
    }
    return json.dumps(document, sort_keys=True).encode()


def instant(text: str) -> datetime:
    """Return the time of an RFC 3339 text. Raises ValueError for one without a zone, TypeError for no text."""
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError("a time without a zone")
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time beyond the calendar") from None


def written(when: datetime) -> str:
    """Return a time as it stands in statements: whole seconds, UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def subjects_of(sidecar: Sidecar, sidecar_digest: str) -> dict[str, str]:
    """Return what an attempt made: the program first, the sidecar, and the other files, by their names."""
    program, cache = sidecar["blobs"]["program"], sidecar["blobs"]["kernel_cache"]
    others = {blob["path"]: blob["digest"] for blob in [*required(sidecar["blobs"]), *([cache] if cache else [])]}
    return {program["path"]: program["digest"], SIDECAR: sidecar_digest} | others


def provenance(sidecar: Sidecar, builder: str) -> Json:
    """Return SLSA's provenance (v1) of a program: which cell was asked for, made of what, by which builder, when."""
    spec = sidecar["spec"]
    verified, compiler = spec.get("verification"), spec.get("compiler")
    named = {
        "model": spec.get("model"),
        "calibration": spec.get("calibration"),
        "samples": verified.get("samples") if verified else None,
    }
    materials: list[Json] = [
        {"name": name, "digest": {"sha256": material["digest"]}}
        for name, material in named.items()
        if material and material.get("digest")
    ]
    materials.append({"name": "toolchain", "uri": f"urn:migraphx-farm:toolchain:{sidecar['toolchain']}"})
    libraries = (compiler.get("libraries") if compiler else None) or {}
    materials += [{"name": name, "uri": f"pkg:pypi/{name}@{version}"} for name, version in sorted(libraries.items())]
    times = {"startedOn": sidecar["started"], "finishedOn": sidecar["created"]}
    blobs = {"log": sidecar["blobs"]["log"], "reproduction": sidecar["blobs"]["reproduction"]}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "namespace": sidecar["namespace"],
                "identifier": sidecar["identifier"],
                "key": sidecar["key"],
                "spec": spec,
                "build": sidecar["build"],
            },
            "internalParameters": {"device": sidecar["device"], "conversion": sidecar["conversion"]},
            "resolvedDependencies": materials,
        },
        "runDetails": {
            "builder": {
                "id": builder,
                "version": {"migraphx-farm": sidecar["farm_version"], "toolchain": sidecar["toolchain"]},
            },
            "metadata": {
                "invocationId": f"{sidecar['job']}-{sidecar['attempt']}",
                **{name: when for name, when in times.items() if when},
            },
            "byproducts": [
                {"name": blob["path"], "digest": {"sha256": blob["digest"]}}
                for blob in blobs.values()
                if blob is not None
            ],
        },
    }


def test_results(sidecar: Sidecar) -> Json:
    """Return how accurate and how fast a program was found to be, by which worker, and on which machine.

    Numbers are those of the sidecar: seconds, samples a second, bytes. What gates make of them, the build says.
    """
    return {
        "accuracy": sidecar["verification"],
        "speed": sidecar["measurements"],
        "tuning": sidecar["tuning"],
        "size": sidecar["blobs"]["program"]["size"],
        "compileMemory": sidecar["peak_memory"],
        "by": {
            "worker": sidecar["worker"],
            "job": sidecar["job"],
            "attempt": sidecar["attempt"],
            "farm": sidecar["farm_version"],
        },
        "place": {"node": sidecar["node"], "device": sidecar["device"], "toolchain": sidecar["toolchain"]},
        "gates": None,
    }


def gate_results(build: str, tolerance: Mapping[str, float], gates: Sequence[Any], judge: str) -> Json:
    """Return what the gates of a build made of a program that passed them; `gates` are their rows."""
    return {"gates": {"build": build, "result": "PASSED", "tolerance": dict(tolerance), "rows": list(gates)},
            "by": {"judge": judge}}  # fmt: skip


def summary(verifier: str, resource: str, policy: str, inputs: Sequence[str], version: str, when: datetime) -> Json:
    """Return SLSA's verification summary (VSA v1) of an artifact that passed; digests of the policy and the inputs.

    It claims build level 1 only: that provenance is there. An operator who runs workers in another way may claim more.
    """
    return {
        "verifier": {"id": verifier, "version": {"migraphx-farm": version}},
        "timeVerified": written(when),
        "resourceUri": resource,
        "policy": {"uri": "urn:migraphx-farm:trust-policy", **({"digest": {"sha256": policy}} if policy else {})},
        "inputAttestations": [{"digest": {"sha256": digest}} for digest in inputs],
        "verificationResult": "PASSED",
        "verifiedLevels": ["SLSA_BUILD_LEVEL_1", GATES_PASSED] if inputs else [GATES_PASSED],
        "slsaVersion": "1.1",
    }


def resource_of(namespace: str, tag: str) -> str:
    """Return the URI of a ref, as a verification summary names what it is about."""
    return f"urn:migraphx-farm:ref:{namespace}:{tag}"


MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
IN_TOTO = "application/vnd.in-toto+json"
LARGEST = 4 << 20  # Bytes of a bundle that are read at most.
MOST = 256  # Bundles of one artifact that are read at most.


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as it was read; nothing in it is checked yet. `keyid` is who signed, as it says."""

    keyid: str
    payload_type: str
    payload: bytes
    _envelope: Envelope

    def is_signed_by(self, key: Key) -> bool:
        """Whether this key made the signature."""
        from securesystemslib.exceptions import VerificationError

        try:
            return key.keyid in self._envelope.verify([key], 1)
        except VerificationError:
            return False


def sign_bundle(payload: bytes, payload_type: str, signer: Signer) -> bytes:
    """Sign bytes of a media type; return the bundle, as one line of JSON."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, payload_type, {})
    signature = envelope.sign(signer)
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": signature.keyid}, "tlogEntries": []},
        "dsseEnvelope": envelope.to_dict(),
    }
    return json.dumps(bundle, sort_keys=True).encode()


def read_bundle(data: bytes) -> Bundle:
    """Read a bundle; fields that are not known here are ignored. Raises Malformed."""
    from securesystemslib.dsse import Envelope

    if len(data) > LARGEST:
        raise Malformed(f"more than {LARGEST >> 20} MiB")
    try:
        document: dict[str, Any] = json.loads(data)
        if document["mediaType"] != MEDIA_TYPE:
            raise Malformed(f"of another kind: {str(document['mediaType'])[:80]!r}")
        found = document["dsseEnvelope"]
        if len(found["signatures"]) != 1:
            raise Malformed(f"it has {len(found['signatures'])} signatures, not one")
        (signature,) = found["signatures"]
        # The hint stands for an id that the signature itself may leave out.
        hint = document["verificationMaterial"].get("publicKey", {}).get("hint", "")
        keyid = str(signature.get("keyid") or hint)
        envelope = Envelope.from_dict({**found, "signatures": [{"keyid": keyid, "sig": str(signature["sig"])}]})
        return Bundle(keyid, str(envelope.payload_type), envelope.payload, envelope)
    except (KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise Malformed(f"no bundle: {type(error).__name__}") from None
    except ValueError as error:
        raise error if isinstance(error, Malformed) else Malformed("no JSON, or no base64 in it") from None
