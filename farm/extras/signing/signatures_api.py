"""What a client asks about signatures: `client.signatures`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.client.fetching import SignedArtifact
from farm.client.transport import Api

if TYPE_CHECKING:
    from farm.extras.signing.judging import TrustCheck
    from farm.extras.signing.verifying import Trust


class SignaturesApi(Api):
    """What is signed about artifacts, by somebody's trust."""

    def judged(self, key: str, trust: Trust, *, tag: str = "") -> list[TrustCheck]:
        """Return the checks of an artifact by somebody's trust, whatever this client trusts. Raises NotFound."""
        found = self._client.artifacts.stored(key)
        signed = SignedArtifact(found["sidecar"].encode(), [each.encode() for each in found["statements"]])
        return trust.judge(signed.text, signed.statements, key=key, tag=tag).checks
