"""Reading JSON of hundreds of megabytes without stopping the process's other threads.

`json.loads` holds the interpreter from the first byte to the last: for a plan of 100,000 cells that are seconds, in
which nobody else is answered. Read piece by piece, other threads get their turns between.
"""

from __future__ import annotations

import json
import re
from typing import Any

SMALL = 1 << 20
"""Bytes up to which a document is read at once."""

_SPACE = re.compile(r"[ \t\n\r]*")


def loads_in_turns(data: bytes) -> Any:
    """Return what `json.loads` returns; the items of lists in the outermost object are read one by one.

    Raises ValueError as it does.
    """
    if len(data) <= SMALL:
        return json.loads(data)
    text = data.decode()
    place = _after_space(text, 0)
    if text[place : place + 1] != "{":
        return json.loads(text)
    found: dict[str, Any] = {}
    place = _after_space(text, place + 1)
    more = text[place : place + 1] != "}"
    while more:
        name, place = _value(text, place)
        if not isinstance(name, str):
            raise json.JSONDecodeError("Expecting property name", text, place)
        place = _expected(text, place, ":")
        found[name], place = _list(text, place) if text[place : place + 1] == "[" else _value(text, place)
        more, place = _goes_on(text, place, "}")
    if _after_space(text, place + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, place + 1)
    return found


def _list(text: str, place: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    place = _after_space(text, place + 1)
    if text[place : place + 1] == "]":
        return items, _after_space(text, place + 1)
    more = True
    while more:
        item, place = _value(text, place)
        items.append(item)
        more, place = _goes_on(text, place, "]")
    return items, _after_space(text, place + 1)


def _value(text: str, place: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, place)
    return value, _after_space(text, end)


def _goes_on(text: str, place: int, end: str) -> tuple[bool, int]:
    """Return whether a comma follows, and the place after it; else the place of the end."""
    if text[place : place + 1] == end:
        return False, place
    return True, _expected(text, place, ",")


def _expected(text: str, place: int, sign: str) -> int:
    if text[place : place + 1] != sign:
        raise json.JSONDecodeError(f"Expecting {sign!r}", text, place)
    return _after_space(text, place + 1)


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


_DECODER = json.JSONDecoder()
