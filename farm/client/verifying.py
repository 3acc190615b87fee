"""Verifying: what came from a farm, or lies in a folder, against the trust policy of who wants to load it."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from farm.artifacts import MAIN, readable
from farm.artifacts.sidecar import SidecarDocument, document, read
from farm.client.fetching import SIDECAR_SUFFIX, file_name, require_model, sidecar_path, statements_path
from farm.errors import ArtifactGone, FarmError, NotFound, Untrusted, UsageError
from farm.files import NotPlain, open_plain, read_plain
from farm.signing import bundles
from farm.signing.judging import Accepted, AtHand, Checks, Standing, TrustCheck, judge
from farm.signing.notary import Notary, pack
from farm.signing.revocations import refresh
from farm.signing.statements import subjects_of
from farm.signing.trust import TrustPolicy, clock, load_policy

if TYPE_CHECKING:
    from farm.artifacts.sidecar import Sidecar
    from farm.client.transfers import Downloads
    from farm.packs.writing import Pack, PackIndex
    from farm.settings import Settings

LARGEST_SIDECAR = 16 << 20
LARGEST_PROGRAM = 1 << 50
_PIECE = 1 << 20
PACK = "pack.json"
SIDECAR = "artifact.json"


@dataclass(frozen=True, slots=True)
class SignedArtifact:
    """A sidecar as it is stored, byte by byte, with the bundles that came with it; `judged` if somebody asked."""

    text: bytes
    statements: Sequence[bytes]
    judged: Checks | None = None

    @property
    def document(self) -> SidecarDocument:
        """The sidecar as plain JSON."""
        return document(self.sidecar)

    @property
    def sidecar(self) -> Sidecar:
        """The sidecar. Raises ArtifactGone if it is none."""
        return _sidecar(self.text, "the farm's sidecar")

    def lines(self) -> bytes:
        """Return the bundles as they are kept next to the sidecar."""
        return bundles.lines(self.statements)

    def pack_files(self, layout: str) -> dict[str, bytes]:
        """Return the files of a pack that a trusted statement brings, by their names; empty if none does."""
        for each in reversed(self.judged.accepted if self.judged else []):
            if each.statement.kind == "pack" and each.statement.predicate.get("layout") == layout:
                return _contents(each)
        return {}


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a client trusts, and the key by which it signs its packs; None: it asks for nothing, and signs nothing.

    `namespace` is the one that it works in: what it is given must be of this one, or of `main`.
    """

    policy: TrustPolicy | None = None
    notary: Notary | None = None
    namespace: str = ""

    @classmethod
    def from_settings(cls, settings: Settings) -> Trust:
        """Return what the settings say. Raises UsageError for a bad policy or key."""
        policy = load_policy(Path(settings.trust_policy).expanduser()) if settings.trust_policy else None
        return cls(policy, Notary.from_settings(settings), settings.namespace)

    def judge(
        self,
        text: bytes,
        statements: Sequence[bytes],
        *,
        key: str = "",
        tag: str = "",
        needs: tuple[str, ...] = (),
    ) -> Checks:
        """Judge a sidecar by what came with it; the program counts as what the sidecar names.

        `key` is the cache key by which a farm was asked for it, which may answer with another artifact.

        Raises ArtifactGone if it is no sidecar, UsageError without a policy.
        """
        if self.policy is None:
            raise UsageError("no trust policy", hint="set `trust_policy`, or name a key: --key FILE.pub")
        sidecar = _sidecar(text, "the sidecar")
        found = AtHand(sidecar.namespace, sidecar.blobs.program.digest, _sha256(text), tag, needs)
        if key and sidecar.key != key:
            wrong = f"it is the artifact {sidecar.key[:16]}…, and {key[:16]}… was asked for"
            return Checks([TrustCheck(Standing.REFUSED, "key", wrong)], [])
        if sidecar.namespace not in readable(self.namespace or MAIN):
            wrong = f"it is of the namespace {sidecar.namespace}, and this reader works in {self.namespace or MAIN}"
            return Checks([TrustCheck(Standing.REFUSED, "namespace", wrong)], [])
        return judge(self.policy, found, statements, clock())

    def refresh(self, document: bytes) -> None:
        """Take over a revocation document if it is newer than that of the policy, and counts by it.

        Raises UsageError if its file cannot be written.
        """
        try:
            if self.policy:
                refresh(document, self.policy, clock())
        except OSError as error:
            raise UsageError(f"cannot write the newer revocation document: {error}") from None

    def sign_pack(self, made: Pack, signed: SignedArtifact) -> None:
        """Add a statement of this client's about all files of a pack, if it has a key. Raises OSError."""
        if not self.notary:
            return
        index = made.index
        digests = {file["path"]: file["digest"] for file in index["files"]}
        digests[PACK] = _sha256((made.folder / PACK).read_bytes())
        subjects = {**subjects_of(signed.sidecar, _sha256(signed.text)), **digests}
        statement = self.notary.sign("pack", subjects, pack(index["layout"], index["onnxruntime"], digests, {}))
        path = statements_path(made.folder / SIDECAR)
        path.write_bytes(bundles.lines([*signed.statements, statement]))


def read_statements(path: Path) -> list[bytes]:
    """Return the bundles of a file; none if there is no such file. Raises Untrusted for one that is too large."""
    try:
        return [line for line in read_plain(path, bundles.LARGEST * 4).splitlines() if line.strip()]
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

    Raises NotFound without a sidecar, ArtifactGone if it is none, UsageError without a policy.
    """
    if path.is_dir() and (path / PACK).exists():
        return list(_verify_pack(path, trust, tag, cache))
    place = _sidecar_of(path)
    text = _read(place)
    sidecar = _sidecar(text, str(place))
    program = path if path.is_file() and path != place else _program_of(place, sidecar)
    judged = trust.judge(text, read_statements(statements_path(place)), tag=tag)
    return [_program(program, sidecar), *judged.checks]


def _program_of(place: Path, sidecar: Sidecar) -> Path:
    """Return where the program of a sidecar lies: by the sidecar's own name, unless an older client wrote it."""
    name = place.name.removesuffix(SIDECAR_SUFFIX)
    return place.with_name(file_name(sidecar.blobs.program.path) if name in (place.name, "") else name)


def _program(path: Path, sidecar: Sidecar) -> TrustCheck:
    wanted = sidecar.blobs.program
    try:
        digest = _file_digest(path)
    except OSError as error:
        return TrustCheck(Standing.REFUSED, "sha256", f"{path.name}: {error.strerror}")
    if digest != wanted.digest:
        return TrustCheck(
            Standing.REFUSED, "sha256", f"{path.name} has {digest[:16]}…, and its sidecar says {wanted.digest[:16]}…"
        )
    return TrustCheck(Standing.OK, "sha256", f"{path.name} has {digest[:16]}…, as its sidecar says")


def _verify_pack(folder: Path, trust: Trust, tag: str, cache: Path | None) -> Iterator[TrustCheck]:
    """Yield the checks of a pack: its files, who signed what it was made of, and who signed the files.

    A file that nobody signed is made again from what is signed, and compared.
    """
    index = _index(folder)
    found: dict[str, str] = {}
    for file in index["files"]:
        parts = PurePosixPath(file["path"]).parts
        try:
            if not parts or parts[0] == "/" or ".." in parts or "\0" in file["path"]:
                raise NotPlain(0, "leads out of the pack")
            found[file["path"]] = _file_digest(folder.joinpath(*parts), within=folder)
        except OSError as error:
            yield TrustCheck(Standing.REFUSED, "sha256", f"{file['path']}: {error.strerror}")
    said = {file["path"]: file["digest"] for file in index["files"]}
    if wrong := [name for name, digest in found.items() if digest != said[name]]:
        yield TrustCheck(Standing.REFUSED, "sha256", f"changed since the pack was written: {', '.join(wrong[:5])}")
    elif len(found) == len(index["files"]):
        yield TrustCheck(Standing.OK, "sha256", f"{len(found)} files as {PACK} says")
    own = {PACK, SIDECAR, statements_path(folder / SIDECAR).name}
    if others := sorted(_files_in(folder) - own - {str(PurePosixPath(name)) for name in said}):
        yield TrustCheck(Standing.REFUSED, "pack", f"{PACK} does not name what is there: {', '.join(others[:5])}")
    text = _read(folder / SIDECAR)
    sidecar = _sidecar(text, str(folder / SIDECAR))
    judged = trust.judge(text, read_statements(statements_path(folder / SIDECAR)), tag=tag)
    yield from judged.checks
    if sidecar.blobs.program.digest not in found.values():
        yield TrustCheck(Standing.REFUSED, "pack", "it does not hold the program")
    if judged.refused or not judged.accepted:
        return  # Said already, or nothing of this namespace need be signed.
    covered = {sidecar.blobs.program.digest, _sha256(text)}
    for each in judged.accepted:
        if each.statement.kind == "pack":
            covered |= set(each.statement.subjects.values())
    bare = [name for name, digest in found.items() if digest not in covered]
    yield _unsigned(bare, found, _made_again(index, sidecar, found, cache) if bare else {})


def _files_in(folder: Path) -> set[str]:
    """Return what there is but folders, however deep: Triton serves the highest version that it finds.

    What a fetch left that was killed, nothing finds.
    """
    from farm.packs.writing import SCRATCH

    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {name for path in found if not (name := path.relative_to(folder).as_posix()).startswith(SCRATCH)}


def _unsigned(names: Sequence[str], found: Mapping[str, str], again: Mapping[str, str]) -> TrustCheck:
    """Judge the files of a pack that nobody signed by those that were made again here."""
    if not names:
        return TrustCheck(Standing.OK, "pack", "all its files are signed")
    if wrong := [name for name in names if name in again and again[name] != found[name]]:
        text_of = f"nobody trusted has signed {', '.join(wrong[:5])}, and other bytes follow from what is signed"
        return TrustCheck(Standing.REFUSED, "pack", text_of)
    if rest := [name for name in names if name not in again]:
        text_of = f"nobody trusted has signed {', '.join(rest[:5])}, and it cannot be made again from this cache"
        return TrustCheck(Standing.REFUSED, "pack", text_of)
    return TrustCheck(Standing.OK, "pack", f"the same as made again from what is signed: {', '.join(names[:5])}")


def _made_again(index: PackIndex, sidecar: Sidecar, found: Mapping[str, str], cache: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the files of a pack that follow from its signed sidecar, by their paths.

    The model is one of them if the client's cache still has what the program was compiled from.
    """
    from farm.client.transfers import Downloads
    from farm.packs.layouts import Layout, require_fit
    from farm.packs.question import CacheFile
    from farm.packs.writing import fixed_model, model_path, small_files

    made: dict[str, str] = {}
    with suppress(FarmError, KeyError, ValueError):
        layout = Layout(index["layout"])
        require_fit(layout, sidecar)
        names = [path.removeprefix("cache/") for path in found if path.startswith("cache/")]
        cached = CacheFile(names[0], str(index["onnxruntime"])) if len(names) == 1 else None
        # They go into scripts: nothing but what a provider says.
        if cached and not re.fullmatch(r"[A-Za-z0-9._-]+\.mxr [0-9][A-Za-z0-9.+]*", f"{cached.name} {cached.version}"):
            return {}
        made |= {path: _sha256(data) for path, data in small_files(layout, sidecar, cached).items()}
        if cached and cache:
            place = PurePosixPath(model_path(layout, sidecar))
            source, data = _model_of(sidecar, Downloads(cache))
            made |= {str(place.parent / path): digest for path, digest in data.items()}
            made[str(place)] = _sha256(fixed_model(source, sidecar))
    return made


def _model_of(sidecar: Sidecar, downloads: Downloads) -> tuple[Path, dict[str, str]]:
    """Return the model of a signed sidecar, as it is kept here, and its external data's SHA-256 by their paths.

    Raises FarmError if it is not here.
    """

    def kept(digest: str, size: int) -> Path:
        found = downloads.find(digest, size)
        if found is None:
            raise NotFound("it is not in the client's cache")
        return found

    blob = sidecar.blobs.reproduction
    if blob is None:
        raise NotFound("it was published without its work order")
    order = json.loads(kept(blob.digest, blob.size).read_bytes())["order"]
    require_model(order, sidecar)
    model, *others = order["model"]["files"]
    return kept(model["digest"], model["size"]), {file["path"]: file["digest"] for file in others}


def _index(folder: Path) -> PackIndex:
    try:
        index: PackIndex = json.loads(read_plain(folder / PACK, LARGEST_SIDECAR))
        if not all(isinstance(file["path"], str) and isinstance(file["digest"], str) for file in index["files"]):
            raise TypeError
        return index
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactGone(f"{folder / PACK} is no index of a pack: {type(error).__name__}") from None


def _sidecar_of(path: Path) -> Path:
    """Return where the sidecar of a program lies. Raises NotFound."""
    candidates = [path] if path.name.endswith(SIDECAR) else [sidecar_path(path), path.with_name(SIDECAR)]
    for each in candidates:
        if each.is_file():
            return each
    raise NotFound(f"no {SIDECAR} next to {path}", hint="`farm fetch` writes it next to the program")


def _sidecar(text: bytes, what: str) -> Sidecar:
    try:
        return read(text)
    except ValueError as error:
        raise ArtifactGone(f"{what} is not valid: {error}", hint="fetch it again") from None


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, LARGEST_SIDECAR)
    except OSError as error:
        raise ArtifactGone(f"cannot read {path}: {error.strerror or error}") from None


def _file_digest(path: Path, *, within: Path | None = None) -> str:
    sha256 = hashlib.sha256()
    with open_plain(path, LARGEST_PROGRAM, within=within) as file:
        while piece := file.read(_PIECE):
            sha256.update(piece)
    return sha256.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _contents(each: Accepted) -> dict[str, bytes]:
    """Return the files that a pack's statement brings, checked against its subjects. Raises Untrusted."""
    import base64
    import binascii

    files: dict[str, bytes] = {}
    try:
        listed: Sequence[Mapping[str, Any]] = each.statement.predicate["files"]
        for file in listed:
            data = base64.b64decode(file["content"], validate=True)
            name = str(file["name"])
            if "/" in name or name.startswith(".") or each.statement.subjects.get(name) != _sha256(data):
                raise ValueError(name)
            files[name] = data
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise Untrusted(f"the signed pack is damaged: {error!r}") from None
    return files
