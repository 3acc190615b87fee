"""A fleet of workers that speak the real protocol, whose compile is a timer: where throughput ends, and why.

    python tests/benchmarks/fleet.py [--workers 50,200] [--each 5] [--seconds 8] [--builds 5] [--real 2] [--json FILE]
        [--players 1]

For each number of workers a farm is started (API, loops, Valkey and S3 server, all real), and so many played workers
with one slot (`tests/support/timed_compiler.py`: all but Celery's consumer is real), in `--players` processes; `--real`
of them are real Celery processes. They run `--each` jobs a worker in `--builds` builds, each `--seconds` long in the
mean, log-normal (TIMED_COMPILER_SPREAD, else 1, is the deviation of the logarithm), so that a run takes about EACH x
SECONDS. Prints throughput, the makespan against its lower bound, the gap of a slot between two jobs, requests to the
job store for each job, what Valkey, the S3 server, the farm's server and the players used of a core, and what the API's
answers and events took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient, freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from tests.benchmarks.ten_thousand import write_net  # noqa: E402
from tests.support.helpers import in_a_thread, wait_until  # noqa: E402
from tests.support.jobs import Worker  # noqa: E402
from tests.support.timed_compiler import seconds_of  # noqa: E402

MODELS = 10


@dataclass(frozen=True)
class Run:
    """What one fleet did."""

    workers: int
    jobs: int
    seconds: float
    jobs_per_second: float
    makespan_to_bound: float
    gap_median: float
    gap_p99: float
    commands_per_job: float
    valkey_core: float
    valkey_mb: float
    valkey_connections: int
    storage_core: float
    server_core: float
    players_core: float
    api_median: float
    api_p99: float
    event_lag_median: float
    event_lag_p99: float


def main() -> None:
    """Run each fleet and print its line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", default="50,200")
    options.add_argument("--each", type=int, default=5)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--builds", type=int, default=5)
    options.add_argument("--real", type=int, default=2)
    options.add_argument("--players", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}")
    runs = []
    for workers in map(int, given.workers.split(",")):
        runs.append(fleet(workers, given))
        for name, value in asdict(runs[-1]).items():
            print(f"  {name:20} {value:10.4g}", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def fleet(workers: int, given: argparse.Namespace) -> Run:
    """Start a farm with so many workers, have it make all jobs, and return what that took."""
    seconds, builds, real = given.seconds, given.builds, given.real
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = load_settings(data_dir=folder / "data", log_level="warning")
        up = stack.enter_context(EmbeddedFarm(settings, works=False))
        client = stack.enter_context(FarmClient.from_settings(up))
        os.environ["TIMED_COMPILER_SECONDS"] = str(seconds)
        stack.callback(os.environ.pop, "TIMED_COMPILER_SECONDS")
        played = workers - real
        counts = [played * (n + 1) // given.players - played * n // given.players for n in range(given.players)]
        players = [stack.enter_context(playing(up, count, f"played-{number}")) for number, count in enumerate(counts)]
        for number in range(real):
            worker = Worker(up, f"real-{number}", 1, app="tests.support.timed_compiler")
            stack.callback(worker.kill)
        wait_until(
            lambda: sum(pool["live_workers"] for pool in client.pools.all()) == workers,
            timeout=300,
            message="all workers",
        )
        manifests = write_manifests(folder, builds, workers * given.each // (builds * MODELS))
        server = redis.Redis.from_url(up.redis_url.get_secret_value())
        watched = Watched(client, server, players)
        began = time.monotonic()
        before = watched.used()
        with in_a_thread(watched.sample):
            ids = []
            for manifest in manifests:
                ids.append(client.submit(freeze(manifest))["id"])
                watched.build = ids[0]
            for build in ids:
                for _ in client.watch(build):
                    pass
        took = time.monotonic() - began
        cells = [cell for build in ids for cell in client.report(build)["cells"]]
        return watched.run(workers, before, took, [seconds_of(cell["key"], seconds) for cell in cells])


@contextmanager
def playing(settings: Settings, count: int, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that plays so many workers."""
    command = [sys.executable, "-m", "tests.support.timed_compiler", str(count), name]
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Watched:
    """What is measured from outside while a fleet runs."""

    def __init__(self, client: FarmClient, server: redis.Redis, players: Sequence[subprocess.Popen[str]]) -> None:
        self.build = ""
        self._client = client
        self._server = server
        self._players = players
        self._processes = {
            name: [each for each in psutil.Process().children(recursive=True) if word in " ".join(each.cmdline())]
            for name, word in (("storage", "weed"), ("server", "farm serve"))
        }
        self._answers: list[float] = []
        self._lags: list[float] = []
        self._most = (0.0, 0)

    def sample(self, over: threading.Event) -> None:
        """Ask the API each second, and follow the first build's events, until `over`."""

        def follow() -> None:
            wait_until(lambda: self.build, timeout=300)
            for event in self._client.watch(self.build):
                self._lags.append(time.time() - event["at"])

        threading.Thread(target=follow, daemon=True).start()
        while not over.wait(1.0):
            if not self.build:
                continue
            began = time.monotonic()
            self._client.build(self.build)
            self._answers.append(time.monotonic() - began)
            info: Any = self._server.info()
            self._most = (max(self._most[0], info["used_memory"] / 1e6), max(self._most[1], info["connected_clients"]))

    def used(self) -> dict[str, float]:
        """Return seconds of CPU of each part so far, and the number of the job store's commands."""
        info: Any = self._server.info()
        used = {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }
        return {
            **used,
            "valkey": info["used_cpu_user"] + info["used_cpu_sys"],
            "commands": info["total_commands_processed"],
            "players": sum(said["cpu"] for said in self._said()),
        }

    def run(self, workers: int, before: dict[str, float], took: float, durations: Sequence[float]) -> Run:
        """Return what a fleet did whose jobs took these seconds each."""
        after = self.used()
        spent = {name: (after[name] - before[name]) / took for name in after}
        gaps = [gap for said in self._said() for gap in said["gaps"]]
        return Run(
            workers=workers,
            jobs=len(durations),
            seconds=took,
            jobs_per_second=len(durations) / took,
            makespan_to_bound=took / max(sum(durations) / workers, *durations),
            gap_median=statistics.median(gaps),
            gap_p99=float(np.quantile(gaps, 0.99)),
            commands_per_job=spent["commands"] * took / len(durations),
            valkey_core=spent["valkey"],
            valkey_mb=self._most[0],
            valkey_connections=self._most[1],
            storage_core=spent["storage"],
            server_core=spent["server"],
            players_core=spent["players"],
            api_median=statistics.median(self._answers),
            api_p99=float(np.quantile(self._answers, 0.99)),
            event_lag_median=statistics.median(self._lags),
            event_lag_p99=float(np.quantile(self._lags, 0.99)),
        )

    def _said(self) -> list[dict[str, Any]]:
        said = []
        for players in self._players:
            assert players.stdin
            assert players.stdout
            players.stdin.write("\n")
            players.stdin.flush()
            said.append(json.loads(players.stdout.readline()))
        return said


def write_manifests(folder: Path, builds: int, batches: int) -> list[Path]:
    """Write the models, and a manifest for each build that makes MODELS x `batches` cells of its own."""
    entries, numbers = [], ", ".join(map(str, range(1, batches + 1)))
    for number in range(MODELS):
        write_net(folder, number)
        entries.append(f"  - {{name: net{number}, source: {{path: net{number}.onnx}}, batches: [{numbers}]}}")
    head = "version: 1\nname: fleet\ntargets: [onnxruntime/cpu]\nprecisions: [fp32]\nmodels:\n"
    manifests = []
    for number in range(builds):
        manifests.append(folder / f"fleet-{number}.yaml")
        manifests[-1].write_text(head + "\n".join(entries) + f"\nsalt: fleet-{number}\n")
    return manifests


if __name__ == "__main__":
    main()
