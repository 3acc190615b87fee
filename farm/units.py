"""Durations and sizes as people write them: `10ms`, `90s`, `4h`, `1.5d`; `512MiB`, `32GiB`."""

from __future__ import annotations

import re

DURATION = r"^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)$"
SIZE = r"^[0-9]{1,9}(\.[0-9]{1,6})?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"

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
