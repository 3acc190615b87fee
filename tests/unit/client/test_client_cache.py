"""The client's cache: what comes goes again, oldest use first, and nothing that may be in use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.client.transfers import adopt, default_cache, note_use, trim


def test_it_is_where_the_user_wants_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "migraphx-farm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert default_cache() == tmp_path / "elsewhere" / "migraphx-farm"


def keep(path: Path, size: int, days: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    entry = path if path.parent.name in ("data", "downloads") else path.parent
    os.utime(entry, (0, time.time() - days * 86_400))
    return path


def test_beyond_its_bound_the_longest_unused_go(tmp_path: Path) -> None:
    old = keep(tmp_path / "conversions" / "aa" / "model.onnx", 400, days=9)
    older = keep(tmp_path / "data" / "bb.npz", 400, days=10)
    newer = keep(tmp_path / "downloads" / "cc", 400, days=8)
    used = keep(tmp_path / "conversions" / "dd" / "model.onnx", 400, days=11)
    elsewhere = keep(tmp_path.parent / f"{tmp_path.name}.onnx", 10, days=0)
    note_use(tmp_path, [used, elsewhere, tmp_path / "data" / "gone.npz"])
    trim(tmp_path, limit=1000)
    assert not older.exists()
    assert not old.parent.exists()
    assert newer.exists()
    assert used.exists()
    assert elsewhere.exists()


def test_what_another_command_may_be_reading_stays(tmp_path: Path) -> None:
    today = keep(tmp_path / "data" / "bb.npz", 400, days=0.5)
    trim(tmp_path, limit=10)
    assert today.exists()


def test_what_another_command_has_found_since_the_first_look_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = keep(tmp_path / "data" / "found.npz", 400, days=10)
    unused = keep(tmp_path / "data" / "unused.npz", 400, days=9)

    def looked_at(folder: Path, pattern: str) -> Iterator[Path]:
        yield found
        note_use(tmp_path, [found])
        yield unused

    monkeypatch.setattr(Path, "glob", looked_at)
    trim(tmp_path, limit=500)
    assert found.exists() and not unused.exists()


def test_half_a_folder_is_replaced_and_a_whole_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "conversions" / "key"
    (place / "rest").mkdir(parents=True)
    for content in (b"first", b"second"):
        made = tmp_path / "made" / "model"
        made.mkdir(parents=True, exist_ok=True)
        (made / "model.onnx").write_bytes(content)
        adopt(made, place, place / "model.onnx")
    assert (place / "model.onnx").read_bytes() == b"first"


def test_what_cannot_be_adopted_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        adopt(tmp_path / "made", tmp_path / "nowhere" / "key", tmp_path / "nowhere" / "key" / "model.onnx")
