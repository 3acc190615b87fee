"""Plans of builds: of a submission, of a follow-up and of a retry; how long compiles take, and builds. Pure."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, linear_regression
from typing import Any, Literal, NamedTuple, cast

from farm.artifacts.refs import SnapshotCell
from farm.errors import UsageError
from farm.jobs.estimate import Compile, Estimate, OutlookDocument, RangeDocument
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import PlannedBuild, PoolView
from farm.jobs.state import LaterTuning, State, WorkOrder, job_key
from farm.matrix.cells import Cell
from farm.matrix.planned import CellGates, CellPlan, PlanDocument, ShownCell
from farm.results.gates import judge_fallback
from farm.results.ref_rules import submitted
from farm.results.report import JudgedCell, Report
from farm.spec import FileReference, SpecDocument, cache_key, changes
from farm.units import grouped, named, plural, together
from farm.wire.program import ConversionRecord

EXPLAINED = 50  # Number of misses in one plan for which the last artifact's spec is read, to say what changed.
FIRST = "first compile"  # Why a cell is compiled that no ref names yet.


@dataclass(frozen=True, slots=True)
class Plan:
    """What a submission would do. Nothing says yet what its cells are compared with (`farm.builds.past_builds`)."""

    cells: list[CellPlan]
    warnings: tuple[str, ...]
    conversions: Mapping[str, ConversionRecord]  # How models were converted from other formats, by name.
    needed: Mapping[str, int]  # Digest and size of every input that has to be fetched.
    digest: str  # SHA-256 of what the farm decided: each cell's cache key and pool, whatever is a hit by now.


def make_plan(
    cells: Sequence[Cell],
    *,
    known: Mapping[str, ArtifactFacts],
    running: Iterable[str],
    last: Mapping[str, SnapshotCell],
    read_spec: Callable[[str], SpecDocument | None],
    live_workers: Mapping[str, int],
    estimates: Mapping[str, Estimate | None],
) -> Plan:
    """Plan every cell: a hit, or a miss and why; its pool, and if a worker serves it.

    `known` are the facts of whole artifacts, by the `job` of a cell; `running` are the jobs that have not ended. `last`
    is the last cell that passed, by identifier; `read_spec` returns the spec behind a key. `live_workers` are numbers
    by pool; `estimates` say, by identifier, how long the compiles take of cells that are not known.
    """
    unfinished = set(running)
    explained = 0
    planned: list[CellPlan] = []
    for cell in cells:
        facts = known.get(cell.job)
        before = last.get(cell.identifier)
        estimate = None if facts else estimates.get(cell.identifier)
        state = "hit" if facts else "joined" if cell.job in unfinished else "miss"
        reason = FIRST if state == "miss" else ""
        if state == "miss" and before:
            explained += 1
            spec = read_spec(before["key"]) if explained <= EXPLAINED else None
            reason = "; ".join(changes(spec, cell.spec)) if spec else "the cache key changed"
        found: dict[str, Any] = {
            **cell._asdict(),
            "emulated": list(cell.emulated),
            "warnings": list(cell.warnings),
            "state": state,
            "reason": reason,
            "live_workers": live_workers.get(cell.pool, 0),
            "expected_seconds": estimate["expected"] if estimate else None,
            "estimate": estimate,
            "facts": facts,
            "before": None,
            "baseline": None,
        }
        del found["job"]
        planned.append(cast(CellPlan, found))
    models = {cell.model: cell.order["model"] for cell in cells}
    conversions = {name: record for name, model in models.items() if (record := model.get("conversion"))}
    warnings = (*_warnings(cells, live_workers), *_undebugged(planned), *_left(planned))
    return Plan(planned, warnings, conversions, needed_blobs(planned), plan_digest(planned))


def _warnings(cells: Sequence[Cell], live_workers: Mapping[str, int]) -> Iterable[str]:
    for pool in sorted({cell.pool for cell in cells}):
        if not live_workers.get(pool):
            waiting = plural(sum(cell.pool == pool for cell in cells), "cell")
            yield f"no live worker serves {pool}: {waiting} would wait (start `farm worker` on a node with it)"
    emulated = Counter((cell.target, part) for cell in cells for part in cell.emulated)
    for (target, part), count in emulated.items():
        yield f"{target} has no units for {part}: {plural(count, 'cell')} can only round to it, and compute no faster"
    for pool in sorted({cell.pool for cell in cells if cell.order.get("cross")}):
        yield f"{pool} compiles without the GPU: its programs are not tuned, verified or measured"
    yield from _together((cell.identifier, text) for cell in cells for text in cell.warnings)
    owner: dict[str, str] = {}
    for cell in cells:
        first = owner.setdefault(cell.job, cell.identifier)
        if first != cell.identifier:
            yield f"{cell.identifier} is the same compile as {first}; they share the job"


def _undebugged(planned: Sequence[CellPlan]) -> Iterable[str]:
    """Warn if `debug` has no effect: it is not part of the key, so existing programs are not compiled again."""
    known = [cell for cell in planned if cell["state"] != "miss"]
    idle = [cell["identifier"] for cell in known if cell["order"] and cell["order"].get("debug")]
    if idle:
        yield (
            f"`debug` shows nothing for what is compiled already or just now ({plural(len(idle), 'cell')}, "
            f"such as {idle[0]}); another `salt` compiles it again"
        )


def _left(planned: Sequence[CellPlan]) -> Iterable[str]:
    """Name the nodes of known programs for which a GPU's provider has no kernel; not if the manifest allows them."""
    judged = ((cell, judge_fallback(cell["facts"])) for cell in planned if cell["facts"])
    yield from _together(
        (cell["identifier"], found.message)
        for cell, found in judged
        if found and cell["gates"].get("fallback", "allow") != "allow"
    )


def _together(said: Iterable[tuple[str, str]]) -> Iterable[str]:
    return (f"{named(names)}: {text}" for names, text in together(said))


def plan_digest(cells: Iterable[CellPlan]) -> str:
    """Return the SHA-256 of cells' identifiers, cache keys and pools."""
    decided = [(cell["identifier"], cell["key"], cell["pool"]) for cell in cells]
    return hashlib.sha256(json.dumps(decided).encode()).hexdigest()


def needed_blobs(cells: Iterable[CellPlan]) -> dict[str, int]:
    """Return digest and size of every input that a miss, or the follow-up of a hit, has to fetch."""
    needed: dict[str, int] = {}
    for cell in cells:
        if (order := cell["order"]) and (cell["state"] != "hit" or order.get("background")):
            needed |= {file["digest"]: file["size"] for file in input_files(order)}
    return needed


def is_measured(cell: CellPlan) -> bool:
    """Whether a planned hit still takes turns with its baseline: a job of its own, that compiles nothing."""
    facts, order = cell["facts"], cell["order"]
    if not (facts and order) or order.get("limit") is None:
        return False
    against = facts.get("against")
    return not against or against["key"] != order["against"]


def is_unfinished(cell: CellPlan) -> bool:
    """Whether a planned cell has a job."""
    return not cell["facts"] or is_measured(cell)


def input_files(order: WorkOrder) -> list[FileReference]:
    """Return the blobs that a work order needs: the model's files, data, and the files of environment variables."""
    data = [file for file in (order["calibration"], order["samples"]) if file]
    return [*order["model"]["files"], *data, *order.get("env", {}).values()]


# --- follow-ups ------------------------------------------------------------------------------------------------------

PRIORITY = -1000  # Lower than any build that somebody waits for.

NOT_JUDGED = ("latency", "throughput", "compile_time", "tuning_time")
"""Limits that a follow-up leaves out: it is faster than the program that passed them, and takes longer to be made."""


def background_cells(planned: Iterable[CellPlan], passed: Iterable[JudgedCell]) -> list[CellPlan]:
    """Return the planned cells of a follow-up: the cells that passed and have background tuning.

    `planned` are the cells of a build's plan, `passed` its judged cells that `latest` may name.
    """
    published = {cell["identifier"]: cell["facts"]["key"] for cell in passed if cell["facts"]}
    return [
        _more_thorough(cell, order, later, published[cell["identifier"]])
        for cell in planned
        if cell["identifier"] in published and (order := cell["order"]) and (later := order.get("background"))
    ]


def _more_thorough(cell: CellPlan, ordered: WorkOrder, later: LaterTuning, published: str) -> CellPlan:
    order: WorkOrder = {**ordered, "spec": {**ordered["spec"], **later}, "against": published}
    order.pop("background", None)
    order.pop("budget", None)
    order.pop("limit", None)
    key = cache_key(order["spec"])
    mode = order["spec"]["tuning"]["mode"]
    gates: CellGates = {**cell["gates"]}
    if limits := {name: limit for name, limit in gates.pop("limits", {}).items() if name not in NOT_JUDGED}:
        gates["limits"] = limits
    # A deep search takes days, and reaching the time limit would be final.
    return {
        **cell,
        "key": key,
        "order": order,
        "gates": gates,
        "limits": {**cell["limits"], "time": 0.0},
        "state": "miss",
        "reason": f"tuning {mode}, in the background",
        "facts": None,
        "priority": PRIORITY,
        "expected": None,
        "expected_seconds": None,
        "estimate": None,
        "sweep": None,
        "warnings": [],
    }


def plan_follow_up(planned: PlanDocument, cells: Sequence[CellPlan], build_id: str, now: float) -> PlanDocument:
    """Return the plan of a build's follow-up with these cells and this id; `now` is in Unix seconds.

    A cell whose tuning has a `background` mode is published as soon as its own mode has ended. Its follow-up has the
    same cell with the `background` mode, measures its program in turns with the published one, and replaces it in
    `latest` if it is shown to be faster.
    """
    before = planned["build"]
    build: PlannedBuild = {
        **before,
        "id": build_id,
        "follows": before["id"],
        "submitted": submitted(before),
        "created_at": now,
        "cells": len(cells),
        "hits": 0,
        "fail_fast": False,
        "retries": None,
        "warnings": [],
    }
    build.pop("request", None)
    build.pop("concurrency", None)
    return {"schema": 1, "build": build, "cells": list(cells)}


# --- retries ---------------------------------------------------------------------------------------------------------


def unsuccessful(report: Report) -> set[str]:
    """Return the identifiers of a report's cells that failed unexpectedly or were cancelled."""
    return {
        cell["identifier"] for cell in report["cells"] if cell["state"] != State.SUCCEEDED and not cell["as_expected"]
    }


def plan_retry(
    planned: PlanDocument,
    cells: Sequence[CellPlan],
    *,
    known: Mapping[str, ArtifactFacts],
    running: Collection[str],
    live_workers: Mapping[str, int],
    build_id: str,
) -> PlanDocument:
    """Return the plan of a build that runs cells of an ended build again, as they were planned.

    A finished build never reopens. Failures are not recorded under cache keys, so a new build tries the same work order
    again, and cells that succeeded (then or since) are hits.

    `planned` is that build's plan, `cells` those of it to take. `known` has the facts of what is published by now, by
    the cells' identifiers; `running` are the job keys (`farm.jobs.state.job_key`) of unfinished jobs; `live_workers`
    counts workers by pool. `build_id` is the id of the new build.

    Raises UsageError for a cell that was a hit when it was planned, and whose artifact is gone.
    """
    before = planned["build"]
    # A sweep names the best of all its sizes; of only some of them it could name another.
    whole = len(cells) == len(planned["cells"])
    again: list[CellPlan] = []
    for cell in cells:
        facts, order = known.get(cell["identifier"]), cell["order"]
        if facts is None and order is None:
            hint = "submit the manifest again: the build has no work order for it"
            raise UsageError(f"{cell['identifier']} existed before the build, and is gone now", hint=hint)
        joined = order is not None and job_key(order, cell["key"]) in running
        state, reason = ("hit", "") if facts else ("joined", "") if joined else ("miss", "tried again")
        expected = cell["expected"]
        again.append(
            {
                **cell,
                "facts": facts,
                "state": state,
                "reason": reason,
                "live_workers": live_workers.get(cell["pool"], 0),
                # What somebody acknowledged then may have been taken back.
                "expected": None if expected and expected.get("by") else expected,
                "sweep": cell["sweep"] if whole else None,
            }
        )
    build: PlannedBuild = {
        **before,
        "warnings": [],
        "cells": len(again),
        "hits": sum(cell["state"] == "hit" for cell in again),
        "id": build_id,
        "retries": before["id"],
    }
    build.pop("concurrency", None)  # It is for what somebody asks for again, not for what is newer.
    return {**planned, "build": build, "cells": again}


# --- estimates -------------------------------------------------------------------------------------------------------

# About 80 of 100 compiles end within their range. It is estimated from compiles of the same target, precision and
# tuning mode: of the same model if there are any, else of models of about its size.

FEWEST = 3  # Fewest compiles of other models that give a range.
NEIGHBOURS = 40  # Most compiles of other models that are used: those nearest in size.
FARTHEST = 4.0  # A model this many times larger or smaller than all known ones is not comparable.
SPREAD = 0.5  # Standard deviation of the logarithm of a model's durations if too few are known: about half to double.

DOUBT = 1
"""For how many compiles `SPREAD` counts where more are known. Those of one build, at the same hour and load,
resemble each other more than the next build's will: 8.2, 8.3 and 8.4 s promise nothing to a tenth of a second.
"""

_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341)
"""Student's t for 10 % on each side, by degrees of freedom from 1."""

_NORMAL90 = 1.2816


def estimate(model: str, size: int, samples: Sequence[Compile]) -> Estimate | None:
    """Estimate a compile of this model from comparable ones; None if there are none."""
    own = [sample for sample in samples if sample.seconds > 0 and model.startswith(sample.model)]
    if own:
        logs = [math.log(sample.seconds) for sample in own]
        return _interval(logs, f"{len(own)} of this model")
    others = _models([sample for sample in samples if sample.seconds > 0 and sample.size > 0])
    if size <= 0 or len(others) < FEWEST:
        return None
    sizes = [sample.size for sample in others]
    if size > FARTHEST * max(sizes) or size * FARTHEST < min(sizes):
        return None
    near = sorted(others, key=lambda sample: abs(math.log(sample.size / size)))[:NEIGHBOURS]
    slope = _slope(near)
    logs = [math.log(sample.seconds) + slope * math.log(size / sample.size) for sample in near]
    return _interval(logs, f"{len(near)} of other models", fitted=1)


def estimate_all(
    compiles: Mapping[str, Compile], history: Mapping[str, Sequence[Compile]]
) -> dict[str, Estimate | None]:
    """Estimate compiles, by any names; `history` has past ones by sort. Equal compiles are estimated once."""
    estimates = {
        # Without a comparable compile, the same cell with its previous model is the nearest comparison.
        each: estimate(each.model, each.size, history.get(each.sort, ())) or estimate(each.model, each.size, [each])
        for each in set(compiles.values())
    }
    return {name: estimates[each] for name, each in compiles.items()}


def _models(samples: Sequence[Compile]) -> list[Compile]:
    """Return one sample per model: several compiles of one model say no more about another model than one does."""
    models = grouped(samples, lambda sample: (sample.model, sample.size))
    return [Compile(*model, geometric_mean(each.seconds for each in some)) for model, some in models.items()]


def _slope(samples: Sequence[Compile]) -> float:
    """Return the power of its size with which a model's duration grows: least squares on logarithms, from 0 to 1.5."""
    sizes = [math.log(sample.size) for sample in samples]
    times = [math.log(sample.seconds) for sample in samples]
    if max(sizes) - min(sizes) < 1e-5:
        return 0.0
    return min(1.5, max(0.0, linear_regression(sizes, times).slope))


def _interval(logs: Sequence[float], by: str, fitted: int = 0) -> Estimate:
    """The prediction interval of a normal sample (of logarithms), whose mean and deviation are estimates themselves.

    The deviation is the sample's, with `DOUBT`; `fitted` is how many more parameters were taken from the same sample.
    """
    count = len(logs)
    middle = sum(logs) / count
    freedom = count - 1 - fitted
    if count < FEWEST or freedom < 1:
        deviation, reach = SPREAD, _NORMAL90
    else:
        squares = DOUBT * SPREAD**2 + sum((value - middle) ** 2 for value in logs)
        deviation = math.sqrt(squares / (DOUBT + freedom))
        reach = _T90[freedom - 1] if freedom <= len(_T90) else _NORMAL90
    half = reach * deviation * math.sqrt(1 + 1 / count)
    low, expected, high = (round(math.exp(middle + side * half), 3) for side in (-1, 0, 1))
    return {"low": low, "expected": expected, "high": high, "by": by}


# --- outlooks --------------------------------------------------------------------------------------------------------

WIDENING = 2.1
"""A range goes from the expected value divided by this to the expected value times this.

Chosen by `tests/benchmarks/outlooks.py`: at least 78 of 100 builds of every simulated farm end in such ranges.
"""

LATE = 0.25  # A running compile is expected to take at least this share of its elapsed time longer.

EstimatedCell = ShownCell | CellPlan | JudgedCell

_LIVE = frozenset({State.QUEUED, State.RUNNING, "miss", "joined"})


class _Compile(NamedTuple):
    """One future compile, or the rest of a running one."""

    pool: str
    seconds: float
    runs: bool


def outlook(
    cells: Iterable[EstimatedCell], pools: Iterable[PoolView], *, paused: str = "", parallel: int | None = None
) -> OutlookDocument:
    """Return when a build's live cells will be done, what they will cost, and what was spent so far.

    The slots of each pool take its compiles, the longest first, and each compile takes as long as its estimate expects.
    One factor makes a range of the result: no estimate knows of retries, or of slots that come and go.

    `paused` is the build's id if it is paused, `parallel` how many of its jobs may run at once (0 or None: no bound).
    """
    # Cells that share a job wait for it once.
    once = {cell.get("job") or cell.get("key") or position: cell for position, cell in enumerate(cells)}.values()
    live = [cell for cell in once if cell["state"] in _LIVE]
    to_come = [_to_come(cell, estimate) for cell in live if (estimate := cell.get("estimate"))]
    to_come.sort(key=lambda each: (not each.runs, -each.seconds))  # What runs has its slot already.
    on_gpu = [each.seconds for each in to_come if _on_gpu(each.pool)]
    known_pools = {pool["name"]: pool for pool in pools}
    taking = {name: 0 if pool.get("paused") else pool["slots"] for name, pool in known_pools.items()}
    wanted = {cell["pool"]: taking.get(cell["pool"], 0) for cell in live}
    slots = {name: min(count, parallel or count) for name, count in wanted.items()}
    unserved = sorted(name for name, count in slots.items() if not count)
    ends = [0.0]
    if to_come and not unserved and not paused:
        there = Counter(cell["pool"] for cell in live if cell["state"] != "miss")  # A planned job does not wait yet.
        for name in {each.pool for each in to_come}:
            others = sum(known_pools[name][where] for where in ("waiting", "running", "uploading")) - there[name]
            ends.append(_end([each.seconds for each in to_come if each.pool == name], slots[name], others))
        if parallel:  # The bound is the build's, over all of its pools.
            ends.append(_end([each.seconds for each in to_come], parallel))
    return {
        "eta": _range(max(ends)),
        "slot_seconds": _range(sum(each.seconds for each in to_come)),
        "gpu_hours": _range(sum(on_gpu) / 3600),
        "spent_seconds": round(sum(_seconds(cell, "spent") for cell in once), 3),
        "spent_gpu_hours": round(sum(_seconds(cell, "spent") for cell in once if _on_gpu(cell["pool"])) / 3600, 4),
        "unknown": len(live) - len(to_come),
        "unserved": unserved,
        "paused": [
            *filter(None, [paused]),
            *(name for name in unserved if name in known_pools and known_pools[name].get("paused")),
        ],
    }


def _to_come(cell: EstimatedCell, estimate: Estimate) -> _Compile:
    runs = cell["state"] == State.RUNNING
    elapsed = _seconds(cell, "elapsed") if runs else 0.0
    seconds = max(0.001, estimate["expected"])  # Rounded to milliseconds, an estimate may be 0.
    return _Compile(cell["pool"], max(seconds - elapsed, LATE * elapsed), runs)


def _on_gpu(pool: str) -> bool:
    return "gfx" in pool or ".sm_" in pool


def _seconds(cell: EstimatedCell, name: Literal["elapsed", "spent"]) -> float:
    seconds = cell.get(name)
    return seconds if isinstance(seconds, float | int) else 0.0


def _end(lengths: Sequence[float], slots: int, others: int = 0) -> float:
    """Return when slots will have done compiles in this order, each on the first free slot.

    Builds take turns, so about one job of others comes for each of ours, as long as there are `others`.
    """
    free = [0.0] * min(slots, len(lengths))
    for seconds in lengths:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free) + min(max(0, others), len(lengths)) * sum(lengths) / len(lengths) / slots


def _range(expected: float) -> RangeDocument | None:
    """The range around an expected value; None for 0, that is, if nothing is left or known."""
    if not expected:
        return None
    return {"low": round(expected / WIDENING, 4), "expected": round(expected, 4), "high": round(expected * WIDENING, 4)}
