"""The client's cache, in a folder that this user's processes share; and uploads: blobs by their digest."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from farm.errors import FarmFault, UsageError
from farm.files import remove_tree, replacing, tree_size
from farm.wire.checking import parsed

if TYPE_CHECKING:
    from farm.artifacts.storage import Put, Upload
    from farm.client.transport import Transport


LIMIT = 20 * 10**9  # Bytes to which the cache is kept.

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
    within = [file.relative_to(cache).parts[:2] for file in files if file.is_relative_to(cache)]
    for entry in {cache.joinpath(*parts) for parts in within}:
        with suppress(OSError):  # A cache that is only read keeps its times.
            os.utime(entry)


def trim(cache: Path, limit: int = LIMIT) -> None:
    """Remove what was not used for longest beyond `limit`."""
    entries = []
    for entry in cache.glob("*/*"):
        with suppress(FileNotFoundError):  # Another command was faster to remove it.
            status = entry.stat()
            entries.append((entry, status.st_mtime, tree_size(entry) if entry.is_dir() else status.st_size))
    excess = sum(size for _, _, size in entries) - limit
    for entry, used, size in sorted(entries, key=lambda found: found[1]):
        if excess <= 0 or used > time.time() - IN_USE:
            return
        with suppress(FileNotFoundError):
            if entry.stat().st_mtime == used:  # Else another command has just found it.
                excess -= size
                # As a whole, under another name first: half a folder must not be found.
                going = entry.with_name(f"{entry.name}.part")
                with suppress(OSError):  # Another command removes it too, or it is not ours to remove.
                    entry.rename(going)
                    remove_tree(going)


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
            return kept[0]
        try:
            document = ask()
        except FarmFault as fault:
            kept = self._read(name)
            if kept is None:
                raise
            if self.on_away and not self._away:
                self.on_away(fault.message, max(0.0, time.time() - kept[1]))
            self._away = True
            return kept[0]
        self._keep(name, document)
        return document

    def _place(self, name: str) -> Path | None:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json" if self._folder else None

    def _read(self, name: str) -> tuple[Any, float] | None:
        """Return a document, and when the farm gave it, in Unix seconds."""
        place = self._place(name)
        if place is None:
            return None
        try:
            found = parsed(place.read_bytes(), place.name)
            return found["document"], float(found["given"])
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


OnUpload = Callable[[int, int], None]  # Called while inputs are uploaded: bytes sent so far, bytes in all.
SLOWEST_HASH = 20e6  # Bytes a second that the farm hashes at least, of a large upload.

UPLOADS = 4
BLOBS_AT_ONCE = 1000
PARTS_AT_ONCE = 2000
"""Parts of large blobs that one answer of the farm has room for; it cuts them at 128 MiB, into 1000 at most."""


def upload(transport: Transport, files: Mapping[str, Path], progress: OnUpload | None = None) -> int:
    """Bring blobs (by digest) to object storage; return the bytes sent. More in `FarmClient.upload`."""
    from farm.artifacts.storage import Missing

    sizes = {digest: path.stat().st_size for digest, path in files.items()}
    uploads: list[Upload] = []
    for lot in lots(sizes):
        blobs = [{"digest": digest, "size": sizes[digest]} for digest in lot]
        uploads += transport.post("/v1/blobs", Missing, {"blobs": blobs})["missing"]
    puts = [(put, files[upload["digest"]]) for upload in uploads for put in upload["puts"]]
    total, said = sum(put["size"] for put, _ in puts), progress or (lambda sent, total: None)
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
