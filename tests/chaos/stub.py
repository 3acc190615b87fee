"""A worker process with the farm's own executor whose children run the scripted compiler: `celery -A tests.chaos.stub`.

What a cell's compiler does is in `script.json` in the data folder: `{"<batch>": [step, …], "": [step]}`, one step for
each attempt (the last one repeats; "" is for all others). `tests/chaos/compiler.py` takes the steps, but for these,
which the worker itself takes before it:

    kill        this whole worker process is killed
    until       the attempt goes on once this file exists

Every publication is noted in the file `published`, one line each: cache key, job, attempt, `new` or `adopted`.
"""

# ruff: noqa: E402

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from farm.compiling import child_process as child

run_child = child.run_child
# Before anybody else takes it from there; whichever module of a release that is.
child.run_child = lambda request, **options: run_child({**request, "step": current.step}, script=COMPILER, **options)

from farm.app import Farm
from farm.compiling.attempt import Attempt
from farm.jobs.state import Outcome, Phase
from farm.node.blob_cache import NodeCache
from farm.node.executor import Executor

COMPILER = Path(__file__).with_name("compiler.py")

farm = Farm.current()
current = threading.local()


class ScriptedExecutor(Executor):
    def execute(self, attempt: Attempt, *, on_phase: Any, cancelled: threading.Event) -> Outcome:
        current.step = step_of(attempt)
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


def publish(namespace: str, sidecar: Any, whole: Any = farm.artifacts.publish) -> Any:
    published = whole(namespace, sidecar)
    line = f"{sidecar['key']} {sidecar['job']} {sidecar['attempt']} {'adopted' if published.adopted else 'new'}\n"
    with (farm.settings.data_dir / "published").open("a") as file:
        file.write(line)
    return published


farm.artifacts.publish = publish  # type: ignore[method-assign]
cache = NodeCache(farm.settings.data_dir / "cache", limit=1 << 30, download=farm.artifacts.get_blob)
farm.__dict__["executor"] = ScriptedExecutor(farm.artifacts, cache, farm.settings)

from tasks.celery_app import app  # noqa: F401 - what Celery starts
