"""What a shared library says of itself: soname and build id, read from the file."""

from __future__ import annotations

import hashlib
import os
import struct
from typing import BinaryIO

_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_STRTAB, _SONAME = 5, 14
_BUILD_ID = 3


def identity(path: str) -> tuple[str, str]:
    """Return soname and build id of a 64-bit ELF library.

    Without a soname the file's name stands for it; without a build id the first 40 digits of the file's SHA-256.
    """
    with open(path, "rb") as file:  # noqa: PTH123
        segments = _segments(file)
        soname = _soname(file, segments) or os.path.basename(path)  # noqa: PTH119
        return soname, _build_id(file, segments) or _digest(file)


def _segments(file: BinaryIO) -> list[tuple[int, int, int, int]]:
    """Return type, offset, address and size of each segment; none for a file of another kind."""
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return []
    offset, size, count = (*struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54))
    segments = []
    for index in range(count):
        file.seek(offset + index * size)
        kind, _, place, address, _, length = struct.unpack("<IIQQQQ", file.read(40))
        segments.append((kind, place, address, length))
    return segments


def _read(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _soname(file: BinaryIO, segments: list[tuple[int, int, int, int]]) -> str:
    for kind, place, _, size in segments:
        if kind != _DYNAMIC:
            continue
        entries = dict(struct.iter_unpack("<QQ", _read(file, place, size - size % 16)))
        if _SONAME not in entries or _STRTAB not in entries:
            return ""
        for other, offset, address, length in segments:
            if other == _LOAD and address <= entries[_STRTAB] < address + length:
                start = offset + entries[_STRTAB] - address + entries[_SONAME]
                return _read(file, start, 256).split(b"\0")[0].decode(errors="replace")
    return ""


def _build_id(file: BinaryIO, segments: list[tuple[int, int, int, int]]) -> str:
    for kind, place, _, length in segments:
        notes = _read(file, place, length) if kind == _NOTE else b""
        while len(notes) >= 12:
            name_size, size, note = struct.unpack_from("<III", notes)
            start = 12 + (name_size + 3) // 4 * 4
            if note == _BUILD_ID and notes[12 : 12 + name_size] == b"GNU\0":
                return notes[start : start + size].hex()
            notes = notes[start + (size + 3) // 4 * 4 :]
    return ""


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()[:40]
