"""What a client asks about artifacts: `client.artifacts`, from a farm or from its storage alone; and downloads."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from farm.artifacts.refs import SnapshotCell
from farm.artifacts.storage import SignedSidecar
from farm.client.fetching import FamilyMember, SignedArtifact, file_name, read_work_order, require_same
from farm.client.transfers import LIMIT, note_use, trim
from farm.client.transport import DOWNLOADS_AT_ONCE, Api, NoRanges, gone, retry
from farm.errors import ArtifactGone, FarmFault, NotFound, Untrusted, UsageError
from farm.files import SHOWN_LOG, left_out, replacing
from farm.jobs.rows import ReproductionDocument
from farm.spec import FileReference
from farm.wire.checking import checked
from farm.wire.program import Sidecar


class ArtifactsApi(Api):
    """Artifacts by their cache keys: sidecars, what is signed about them, and their files."""

    on_download: OnDownload | None = None
    """Called while a blob is downloaded."""

    any_name = False
    """Whether a trust policy may be met by what was signed under another model's name: a hit of the same cell."""

    def get(self, key: str) -> Sidecar:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        return self._transport.sidecar(key)

    def sidecar_of(self, cell: SnapshotCell) -> Sidecar:
        """Return the sidecar of a ref's cell, kept as `client.refs.cells` does it. Raises ArtifactGone."""
        try:
            found: Sidecar = self._client.kept.ask(f"artifact {cell['key']}", lambda: self.get(cell["key"]))
            return found
        except NotFound as error:
            raise ArtifactGone(f"{cell['identifier']}: {error.message}", hint=error.hint) from None

    def log(self, key: str) -> bytes:
        """Return the log of the attempt that made an artifact; of a long one its end. Raises NotFound without one."""
        blob = self.get(key)["blobs"].get("log")
        if not blob:
            raise NotFound(f"the artifact {key} was published without a log")
        with tempfile.TemporaryDirectory() as folder, self.download(blob, Path(folder)).open("rb") as log:
            begin = max(0, log.seek(0, os.SEEK_END) - SHOWN_LOG)
            log.seek(begin)
            return (left_out(begin, blob["digest"]) if begin else b"") + log.read()

    def work_order(self, sidecar: Sidecar) -> ReproductionDocument:
        """Return what reruns the attempt that made an artifact. Raises NotFound if that was not kept, ArtifactGone."""
        blob = sidecar["blobs"].get("reproduction")
        if not blob:
            raise NotFound(f"the artifact {sidecar['key']} was published without its work order")
        with tempfile.TemporaryDirectory() as folder:
            return read_work_order(self.download(blob, Path(folder)).read_bytes(), sidecar, self._transport.url)

    # --- signatures ---------------------------------------------------------------------------------------------

    def signed(self, key: str, *, tag: str = "") -> SignedArtifact | None:
        """Return the sidecar of a cache key as it is stored, and what is signed about it; None if nothing is.

        `tag` is the ref by which it was found.

        Raises Untrusted with the reasons if this client has a trust policy that refuses it.
        """
        trust = self._client.trust
        asks = trust is not None and trust.asks
        try:
            found = self.stored(key)
        except FarmFault:  # It is away, and has never said any.
            if asks:
                raise
            return None
        if not (asks or found["statements"]):
            return None
        signed = SignedArtifact(found["sidecar"].encode(), [each.encode() for each in found["statements"]])
        if trust and asks:
            trust.admit(signed, key=key, tag=tag)
        return signed

    def stored(self, key: str) -> SignedSidecar:
        """Return the sidecar of a cache key as it is stored, and the statements about it. Raises NotFound."""
        found = self._client.kept.ask(f"statements {key}", lambda: self._transport.statements(key))
        return checked(found, SignedSidecar, self._transport.url)

    def described(self, member: FamilyMember, ref: str) -> tuple[Sidecar, SignedArtifact | None]:
        """Return the sidecar of a ref's cell, the signed one if there is one, and what is signed, as `signed`.

        Raises ArtifactGone if it describes other bytes or another compile than the ref names, Untrusted if another
        cell's name is signed.
        """
        cell, sidecar = member
        try:
            signed = self.signed(cell["key"], tag=ref)
        except Untrusted as error:
            raise Untrusted(error.message.replace(cell["key"], cell["identifier"]), hint=error.hint) from None
        sidecar = signed.sidecar if signed else sidecar
        is_judged = self._client.trust and self._client.trust.asks
        require_same(cell, sidecar, ref, any_name=self.any_name if is_judged else None)
        return sidecar, signed

    # --- files --------------------------------------------------------------------------------------------------

    def download(self, blob: FileReference, folder: Path) -> Path:
        """Write a sidecar's blob into a folder, under its own name, and return its path. Raises as `bring`."""
        place = folder / file_name(blob["path"])
        self.bring(blob, place)
        return place

    def bring(self, blob: FileReference, place: Path) -> None:
        """Write a blob, which a sidecar or a work order names, to `place`; its folder exists.

        Raises ArtifactGone if it is not in object storage, or damaged there.
        """
        location, lock = "", threading.Lock()

        def reads(start: int, end: int, write: Callable[[bytes], None]) -> None:
            nonlocal location
            with lock:
                url = location = location or self._transport.location(blob["digest"], place.name)
            try:
                self._transport.read(url, place.name, start, end, write, whole=end - start == blob["size"])
            except FarmFault:
                location = ""  # It may have expired.
                raise

        Downloads(self._client.cache).bring({**blob, "path": place.name}, place, reads, self.on_download)


# --- downloads --------------------------------------------------------------------------------------------------------
# In the cache, which needs no farm to be read. A blob comes in pieces, several at once. The unfinished file itself says
# which of them are there, so the next download goes on from there, also after a kill. Every byte is hashed each time a
# blob is brought, from the network or from the folder: one that is damaged here is fetched again.


PIECE = 8 << 20  # Bytes that one request asks for.

AHEAD = 8 * DOWNLOADS_AT_ONCE
"""Pieces that are asked for before the first of them is hashed: a farm may call a blob as large as it likes."""

LARGEST = 4 << 40  # Bytes of a blob at most: the API takes no larger ones.

_READ = 1 << 18
_FICLONE = 0x40049409
"""The ioctl by which a file system that can do it lets two files share their blocks until one is written."""

OnDownload = Callable[[int, int], None]  # Takes how many bytes of a blob are here and hashed, and how many it has.

Reads = Callable[[int, int, Callable[[bytes], None]], None]
"""Where a blob's bytes come from: hands those from a start to an end to a function; all again after it raised.

Raises NoRanges if only the whole can be had, FarmFault if it cannot be had now, ArtifactGone if never.
"""


class Downloads:
    """Blobs in a `cache`; beyond `limit` bytes `trim` removes what was not used for longest.

    Without a cache nothing is kept, and nothing goes on from where another process ended.
    """

    def __init__(self, cache: Path | None, limit: int = LIMIT) -> None:
        self._cache = cache
        self._limit = limit

    def bring(self, wanted: FileReference, place: Path, reads: Reads, progress: OnDownload | None = None) -> Path:
        """Let `place` be a blob, from here or with `reads`, every byte hashed; return its path.

        The place is a clone of the file in the cache, or a copy if the file system has no clones, but not a second name
        of it: who writes into one would change the cache and each folder that was fetched before, also if the file is
        read-only (root writes it all the same).

        Raises ArtifactGone if the bytes are not those of the digest, and what `reads` raises; OSError for `place`.
        """
        said = progress or (lambda done, total: None)
        whole = self._place(wanted["digest"])
        if self._cache and whole:
            note_use(self._cache, [whole])  # First: another process may trim the cache while this one hashes.
        if whole is None or not _is_whole(whole, wanted, said):
            part, path, kept = _open_part(whole, place)
            try:
                # Another process may have brought it while this one waited.
                if whole is None or not kept or not _is_whole(whole, wanted, said):
                    _fetch(part, wanted, reads, said)
                    os.ftruncate(part, wanted["size"])
                    path.replace(whole if whole and kept else place)
            finally:
                os.close(part)
                if not kept:
                    path.unlink(missing_ok=True)
            if not kept:
                return place
        if self._cache and whole:
            try:
                with replacing(place) as clone:
                    _clone(whole, clone)
            except FileNotFoundError:
                if whole.exists() or not place.parent.exists():
                    raise
                return self.bring(wanted, place, reads, progress)  # Another process has just removed it.
            trim(self._cache, self._limit)
        return place

    def find(self, digest: str, size: int) -> Path | None:
        """Return the file of a blob that is in the cache, every byte hashed; None if it is not there."""
        whole = self._place(digest)
        wanted: FileReference = {"path": digest, "digest": digest, "size": size}
        return whole if whole and _is_whole(whole, wanted, lambda done, total: None) else None

    def _place(self, digest: str) -> Path | None:
        """Return where a blob is kept. Raises ArtifactGone for what is not a digest: a work order may say anything."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactGone(f"the farm names a blob {digest!r}, which is not a SHA-256")
        return self._cache / "blobs" / digest if self._cache else None


def _open_part(whole: Path | None, place: Path) -> tuple[int, Path, bool]:
    """Open the file in which a blob is put together, for this process alone; return its path too, and if it is cached.

    Behind the blob's bytes it has one for each piece that is there.

    Without a cache, or if that cannot be written, it is next to the place, for this time only. Raises OSError.
    """
    if whole:
        path = whole.with_name(f"{whole.name}.part")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return _alone(path), path, True
    path = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path, False


def _alone(path: Path) -> int:
    """Open a file for this process alone, and wait until no other has it open so."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # It was finished meanwhile, and has another name.


def _is_whole(whole: Path, wanted: FileReference, progress: OnDownload) -> bool:
    """Whether a blob is here, every byte; one that is damaged is removed."""
    try:
        with whole.open("rb", buffering=0) as source:
            sha256, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_READ))
            while count := source.readinto(buffer):
                sha256.update(buffer[:count])
                size += count
                progress(min(size, wanted["size"]), wanted["size"])
        if (size, sha256.hexdigest()) == (wanted["size"], wanted["digest"]):
            return True
        whole.unlink()
    except OSError:
        pass
    return False


def _clone(source: Path, place: Path) -> None:
    """Make a file that is another's clone, else a copy."""
    try:
        with source.open("rb") as whole, place.open("xb") as clone:
            fcntl.ioctl(clone, _FICLONE, whole.fileno())
        return
    except OSError:
        place.unlink(missing_ok=True)
    shutil.copyfile(source, place)


# --- from the network -------------------------------------------------------------------------------------------------


def _fetch(part: int, wanted: FileReference, reads: Reads, progress: OnDownload) -> None:
    """Bring what an unfinished file lacks."""
    if wanted["size"] > LARGEST:
        raise gone(wanted["path"], f"has more bytes than {LARGEST >> 40} TiB, as the farm says")
    pieces = -(-wanted["size"] // PIECE)
    if os.fstat(part).st_size != wanted["size"] + pieces:
        _empty(part, wanted)
    resumed = any(os.pread(part, pieces, wanted["size"]))
    try:
        if _fetch_pieces(part, wanted, reads, progress, PIECE):
            return
    except NoRanges:
        resumed = False
        _empty(part, wanted)
        if _fetch_pieces(part, wanted, reads, progress, wanted["size"]):
            return
    _empty(part, wanted)
    # What an earlier process left may be damaged, and what storage has may be whole.
    if not resumed or not _fetch_pieces(part, wanted, reads, progress, PIECE):
        _empty(part, wanted)
        raise _damaged(wanted)


def _empty(part: int, wanted: FileReference) -> None:
    if os.fstat(part).st_size:  # Else ext4 writes the file to the disk when it is closed, as one that was cut.
        os.ftruncate(part, 0)
    os.ftruncate(part, wanted["size"] - (-wanted["size"] // PIECE))


def _fetch_pieces(part: int, wanted: FileReference, reads: Reads, progress: OnDownload, piece: int) -> bool:
    """Bring the pieces that are not there, and hash all in their order; return whether they are the blob."""
    stop = threading.Event()
    starts = range(0, wanted["size"], piece)
    there = os.pread(part, len(starts), wanted["size"])

    def bring(number: int) -> None:
        start = starts[number]
        end = min(start + piece, wanted["size"])

        def once() -> None:
            at = start

            def write(data: bytes) -> None:
                nonlocal at
                if stop.is_set():
                    raise _Stopped
                if at + len(data) > end:
                    raise _damaged(wanted)
                _write(part, data, at)
                at += len(data)
                if piece > PIECE:  # Others are told of in their order, when they are hashed.
                    progress(at, wanted["size"])

            reads(start, end, write)
            if at != end:
                raise _damaged(wanted)

        retry(once)
        os.pwrite(part, b"\1", wanted["size"] + number)

    sha256, buffer = hashlib.sha256(), memoryview(bytearray(_READ))
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as threads:
        missing = (number for number in range(len(starts)) if not there[number])
        coming: dict[int, Future[None]] = {}
        try:
            for number, start in enumerate(starts):
                coming |= {each: threads.submit(bring, each) for each in islice(missing, AHEAD - len(coming))}
                if number in coming:
                    coming.pop(number).result()
                end = min(start + piece, wanted["size"])
                for at in range(start, end, _READ):
                    sha256.update(buffer[: os.preadv(part, [buffer[: end - at]], at)])
                progress(end, wanted["size"])
        finally:
            stop.set()
            threads.shutdown(wait=True, cancel_futures=True)
    return sha256.hexdigest() == wanted["digest"]


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Raises UsageError if the disk is full."""
    view = memoryview(data)
    try:
        while view:  # All at once, but if the disk is nearly full, or a signal came.
            count = os.pwrite(descriptor, view, at)
            view, at = view[count:], at + count
    except OSError as error:
        message = f"cannot write what is downloaded: {error.strerror or error}"
        raise UsageError(message, hint="make room, or put the cache elsewhere: XDG_CACHE_HOME") from None


class _Stopped(Exception):
    """Another piece has failed."""


def _damaged(wanted: FileReference) -> ArtifactGone:
    return gone(wanted["path"], "is damaged in object storage: its bytes are not the published ones")
