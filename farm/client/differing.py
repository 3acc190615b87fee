"""In what two builds differ: `farm diff`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from farm.errors import ArtifactGone, NotFound
from farm.results.changes import change
from farm.results.lines import CellEnd, CellLine
from farm.spec import CompileSpec, changes

if TYPE_CHECKING:
    from farm.results.report import CellDifference, Differences, JudgedCell, Report
    from farm.wire.program import Sidecar


def differences(left: Report, right: Report, sidecar: Callable[[str], Sidecar]) -> Differences:
    """Return in what two builds differ; `sidecar` returns that of a cache key."""
    before, after = ({cell["identifier"]: cell for cell in report["cells"]} for report in (left, right))
    moved = {name: change(_end(before[name]), _end(after[name])) for name in before if name in after}
    names = [
        name
        for name in before | after
        if name not in moved or moved[name].is_noticed or _key(before[name]) != _key(after[name])
    ]
    found: list[CellDifference] = []
    for name in names:
        cells = before.get(name), after.get(name)
        keys = [facts["key"] for cell in cells if cell and (facts := cell["facts"])]
        changed: list[str] = []
        if len(set(keys)) > 1:
            with suppress(NotFound, ArtifactGone):
                one, other = (sidecar(key)["spec"] for key in keys)
                changed = changes(one, CompileSpec.from_dict(other))
        effect, share = (moved[name].effect, moved[name].share) if name in moved else (None, None)
        found.append(
            {
                "identifier": name,
                "left": cells[0],
                "right": cells[1],
                "changes": changed,
                "effect": effect,
                "share": share,
            }
        )
    return {
        "left": left["build"],
        "right": right["build"],
        "same": len(before | after) - len(names),
        "cells": found,
        "left_out": {
            "left": [name for name in before if name not in after],
            "right": [name for name in after if name not in before],
        },
    }


def _end(cell: JudgedCell) -> CellEnd:
    return CellEnd.of(CellLine.of(cell))


def _key(cell: JudgedCell) -> str:
    return cell["facts"]["key"] if cell["facts"] else cell["key"]
