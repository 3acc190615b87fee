"""No-op jobs a second through the whole farm, against bare Celery and Dramatiq on one broker; how long a slot waits.

    python tests/benchmarks/noop_jobs.py [--jobs 1000] [--rounds 5] [--slots 4]

A farm job is submitted, handed out, claimed, executed (by nothing), finished and reported; a bare one is sent by
`delay()` and run, and so is Dramatiq's by `send()` (left out if it is not installed). All use one worker process with
a thread pool of the same size, in turns. The bare one has the farm's settings, but for Celery's own acknowledgements,
which are all that it has: the farm has its leases instead (docs/decisions/0029). A slot's wait is the time from the end
of its job to the claim of the next, while others wait in the queue.
"""

import argparse
import heapq
import importlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.local import servers  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from farm.store import Store, broker  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.jobs import Reports, control_plane, new_cell, running_worker, submit  # noqa: E402

bare = broker.make_celery(load_settings())
bare.conf.broker_transport_options["ack_emulation"] = True


@bare.task(name="bare.noop", queue="bare")
def noop(*_: object) -> None:
    pass


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--slots", type=int, default=4)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = servers.start_valkey(Path(folder), secrets.token_hex(8))
        try:
            settings = load_settings(redis_url=server.url, data_dir=Path(folder), log_level="error")
            measure(settings, given.jobs, given.rounds, given.slots)
        finally:
            server.stop()


def measure(settings: Settings, jobs: int, rounds: int, slots: int) -> None:
    """Run both kinds in turns; print the median rates and their ratio."""
    bare.conf.broker_url = settings.redis_url.get_secret_value()
    store = Store.connect(settings)
    rates: dict[str, list[float]] = {"farm": [], "bare": []}
    waits = []
    with ExitStack() as stack:
        stack.enter_context(bare_worker(settings, slots))
        stack.enter_context(running_worker(settings, store, slots=slots))
        reports = stack.enter_context(control_plane(settings, store))
        runs: dict[str, Callable[[int], object]] = {
            "farm": partial(run_farm, store, reports),
            "bare": partial(run_bare, store),
        }
        if importlib.util.find_spec("dramatiq"):
            rates["dramatiq"] = []
            runs["dramatiq"] = stack.enter_context(dramatiq_worker(settings, store, slots))
        for run in runs.values():
            run(20)
        for _ in range(rounds):
            for name, run in runs.items():
                rates[name].append(jobs / seconds(run, jobs))
            waits.append(float(np.quantile(waits_of_slots(store, run_farm(store, reports, jobs), slots), 0.99)))
        alone = [1000 * seconds(runs["farm"], 1) for _ in range(20)]
    for name, values in rates.items():
        figure(f"no-op jobs: {name}", values, "1/s", more_is_better=True)
        if name != "farm":
            ratios = [ours / theirs for ours, theirs in zip(rates["farm"], values, strict=True)]
            figure(f"no-op jobs: farm against {name}", ratios, "x", more_is_better=True)
    more = [1000 / ours - 1000 / theirs for ours, theirs in zip(rates["farm"], rates["bare"], strict=True)]
    figure("no-op jobs: what a job of the farm takes more than a bare one", more, "ms", 1)
    figure(f"wait of a slot for its next job, p99, {jobs} waiting", waits, "ms", 50)
    figure("one no-op job alone, submitted to reported", alone, "ms", 100)


def waits_of_slots(store: Store, build: str, slots: int) -> list[float]:
    """Return for each job of a build, but for the first of each slot, how long a slot waited for it, in ms.

    The store does not say which slot a job had: it is the one that was free for the longest time.
    """
    jobs = [job for each in set(store.builds.jobs(build).values()) if (job := store.jobs.get(each))]
    free: list[float] = []
    found = []
    for started, ended in sorted((job["started_at"] or 0.0, job["ended_at"] or 0.0) for job in jobs):
        if len(free) == slots:
            found.append(1000 * max(0.0, started - heapq.heappop(free)))
        heapq.heappush(free, ended)
    return found


def seconds(run: Callable[[int], object], count: int) -> float:
    """Time one run."""
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


def run_bare(store: Store, count: int) -> None:
    """Send with delay(); wait until nothing is queued and nothing unacknowledged."""
    for number in range(count):
        noop.delay(f"j-{number:016x}", 1)
    while store._link.ask("LLEN", f"{broker.PREFIX}bare") or store._link.ask("HLEN", f"{broker.PREFIX}unacked"):
        time.sleep(0.001)


def run_farm(store: Store, reports: Reports, count: int) -> str:
    """Submit one build; wait for its report, and return its id."""
    build = submit(store, *[new_cell() for _ in range(count)])
    reports.wait(build, timeout=300)
    return build


@contextmanager
def bare_worker(settings: Settings, slots: int) -> Iterator[None]:
    """A plain Celery worker for the bare task."""
    command = [sys.executable, "-m", "celery", "-q", "-A", "tests.benchmarks.noop_jobs:bare", "worker", "-l", "ERROR"]
    command += ["-P", "threads", "-c", str(slots), "-Q", "bare"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT)})
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def dramatiq_worker(settings: Settings, store: Store, slots: int) -> Iterator[Callable[[int], None]]:
    """A Dramatiq worker; gives what sends so many messages, and waits until none is left."""
    url = settings.redis_url.get_secret_value()
    environ = {**os.environ, "DRAMATIQ_URL": url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dramatiq", "tests.support.dramatiq_noop", "-p", "1", "-t", str(slots)]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL)
    os.environ["DRAMATIQ_URL"] = url
    noop = importlib.import_module("tests.support.dramatiq_noop").noop

    def run(count: int) -> None:
        for number in range(count):
            noop.send(f"j-{number:016x}", 1)
        while store._link.ask("HLEN", "dramatiq:default.msgs"):
            time.sleep(0.001)

    try:
        yield run
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
