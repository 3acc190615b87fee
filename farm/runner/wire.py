"""Protobuf messages read by hand, where no library for them is at hand."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class MalformedMessage(Exception):
    """The bytes are not a protobuf message of the kind expected."""


def fields(data: memoryview | bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Yield field number and value of one protobuf message; groups do not occur in these files."""
    view = memoryview(data)
    place = 0
    while place < len(view):
        key, place = _varint(view, place)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            number, place = _varint(view, place)
            yield field, number
            continue
        if kind == _BYTES:
            size, place = _varint(view, place)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise MalformedMessage
        if not field or place + size > len(view):
            raise MalformedMessage
        yield field, view[place : place + size]
        place += size


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = view[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (1 << 64) - 1, place
    raise MalformedMessage


def as_bytes(value: Any) -> memoryview:
    """Return a field's content as bytes."""
    if isinstance(value, int):
        raise MalformedMessage
    return memoryview(value)


def text(value: Any) -> str:
    """Return a field's content as text."""
    return bytes(as_bytes(value)).decode()


def signed(value: Any) -> int:
    """Return a field's content as a signed number."""
    if not isinstance(value, int):
        raise MalformedMessage
    return value - (1 << 64) if value >= 1 << 63 else value


def onnx_outputs(path: str) -> list[str]:
    """Return the names of an ONNX model's outputs, in order. The model was checked before."""
    with open(path, "rb") as file:  # noqa: PTH123
        # Not closed by hand: slices of it are still about, and weights should not be read for a few names.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return [
        text(name)
        for field, graph in fields(memoryview(content))
        if field == 7
        for inner, value in fields(as_bytes(graph))
        if inner == 12
        for key, name in fields(as_bytes(value))
        if key == 1
    ]
