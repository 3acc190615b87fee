"""A scripted compiler whose compile is a timer, for thousands of cheap attempts; all else of an attempt is real.

`python -m tasks tests.support.timed_compiler …` is a worker process with it, on Celery. `python -m
tests.support.timed_compiler WORKERS NODE` plays many workers in one process: each is a thread that takes messages from
the broker's queue as Celery does, and runs the real `Attempts` on them; their heartbeats are sent as a supervisor does.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

import redis

from farm.app import Farm
from farm.artifacts.sidecar import facts
from farm.compiling.attempt import Attempt
from farm.compiling.children import OnPhase
from farm.compiling.slots import ANYWHERE
from farm.jobs.state import Outcome, Phase
from farm.logging import configure
from farm.node.attempts import Attempts
from farm.store import broker
from tests.support.scripted_pool import POOL

MEAN = float(os.environ.get("TIMED_COMPILER_SECONDS", "1"))
"""Mean seconds of an attempt."""

SPREAD = float(os.environ.get("TIMED_COMPILER_SPREAD", "1"))
"""Standard deviation of the logarithm of the durations: with 1 most are short, and a few take ten times as long."""

SHARES = {
    Phase.FETCHING: 0.02,
    Phase.COMPILING: 0.6,
    Phase.VERIFYING: 0.08,
    Phase.MEASURING: 0.3,
}
"""What each phase takes of an attempt's time."""

PROGRAM = b"a program" * 1000


def seconds_of(key: str, mean: float = MEAN) -> float:
    """Seconds that the compile of a cache key takes: always the same, log-normal over the keys."""
    return mean * random.Random(key).lognormvariate(-(SPREAD**2) / 2, SPREAD)


class TimedExecutor:
    """Runs an attempt's phases by the clock, and publishes a program as any worker does."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm

    def execute(self, attempt: Attempt, *, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
        """Return a success after the attempt's time."""
        whole = seconds_of(attempt.key)
        for phase, share in SHARES.items():
            on_phase(phase, None, "")
            if cancelled.wait(share * whole):
                return Outcome.cancelled()
        on_phase(Phase.UPLOADING, None, "")
        artifacts = self._farm.artifacts
        program, size = artifacts.put_blob_bytes(attempt.key.encode() + PROGRAM)
        log, log_size = artifacts.put_blob_bytes(f"compiled in {whole:.3f} s\n".encode())
        sidecar: dict[str, Any] = {
            "schema": 1,
            "key": attempt.key,
            "namespace": attempt.namespace,
            "identifier": attempt.order["identifier"],
            "spec": attempt.order["spec"],
            "blobs": {
                "program": {"path": "program.onnx", "digest": program, "size": size},
                "log": {"path": "log.txt", "digest": log, "size": log_size},
            },
            "toolchain": attempt.order["spec"]["toolchain"],
            "device": {"arch": "cpu"},
            "verification": {"reference": "onnxruntime", "samples": 8, "errors": {"y": 1e-7}, "spread": {"y": 1.0}},
            "measurements": {"latency": {"median": 1e-3}},
            "phases": {phase.value: share * whole for phase, share in SHARES.items()},
            "node": attempt.worker,
            "created": datetime.now(UTC).isoformat(timespec="microseconds"),
            "build": attempt.build,
            "job": attempt.job_id,
        }
        made = artifacts.publish(attempt.namespace, sidecar)
        return Outcome.success(facts(made.sidecar), hit=made.adopted, log=log)


class PlayedWorker(threading.Thread):
    """One worker with one slot, without processes of its own."""

    def __init__(self, farm: Farm, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._farm = farm
        self.gaps: list[float] = []
        """Seconds between the end of an attempt and the claim of the next, while jobs waited."""

    def run(self) -> None:
        """Take messages until the process ends."""
        farm = self._farm
        attempts = Attempts(
            farm.store, TimedExecutor(farm), farm.settings, (ANYWHERE,), worker=self.name, node=self.name
        )
        server = redis.Redis.from_url(farm.settings.redis_url.get_secret_value())
        queue, ended = broker.PREFIX + POOL.name, math.inf
        while True:
            taken: Any = server.brpop([queue], timeout=1)
            if not taken:
                ended = math.inf  # Nothing waited.
                continue
            job_id, _, number = json.loads(taken[1])["headers"]["id"].rpartition(".")
            if math.isfinite(ended):
                self.gaps.append(time.monotonic() - ended)
            attempts.run(job_id, int(number))
            ended = time.monotonic()


def play(count: int, node: str) -> None:
    """Play so many workers for ever; print a line of JSON for each line that is read."""
    farm = Farm.current()
    configure(farm.settings)
    lease, every = farm.settings.lease_seconds, farm.settings.renew_seconds
    threading.stack_size(512 * 1024)
    workers = [PlayedWorker(farm, f"{node}-{number}") for number in range(count)]
    for worker in workers:
        document = {"id": worker.name, "node": worker.name, "slots": 1, "pools": [POOL.as_dict()]}
        farm.store.workers.register(document, ttl=lease)
        worker.start()

    def beat() -> None:
        while True:
            began = time.monotonic()
            for number, worker in enumerate(workers):
                farm.store.workers.heartbeat(worker.name)
                time.sleep(max(0.0, began + every * (number + 1) / count - time.monotonic()))

    threading.Thread(target=beat, daemon=True).start()
    for _ in sys.stdin:
        used = os.times()
        gaps = [gap for worker in workers for gap in worker.gaps]
        print(json.dumps({"cpu": used.user + used.system, "gaps": gaps}), flush=True)


if __name__ == "__main__":
    play(int(sys.argv[1]), sys.argv[2])
else:
    Farm.current().__dict__["executor"] = TimedExecutor(Farm.current())

    from tasks.celery_app import app  # noqa: F401 - what Celery starts
