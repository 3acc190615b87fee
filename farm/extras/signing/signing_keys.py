"""Keys: a private one in a file that only its owner reads, a public one in a file for everybody (both PEM)."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import UsageError
from farm.files import NotPlain, read_plain, read_private

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

    from farm.settings import Settings

PRIVATE, PUBLIC = ".key", ".pub"
_LARGEST = 64 << 10


def new_key(name: str, folder: Path) -> tuple[Path, Path, str]:
    """Make an Ed25519 key; return the files of its private and public half, and its id.

    Raises UsageError for an invalid name, and if one of the files exists: a lost key cannot be made again.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"{name!r} cannot name a key", hint="letters, digits, dot, dash and underscore")
    private, public = folder / f"{name}{PRIVATE}", folder / f"{name}{PUBLIC}"
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    shown = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data, mode in ((private, secret, 0o600), (public, shown, 0o644)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                file.write(data)
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists", hint="choose another name") from None
    except OSError as error:
        raise UsageError(f"cannot write a key into {folder}: {error.strerror or error}") from None
    return private, public, public_key(shown).keyid


def load_signer(path: Path) -> CryptoSigner:
    """Return what signs with a private key. Raises UsageError if others can read its file, or it is not a key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        return CryptoSigner(load_pem_private_key(read_private(path, _LARGEST), None))
    except PermissionError as error:
        hint = "it must be yours, and only readable for you: chmod 600"
        raise UsageError(f"the private key {path}: {error.strerror or error}", hint=hint) from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a private key: {error}", hint="`farm key new` makes one") from None


def signers_of(settings: Settings) -> dict[str, CryptoSigner]:
    """Return what signs refs on a server, by the ids of its keys. Raises UsageError for a bad one."""
    paths = [Path(path).expanduser() for path in (settings.signing_key, settings.timestamp_key) if path]
    return {signer.public_key.keyid: signer for signer in map(load_signer, paths)}


def load_public(path: Path) -> SSlibKey:
    """Return a public key; its id follows from it. Raises UsageError."""
    try:
        return public_key(read_plain(path, _LARGEST))
    except NotPlain as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a public key: {error!s:.200}", hint="`farm key new` makes one") from None


def public_key(pem: bytes) -> SSlibKey:
    """Return the public key of a PEM text. Raises ValueError, TypeError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        return SSlibKey.from_crypto(load_pem_public_key(pem))
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None


def clock() -> datetime:
    """Return the time here."""
    return datetime.now(UTC)
