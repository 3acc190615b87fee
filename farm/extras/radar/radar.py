"""Shadow builds: the cells that a ref names, compiled under another toolchain, and what that says about them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from farm.artifacts.refs import SnapshotCell
from farm.errors import ExitCode
from farm.jobs.state import AttemptLimits, FailureKind, State, WorkOrder
from farm.matrix.planned import CellGates, CellPlan, NotShadowed, ShadowNotes
from farm.results.gates import GateRow, sentence
from farm.results.report import JudgedCell, Report
from farm.results.verdict import CellEnd, CellLine, change
from farm.runner.documents import DeviceDocument
from farm.spec import SpecDocument, cache_key
from farm.targets.compilers import OFF, compilers
from farm.targets.pools import Pool, version_of
from farm.units import view_of

Effect = Literal["breaks", "worse", "better", "same", "unclear", "open"]
"""What a toolchain does to a cell. `unclear`: a number could not be compared, and nothing else is worse or better."""

NOTICED = 2.0  # Errors that differ by less than this factor count as the same: they are within every tolerance.
NEGLIGIBLE = 1e-6  # Relative errors below this are rounding.

LIMITS: Mapping[str, float] = {"latency": 0.05, "size": 0.1, "memory": 0.25, "load": 1.0, "compile_time": 1.0}
"""By which share a number may get worse under another toolchain, unless the cell's manifest or the request differs."""


# --- planning a shadow build --------------------------------------------------------------------------------------


class KnownWork(NamedTuple):
    """What is known about how a program was made: enough to make it again."""

    order: WorkOrder
    limits: AttemptLimits
    gates: CellGates
    priority: int
    line: int


def pool_for(
    spec: SpecDocument, target: str, pools: Sequence[tuple[Pool, int]], toolchain: str, *, cross: bool
) -> Pool | None:
    """Return the pool in which a spec is compiled under another toolchain; None if there is none.

    `pools` come with their numbers of live workers. `toolchain` is how the id begins; without it, it is the newest that
    has a worker and is newer than the spec's own.
    """
    found = [
        (pool, live)
        for pool, live in pools
        if str(pool.target) == target
        and pool.toolchain != spec["toolchain"]
        and pool.untuned == cross
        and _is_device(pool, spec["device"])
        and (
            pool.begins(toolchain) if toolchain else live and version_of(pool.toolchain) > version_of(spec["toolchain"])
        )
    ]
    best = max(found, key=lambda each: (bool(each[1]), version_of(each[0].toolchain), each[0].recipe), default=None)
    return best[0] if best else None


def _is_device(pool: Pool, device: DeviceDocument) -> bool:
    arch, _, rest = device["arch"].partition(":")
    same_arch = pool.device.arch.partition(":")[0] == arch if rest == "any" else pool.device.arch == device["arch"]
    pairs = ((device["compute_units"], pool.device.compute_units), (device["xcc"], pool.device.xcc))
    family = device["cpu_family"]
    return same_arch and all(ours in (None, theirs) for ours, theirs in pairs) and family in (None, pool.cpu_family)


def lacking(spec: SpecDocument, pool: Pool) -> str:
    """Return why a pool's compiler cannot make what a spec asks for, as far as that is known before it tries."""
    lacks = compilers()[spec["compiler"]["name"]].lacks(pool.features, spec["precision"], spec["options"])
    return "; ".join(f"{pool.toolchain} has no {feature}, which {what} needs" for feature, what in lacks.items())


def shadow_cell(cell: SnapshotCell, work: KnownWork, pool: Pool, ref: str, *, defaults: bool) -> CellPlan:
    """Return the planned cell that compiles a ref's cell in another pool. Whether it is a hit is not decided yet.

    Without `defaults` it has no limits and budgets of its own.
    """
    compiler = work.order["spec"]["compiler"]
    named = compilers()[compiler["name"]].libraries_of(work.order["spec"]["precision"])
    # A budget that cut a tuning short is part of the key of what it made, not of what is asked for.
    tuning = work.order["spec"]["tuning"].copy()
    tuning.pop("budget", None)
    spec: SpecDocument = {
        **work.order["spec"],
        "tuning": tuning,
        "toolchain": pool.toolchain,
        "compiler": {
            **compiler,
            "recipe": pool.recipe,
            "libraries": {name: pool.libraries[name] for name in named if name in pool.libraries},
        },
    }
    order: WorkOrder = {**work.order, "identifier": cell["identifier"], "pool": pool.name, "spec": spec}
    order.pop("against", None)
    order.pop("limit", None)
    order.pop("background", None)
    limits = {**LIMITS, **work.gates.get("limits", {})} if defaults else {}
    if defaults and tuning["mode"] != OFF:
        limits.setdefault("tuning_time", LIMITS["compile_time"])
    gates: CellGates = {**work.gates, "limits": limits, "baseline": ref, "undecided": "warn"}
    if not defaults:
        gates.pop("budgets", None)
    known = {
        **cell,
        **work._asdict(),
        **dict.fromkeys(("expected_seconds", "estimate", "expected", "sweep", "facts")),
        "key": cache_key(spec),
        "pool": pool.name,
        "emulated": order.get("emulated", []),
        "state": "miss",
        "reason": f"toolchain: {cell['toolchain']} -> {pool.toolchain}",
        "live_workers": 0,
        "warnings": [],
        "order": order,
        "gates": gates,
    }
    return view_of(CellPlan, known)


# --- the radar: what it says about the cells ----------------------------------------------------------------------


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
    effects = {effect: counts[effect] for effect in ("breaks", "worse", "better", "same", "unclear", "open")}
    said = {"build": build["id"], "promotable": not why, "why": why, "counts": effects, "cells": cells}
    return view_of(RadarDocument, {**build, **notes, "schema": 1, **said})


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
