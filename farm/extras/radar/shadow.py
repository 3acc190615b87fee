"""Shadow builds: the cells that a ref names, compiled under another toolchain. Nothing that readers see moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from farm.artifacts.refs import SnapshotCell
from farm.jobs.order import WorkOrder
from farm.jobs.state import AttemptLimits
from farm.matrix.planned import CellGates, CellPlan
from farm.spec import CompileSpec, DeviceDocument, SpecDocument, cache_key
from farm.targets.compilers import OFF, compilers
from farm.targets.pools import Pool, version_of

LIMITS: Mapping[str, float] = {"latency": 0.05, "size": 0.1, "memory": 0.25, "load": 1.0, "compile_time": 1.0}
"""By which share a number may get worse under another toolchain, unless the cell's manifest or the request differs."""


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
    spec: SpecDocument = {
        **work.order["spec"],
        "toolchain": pool.toolchain,
        "compiler": {
            **compiler,
            "recipe": pool.recipe,
            "libraries": {name: pool.libraries[name] for name in named if name in pool.libraries},
        },
    }
    # A budget that cut a tuning short is part of the key of what it made, not of what is asked for.
    tuning = dict(spec["tuning"])
    tuning.pop("budget", None)
    spec["tuning"] = tuning  # type: ignore[typeddict-item]
    order: WorkOrder = {**work.order, "identifier": cell["identifier"], "pool": pool.name, "spec": spec}
    for name in ("against", "limit", "background"):
        order.pop(name, None)  # type: ignore[misc]
    limits = {**LIMITS, **work.gates.get("limits", {})} if defaults else {}
    if defaults and spec["tuning"]["mode"] != OFF:
        limits.setdefault("tuning_time", LIMITS["compile_time"])
    gates: CellGates = {**work.gates, "limits": limits, "baseline": ref, "undecided": "warn"}
    if not defaults:
        gates.pop("budgets", None)
    return {
        "identifier": cell["identifier"],
        "model": cell["model"],
        "target": cell["target"],
        "precision": cell["precision"],
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        "key": cache_key(CompileSpec.from_dict(spec)),
        "pool": pool.name,
        "emulated": order.get("emulated", []),
        "state": "miss",
        "reason": f"toolchain: {cell['toolchain']} -> {pool.toolchain}",
        "live_workers": 0,
        "expected_seconds": None,
        "estimate": None,
        "line": work.line,
        "warnings": [],
        "order": order,
        "limits": work.limits,
        "priority": work.priority,
        "gates": gates,
        "expected": None,
        "sweep": None,
        "facts": None,
    }
