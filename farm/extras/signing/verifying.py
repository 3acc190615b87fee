"""Verifying: what came from a farm, or lies in a folder, against the trust policy of its reader."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_data_path

from farm import entry_points
from farm.artifacts.refs import ShownRef
from farm.artifacts.storage import MAIN, readable
from farm.client.fetching import SignedArtifact, program_path, read_sidecar, sidecar_path, statements_path
from farm.client.packs import PACK, SIDECAR
from farm.client.transport import Api
from farm.errors import ArtifactGone, NotFound, Untrusted, UsageError
from farm.extras.signing import statements
from farm.extras.signing.signed_refs import promise, signed_ref
from farm.extras.signing.signing_keys import clock, load_signer
from farm.extras.signing.trust import AtHand, Checks, Standing, TrustCheck, TrustPolicy, judge, load_policy
from farm.files import open_plain, read_plain
from farm.settings import Settings
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from farm.client.client import FarmClient

LARGEST_SIDECAR = 16 << 20
LARGEST_PROGRAM = 1 << 50


@dataclass(frozen=True, slots=True)
class Trust:
    """A client's trust policy, without which it requires nothing, and the key of a promoter.

    `namespace` is the one that it works in: what it is given must be of this one, or of `main`. `memory` is the folder
    that keeps what was last seen of each signed ref, so that nobody shows an older one.
    """

    policy: TrustPolicy | None = None
    namespace: str = ""
    signer: CryptoSigner | None = None
    memory: Path = field(default_factory=lambda: user_data_path("migraphx-farm") / "refs")

    @classmethod
    def from_settings(cls, settings: Settings) -> Trust:
        """Return what the settings say. Raises UsageError for a bad policy."""
        policy = load_policy(Path(settings.trust_policy).expanduser()) if settings.trust_policy else None
        signer = load_signer(Path(settings.signing_key).expanduser()) if settings.signing_key else None
        return cls(policy, settings.namespace, signer)

    @property
    def asks(self) -> bool:
        """Whether there is a policy; else nothing is refused."""
        return self.policy is not None

    def ref(self, tag: str, ask: Callable[[], ShownRef]) -> ShownRef:
        """Return what `ask` answers about a ref. Raises Untrusted unless it is signed as the policy's roles say."""
        roles = self.policy.roles if self.policy else None
        if self.policy is None or roles is None:
            return ask()
        own, found = self.namespace or MAIN, ask()
        owner, *answers = found.get("namespace", own), found
        # Else who answers could hide a ref of this namespace, and show that of `main` in its place.
        if owner not in ({own} if own in self.policy.document.namespaces else {own, MAIN}):
            raise Untrusted(f"{own} has no ref {tag}", hint=f"FARM_NAMESPACE={MAIN} reads that of {MAIN}")
        return signed_ref(roles, self.memory, f"{owner}/{tag}", lambda: answers.pop() if answers else ask())

    def promise(self, client: FarmClient, tag: str, source: str, *, previous: bool) -> tuple[str, int] | None:
        """Return what this promoter signs about a move of a ref, and the generation from which it moves.

        None without a key for it. Raises as `ref`: what is signed is what the policy takes.
        """
        own = self.namespace or MAIN
        return promise(client, self.signer, f"{own}/{tag}", source, previous=previous) if self.signer else None

    def admit(self, signed: SignedArtifact, *, key: str, tag: str) -> None:
        """Raise Untrusted, with the reasons, unless the policy accepts an artifact."""
        self.judge(signed.text, signed.statements, key=key, tag=tag).require(key)

    def judge(self, text: bytes, statements: Sequence[bytes], *, key: str = "", tag: str = "") -> Checks:
        """Judge a sidecar by what came with it; the program counts as what the sidecar names.

        `key` is the cache key by which a farm was asked for it, which may answer with another artifact.

        Raises ArtifactGone if it is not a sidecar, UsageError without a policy.
        """
        if self.policy is None:
            raise UsageError("no trust policy", hint="set `trust_policy`, or name a key: --key FILE.pub")
        sidecar = read_sidecar(text, "the sidecar")
        found = AtHand(sidecar["namespace"], sidecar["blobs"]["program"]["digest"], sha256_of(text), tag)
        if key and sidecar["key"] != key:
            wrong = f"it is the artifact {sidecar['key'][:16]}…, and {key[:16]}… was asked for"
            return Checks([TrustCheck(Standing.REFUSED, "key", wrong)], [])
        if sidecar["namespace"] not in readable(self.namespace or MAIN):
            wrong = f"it is of the namespace {sidecar['namespace']}, and this reader works in {self.namespace or MAIN}"
            return Checks([TrustCheck(Standing.REFUSED, "namespace", wrong)], [])
        return judge(self.policy, found, statements, clock())


def read_statements(path: Path) -> list[bytes]:
    """Return the bundles of a file; none if there is no such file. Raises Untrusted for one that is too large."""
    try:
        return [line for line in read_plain(path, statements.LARGEST * 4, linked=True).splitlines() if line.strip()]
    except OSError as error:
        if error.errno == errno.ENOENT:
            return []
        raise Untrusted(f"cannot read {path}: {error.strerror or error}") from None


def what_to_verify(path: Path) -> list[Path]:
    """Return what there is to verify at a path: a file or a pack is one thing, a folder has its sidecars.

    Raises NotFound for a folder without any.
    """
    if not path.is_dir() or (path / PACK).exists():
        return [path]
    found = sorted(path.glob(f"*{SIDECAR}"))
    if not found:
        raise NotFound(f"no {SIDECAR} in {path}", hint="`farm fetch` writes one for each program")
    return found


def verify_file(path: Path, trust: Trust, *, tag: str = "", cache: Path | None = None) -> list[TrustCheck]:
    """Check a program (by its path or its sidecar's) or the folder of a pack, by what lies next to it. Asks no server.

    `cache` is the client's: the model of a pack is made again from there.

    Raises NotFound without a sidecar, ArtifactGone if it is not one, UsageError without a policy.
    """
    if path.is_dir() and (path / PACK).exists():
        verify = entry_points.required(entry_points.VERIFIERS, "pack")
        return list(verify(path, trust, tag, cache))
    place = _sidecar_of(path)
    text = read_document(place)
    sidecar = read_sidecar(text, str(place))
    stored = sidecar["blobs"]["program"]
    program = path if path.is_file() and path != place else program_path(place, stored["path"], stored["digest"])
    judged = trust.judge(text, read_statements(statements_path(place)), tag=tag)
    return [_program(program, sidecar), *judged.checks]


def _program(path: Path, sidecar: Sidecar) -> TrustCheck:
    wanted = sidecar["blobs"]["program"]
    try:
        digest = file_digest(path)
    except OSError as error:
        return TrustCheck(Standing.REFUSED, "sha256", f"{path.name}: {error.strerror}")
    if digest != wanted["digest"]:
        return TrustCheck(
            Standing.REFUSED, "sha256", f"{path.name} has {digest[:16]}…, and its sidecar says {wanted['digest'][:16]}…"
        )
    return TrustCheck(Standing.OK, "sha256", f"{path.name} has {digest[:16]}…, as its sidecar says")


def _sidecar_of(path: Path) -> Path:
    """Return where the sidecar of a program lies. Raises NotFound."""
    candidates = [path] if path.name.endswith(SIDECAR) else [sidecar_path(path), path.with_name(SIDECAR)]
    for each in candidates:
        if each.is_file():
            return each
    raise NotFound(f"no {SIDECAR} next to {path}", hint="`farm fetch` writes it next to the program")


def read_document(path: Path) -> bytes:
    """Return the bytes of a small file. Raises ArtifactGone."""
    try:
        return read_plain(path, LARGEST_SIDECAR, linked=True)
    except OSError as error:
        raise ArtifactGone(f"cannot read {path}: {error.strerror or error}") from None


def file_digest(path: Path, *, within: Path | None = None) -> str:
    """Return the SHA-256 of a regular file, which may have several names, `within` a folder. Raises OSError."""
    with open_plain(path, LARGEST_PROGRAM, within=within, linked=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


class SignaturesApi(Api):
    """What is signed about artifacts, by somebody's trust."""

    def judged(self, key: str, trust: Trust, *, tag: str = "") -> list[TrustCheck]:
        """Return the checks of an artifact by somebody's trust, whatever this client trusts. Raises NotFound."""
        found = self._client.artifacts.stored(key)
        given = [each.encode() for each in found["statements"]]
        return trust.judge(found["sidecar"].encode(), given, key=key, tag=tag).checks
