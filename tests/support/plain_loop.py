"""A plain loop over the children of a build's cells: what the farm is held against.

`python -m tests.support.plain_loop` does the same steps in one process, without any child: the least they can take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.client.client import FarmClient
from farm.compiling.asking import (
    MadeProgram,
    compile_request,
    evaluate_request,
    reference_recipe,
    reference_request,
    references_of,
)
from farm.compiling.attempt import ANYWHERE, Slot
from farm.compiling.child_process import run_child
from farm.compiling.failures import classify
from farm.runner.actions import add_modules, run_action
from farm.runner.launcher import Messages
from farm.runner.protocol import RequestFailed
from farm.spec import digest_of
from farm.targets.compilers import child_modules, compilers
from tests.support.places import ROOT

Step = Callable[[dict[str, Any]], Any]
"""Does what a request asks for; None if it cannot be done."""


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def child(request: dict[str, Any]) -> Any:
            end = run_child(request, log_path=folder / "log.txt", folder=folder, python=python)
            return None if classify(end) else end.result

        where = {"gpu": slot.gpu, "maker": slot.maker, "cpus": slot.cpus, "search": search}
        return _steps(orders, files, {"threads": threads, **where}, measure_seconds, child)


def plain_process(
    orders: Sequence[dict[str, Any]],
    files: Mapping[str, Path],
    threads: int,
    measure_seconds: float,
    slot: Slot = ANYWHERE,
) -> float:
    """Return the seconds that one process takes for the same steps in a slot, from its start to its end."""
    asked = {
        "orders": orders,
        "files": {digest: str(path) for digest, path in files.items()},
        "where": {"threads": threads, "gpu": slot.gpu, "maker": slot.maker, "cpus": slot.cpus},
        "measure_seconds": measure_seconds,
    }
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "tests.support.plain_loop"]
    subprocess.run(command, input=json.dumps(asked), text=True, env=environment, check=True)
    return time.monotonic() - start


def _steps(
    orders: Sequence[dict[str, Any]],
    files: Mapping[str, Path],
    where: Mapping[str, Any],
    measure_seconds: float,
    step: Step,
) -> float:
    start = time.monotonic()
    references: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def child(request: dict[str, Any]) -> Any:
            return step({**request, **where})

        for number, order in enumerate(orders):
            model = files[order["model"]["files"][0]["digest"]]
            data = {key: files[order[key]["digest"]] if order[key] else None for key in ("calibration", "samples")}
            used = next(iter(references_of(order)), "none")
            recipe = digest_of(reference_recipe(order, used))
            if recipe not in references:
                references[recipe] = folder / f"{recipe}.npz"
                child(reference_request(order, model, data["samples"], references[recipe], used))
            program = folder / f"{number}{compilers()[order['spec']['compiler']['name']].extension}"
            compiled = child(compile_request(order, model, data["calibration"], program))
            if compiled:
                sample = folder / f"{number}.npz"
                made = MadeProgram.of(program, compiled)
                child(evaluate_request(order, made, references[recipe], sample, measure_seconds))
    return time.monotonic() - start


def _in_this_process(request: dict[str, Any]) -> Any:
    with Path(os.devnull).open("wb") as nowhere:
        try:
            return run_action(request, Messages(nowhere.fileno()))
        except RequestFailed:
            return None


if __name__ == "__main__":
    given = json.load(sys.stdin)
    paths = {digest: Path(path) for digest, path in given["files"].items()}
    add_modules(child_modules())
    _steps(given["orders"], paths, given["where"], given["measure_seconds"], _in_this_process)
