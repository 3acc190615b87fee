"""No-op jobs a second through the whole farm, against bare Celery on the same broker: `python tests/benchmarks/noop_jobs.py`.

A farm job is submitted, handed out, claimed, executed (by nothing), finished and reported; a bare one is published by
`delay()` and run. Both use one worker process with the same thread pool, one after the other in turns. The target is half
of bare Celery's rate, which keeps the farm's own time well under 0.1 s a job.
"""

import argparse
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm import broker, embedded  # noqa: E402
from farm.control.loops import ControlPlane  # noqa: E402
from farm.pools import Pool, Target  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from farm.spec import Device  # noqa: E402
from farm.store import Store  # noqa: E402

POOL = Pool(Target("onnxruntime", "cpu"), "noop-00000000", Device("cpu"), recipe=1)
BARE = broker.PREFIX + "bare"

bare = broker.make_celery(load_settings())


@bare.task(name="bare.noop", queue="bare")
def noop(*_: object) -> None:
    """Does nothing."""


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--slots", type=int, default=4)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = embedded.start_valkey(Path(folder), secrets.token_hex(8))
        try:
            settings = load_settings(redis_url=server.url, data_dir=Path(folder), log_level="error")
            measure(settings, given.jobs, given.rounds, given.slots)
        finally:
            server.stop()


def measure(settings: Settings, jobs: int, rounds: int, slots: int) -> None:
    """Run both kinds in turns; print the median rates and their ratio."""
    bare.conf.broker_url = settings.redis_url.get_secret_value()
    app = broker.make_celery(settings)
    store = Store.connect(settings)
    rates: dict[str, list[float]] = {"bare": [], "farm": []}
    with worker_processes(settings, slots), control_plane(settings, store, app) as reported:
        runs: dict[str, Callable[[int], None]] = {
            "bare": partial(run_bare, store),
            "farm": partial(run_farm, store, reported),
        }
        for run in runs.values():
            run(20)
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(jobs)
                rates[name].append(jobs / (time.perf_counter() - start))
        start = time.perf_counter()
        for _ in range(20):
            run_farm(store, reported, 1)
        alone = (time.perf_counter() - start) / 20
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name}: {medians[name]:.0f} jobs/s (median of {rounds} x {jobs} jobs, {spread})")
    print(f"ratio: {medians['farm'] / medians['bare']:.2f} (target 0.5)")
    print(f"one job alone, submitted to reported: {alone * 1000:.1f} ms")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load}")


def run_bare(store: Store, count: int) -> None:
    """Publish with delay(), wait until nothing is queued and nothing unacknowledged."""
    for number in range(count):
        noop.delay(f"j-{number:016x}", 1)
    while store._link.ask("LLEN", BARE) or store._link.ask("HLEN", broker.PREFIX + "unacked"):
        time.sleep(0.001)


def run_farm(store: Store, reported: "Reported", count: int) -> None:
    """Submit one build, wait for its report."""
    build_id = f"b-{secrets.token_hex(8)}"
    store.builds.create({"id": build_id, "namespace": "main", "cells": count}, [[new_cell() for _ in range(count)]])
    reported.wait(build_id)


def new_cell() -> dict[str, object]:
    """A cell like a small real one, with a key of its own."""
    key = secrets.token_hex(32)
    return {
        "identifier": f"model/onnxruntime-cpu/fp32/{key[:8]}",
        "key": key,
        "namespace": "main",
        "pool": POOL.name,
        "priority": 0,
        "limits": {"time": 60.0, "memory": 0},
        "expected_seconds": None,
        "order": {"identifier": key[:8], "spec": {"filling": "x" * 1500}},
        "facts": None,
        "failure": None,
    }


class Reported:
    """Builds that the control plane reported."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids: set[str] = set()
        self._change = threading.Condition()

    def report(self, build_id: str) -> None:
        """Take the place of `Builds.finish`."""
        self._store.builds.mark_reported(build_id, {"exit_code": 0})
        with self._change:
            self._ids.add(build_id)
            self._change.notify_all()

    def wait(self, build_id: str) -> None:
        """Wait for a build."""
        with self._change:
            assert self._change.wait_for(lambda: build_id in self._ids, timeout=300), f"{build_id} was not reported"


@contextmanager
def control_plane(settings: Settings, store: Store, app: broker.Celery) -> Iterator[Reported]:
    """The control plane, in a thread, as in the server process."""
    reported = Reported(store)
    plane = ControlPlane(
        settings,
        store,
        send=partial(broker.dispatch, app),
        queued=partial(broker.queued, app),
        finish_build=reported.report,
        resume=lambda: None,
    )
    stop = threading.Event()
    thread = threading.Thread(target=plane.run, args=(stop,))
    thread.start()
    try:
        yield reported
    finally:
        stop.set()
        thread.join()


@contextmanager
def worker_processes(settings: Settings, slots: int) -> Iterator[None]:
    """A farm worker with its supervisor, and a bare Celery worker."""
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT)}
    start = f"from farm.worker import run_worker; from tests.benchmarks.noop_jobs import POOL; from farm.settings import "
    start += f"load_settings; run_worker(load_settings(), [POOL], slots={slots}, app='tests.scripted')"
    bare_worker = [sys.executable, "-m", "celery", "-A", "tests.benchmarks.noop_jobs:bare", "worker", "-P", "threads"]
    bare_worker += ["-c", str(slots), "-Q", "bare", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    processes = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for command in ([sys.executable, "-c", start], [*bare_worker, "-l", "ERROR"])
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
