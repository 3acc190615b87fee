"""What ELF files say about themselves: a library's soname and build id, a kernel's GPU architecture."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO

_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_STRTAB, _SONAME = 5, 14
_BUILD_ID = 3
_AMDGPU = 224

_ARCHES = {
    0x2F: "gfx906", 0x30: "gfx908", 0x3F: "gfx90a", 0x40: "gfx940", 0x4C: "gfx942", 0x4F: "gfx950", 0x33: "gfx1010",
    0x36: "gfx1030", 0x41: "gfx1100", 0x46: "gfx1101", 0x47: "gfx1102", 0x44: "gfx1103", 0x43: "gfx1150",
    0x4A: "gfx1151", 0x55: "gfx1152", 0x58: "gfx1153", 0x48: "gfx1200", 0x4E: "gfx1201", 0x49: "gfx1250",
    0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic", 0x54: "gfx11-generic",
    0x59: "gfx12-generic", 0x5F: "gfx9-4-generic",
}  # fmt: skip
"""Low byte of `e_flags` of an AMDGPU code object (LLVM, docs/AMDGPUUsage.rst)."""
_FEATURES = (("sramecc", 0xC00, 0x800, 0xC00), ("xnack", 0x300, 0x200, 0x300))
"""Name, mask, off and on within `e_flags`; what runs either way has no suffix."""

_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED_BUNDLE = b"CCOB"


def gpu_arches(head: bytes) -> list[str]:
    """Return the architectures that a code object holds kernels for, from its first bytes: `gfx90a:sramecc+:xnack-`.

    A code object is an ELF file, or an offload bundle of several. Empty if it is neither, `compressed` if it is a
    compressed bundle: to read its list is to unpack it.
    """
    if head.startswith(_COMPRESSED_BUNDLE):
        return ["compressed"]
    if head.startswith(_BUNDLE):
        return list(_bundled(head))
    if head[:5] != b"\x7fELF\x02" or len(head) < 64 or struct.unpack_from("<H", head, 18)[0] != _AMDGPU:
        return []
    (flags,) = struct.unpack_from("<I", head, 48)
    arch = _ARCHES.get(flags & 0xFF, f"unknown-{flags & 0xFF:#x}")
    signs = [(name, {off: "-", on: "+"}.get(flags & mask)) for name, mask, off, on in _FEATURES]
    return [":".join([arch, *(f"{name}{sign}" for name, sign in signs if sign)])]


def wave_sizes(head: bytes) -> set[int]:
    """Return the threads of a wavefront of the kernels whose metadata are in a code object's first bytes.

    The metadata are msgpack in a note before the code (LLVM, docs/AMDGPUUsage.rst, "Code Object V3 Metadata").
    """
    return {size[0] for size in re.findall(rb"\.wavefront_size([\x20\x40])", head)}


def _bundled(head: bytes) -> Iterator[str]:
    """Yield the targets of a bundle's entries (offset, size, length of id, id); the host's entry is left out."""
    place = len(_BUNDLE)
    count = int.from_bytes(head[place : place + 8], "little")
    place += 8
    while count and len(head) >= place + 24:
        (length,) = struct.unpack_from("<Q", head, place + 16)
        name = head[place + 24 : place + 24 + length].decode(errors="replace")
        if "amdgcn" in name:
            yield name.rpartition("--")[2]
        place += 24 + length
        count -= 1


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
