"""Transfers: blobs by their digest, to object storage and from it.

Downloads lie in a folder that this user's processes share and that needs no farm to be read. A blob comes in pieces,
several at once. The unfinished file itself says which of them are there, so the next download goes on from there, also
after a kill. Every byte is hashed each time a blob is brought, from the network or from the folder: one that is damaged
here is fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from platformdirs import user_cache_path

from farm.client.transport import DOWNLOADS_AT_ONCE, NoRanges, Transport, gone, retry
from farm.errors import ArtifactGone, FarmFault, UsageError
from farm.files import remove_tree, replacing, tree_size
from farm.wire.checking import parsed

if TYPE_CHECKING:
    from concurrent.futures import Future

    from farm.artifacts.storage import Put, Upload
    from farm.spec import FileReference


LIMIT = 20 * 10**9
"""Bytes to which the cache is kept."""

IN_USE = 86_400.0
"""Seconds after its last use in which an entry stays, whatever its size: another command may be reading it."""


def default_cache() -> Path:
    """Return the folder of the user's cache."""
    return user_cache_path("migraphx-farm")


def adopt(made: Path, place: Path, whole: Path) -> None:
    """Move a finished folder to its place in the cache. `whole` is a file that exists only in a complete folder.

    If another process was faster, its folder stays: the content is the same. Raises OSError.
    """
    if place.exists() and not whole.is_file():
        place.rename(made.with_name(f"{made.name}.broken"))
    try:
        made.rename(place)
    except OSError:
        if not whole.is_file():
            raise


def note_use(cache: Path, files: Iterable[Path]) -> None:
    """Record that files are used now: those in the cache stay for a day."""
    for entry in {_entry(cache, file) for file in files if file.is_relative_to(cache)}:
        with suppress(OSError):  # A cache that is only read keeps its times.
            os.utime(entry)


def trim(cache: Path, limit: int = LIMIT) -> None:
    """Remove what was not used for longest beyond `limit`."""
    entries = []
    for entry in cache.glob("*/*"):
        with suppress(FileNotFoundError):  # Another command was faster to remove it.
            entries.append((entry, entry.stat().st_mtime, _size(entry)))
    excess = sum(size for _, _, size in entries) - limit
    for entry, used, size in sorted(entries, key=lambda found: found[1]):
        if excess <= 0 or used > time.time() - IN_USE:
            return
        with suppress(FileNotFoundError):
            if entry.stat().st_mtime == used:  # Else another command has just found it.
                _remove(entry)
                excess -= size


def _entry(cache: Path, file: Path) -> Path:
    return cache.joinpath(*file.relative_to(cache).parts[:2])


def _size(entry: Path) -> int:
    return tree_size(entry) if entry.is_dir() else entry.stat().st_size


def _remove(entry: Path) -> None:
    """Take an entry away as a whole, under another name first: half a folder must not be found."""
    going = entry.with_name(f"{entry.name}.part")
    with suppress(OSError):  # Another command removes it too, or it is not ours to remove.
        entry.rename(going)
        remove_tree(going)


class KeptAnswer(NamedTuple):
    """A document, and when the farm gave it, in Unix seconds."""

    document: Any
    given: float


class KeptAnswers:
    """The last answers of one farm to one caller, in a `cache`; without a cache nothing is kept."""

    def __init__(self, cache: Path | None, farm: str, token: str = "") -> None:
        """`farm` is its address with the namespace; `token` says who asks, and is not kept."""
        whose = hashlib.sha256(f"{farm}\n{token}".encode()).hexdigest()
        self._cache = cache
        self._folder = cache / "answers" / whose[:32] if cache else None
        self._away = False
        self.on_away: Callable[[str, float], None] | None = None
        """Called once if the farm cannot answer: with the reason, and how old the first kept answer is, in seconds."""

    def ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return what `ask` does, else what it returned last under this `name`. Raises what `ask` does without either.

        Only for what a farm that is away would have answered: not for what it refuses.
        """
        if self._away and (kept := self._read(name)):
            return kept.document
        try:
            document = ask()
        except FarmFault as fault:
            kept = self._read(name)
            if kept is None:
                raise
            if self.on_away and not self._away:
                self.on_away(fault.message, max(0.0, time.time() - kept.given))
            self._away = True
            return kept.document
        self._keep(name, document)
        return document

    def _place(self, name: str) -> Path | None:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json" if self._folder else None

    def _read(self, name: str) -> KeptAnswer | None:
        place = self._place(name)
        if place is None:
            return None
        try:
            found = parsed(place.read_bytes(), place.name)
            return KeptAnswer(found["document"], float(found["given"]))
        except (OSError, UsageError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, name: str, document: Any) -> None:
        place = self._place(name)
        if place is None or self._cache is None:
            return
        with suppress(OSError):  # A cache that cannot be written is done without.
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as part:
                part.write_text(json.dumps({"given": time.time(), "name": name, "document": document}))
            note_use(self._cache, [place])


PIECE = 8 << 20
"""Bytes that one request asks for."""

AHEAD = 8 * DOWNLOADS_AT_ONCE
"""Pieces that are asked for before the first of them is hashed: a farm may call a blob as large as it likes."""

LARGEST = 4 << 40
"""Bytes of a blob at most: the API takes no larger ones."""

_READ = 1 << 18
_FICLONE = 0x40049409
"""The ioctl by which a file system that can do it lets two files share their blocks until one is written."""

OnDownload = Callable[[int, int], None]
"""Takes how many bytes of a blob are here and hashed, and how many it has."""

OnUpload = Callable[[int, int], None]
"""Called while inputs are uploaded: bytes sent so far, bytes in all."""

SLOWEST_HASH = 20e6
"""Bytes a second that the farm hashes at least, of a large upload."""

UPLOADS = 4
BLOBS_AT_ONCE = 1000
PARTS_AT_ONCE = 2000
"""Parts of large blobs that one answer of the farm has room for; it cuts them at 128 MiB, into 1000 at most."""


def upload(transport: Transport, files: Mapping[str, Path], progress: OnUpload | None = None) -> int:
    """Bring blobs (by digest) to object storage; return the bytes sent.

    Skips existing blobs, and parts of large blobs that an earlier try has uploaded.
    """
    from farm.artifacts.storage import Missing

    sizes = {digest: path.stat().st_size for digest, path in files.items()}
    uploads: list[Upload] = []
    for lot in lots(sizes):
        blobs = [{"digest": digest, "size": sizes[digest]} for digest in lot]
        uploads += transport.post("/v1/blobs", Missing, {"blobs": blobs})["missing"]
    puts = [(put, files[upload["digest"]]) for upload in uploads for put in upload["puts"]]
    total, said = sum(put["size"] for put, _ in puts), progress or _silent
    _send(transport, puts, lambda sent: said(sent, total))
    for each in uploads:
        if each["finish"]:
            # The farm reads all of it once, to hash it.
            timeout, body = 120.0 + each["size"] / SLOWEST_HASH, {"size": each["size"]}
            transport.request("POST", f"/v1/blobs/{each['digest']}/finish", json=body, timeout=timeout)
    return total


def lots(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield blobs (by digest) that one request may ask for."""
    lot: list[str] = []
    room = PARTS_AT_ONCE
    for digest, size in sizes.items():
        parts = min(1000, 1 + (size >> 27))
        if lot and (len(lot) == BLOBS_AT_ONCE or parts > room):
            yield lot
            lot, room = [], PARTS_AT_ONCE
        lot.append(digest)
        room -= parts
    if lot:
        yield lot


def _send(transport: Transport, puts: Sequence[tuple[Put, Path]], progress: Callable[[int], None]) -> None:
    """Send several files, or parts of them, at once; `progress` takes the bytes sent so far."""
    from concurrent.futures import ThreadPoolExecutor

    sent, stopped, lock = 0, False, threading.Lock()

    def count_or_stop(size: int) -> None:
        nonlocal sent
        if stopped:
            raise KeyboardInterrupt
        with lock:
            sent += size
            progress(sent)

    with ThreadPoolExecutor(UPLOADS) as threads:
        try:
            for done in [threads.submit(transport.put, put, path, count_or_stop) for put, path in puts]:
                done.result()
        except BaseException:
            stopped = True  # Else the block would end only when all of it is sent.
            threads.shutdown(wait=False, cancel_futures=True)
            raise


# --- downloads --------------------------------------------------------------------------------------------------------


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
        said = progress or _silent
        whole = self._place(wanted["digest"])
        if self._cache and whole:
            note_use(self._cache, [whole])  # First: another process may trim the cache while this one hashes.
        if whole is None or not _is_whole(whole, wanted, said):
            part, kept = _open_part(whole, place)
            try:
                # Another process may have brought it while this one waited.
                if whole is None or not kept or not _is_whole(whole, wanted, said):
                    _fetch(part.descriptor, wanted, reads, said)
                    os.ftruncate(part.descriptor, wanted["size"])
                    part.path.replace(whole if whole and kept else place)
            finally:
                os.close(part.descriptor)
                if not kept:
                    part.path.unlink(missing_ok=True)
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
        return whole if whole and _is_whole(whole, {"path": digest, "digest": digest, "size": size}, _silent) else None

    def _place(self, digest: str) -> Path | None:
        """Return where a blob is kept. Raises ArtifactGone for what is not a digest: a work order may say anything."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactGone(f"the farm names a blob {digest!r}, which is not a SHA-256")
        return self._cache / "blobs" / digest if self._cache else None


class _Unfinished(NamedTuple):
    """A file in which a blob is put together: behind the blob's bytes, one for each piece that is there."""

    descriptor: int
    path: Path


def _open_part(whole: Path | None, place: Path) -> tuple[_Unfinished, bool]:
    """Open the file in which a blob is put together, for this process alone; and whether it is in the cache.

    Without a cache, or if that cannot be written, it is next to the place, for this time only. Raises OSError.
    """
    if whole:
        path = whole.with_name(f"{whole.name}.part")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return _Unfinished(_alone(path), path), True
    path = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    return _Unfinished(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path), False


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
        if _fetch_pieces(part, wanted, reads, progress):
            return
    except NoRanges:
        resumed = False
        if _fetch_whole(part, wanted, reads, progress):
            return
    _empty(part, wanted)
    # What an earlier process left may be damaged, and what storage has may be whole.
    if not resumed or not _fetch_pieces(part, wanted, reads, progress):
        _empty(part, wanted)
        raise _damaged(wanted)


def _empty(part: int, wanted: FileReference) -> None:
    _cut(part)
    os.ftruncate(part, wanted["size"] - (-wanted["size"] // PIECE))


def _cut(part: int) -> None:
    """Remove what a file holds, if any: ext4 writes a file that was cut to nothing to the disk when it is closed."""
    if os.fstat(part).st_size:
        os.ftruncate(part, 0)


def _fetch_pieces(part: int, wanted: FileReference, reads: Reads, progress: OnDownload) -> bool:
    """Bring the pieces that are not there, and hash all in their order; return whether they are the blob."""
    from concurrent.futures import ThreadPoolExecutor

    stop = threading.Event()
    starts = range(0, wanted["size"], PIECE)
    there = os.pread(part, len(starts), wanted["size"])

    def bring(number: int) -> None:
        start = starts[number]
        end = min(start + PIECE, wanted["size"])

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
                end = min(start + PIECE, wanted["size"])
                for at in range(start, end, _READ):
                    sha256.update(buffer[: os.preadv(part, [buffer[: end - at]], at)])
                progress(end, wanted["size"])
        finally:
            stop.set()
            threads.shutdown(wait=True, cancel_futures=True)
    return sha256.hexdigest() == wanted["digest"]


def _fetch_whole(part: int, wanted: FileReference, reads: Reads, progress: OnDownload) -> bool:
    """Bring a blob from a server that sends whole files only; return whether it is the blob."""
    sha256, end = hashlib.sha256(), 0

    def write(data: bytes) -> None:
        nonlocal end
        if end + len(data) > wanted["size"]:
            raise _damaged(wanted)
        sha256.update(data)
        _write(part, data, end)
        end += len(data)
        progress(end, wanted["size"])

    def once() -> None:
        nonlocal sha256, end
        _cut(part)
        sha256, end = hashlib.sha256(), 0
        reads(0, wanted["size"], write)

    retry(once)
    return (end, sha256.hexdigest()) == (wanted["size"], wanted["digest"])


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


def _silent(done: int, total: int) -> None:
    pass
