"""What else changed between two measurements of a cell: its compiler, the machine, how fast that ran. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.jobs.facts import ArtifactFacts
    from farm.matrix.planned import Baseline
    from farm.wire.program import Conditions, Sidecar

CLOCK_BAND = 0.05
"""Relative difference of two clocks below which nothing is said: they are never quite the same."""


def since_baseline(baseline: Baseline, facts: ArtifactFacts) -> list[str]:
    """Return what differs between a program's measurement and its baseline's, as far as a plan knows it."""
    values = baseline["values"]
    names = {"toolchain": baseline["toolchain"], "driver": values.get("driver", ""), "node": values.get("node", "")}
    return list(_moved(names, {name: str(facts.get(name) or "") for name in names}))


def between(before: Sidecar, after: Sidecar) -> list[str]:
    """Return what differs between the measurements of two programs, as their sidecars tell."""
    both = [
        {
            "toolchain": each["toolchain"],
            "device": each["device"].get("model") or each["device"]["arch"],
            "driver": each["device"].get("driver") or "",
            "node": each["node"],
        }
        for each in (before, after)
    ]
    then, now = (_last(each) for each in (before, after))
    return [*_moved(*both), *_clocks(then.get("clocks") or {}, now.get("clocks") or {})]


def _last(sidecar: Sidecar) -> Conditions:
    found = sidecar["measurements"].get("conditions") or [{}]
    return found[-1]


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name, old in before.items():
        if old and after[name] and old != after[name]:
            yield f"{name} {old} -> {after[name]}"


def _clocks(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    for label in before.keys() & after.keys():
        if abs(after[label] - before[label]) > CLOCK_BAND * before[label]:
            yield f"clock {label} {before[label]:.0f} -> {after[label]:.0f} MHz"
