"""A worker process with the farm's own executor whose children run the scripted compiler: `python -m tasks APP …`.

What a cell's compiler does is in `script.json` in the data folder: `{"<batch>": [step, …], "": [step]}`, one step for
each attempt (the last one repeats; "" is for all others). `tests/chaos/compiler.py` takes the steps, but for these,
which the worker itself takes before it:

    kill        this whole worker process is killed
    until       the attempt goes on once this file exists
    dying       seconds that what is killed of it gets to be gone

With CHAOS_WITHOUT_GROUPS in the environment its children have no control groups.

Every publication is noted in the file `published`, one line each: cache key, job, attempt, `new` or `adopted`.
"""

# ruff: noqa: E402

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from farm.compiling import cgroups
from farm.compiling import child_process as child

run_child = child.run_child


def run_noted(request: Any, **options: Any) -> Any:
    """Run a scripted child, and note each compile in the file `compiles`, a line with its job and attempt."""
    if request["action"] == "compile":
        with (farm.settings.data_dir / "compiles").open("a") as file:
            file.write(f"{current.name}\n")
    if "dying" in current.step:
        options["limits"] = replace(options["limits"], dying=current.step["dying"])
    options.pop("templates", None)  # Tests look for launchers below the worker's process.
    return run_child({**request, "step": current.step}, script=COMPILER, **options)


if os.environ.get("CHAOS_WITHOUT_GROUPS"):
    cgroups.find = lambda: cgroups.Groups(None, why="as the test wants it")  # type: ignore[assignment]

# Before anybody else takes it from there; whichever module of a release that is.
child.run_child = run_noted

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.compiling.attempt import Attempt
from farm.jobs.state import Outcome, Phase
from farm.node.executor import Executor

COMPILER = Path(__file__).with_name("compiler.py")

farm = Farm.current()
current = threading.local()


class ScriptedExecutor(Executor):
    def execute(self, attempt: Attempt, *, on_phase: Any, cancelled: threading.Event) -> Outcome:
        current.step, current.name = step_of(attempt), f"{attempt.job_id} {attempt.number}"
        if current.step.get("kill"):
            on_phase(Phase.COMPILING, None, "")
            os.kill(os.getpid(), signal.SIGKILL)
        if "until" in current.step:
            on_phase(Phase.COMPILING, None, "waiting")
            while not Path(current.step["until"]).exists():
                if cancelled.wait(0.02):
                    return Outcome.cancelled()
        return super().execute(attempt, on_phase=on_phase, cancelled=cancelled)


def step_of(attempt: Attempt) -> dict[str, Any]:
    script = json.loads((farm.settings.data_dir / "script.json").read_text())
    steps_ = script.get(str(attempt.order["spec"]["batch"])) or script[""]
    step: dict[str, Any] = steps_[min(attempt.number, len(steps_)) - 1]
    return step


def publish(store: S3Store, namespace: str, sidecar: Any, whole: Any = S3Store.publish, **options: Any) -> Any:
    published = whole(store, namespace, sidecar, **options)
    is_ours = all(published[name] == sidecar[name] for name in ("job", "attempt"))
    line = f"{sidecar['key']} {sidecar['job']} {sidecar['attempt']} {'new' if is_ours else 'adopted'}\n"
    with (farm.settings.data_dir / "published").open("a") as file:
        file.write(line)
    return published


S3Store.publish = publish  # type: ignore[method-assign]
farm.__dict__["executor"] = ScriptedExecutor(farm.artifacts, farm.settings)

from tasks.celery_app import app  # noqa: F401 - what Celery starts
