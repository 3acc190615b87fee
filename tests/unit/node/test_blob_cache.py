"""The node's cache: brings once, copies out, stays within its bound."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from farm.errors import ArtifactGone
from farm.files import NotPlain, replacing
from farm.node.disk import NodeCache
from farm.settings import load_settings
from farm.spec import FileReference


class Source:
    """Blobs by digest, and how often each was brought."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.brought: list[str] = []

    def add(self, data: bytes) -> FileReference:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"path": f"{digest[:6]}.bin", "digest": digest, "size": len(data)}

    def download(self, digest: str, path: Path) -> None:
        self.brought.append(digest)
        path.write_bytes(self.blobs[digest])


def cache_in(
    folder: Path, download: Callable[[str, Path], object], *, limit: int = 1000, min_free: int = 0
) -> NodeCache:
    """The cache of a node with its data in a folder."""
    return NodeCache(load_settings({}, data_dir=folder, cache_bytes=limit, min_free_bytes=min_free), download)


def test_a_file_is_brought_once_and_copied_to_each_attempt(tmp_path: Path) -> None:
    source = Source()
    file = source.add(b"model")
    cache = cache_in(tmp_path, source.download)
    first = cache.place([file], tmp_path / "one")[0]
    first.write_bytes(b"overwritten by a hostile compiler")
    assert cache.place([file], tmp_path / "two")[0].read_bytes() == b"model"
    assert len(source.brought) == 1


@pytest.mark.parametrize("name", ["{key}", "../../../key", "ab/../../../../key"])
def test_a_name_that_leads_out_of_the_cache_is_refused(tmp_path: Path, name: str) -> None:
    """A worker that was taken over writes it into a record of references: another's file would go as a damaged one."""
    (key := tmp_path / "key").write_bytes(b"to sign with")
    cache = cache_in(tmp_path / "data", Source().download)
    for place in ("..", "ab"):
        (tmp_path / "data" / "cache" / place).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ArtifactGone, match="is not a SHA-256"):
        cache.copy({"path": "", "digest": name.format(key=key), "size": 11}, tmp_path / "out")
    assert key.read_bytes() == b"to sign with"


def test_the_least_recently_used_files_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    source = Source()
    cache = cache_in(tmp_path, source.download, limit=250)
    files = [source.add(bytes([number]) * 100) for number in range(4)]
    for number, file in enumerate(files):
        path = cache.get(file)
        os.utime(path, (number, number))
    kept = {path.name for path in (tmp_path / "cache").glob("??/*")}
    assert kept == {file["digest"] for file in files[2:]}


def test_the_cache_goes_before_its_disk_is_full(small_disk: Path, tmp_path: Path) -> None:
    """Two slots bring models whose copies the disk has no room for together: none is lost, none fails, room is left."""
    source = Source()
    spare, files = 4 << 20, [source.add(bytes([number]) * (1 << 20)) for number in range(20)]

    def download(digest: str, path: Path) -> None:
        with replacing(path) as part:
            source.download(digest, part)

    def copy(file: FileReference) -> tuple[int, int]:
        (copied,) = cache_in(small_disk, download, limit=1 << 40, min_free=spare).place([file], tmp_path)
        return len({copied.read_bytes(), source.blobs[file["digest"]]}), shutil.disk_usage(small_disk).free

    with ThreadPoolExecutor(2) as slots:
        found = list(slots.map(copy, files))
    assert {same for same, _ in found} == {1}
    assert min(free for _, free in found) >= spare
    assert cache_in(small_disk, download).get(files[-1]).stat().st_size == 1 << 20
    assert len(source.brought) == len(files), "what was used last is kept"
    too_large = {**files[0], "digest": "f" * 64, "size": 64 << 20}
    source.blobs["f" * 64] = bytes(64 << 20)
    with pytest.raises(OSError, match="No space left"):
        cache_in(small_disk, download, limit=1 << 40).copy(too_large, tmp_path / "large")
    assert source.brought.count("f" * 64) == 1, "there was nothing left to give"


def test_the_parts_that_killed_processes_left_go_and_those_of_others_stay(tmp_path: Path) -> None:
    """A worker that is killed while it downloads leaves gigabytes, which no bound counts."""
    source = Source()
    cache = cache_in(tmp_path, source.download)
    left, under_way = (tmp_path / "cache" / "00" / f".{name}.part" for name in ("left", "under-way"))
    left.parent.mkdir(parents=True)
    for part in (left, under_way):
        part.write_bytes(b"half")
    os.utime(left, (1, 1))
    cache.get(source.add(b"model"))
    assert (left.exists(), under_way.exists()) == (False, True)


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../escaped"])
def test_a_path_outside_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    source = Source()
    cache = cache_in(tmp_path, source.download)
    with pytest.raises(ValueError, match="leaves its folder"):
        cache.place([{**source.add(b"x"), "path": path}], tmp_path / "one")


@pytest.mark.parametrize("damage", ["bytes", "link", "pipe"])
def test_a_damaged_file_is_brought_again_before_anybody_has_it(tmp_path: Path, damage: str) -> None:
    """What is under a digest in the cache goes to attempts of every namespace."""
    source = Source()
    file = source.add(b"model")
    cache = cache_in(tmp_path, source.download)
    path = cache.get(file)
    path.unlink()
    if damage == "bytes":
        path.write_bytes(b"m0del")
    elif damage == "link":
        (tmp_path / "other").write_bytes(b"m0del")
        path.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(path)
    assert cache.place([file], tmp_path / "one")[0].read_bytes() == b"model"
    assert path.read_bytes() == b"model"
    assert len(source.brought) == 2


def test_slots_that_need_the_same_new_file_at_once_all_get_it(tmp_path: Path) -> None:
    """Each downloads it and replaces the file of the one before, which somebody else may be reading or counting."""
    slots = 24
    source = Source()

    def download(digest: str, path: Path) -> None:
        with replacing(path) as part:
            part.write_bytes(source.blobs[digest])

    for turn in range(20):
        together = threading.Barrier(slots)
        file = source.add(f"model {turn}".encode())

        def copy(slot: int, file: FileReference = file, together: threading.Barrier = together) -> bytes:
            cache = cache_in(tmp_path, download)
            together.wait()
            return cache.place([file], tmp_path / str(slot))[0].read_bytes()

        with ThreadPoolExecutor(slots) as threads, capture_logs() as logs:
            assert set(threads.map(copy, range(slots))) == {source.blobs[file["digest"]]}
        assert logs == []


def test_a_blob_that_stays_wrong_is_given_to_nobody(tmp_path: Path) -> None:
    source = Source()
    file = source.add(b"model")
    source.blobs[file["digest"]] = b"m0del"
    cache = cache_in(tmp_path, source.download)
    with pytest.raises(ArtifactGone, match="is not what its name says"):
        cache.place([file], tmp_path / "one")
    assert [path for path in (tmp_path / "one").iterdir() if path.is_file()] == []


def test_what_a_child_made_is_kept_under_the_digest_of_what_was_copied(tmp_path: Path) -> None:
    """Its file may change between two reads: there is one."""
    cache = cache_in(tmp_path, Source().download)
    made = tmp_path / "made" / "reference.npz"
    made.parent.mkdir()
    made.write_bytes(b"right")
    path, digest, size = cache.add(made, 100, within=tmp_path)
    made.write_bytes(b"wrong")
    assert (path.name, digest, size) == (digest, hashlib.sha256(b"right").hexdigest(), 5)
    assert path.read_bytes() == b"right"
    (tmp_path / "everything").symlink_to(tmp_path / "made")
    for place, limit in ((tmp_path / "everything" / made.name, 100), (made, 4)):
        with pytest.raises(NotPlain):
            cache.add(place, limit, within=tmp_path)
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == [digest]
