"""The radar: what a shadow build under another toolchain says about the cells that a ref names. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from typing_extensions import TypedDict

from farm.errors import ExitCode
from farm.jobs.state import FailureKind, State
from farm.matrix.planned import NotShadowed, ShadowNotes
from farm.results.changes import change
from farm.results.gates import GateRow, sentence
from farm.results.lines import CellEnd, CellLine
from farm.results.report import JudgedCell, Report

Effect = Literal["breaks", "worse", "better", "same", "unclear", "open"]
"""What a toolchain does to a cell. `unclear`: a number could not be compared, and nothing else is worse or better."""

NOTICED = 2.0
"""Errors that differ by less than this factor count as the same: they are within every tolerance."""
NEGLIGIBLE = 1e-6
"""Relative errors below this are rounding."""


class RadarCell(TypedDict):
    """One cell under both toolchains.

    `passes`: it may be promoted; else `kind` says how it failed. `compared` has the numbers of its gates. `error` is
    the largest relative error of an output.
    """

    identifier: str
    effect: Effect
    passes: bool
    text: str
    before: str
    after: str
    key_before: str
    key: str
    error_before: float | None
    error: float | None
    hit: bool
    kind: str
    compared: list[GateRow]


class RadarDocument(TypedDict):
    """What gets better, worse and breaks under a toolchain; `promotable` if nothing speaks against it, else `why`."""

    schema: int
    build: str
    namespace: str
    ref: str
    generation: int
    toolchain: str
    state: str
    promotable: bool
    why: str
    counts: Mapping[str, int]
    cells: Sequence[RadarCell]
    left_out: Sequence[NotShadowed]


def radar_of(report: Report, notes: ShadowNotes) -> RadarDocument:
    """Return what a shadow build found; of an open one what is known so far."""
    build = report["build"]
    cells = [_radar_cell(cell, notes) for cell in report["cells"]]
    counts = Counter(cell["effect"] for cell in cells)
    counts["breaks"] += sum(cell["breaks"] for cell in notes["left_out"])
    why = ""
    if build["state"] != "reported" or not build["verdict"]:
        why = "it has not ended"
    elif build["verdict"]["exit_code"] != ExitCode.OK:
        why = build["verdict"]["text"]
    elif refused := [cell for cell in notes["left_out"] if cell["breaks"]]:
        why = f"{refused[0]['identifier']}: {refused[0]['text']}"
    return {
        "schema": 1,
        "build": build["id"],
        "namespace": build["namespace"],
        "ref": notes["ref"],
        "generation": notes["generation"],
        "toolchain": notes["toolchain"],
        "state": build["state"],
        "promotable": not why,
        "why": why,
        "counts": {effect: counts[effect] for effect in ("breaks", "worse", "better", "same", "unclear", "open")},
        "cells": cells,
        "left_out": notes["left_out"],
    }


def _radar_cell(cell: JudgedCell, notes: ShadowNotes) -> RadarCell:
    before, facts = notes["before"][cell["identifier"]], cell["facts"]
    rows = cell.get("compared") or []
    error = max(facts["errors"].values(), default=None) if facts else None
    effect, text = _effect(cell, rows, before["error"], error)
    return {
        "identifier": cell["identifier"],
        "effect": effect,
        "passes": cell["state"] == State.SUCCEEDED and not cell["warning"],
        "text": text,
        "before": before["toolchain"],
        "after": before["under"],
        "key_before": before["key"],
        "key": facts["key"] if facts else cell["key"],
        "error_before": before["error"],
        "error": error,
        "hit": cell["hit"],
        "kind": cell["kind"] or "",
        "compared": rows,
    }


def _effect(
    cell: JudgedCell, rows: Sequence[GateRow], error_before: float | None, error: float | None
) -> tuple[Effect, str]:
    if cell["state"] not in (State.SUCCEEDED, State.FAILED):
        return ("breaks", "cancelled") if cell["state"] == State.CANCELLED else ("open", cell["waiting"])
    if cell["state"] == State.FAILED:
        slower = cell["kind"] in (FailureKind.REGRESSION, FailureKind.BUDGET)
        return ("worse", cell["message"]) if slower else ("breaks", f"{cell['kind']}: {cell['message']}")
    end = CellEnd.of(CellLine.of(cell))
    found = change(end, end, rows)  # A ref names only what passed.
    said = {outcome: [sentence(row) for row in rows if row["outcome"] == outcome] for outcome in ("better", "worse")}
    if error is not None and error_before is not None:
        text = f"the largest error is {error:.2g}, it was {error_before:.2g}"
        if error > max(error_before * NOTICED, NEGLIGIBLE):
            said["worse"].append(f"{text} (within the tolerance)")
        elif error_before > max(error * NOTICED, NEGLIGIBLE):
            said["better"].append(text)
    texts = "; ".join([*said["worse"], *said["better"]])
    if found.effect == "worse" or said["worse"]:
        return "worse", texts
    if texts:
        return "better", texts
    return ("unclear", found.left_out) if rows and found.left_out else ("same", "")
