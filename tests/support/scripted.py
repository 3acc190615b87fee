"""A worker process whose executor follows a script instead of compiling: `python -m tasks tests.support.scripted …`.

A work order's `script` is a list of steps, one for each attempt (the last one repeats): `{"do": …}` with

    succeed             the attempt succeeds with `facts`
    fail                it fails with `kind` and `message`
    fail-on             it fails with `kind` on the node that is named `node`, and succeeds on others
    wait                it succeeds once the file `until` exists
    publish             as wait, but it leaves its slot before
    last                it succeeds after `seconds`
    hang                it goes on until it is cancelled
    child               as hang, with a guarded child process; `pid` names a file for its process id
    raise               the executor itself breaks
    exit                the whole worker process dies
"""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from farm.app import Farm
from farm.compiling.attempt import Attempt
from farm.jobs.state import FailureKind, Outcome, Phase
from tests.support.places import ROOT

GUARD = ROOT / "farm" / "local" / "server_guard.py"


class ScriptedExecutor:
    def execute(self, attempt: Attempt, *, on_phase: Any, cancelled: threading.Event) -> Outcome:
        script = attempt.order.get("script") or [{"do": "succeed"}]
        step = script[min(attempt.number, len(script)) - 1]
        return getattr(self, f"do_{step['do'].replace('-', '_')}")(step, attempt, on_phase, cancelled)

    def do_succeed(self, step: dict[str, Any], *_: Any) -> Outcome:
        return Outcome.success(step.get("facts", {"latency": 0.001}))

    def do_fail(self, step: dict[str, Any], *_: Any) -> Outcome:
        return Outcome.failure(FailureKind(step["kind"]), step.get("message", "as scripted"))

    def do_fail_on(self, step: dict[str, Any], attempt: Attempt, *_: Any) -> Outcome:
        return (self.do_fail if attempt.worker.startswith(f"{step['node']}-") else self.do_succeed)(step)

    def do_wait(self, step: dict[str, Any], attempt: Attempt, on_phase: Any, cancelled: threading.Event) -> Outcome:
        on_phase(Phase.COMPILING, 0.5, "waiting")
        while not Path(step["until"]).exists():
            if cancelled.wait(0.01):
                return Outcome.cancelled()
        return Outcome.success({"attempt": attempt.number})

    def do_publish(self, step: dict[str, Any], attempt: Attempt, on_phase: Any, cancelled: threading.Event) -> Outcome:
        on_phase(Phase.UPLOADING, None, "")
        attempt.leave()
        return self.do_wait(step, attempt, lambda *_: None, cancelled)

    def do_last(self, step: dict[str, Any], _: Any, __: Any, cancelled: threading.Event) -> Outcome:
        return Outcome.cancelled() if cancelled.wait(step["seconds"]) else Outcome.success({})

    def do_hang(self, _: Any, __: Any, on_phase: Any, cancelled: threading.Event) -> Outcome:
        on_phase(Phase.COMPILING, None, "")
        cancelled.wait()
        return Outcome.cancelled()

    def do_child(self, step: dict[str, Any], *rest: Any) -> Outcome:
        command = [sys.executable, "-c", "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"]
        with Path(step["pid"]).open("w") as out:
            child = subprocess.Popen([sys.executable, str(GUARD), "0", *command], stdin=subprocess.PIPE, stdout=out)
        try:
            return self.do_hang(step, *rest)
        finally:
            child.communicate()

    def do_raise(self, *_: Any) -> Outcome:
        raise ValueError("as scripted")

    def do_exit(self, *_: Any) -> Outcome:
        os._exit(42)


Farm.current().__dict__["executor"] = ScriptedExecutor()  # in place of the one that would need object storage

from tasks.celery_app import app  # noqa: E402, F401 - what Celery starts
