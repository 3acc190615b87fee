"""Sigstore bundles: a DSSE envelope with one signature, and a hint which public key checks it."""

from __future__ import annotations

import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Key, Signer

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
IN_TOTO = "application/vnd.in-toto+json"
LARGEST = 4 << 20
"""Bytes of a bundle that are read at most."""
MOST = 256
"""Bundles of one artifact that are read at most."""


class Malformed(ValueError):
    """Bytes that are not a bundle, or one of a kind that is not read here."""


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


def sign(payload: bytes, payload_type: str, signer: Signer) -> bytes:
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


def read(data: bytes) -> Bundle:
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
