"""What else changed between two measurements of a cell: its compiler, the machine, how fast that ran. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLOCK_BAND = 0.05
"""Relative difference of two clocks below which nothing is said: they are never quite the same."""


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what differs between two measurements, as the facts or values of their programs tell."""
    names = ("toolchain", "card", "driver", "cpu", "node")
    both = [(name, before.get(name), after.get(name)) for name in names]
    then, now = before.get("clocks") or {}, after.get("clocks") or {}
    clocks = [(label, then[label], now[label]) for label in then if label in now]
    return [f"{name} {old} -> {new}" for name, old, new in both if old and new and old != new] + [
        f"clock {label} {old:.0f} -> {new:.0f} MHz" for label, old, new in clocks if abs(new - old) > CLOCK_BAND * old
    ]
