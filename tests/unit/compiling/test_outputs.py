"""What a child left in its folders: only plain files are there for the next reader."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from farm.files import DEEPEST, read_plain, remove_tree, sweep


def nested(folder: Path, levels: int, name: str = "a" * 200) -> None:
    """Make folders below each other, deeper than a path may be long, as a child does it."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(levels):
            Path(name).mkdir()
            os.chdir(name)
        Path("leaf").write_text("there")
    finally:
        os.fchdir(before)
        os.close(before)


def test_plain_files_and_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "gfx942").mkdir(parents=True)
    (tmp_path / "kernels" / "gfx942" / "1.ukdb").write_bytes(b"kernel")
    (tmp_path / "program.mxr").write_bytes(b"program")
    (tmp_path / "program.mxr").chmod(0)
    assert sweep(tmp_path) == []
    assert (tmp_path / "program.mxr").read_bytes() == b"program"
    assert (tmp_path / "kernels" / "gfx942" / "1.ukdb").read_bytes() == b"kernel"


def test_links_pipes_and_second_names_are_removed_and_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the worker's")
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "program.mxr").symlink_to(secret)
    (folder / "everything").symlink_to("/")
    (folder / "linked").hardlink_to(secret)
    os.mkfifo(folder / "text")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        assert sorted(sweep(folder)) == [
            "everything (a link)",
            "linked (a second name)",
            "program.mxr (a link)",
            "socket (a socket)",
            "text (a pipe)",
        ]
    assert list(folder.iterdir()) == []
    assert secret.read_text() == "the worker's"


@pytest.mark.parametrize("levels", [DEEPEST + 1, 1500])
def test_folders_that_are_too_deep_are_removed(tmp_path: Path, levels: int) -> None:
    nested(tmp_path, levels)
    (found,) = sweep(tmp_path)
    assert "deeper than" in found
    remove_tree(tmp_path)
    assert not tmp_path.exists()


def test_a_path_of_few_characters_may_have_too_many_bytes(tmp_path: Path) -> None:
    nested(tmp_path, 25, "\u20ac" * 85)
    (found,) = sweep(tmp_path)
    assert "deeper than" in found


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("stays")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(kept)
    (folder / "closed").mkdir(mode=0)
    nested(folder, 1500)
    remove_tree(folder)
    assert not folder.exists()
    assert (kept / "file").read_text() == "stays"
    (tmp_path / "link").symlink_to(kept)
    remove_tree(tmp_path / "link")
    assert (kept / "file").read_text() == "stays"
    remove_tree(tmp_path / "never-was")


def test_only_plain_files_are_read_and_only_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_plain(tmp_path / "file", 4)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            read_plain(tmp_path / name, 5)
