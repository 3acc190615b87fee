"""Genuine bytes with damage that somebody chose: the one source of inputs of the fuzz tests, as a Hypothesis strategy.

A failing example shrinks to the fewest mutations.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

LARGEST = 1 << 20
"""Bytes of an input at most: mutations that repeat a part stop there."""

NUMBERS = (0, 1, -1, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
OPENINGS = (b"[", b'{"a":', b"(", b"-", b"\x81\xa1a", b"\x91", b"\x0a\x7f", b"- ", b"? ", b"a:\n ", b"<a>", b"&a [")
TEXTS = (
    b"\0", b"\n", b"\r", b"\t", b"\x1b[31m", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", "\u2028".encode(), b"'", b'"',
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"null", b"[]", b"{}", b"../", b"/etc/passwd", b"%s", b"{0}", b";",
    b"=", b":", b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xff" * 9 + b"\x01", b"\xde\xff\xff", b"PK\x05\x06",
)  # fmt: skip
"""What readers of texts, msgpack, protobuf, JSON and archives stumble over."""
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**64, 10**30, float("nan"), float("inf"), "", "x", "\ud800", "\0", "../../x", "a" * 5000,
    "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59", [], {}, [[]], [None], {"": None}, ["x", "x"], {"name": 1},
)  # fmt: skip


class Mutation(NamedTuple):
    """One change of some bytes: what, where (as a share of the length), and with which choice or number."""

    kind: str
    place: int
    length: int
    choice: int


def _flip(data: bytes, at: int, change: Mutation) -> bytes:
    changed = bytearray(data or b"\0")
    changed[at % len(changed)] ^= 1 << change.choice % 8
    return bytes(changed)


def _cut(data: bytes, at: int, change: Mutation) -> bytes:
    return data[:at]


def _drop(data: bytes, at: int, change: Mutation) -> bytes:
    return data[:at] + data[at + change.length :]


def _repeat(data: bytes, at: int, change: Mutation) -> bytes:
    part = data[at : at + change.length]
    times = min(1 << change.choice % 17, max(1, (LARGEST - len(data)) // max(1, len(part))))
    return data[:at] + part * times + data[at:]


def _insert(data: bytes, at: int, change: Mutation) -> bytes:
    return data[:at] + TEXTS[change.choice % len(TEXTS)] + data[at:]


def _overwrite(data: bytes, at: int, change: Mutation) -> bytes:
    text = TEXTS[change.choice % len(TEXTS)]
    return data[:at] + text + data[at + len(text) :]


def _number(data: bytes, at: int, change: Mutation) -> bytes:
    """Write a number over a field that may be a length."""
    size = (1, 2, 4, 8)[change.length % 4]
    number = NUMBERS[change.choice % len(NUMBERS)] & ((1 << 8 * size) - 1)
    order = "<>"[change.choice // len(NUMBERS) % 2]
    return (
        data[:at]
        + struct.pack(f"{order}Q", number)[::1][slice(8 - size, 8) if order == ">" else slice(size)]
        + data[at + size :]
    )


def _decimal(data: bytes, at: int, change: Mutation) -> bytes:
    """Replace the next number in a text."""
    found = re.compile(rb"-?\d+(?:\.\d+)?").search(data, at)
    if not found:
        return data
    text = (b"-1", b"0", b"1e999", b"NaN", b"9" * 5000, b"4294967296", b"18446744073709551616", b"1.5")[
        change.choice % 8
    ]
    return data[: found.start()] + text + data[found.end() :]


def _nest(data: bytes, at: int, change: Mutation) -> bytes:
    opening = OPENINGS[change.choice % len(OPENINGS)]
    return data[:at] + opening * (10, 200, 1200, 60_000)[change.length % 4] + data[at:]


def _swap(data: bytes, at: int, change: Mutation) -> bytes:
    """Exchange two parts of one length."""
    other = (at + change.choice * 7) % (len(data) + 1)
    first, second = sorted((at, other))
    size = min(change.length, second - first, len(data) - second)
    one, two = data[first : first + size], data[second : second + size]
    return data[:first] + two + data[first + size : second] + one + data[second + size :]


def _json(data: bytes, at: int, change: Mutation) -> bytes:
    """Change one value of a JSON document: another, none, twice."""
    try:
        document = json.loads(data)
        places = _places(document) if isinstance(document, dict | list) else []
    except (ValueError, RecursionError):
        return _overwrite(data, at, change)
    if not places:
        return json.dumps(VALUES[change.choice % len(VALUES)]).encode()
    holder: Any = document
    *path, key = places[change.place % len(places)]
    for step in path:
        holder = holder[step]
    if change.choice % 8 == 0:
        del holder[key]
    elif change.choice % 8 == 1 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = VALUES[change.length % len(VALUES)]
    return json.dumps(document).encode()


def _places(document: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document; without recursion, which is slow for large ones."""
    found: list[tuple[Any, ...]] = []
    holders: list[tuple[tuple[Any, ...], Any]] = [((), document)]
    for path, holder in holders:
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((*path, key))
            if isinstance(holder[key], dict | list):
                holders.append((found[-1], holder[key]))
    return found


KINDS: dict[str, Callable[[bytes, int, Mutation], bytes]] = {
    "flip": _flip, "cut": _cut, "drop": _drop, "repeat": _repeat, "insert": _insert, "overwrite": _overwrite,
    "number": _number, "decimal": _decimal, "nest": _nest, "swap": _swap, "json": _json,
}  # fmt: skip
_MUTATION = st.builds(
    Mutation, st.sampled_from(sorted(KINDS)), st.integers(0, 2**16 - 1), st.integers(1, 4096), st.integers(0, 255)
)


def mutate(data: bytes, changes: Sequence[Mutation]) -> bytes:
    """Return bytes after these changes, one after the other."""
    for change in changes:
        data = KINDS[change.kind](data, change.place * (len(data) + 1) >> 16, change)[:LARGEST]
    return data


def mutated(corpus: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy of inputs that were made from a corpus."""
    return st.builds(mutate, st.sampled_from(corpus), st.lists(_MUTATION, min_size=1, max_size=6))
