"""Files that come whole or not at all."""

from pathlib import Path

import pytest

from farm.files import replacing


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
