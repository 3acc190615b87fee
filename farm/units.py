"""Durations, sizes, shares as people write and read them (`10ms`, `4h`; `5%`); parts of lists and documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar, cast

T = TypeVar("T")
K = TypeVar("K")

DURATION = r"^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)$"
SIZE = r"^[0-9]{1,9}(\.[0-9]{1,6})?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"
SHARE = r"^[0-9]{1,6}(\.[0-9]{1,6})?%$"

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def parse_duration(text: object) -> float:
    """Return seconds. Raises ValueError for anything but a number with its unit, greater than zero."""
    if not isinstance(text, str) or not (match := re.fullmatch(DURATION, text)):
        raise ValueError(f"{str(text)[:40]!r} is not a duration: write a number and a unit, such as 90s, 30m, 4h or 2d")
    seconds = float(text.removesuffix(match[2])) * _SECONDS[match[2]]
    if not seconds:
        raise ValueError("a duration must be greater than zero")
    return seconds


def parse_size(text: object) -> int:
    """Return bytes. Raises ValueError for anything but a number with its unit."""
    if not isinstance(text, str) or not (match := re.fullmatch(SIZE, text)):
        raise ValueError(f"{str(text)[:40]!r} is not a size: write a number and a unit, such as 512MiB or 32GiB")
    return int(float(text.removesuffix(match[2])) * _BYTES[match[2]])


def parse_share(text: object) -> float:
    """Return `0.05` for `5%`. Raises ValueError for anything but a number and a percent sign."""
    if not isinstance(text, str) or not re.fullmatch(SHARE, text):
        raise ValueError(f"{str(text)[:40]!r} is not a share: write a number and a percent sign, such as 5%")
    return float(text.removesuffix("%")) / 100


def size(count: float | None) -> str:
    """Return bytes for people: `3.2 MB`."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float | None) -> str:
    """Return a duration for people: `820 µs`, `4.31 ms`, `12 s`, `3 min 20 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds is None:
        return ""
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    if hours < 48:
        return f"{hours} h {left} min" if left else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def error(value: float | None) -> str:
    """Return a relative error with two digits, or `0`; empty if it is not known."""
    return "" if value is None else f"{value:.1e}" if value else "0"


def in_seconds(milliseconds: str | float | None) -> float | None:
    """Return seconds for a field of a record, which has milliseconds; None if the record does not have it."""
    return float(milliseconds) / 1000 if milliseconds else None


def rate(per_second: float | None) -> str:
    """Return a throughput for people: `1.24e+03/s`, `8.2/s`."""
    return "" if per_second is None else f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.3g}/s"


def by_number(text: str) -> list[tuple[int, str]]:
    """Return a key for sorting texts by the numbers in them: `b2` comes before `b10`."""
    parts = re.split(r"0*([0-9]+)", text)  # Compared as text: `int` takes 4300 digits.
    return [(len(part), part) if part.isdigit() else (-1, part) for part in parts]


def plural(count: int, word: str, words: str = "") -> str:
    """Return `1 cell`, `2,000 cells`."""
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def counted(counts: Mapping[str, int]) -> str:
    """Return a build's counts by state in words: `3 succeeded, 2 running`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count and name not in ("hits", "expected"))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by what `key` returns for them; groups and items in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def alike(failed: Iterable[T], how: Callable[[T], tuple[object, ...]]) -> list[list[T]]:
    """Return together what failed alike: of what `how` returns, only numbers in the message, the last, may differ."""
    plain = r"\d\S*( [µmkMG]?[sB]\b)?"
    return [*grouped(failed, lambda each: (*how(each)[:-1], re.sub(plain, "", f"{how(each)[-1]}"))).values()]


def together(said: Iterable[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Return each text once, with the names of all that it is said of."""
    return [([name for name, _ in each], text) for text, each in grouped(said, lambda pair: pair[1]).items()]


def named(cells: Sequence[str]) -> str:
    """Return a cell's name, of several their number and the first names: `12 cells (a, b, c, …)`."""
    return cells[0] if len(cells) == 1 else f"{len(cells)} cells ({', '.join(cells[:3])}{', …' * (len(cells) > 3)})"


def lots(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    iterator = iter(items)
    while lot := list(islice(iterator, size)):
        yield lot


def view_of(kind: type[T], document: Mapping[str, object]) -> T:
    """Return the fields of a view (a TypedDict) that a document has: those that may be missing are not made up."""
    return cast("T", {name: document[name] for name in kind.__annotations__ if name in document})
