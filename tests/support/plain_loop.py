"""A plain loop over the children of a build's cells: what the farm is held against."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.client.client import FarmClient
from farm.compiling.child_process import run_child
from farm.compiling.failures import classify
from farm.compiling.requests import compile_request, evaluate_request, reference_recipe, reference_request
from farm.compiling.slots import ANYWHERE, Slot
from farm.spec import digest_of
from farm.targets.compilers import compilers


def work_orders(client: FarmClient, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the work orders that the farm's workers had, in the order of the manifest."""
    return [client.jobs.get(cell["job"])["order"] for cell in cells]


def plain_loop(
    orders: Sequence[dict[str, Any]],
    files: Mapping[str, Path],
    threads: int,
    measure_seconds: float,
    slot: Slot = ANYWHERE,
    *,
    search: Sequence[str] = (),
    python: str = "",
) -> float:
    """Return the seconds that the same children take in a slot, one after the other, without farm and seal.

    `search` and `python` are where their compiler is, as the worker's settings have it.
    """
    start = time.monotonic()
    references: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log.txt"
        where = {"threads": threads, "gpu": slot.gpu, "maker": slot.maker, "cpus": slot.cpus, "search": search}

        def child(request: dict[str, Any]) -> dict[str, Any] | None:
            end = run_child({**request, **where}, log_path=log, folder=folder, python=python)
            return None if classify(end) else end.result

        for number, order in enumerate(orders):
            model = files[order["model"]["files"][0]["digest"]]
            data = {key: files[order[key]["digest"]] if order[key] else None for key in ("calibration", "samples")}
            recipe = digest_of(reference_recipe(order))
            if recipe not in references:
                references[recipe] = folder / f"{recipe}.npz"
                child(reference_request(order, model, data["samples"], references[recipe]))
            program = folder / f"{number}{compilers()[order['spec']['compiler']['name']].extension}"
            compiled = child(compile_request(order, model, data["calibration"], program))
            if compiled:
                sample = folder / f"{number}.npz"
                child(evaluate_request(order, program, compiled, references[recipe], sample, measure_seconds))
    return time.monotonic() - start
