"""What a client asks about signatures: `client.signatures`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from farm.client.fetching import SignedArtifact
from farm.client.topic import Api

if TYPE_CHECKING:
    from farm.extras.signing.judging import TrustCheck
    from farm.extras.signing.verifying import Trust


class SignaturesApi(Api):
    """What is signed about artifacts, by somebody's trust, and what is revoked."""

    def judged(self, key: str, trust: Trust, *, tag: str = "") -> list[TrustCheck]:
        """Return the checks of an artifact by somebody's trust, whatever this client trusts. Raises NotFound."""
        found = self._client.artifacts.stored(key)
        signed = SignedArtifact(found["sidecar"].encode(), [each.encode() for each in found["statements"]])
        return trust.checks(signed, self._transport, key=key, tag=tag).checks

    def publish_revocations(self, document: bytes) -> None:
        """Publish a signed revocation document for all readers. Raises UsageError, Conflict for an older one."""
        try:
            body = json.loads(document)
        except ValueError:
            body = {}
        self._transport.request("POST", "/v1/revocations/issue", json=body)
