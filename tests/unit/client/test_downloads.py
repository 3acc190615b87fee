"""Downloads: in pieces, resumed after a kill, shared by processes, and never a wrong byte."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.client import artifact_apis
from farm.client.artifact_apis import Downloads
from farm.client.transfers import IN_USE, trim
from farm.client.transport import NoRanges
from farm.errors import ArtifactGone, StorageUnavailable, UsageError

PIECE = 1000
DATA = bytes(range(256)) * 40  # 10 240 bytes: eleven pieces, the last a short one
WANTED = {"path": "net.mxr", "digest": hashlib.sha256(DATA).hexdigest(), "size": len(DATA)}
Write = Callable[[bytes], None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_apis, "PIECE", PIECE)
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", (0.0, 0.0))


class Server:
    """Hands out `data`, and counts what it is asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.asked: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, start: int, end: int, write: Write) -> None:
        with self._lock:
            self.asked.append(start)
        for at in range(start, end, 300):
            write(self.data[at : min(at + 300, end)])


def never(start: int, end: int, write: Write) -> None:
    raise AssertionError("the network is not needed")


def test_a_blob_comes_in_pieces_and_is_kept(tmp_path: Path) -> None:
    server, seen, kept = Server(), list[tuple[int, int]](), Downloads(tmp_path / "cache")
    place = kept.bring(WANTED, tmp_path / "one", server, lambda done, total: seen.append((done, total)))
    assert place.read_bytes() == DATA
    assert sorted(server.asked) == list(range(0, len(DATA), PIECE))
    assert seen == sorted(seen) and seen[-1] == (len(DATA), len(DATA))
    assert kept.bring(WANTED, tmp_path / "two", never).read_bytes() == DATA
    assert [path.name for path in (tmp_path / "cache" / "blobs").iterdir()] == [WANTED["digest"]]


def test_a_write_into_a_fetched_file_changes_no_other_and_not_the_cache(tmp_path: Path) -> None:
    """Also a model's external data: its check refuses a file with a second name."""
    cache = Downloads(tmp_path / "cache")
    prod = cache.bring(WANTED, tmp_path / "prod", Server())
    staging = cache.bring(WANTED, tmp_path / "staging", never)
    with staging.open("r+b") as file:
        file.write(b"an experiment")
    assert prod.read_bytes() == DATA
    assert cache.bring(WANTED, tmp_path / "again", never).read_bytes() == DATA
    assert [place.stat().st_nlink for place in (prod, staging)] == [1, 1]


def test_without_a_cache_nothing_is_left_but_the_blob(tmp_path: Path) -> None:
    assert Downloads(None).bring(WANTED, tmp_path / "one", Server()).read_bytes() == DATA
    with pytest.raises(ArtifactGone):
        Downloads(None).bring(WANTED, tmp_path / "two", Server(DATA[::-1]))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (tmp_path / "one").stat().st_mode & 0o444


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", Server()).read_bytes() == DATA
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "one"]


def test_a_blob_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    """A farm that nobody should trust says the size; that of the second one here has no place in a file's."""

    def gone(start: int, end: int, write: Write) -> None:
        raise ArtifactGone("it is not there")

    tracemalloc.start()
    try:
        for pieces in (30_000, 2**63):
            with pytest.raises(ArtifactGone):
                Downloads(tmp_path / "cache").bring({**WANTED, "size": pieces * PIECE}, tmp_path / "one", gone)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cached", [True, False])
def test_a_digest_leads_nowhere_else(tmp_path: Path, cached: bool) -> None:
    """A file that did not have its digest was removed from the cache: with a path as its digest, any file was."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    downloads = Downloads(tmp_path / "cache" if cached else None)
    (tmp_path / "cache" / "blobs").mkdir(parents=True)
    for digest in ("../../mine", str(mine), "", WANTED["digest"].upper()):
        with pytest.raises(ArtifactGone, match="which is not a SHA-256"):
            downloads.bring({**WANTED, "digest": digest}, tmp_path / "one", Server())
        with pytest.raises(ArtifactGone, match="which is not a SHA-256"):
            downloads.find(digest, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "mine"]


def test_an_empty_blob(tmp_path: Path) -> None:
    empty = {"path": "log.txt", "digest": hashlib.sha256(b"").hexdigest(), "size": 0}
    assert Downloads(tmp_path / "cache").bring(empty, tmp_path / "one", never).read_bytes() == b""


def test_a_damaged_blob_of_the_cache_is_fetched_again(tmp_path: Path) -> None:
    kept = Downloads(tmp_path / "cache")
    kept.bring(WANTED, tmp_path / "one", Server())
    (tmp_path / "cache" / "blobs" / WANTED["digest"]).write_bytes(DATA[:-1] + b"x")
    server = Server()
    assert kept.bring(WANTED, tmp_path / "two", server).read_bytes() == DATA
    assert server.asked


def test_a_blob_that_another_process_removes_meanwhile_is_brought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, server, clone = Downloads(tmp_path / "cache"), Server(), artifact_apis._clone
    kept.bring(WANTED, tmp_path / "one", Server())

    def once(source: Path, place: Path) -> None:
        monkeypatch.setattr(artifact_apis, "_clone", clone)
        source.unlink()
        clone(source, place)

    monkeypatch.setattr(artifact_apis, "_clone", once)
    assert kept.bring(WANTED, tmp_path / "two", server).read_bytes() == DATA
    assert server.asked
    with pytest.raises(FileNotFoundError):
        kept.bring(WANTED, tmp_path / "no" / "folder", never)


@pytest.mark.parametrize("data", [DATA[:-1] + b"x", DATA[:-1]])
def test_wrong_bytes_never_get_the_name(tmp_path: Path, data: bytes) -> None:
    kept = Downloads(tmp_path / "cache")
    with pytest.raises(ArtifactGone, match=r"net\.mxr is damaged in object storage"):
        kept.bring(WANTED, tmp_path / "one", Server(data))
    assert not (tmp_path / "one").exists()
    assert kept.bring(WANTED, tmp_path / "one", Server()).read_bytes() == DATA, "nothing of it is used"


def test_a_piece_that_fails_is_asked_for_again(tmp_path: Path) -> None:
    server, failed = Server(), set[int]()

    def flaky(start: int, end: int, write: Write) -> None:
        if start == 3 * PIECE and start not in failed:
            failed.add(start)
            write(b"half of it")
            raise StorageUnavailable("cannot download net.mxr")
        server(start, end, write)

    assert Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", flaky).read_bytes() == DATA
    assert failed


def test_a_server_without_ranges_sends_the_whole(tmp_path: Path) -> None:
    server = Server()

    def whole(start: int, end: int, write: Write) -> None:
        if (start, end) != (0, len(DATA)):
            raise NoRanges
        server(start, end, write)

    seen, kept = list[tuple[int, int]](), Downloads(tmp_path / "cache")
    place = kept.bring(WANTED, tmp_path / "one", whole, lambda done, total: seen.append((done, total)))
    assert place.read_bytes() == DATA
    assert seen == sorted(seen) and len(seen) > 10 and seen[-1] == (len(DATA), len(DATA)), "said while it comes"
    with pytest.raises(ArtifactGone):
        Downloads(None).bring({**WANTED, "digest": "0" * 64}, tmp_path / "two", whole)


def _killed_half_way(cache: Path) -> None:
    artifact_apis.PIECE, artifact_apis.DOWNLOADS_AT_ONCE = PIECE, 1

    def dying(start: int, end: int, write: Write) -> None:
        if start == 6 * PIECE:
            write(DATA[start : start + 10])
            os.kill(os.getpid(), signal.SIGKILL)
        Server()(start, end, write)

    Downloads(cache).bring(WANTED, cache.parent / "killed", dying)


def test_a_download_goes_on_after_a_kill(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_killed_half_way, args=(tmp_path / "cache",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    server = Server()
    assert Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", server).read_bytes() == DATA
    assert sorted(server.asked) == list(range(6 * PIECE, len(DATA), PIECE))


def test_what_was_left_damaged_is_fetched_again(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_killed_half_way, args=(tmp_path / "cache",))
    child.start()
    child.join()
    with (tmp_path / "cache" / "blobs" / f"{WANTED['digest']}.part").open("r+b") as part:
        part.write(b"not these bytes")
    assert Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", Server()).read_bytes() == DATA


def test_one_process_fetches_and_the_other_waits_for_it(tmp_path: Path) -> None:
    server, begun, go_on = Server(), threading.Event(), threading.Event()

    def slow(start: int, end: int, write: Write) -> None:
        begun.set()
        assert go_on.wait(60)
        server(start, end, write)

    first = threading.Thread(
        target=lambda: Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", slow), daemon=True
    )
    first.start()
    assert begun.wait(60)
    second = threading.Thread(
        target=lambda: Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "two", never), daemon=True
    )
    second.start()
    go_on.set()
    first.join(60)
    second.join(60)
    assert (tmp_path / "two").read_bytes() == DATA
    assert len(server.asked) == 11


def test_the_cache_stays_within_its_limit(tmp_path: Path) -> None:
    kept = Downloads(tmp_path / "cache", limit=len(DATA))
    kept.bring(WANTED, tmp_path / "one", Server())
    blobs = tmp_path / "cache" / "blobs"
    os.utime(blobs / WANTED["digest"], (0, IN_USE))
    other = b"another blob"
    kept.bring(
        {"path": "b", "digest": hashlib.sha256(other).hexdigest(), "size": len(other)}, tmp_path / "two", Server(other)
    )
    assert [path.name for path in blobs.iterdir()] == [hashlib.sha256(other).hexdigest()]
    assert (tmp_path / "one").read_bytes() == DATA, "what was fetched stays"


def test_what_is_being_read_is_not_trimmed(tmp_path: Path) -> None:
    """Another process may trim the cache while this one hashes a blob that nobody has used for days."""
    kept = Downloads(tmp_path / "cache")
    kept.bring(WANTED, tmp_path / "one", Server())
    days_ago = time.time() - 2 * IN_USE
    os.utime(tmp_path / "cache" / "blobs" / WANTED["digest"], (days_ago, days_ago))
    place = kept.bring(WANTED, tmp_path / "two", never, lambda *_: trim(tmp_path / "cache", 0))
    assert place.read_bytes() == DATA


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farm.client.artifact_apis.os.pwrite", full)
    with pytest.raises(UsageError, match="No space left") as caught:
        Downloads(tmp_path / "cache").bring(WANTED, tmp_path / "one", Server())
    assert "XDG_CACHE_HOME" in caught.value.hint
