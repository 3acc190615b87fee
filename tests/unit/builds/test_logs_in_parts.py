"""A log in parts: each line is in one part, whole, and none is read twice."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.builds import reading
from farm.builds.reading import JobLog


@given(lines=st.lists(st.text("ab", max_size=12), max_size=40), part=st.integers(1, 9))
@example(lines=["a" * 3, "", "b" * 3], part=4)
def test_the_parts_of_a_log_are_the_log(lines: list[str], part: int) -> None:
    text = "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PART", part)
        patch.setattr(reading, "LONGEST_LINE", 12)
        log = JobLog(len(text), lambda start, end: text.encode()[start:end])
        parts = [log.part(number) for number in range(log.parts)]
        assert "".join(parts) == text
        assert all(each.endswith("\n") for each in parts[:-1] if each and "".join(parts[parts.index(each) + 1 :]))


def test_a_line_that_is_longer_than_a_part_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PART", 10)
    monkeypatch.setattr(reading, "LONGEST_LINE", 4)
    text = b"short\n" + b"x" * 57 + b"\nend\n"
    log = JobLog(len(text), lambda start, end: text[start:end])
    assert "".join(map(log.part, range(log.parts))).encode() == text


def test_only_the_end_of_a_huge_log_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    log = JobLog(10, lambda start, end: b"0123456789"[start:end], "ab")
    assert b"".join(log.last()) == b"0123456789"
    monkeypatch.setattr(reading, "SHOWN_LOG", 4)
    assert b"".join(log.last()) == b"(6 bytes before this are in blob ab)\n6789"
