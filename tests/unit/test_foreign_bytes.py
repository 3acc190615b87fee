"""Readers of foreign bytes: damage of genuine ones ends in an error of the farm's, soon, and without much memory."""

from pathlib import Path

from tests.fuzz.run import broken, try_readers


def test_damaged_bytes_end_in_an_error_of_the_farms(tmp_path: Path) -> None:
    """No traceback, no more than 2 s of CPU, four times the input and 64 MiB of memory."""
    results = try_readers(tmp_path, examples=30)
    assert not broken(results)


def test_what_breaks_a_promise_is_seen(tmp_path: Path) -> None:
    """Readers that hang, take memory, die, or raise what they should not."""
    bad = {
        "hangs": "more than 0.3 s",
        "hoards": "MiB of memory",
        "dies": "ended with -9",
        "raises": "KeyError",
        "is-silent": "a message",
    }
    results = try_readers(tmp_path, examples=1, only=tuple(bad), table="tests.fuzz.bad_readers", limit=0.3)
    found = broken(results)
    assert {name: bad[name] in words for name, words in found.items()} == dict.fromkeys(bad, True), found
    assert (tmp_path / "hangs").read_bytes() == b"seed"
