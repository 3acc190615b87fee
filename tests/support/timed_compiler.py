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
from farm.compiling.attempt import ANYWHERE, Attempt
from farm.compiling.pipeline import OnPhase
from farm.jobs.state import Outcome, Phase
from farm.logging import configure
from farm.metrics.instruments import STORAGE_SECONDS, STORE_SECONDS
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


BY_MODEL = bool(os.environ.get("TIMED_COMPILER_BY_MODEL"))
"""Whether the models differ by SPREAD, and the compiles of one only by NOISE: then durations can be learnt."""

NOISE = 0.1


def seconds_of(key: str, identifier: str, mean: float = MEAN) -> float:
    """Seconds that the compile of a cell takes: always the same, log-normal over the cache keys or over the models."""
    if not BY_MODEL:
        return mean * random.Random(key).lognormvariate(-(SPREAD**2) / 2, SPREAD)
    of_model = random.Random(identifier.partition("/")[0]).lognormvariate(-(SPREAD**2) / 2, SPREAD)
    return mean * of_model * random.Random(key).lognormvariate(0, NOISE)


class TimedExecutor:
    """Runs an attempt's phases by the clock, and publishes a program as any worker does."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._ended = 0.0
        self._running: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def slept(self) -> float:
        """Return the seconds that all attempts together spent on nothing but their timers so far."""
        now = time.monotonic()
        with self._lock:
            return self._ended + sum(min(whole, now - began) for began, whole in self._running.values())

    def execute(self, attempt: Attempt, *, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
        """Return a success after the attempt's time."""
        whole = seconds_of(attempt.key, attempt.order["identifier"])
        with self._lock:
            self._running[attempt.job_id] = (time.monotonic(), whole)
        try:
            return self._execute(attempt, whole, on_phase, cancelled)
        finally:
            with self._lock:
                began, _ = self._running.pop(attempt.job_id)
                self._ended += min(whole, time.monotonic() - began)

    def _execute(self, attempt: Attempt, whole: float, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
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
            "seconds": whole,
            "model_size": sum(file["size"] for file in attempt.order["model"]["files"]),
            "phases": {phase.value: share * whole for phase, share in SHARES.items()},
            "node": attempt.worker,
            "created": datetime.now(UTC).isoformat(timespec="microseconds"),
            "build": attempt.build,
            "job": attempt.job_id,
        }
        made = artifacts.publish(attempt.namespace, sidecar)
        return Outcome.success(facts(made), hit=made["created"] != sidecar["created"], log=log)


class PlayedWorker(threading.Thread):
    """One worker with one slot, without processes of its own."""

    def __init__(self, farm: Farm, name: str, executor: TimedExecutor) -> None:
        super().__init__(name=name, daemon=True)
        self._farm = farm
        self._executor = executor
        self.gaps: list[float] = []
        """Seconds between the end of an attempt and the claim of the next, while jobs waited."""
        self.claims: list[float] = []
        """Seconds from when a job was queued to its claim, of the jobs that this worker waited for, its slot free."""

    def run(self) -> None:
        """Take messages until the process ends."""
        farm = self._farm
        attempts = Attempts(farm.store, self._executor, farm.settings, (ANYWHERE,), worker=self.name, node=self.name)
        server = redis.Redis.from_url(farm.settings.redis_url.get_secret_value())
        queue, ended = broker.PREFIX + POOL.name, math.inf
        while True:
            taken: Any = server.brpop([queue], timeout=1)
            if not taken:
                ended = math.inf  # Nothing waited.
                continue
            job_id, _, number = json.loads(taken[1])["headers"]["id"].rpartition(".")
            waited = math.isinf(ended)
            if not waited:
                self.gaps.append(time.monotonic() - ended)
            attempts.run(job_id, int(number))
            ended = time.monotonic()
            if waited:
                queued, started = server.hmget(f"{{farm}}:job:{job_id}", "queued_at", "started_at")
                if queued and started:
                    self.claims.append((int(started) - int(queued)) / 1000)


def play(count: int, node: str) -> None:
    """Play so many workers for ever; print a line of JSON for each line that is read."""
    farm = Farm.current()
    configure(farm.settings)
    lease, every = farm.settings.lease_seconds, farm.settings.renew_seconds
    threading.stack_size(512 * 1024)
    executor = TimedExecutor(farm)
    workers = [PlayedWorker(farm, f"{node}-{number}", executor) for number in range(count)]
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
        said = {
            "cpu": used.user + used.system,
            "workers": count,
            "slept": executor.slept(),
            "gaps": [gap for worker in workers for gap in worker.gaps],
            "claims": [claim for worker in workers for claim in worker.claims],
            "requests": requests(),
        }
        print(json.dumps(said), flush=True)


def requests() -> dict[str, float]:
    """Return how often this process asked the job store and object storage, by what for."""
    return {
        f"{what} {next(iter(sample.labels.values()))}": sample.value
        for what, histogram in (("store:", STORE_SECONDS), ("storage:", STORAGE_SECONDS))
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_count")
    }


if __name__ == "__main__":
    play(int(sys.argv[1]), sys.argv[2])
else:
    Farm.current().__dict__["executor"] = TimedExecutor(Farm.current())

    from tasks.celery_app import app  # noqa: F401 - what Celery starts
