"""A farm's keys, a sidecar with its statements, and the policy of somebody who trusts them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts import sidecar as sidecars
from farm.extras.signing import statements
from farm.extras.signing.signing_keys import load_signer, new_key
from farm.extras.signing.trust import AtHand
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
DAY = timedelta(days=1)
PROGRAM = b"a program"
POLICY = """\
[signers.farm]
key = "farm.pub"
signs = ["provenance", "test-results", "summary"]
[signers.root]
key = "root.pub"
[namespaces.main]
signers = ["farm"]
require = ["provenance", "test-results"]
promoted = ["prod"]
"""
"""What somebody asks of programs who trusts the key `farm`."""


def key_in(folder: Path, name: str) -> CryptoSigner:
    """Make a key; its public half lies next to it."""
    private, _, keyid = new_key(name, folder)
    signer = load_signer(private)
    assert signer.public_key.keyid == keyid
    return signer


def sidecar_of(program: bytes = PROGRAM, **changes: Any) -> Sidecar:
    document: dict[str, Any] = {
        "schema": 1,
        "key": "0" * 64,
        "namespace": "main",
        "identifier": "net/onnxruntime-cpu/fp32/b1",
        "spec": {
            "compiler": {"name": "onnxruntime", "recipe": 1, "libraries": {"onnx": "1.23.2"}},
            "model": {"format": "onnx", "digest": "a" * 64},
            "device": {"arch": "cpu"},
            "verification": {"samples": {"digest": "b" * 64}, "reference": "auto"},
        },
        "blobs": {
            "program": {"path": "net.onnx", "digest": hashlib.sha256(program).hexdigest(), "size": len(program)},
            "log": {"path": "log.txt", "digest": "c" * 64, "size": 3},
        },
        "toolchain": "onnxruntime1.31",
        "device": {"arch": "cpu"},
        "measurements": {"latency": {"median": 0.001}},
        "verification": {"reference": "onnxruntime", "samples": 8, "errors": {"y": 0.001}},
        "worker": "w1",
        "node": "n1",
        "job": "j-1",
        "attempt": 1,
        "created": "2026-11-22T00:00:00+00:00",
    }
    return sidecars.validate({**document, **changes})


@dataclass
class Signed:
    """A program, its sidecar, and who signs for it."""

    sidecar: Sidecar
    signer: CryptoSigner

    @property
    def text(self) -> bytes:
        return sidecars.text(self.sidecar)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    def at_hand(self, **changes: Any) -> AtHand:
        given = {"namespace": self.sidecar["namespace"], "program": self.sidecar["blobs"]["program"]["digest"],
                 "sidecar": self.digest, **changes}  # fmt: skip
        return AtHand(**given)

    def sign(self, kind: str, predicate: dict[str, Any], when: datetime = NOW, **subjects: str) -> bytes:
        named = subjects or statements.subjects_of(self.sidecar, self.digest)
        return statements.sign_bundle(statements.payload(kind, named, predicate, when), statements.IN_TOTO, self.signer)

    def provenance(self, when: datetime = NOW, builder: str = statements.BUILDER) -> bytes:
        return self.sign("provenance", statements.provenance(self.sidecar, builder), when)

    def results(self, when: datetime = NOW) -> bytes:
        return self.sign("test-results", statements.test_results(self.sidecar), when)

    def summary(self, tag: str) -> bytes:
        resource = statements.resource_of(self.sidecar["namespace"], tag)
        return self.sign("summary", statements.summary("urn:v", resource, "d" * 64, [], "0", NOW))
