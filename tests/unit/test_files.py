"""Files that come whole or not at all, and those that are for one user alone."""

import os
from pathlib import Path

import pytest

from farm.files import private_folder, read_private, replacing


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    with replacing(place) as part:
        part.write_text("new")
        assert place.read_text() == "old"
    assert place.read_text() == "new"
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    with pytest.raises(type(error)), replacing(place) as part:
        part.write_text("ne")
        raise error
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    place = tmp_path / "file"
    with replacing(place) as one, replacing(place) as other:
        one.write_text("one")
        other.write_text("other")
    assert place.read_text() == "one"
    assert list(tmp_path.iterdir()) == [place]


def test_a_folder_that_is_there_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir(mode=0o755)
    for folder in (tmp_path / "older", tmp_path / "new"):
        assert private_folder(folder) == folder
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_and_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError):
        private_folder(tmp_path / "link")
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        os.chown(tmp_path / "elsewhere", 65534, 65534)
        with pytest.raises(PermissionError, match="another user's"):
            private_folder(tmp_path / "elsewhere")


def test_a_file_that_others_can_read_was_not_written_for_this_user(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_private(file, 100)
    file.write_text("secret")
    file.chmod(0o644)
    with pytest.raises(PermissionError, match="open to others"):
        read_private(file, 100)
    file.chmod(0o600)
    assert read_private(file, 100) == b"secret"
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
        with pytest.raises(PermissionError, match="another user's"):
            read_private(file, 100)
