"""No-op jobs a second through the whole farm, against bare Celery on the same broker.

    python tests/benchmarks/noop_jobs.py [--jobs 500] [--rounds 5] [--slots 4]

A farm job is submitted, handed out, claimed, executed (by nothing), finished and reported; a bare one is sent by
`delay()` and run. Both use one worker process with a thread pool of the same size, in turns. The bare one has the
farm's settings, but for Celery's own acknowledgements, which are all that it has: the farm has its leases instead
(docs/decisions/0029). The target is half of bare Celery's rate; the farm's own time for a job that comes alone should
stay under 0.1 s.
"""

import argparse
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.local import servers  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from farm.store import Store, broker  # noqa: E402
from tests.support.jobs import Reports, control_plane, new_cell, running_worker, submit  # noqa: E402

bare = broker.make_celery(load_settings())
bare.conf.broker_transport_options["ack_emulation"] = True


@bare.task(name="bare.noop", queue="bare")
def noop(*_: object) -> None:
    pass


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=500)
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
    rates: dict[str, list[float]] = {"bare": [], "farm": []}
    with (
        bare_worker(settings, slots),
        running_worker(settings, store, slots=slots),
        control_plane(settings, store) as reports,
    ):
        runs: dict[str, Callable[[int], None]] = {
            "bare": partial(run_bare, store),
            "farm": partial(run_farm, store, reports),
        }
        for run in runs.values():
            run(20)
        for _ in range(rounds):
            for name, run in runs.items():
                rates[name].append(jobs / seconds(run, jobs))
        alone = statistics.median(seconds(runs["farm"], 1) for _ in range(20))
    for name, values in rates.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{name}: {median:.0f} jobs/s (median of {rounds} x {jobs} jobs; {low:.0f} to {high:.0f})")
    ratio = statistics.median(rates["farm"]) / statistics.median(rates["bare"])
    print(f"ratio: {ratio:.2f} (target 0.5)")
    print(f"one job alone, submitted to reported: {alone * 1000:.1f} ms (target 100)")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load}")


def seconds(run: Callable[[int], None], count: int) -> float:
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


def run_farm(store: Store, reports: Reports, count: int) -> None:
    """Submit one build; wait for its report."""
    reports.wait(submit(store, *[new_cell() for _ in range(count)]), timeout=300)


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


if __name__ == "__main__":
    main()
