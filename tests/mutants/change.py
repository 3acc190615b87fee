"""One small change of one file."""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """Some bytes of a file replaced by others: its place, its sort, and the lines that a test has to run to notice it.

    `everywhere`: any test that runs the file may notice, since the lines run at import, or once for a cache.
    """

    file: str
    start: int
    end: int
    new: str
    sort: str
    lines: tuple[int, int]
    everywhere: bool = False
    function: str = ""
    """In Lua, the function around it."""

    def applied(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def difference(self, source: bytes) -> list[str]:
        """Return the lines that differ, with `-` and `+`."""
        start, end = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.end)
        before, after = (
            source[start:end],
            self.applied(source)[start : end + len(self.new.encode()) - self.end + self.start],
        )
        return [
            f"{sign} {line.strip()}"
            for sign, lines in (("-", before), ("+", after))
            for line in lines.decode().splitlines() or [""]
        ]

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} ({self.sort})"


def other_number(value: float) -> str:
    """Return a number's text when it is changed: a large whole one by far, since one more is often as good a bound."""
    if isinstance(value, float):
        return repr(value * 2 or 1.0)
    return str(value + 1 if value < 10 else value // 2)
