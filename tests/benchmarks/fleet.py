"""A fleet of workers that speak the real protocol, whose compile is a timer: where throughput ends, and why.

    python tests/benchmarks/fleet.py [--workers 50,200] [--each 5] [--seconds 8] [--builds 5] [--real 2] [--players 1]
        [--models 10] [--precisions fp32,fp16] [--delay-ms 1] [--minutes M] [--json FILE]
    python tests/benchmarks/fleet.py --draw FILE.. --out PICTURE.svg

For each number of workers a farm is started (API, loops, Valkey and S3 server, all real), and so many played workers
with one slot (`tests/support/timed_compiler.py`: all but Celery's consumer is real), in `--players` processes; `--real`
of them are real Celery processes. They run `--each` jobs a worker in `--builds` builds, each `--seconds` long in the
mean, log-normal (TIMED_COMPILER_SPREAD, else 1, is the deviation of the logarithm), so that a run takes about EACH x
SECONDS. A build of 50,000 jobs: `--builds 1 --models 100 --precisions fp32,fp16,bf16`. With TIMED_COMPILER_BY_MODEL=1
durations depend on the model, and the farm has compiled each once before. When they are not known, the order alone
makes 1.15 to 1.25 of the bound (1,000 workers, 100 jobs each; 1.03 to 1.05 with 0.5). Somebody watches each build. With
`--delay-ms`, every byte between workers, players, server and client and Valkey, S3 server and API comes so much later
in each direction (`tests/support/delaying_proxy.py`).

Prints every 15 s what was done and what the parts used of a core, and at the end throughput, the makespan against its
lower bound, the time from the queue to the claim while slots are free, the gap of a slot between two jobs, requests for
each job, and what the API's answers and events took meanwhile. `--minutes`, or SIGTERM, ends a run early: its figures
are of the time that it had (`complete` is false), and it has no makespan.
"""

from __future__ import annotations

import argparse
import heapq
import io
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import redis
from pydantic import SecretStr

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient  # noqa: E402
from farm.client.freezing import freeze  # noqa: E402
from farm.errors import FarmError  # noqa: E402
from farm.local.embedded import BUCKET, EmbeddedFarm  # noqa: E402
from farm.local.servers import start_valkey, start_weed  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.benchmarks.ten_thousand import write_net  # noqa: E402
from tests.support.delaying_proxy import delaying  # noqa: E402
from tests.support.helpers import in_a_thread, wait_until  # noqa: E402
from tests.support.jobs import Worker  # noqa: E402
from tests.support.timed_compiler import BY_MODEL, seconds_of  # noqa: E402

EVERY = 15.0
"""Seconds between two lines of progress."""

PARTS = ("server", "valkey", "storage", "players")


SHORTER: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r'(?<=<g) id="[^"]*"|<!--.*?-->|(?<=\n) +| +(?=\n)', ""),
    (r"font-family: 'DejaVu Sans'; ", ""),
    (r"(?<=>\*\{)", "font-family: 'DejaVu Sans', sans-serif; "),
    (r' transform="rotate\(-0 [^"]*"', ""),
    (r'(<use [^>]*) style="stroke: #000000; stroke-width: 0.8"', r"\1"),
    (r"(?<![>\d])\d+\.\d+", lambda number: f"{float(number[0]):.1f}"),
)
"""What of a drawing is said twice, or finer than can be seen: it is more than half of the file."""


@dataclass(frozen=True)
class Run:
    """What one fleet did. Seconds, unless the name says else; `…_core` is a share of a core, over the whole run."""

    workers: int
    jobs: int
    delay_ms: float
    complete: bool
    """Whether all jobs ended; if not, everything is of those that did."""
    jobs_done: int
    seconds: float
    submitting: float
    jobs_per_second: float
    makespan_to_bound: float | None
    makespan_to_same_order: float | None
    """Against slots that take the same jobs in the same order without a pause: what is not due to the order."""
    slots_in_timers: float
    """Share of the slots' time that went into the timers alone: its inverse is the makespan against its mean."""
    claim_median: float | None
    claim_p99: float | None
    gap_median: float | None
    gap_p99: float | None
    commands_per_job: float
    round_trips_per_job: float
    """Reads of Valkey, one for each command or pipeline that somebody waits for."""
    storage_requests_per_job: float
    """Of the players and of the server."""
    valkey_core: float
    valkey_mb: float
    valkey_connections: int
    storage_core: float
    server_core: float
    server_ms_per_job: float
    players_core: float
    api_median: float | None
    api_p99: float | None
    event_lag_median: float | None
    event_lag_p99: float | None
    page_first: float | None
    """Until the page of the first build, which has ended, is there; then the same page again."""
    page_again: float | None
    commands: Mapping[str, float]
    """The job store's commands for each job, by name."""
    requests: Mapping[str, float]
    """What the played workers asked of the job store and of object storage for each job."""
    server_requests: Mapping[str, float]
    """The same of the server."""
    progress: Sequence[Mapping[str, float]]


class Stopped(Exception):
    """The run is over before its jobs are."""


def main() -> None:
    """Run each fleet and print its figures, or draw those of earlier runs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", default="50,200")
    options.add_argument("--each", type=int, default=5)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--builds", type=int, default=5)
    options.add_argument("--models", type=int, default=10)
    options.add_argument("--precisions", default="fp32")
    options.add_argument("--real", type=int, default=2)
    options.add_argument("--players", type=int, default=1)
    options.add_argument("--delay-ms", type=float, default=0.0)
    options.add_argument("--minutes", type=float, default=0.0)
    options.add_argument("--json", type=Path)
    options.add_argument("--draw", type=Path, nargs="+")
    options.add_argument("--out", type=Path, default=Path("fleet.svg"))
    given = options.parse_args()
    if given.draw:
        draw([run for path in given.draw for run in json.loads(path.read_text())], given.out)
        return
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}")
    runs: list[Run] = []
    ended = threading.Event()
    signal.signal(signal.SIGALRM, partial(_stop, threading.Event()))
    signal.signal(signal.SIGTERM, partial(_stop, ended))
    for workers in map(int, given.workers.split(",")):
        runs.append(fleet(workers, given))
        for name, value in asdict(runs[-1]).items():
            if isinstance(value, int | float):
                figure(f"{workers} workers, {given.each} jobs each: {name}", float(value), "")
        if given.json:
            given.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
        if ended.is_set():
            break


def _stop(ended: threading.Event, _: int, __: FrameType | None) -> None:
    ended.set()
    raise Stopped


def fleet(workers: int, given: argparse.Namespace) -> Run:
    """Start a farm with so many workers, have it make all jobs, and return what that took."""
    seconds, builds, real = given.seconds, given.builds, given.real
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = load_settings(data_dir=folder / "data", log_level="warning")
        up = started(settings, given.delay_ms, stack)
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
        if BY_MODEL:
            (first,) = write_manifests(folder, 1, 1, given, "learn")
            for _ in client.watch(client.submit(freeze(first))["id"]):
                pass
        variants = given.models * len(given.precisions.split(","))
        batches = max(1, workers * given.each // (builds * variants))
        jobs = builds * batches * variants
        manifests = write_manifests(folder, builds, batches, given)
        watched = Watched(client, redis.Redis.from_url(up.redis_url.get_secret_value()), players)
        print(f"{workers} workers, {jobs} jobs, delay {given.delay_ms:g} ms", flush=True)
        watched.begin()
        complete, submitting = False, 0.0
        with suppress(Stopped), in_a_thread(watched.sample), in_a_thread(watched.tell):
            signal.setitimer(signal.ITIMER_REAL, given.minutes * 60)
            for manifest in manifests:
                watched.follow(client.submit(freeze(manifest))["id"])
                submitting = time.monotonic() - watched.began
            while not watched.are_reported():
                time.sleep(0.1)
            complete = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        run = watched.run(workers, jobs, given.delay_ms, submitting, complete=complete)
        if not complete:
            return run
        cells = [cell for build in watched.builds for cell in client.report(build)["cells"]]
        durations = [seconds_of(cell["key"], cell["identifier"], seconds) for cell in watched.in_order_of_start(cells)]
        bound, same = max(sum(durations) / workers, *durations), makespan(durations, workers)
        return replace(
            run,
            makespan_to_bound=run.seconds / bound,
            makespan_to_same_order=run.seconds / same,
            page_first=page_seconds(up, watched.builds[0]),
            page_again=page_seconds(up, watched.builds[0]),
        )


def page_seconds(settings: Settings, build: str) -> float:
    """Seconds until a build's page is there."""
    began, headers = time.monotonic(), {"Authorization": f"Bearer {settings.api_token.get_secret_value()}"}
    with httpx.Client(base_url=settings.api_url, headers=headers, timeout=600) as browser:
        while (answer := browser.get(f"/ui/ns/main/builds/{build}")).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            time.sleep(0.1)
        answer.raise_for_status()
    return time.monotonic() - began


def makespan(durations: Iterable[float], workers: int) -> float:
    """Seconds that workers need which take jobs in this order, each as soon as it is free."""
    free = [0.0] * workers
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def started(settings: Settings, delay: float, stack: ExitStack) -> Settings:
    """Start a farm without workers; return the settings by which its parts are reached, so many milliseconds away."""
    if not delay:
        return stack.enter_context(EmbeddedFarm(settings, works=False))
    folder = settings.data_dir
    valkey = start_valkey(folder / "valkey-apart", "secret")
    stack.callback(valkey.stop)
    weed = start_weed(folder / "s3-apart", "key", "secret", bucket=BUCKET)
    stack.callback(weed.stop)

    def away(url: str) -> str:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        port = stack.enter_context(delaying(parts.hostname, parts.port, delay))
        return url.replace(f":{parts.port}", f":{port}")

    parts = {
        "redis_url": SecretStr(away(valkey.url)),
        "s3_endpoint": away(weed.url),
        "s3_bucket": BUCKET,
        "s3_access_key": SecretStr("key"),
        "s3_secret_key": SecretStr("secret"),
    }
    up = stack.enter_context(EmbeddedFarm(settings.model_copy(update=parts), works=False))
    return up.model_copy(update={"api_url": away(up.api_url)})


@contextmanager
def playing(settings: Settings, count: int, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that plays so many workers."""
    command = [sys.executable, "-m", "tests.support.timed_compiler", str(count), name]
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A signal for this benchmark is not one for them.
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Watched:
    """What is measured from outside while a fleet runs."""

    def __init__(self, client: FarmClient, server: redis.Redis, players: Sequence[subprocess.Popen[str]]) -> None:
        self.builds: list[str] = []
        self.began = 0.0
        self._client = client
        self._server = server
        self._players = players
        children = psutil.Process().children(recursive=True)
        self._processes = {
            name: [each for each in children if word in " ".join(each.cmdline())]
            for name, word in (("storage", "weed"), ("server", "farm serve"), ("players", "-m tests.support.timed_"))
        }
        self._before: dict[str, dict[str, float]] = {}
        self._answers: list[float] = []
        self._lags: list[float] = []
        self._most = (0.0, 0)
        self._progress: list[dict[str, float]] = []

    def begin(self) -> None:
        """Measure from now on."""
        self._before = self._counts()
        self.began = time.monotonic()

    def follow(self, build: str) -> None:
        """Watch a build, as who submitted it does."""

        def follow() -> None:
            # The farm ends before a build that is not waited for, and the client is closed.
            with suppress(FarmError, RuntimeError):
                for event in self._client.watch(build):
                    self._lags.append(time.time() - event["at"])

        self.builds.append(build)
        threading.Thread(target=follow, daemon=True).start()

    def are_reported(self) -> bool:
        """Whether all builds have their reports."""
        return all(state == b"reported" for state, *_ in self._states("state"))

    def in_order_of_start(self, cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return cells in the order in which their jobs were claimed."""
        found = list(cells)
        with self._server.pipeline(transaction=False) as pipeline:
            for cell in found:
                pipeline.hget(f"{{farm}}:job:{cell['job']}", "started_at")
            started = [int(at or 0) for at in pipeline.execute()]
        return [cell for _, cell in sorted(zip(started, found, strict=True), key=lambda pair: pair[0])]

    def sample(self, over: threading.Event) -> None:
        """Ask the API each second until `over`."""
        while not over.wait(1.0):
            if not self.builds:
                continue
            began = time.monotonic()
            self._client.build(self.builds[0])
            self._answers.append(time.monotonic() - began)
            info: Any = self._server.info()
            self._most = (max(self._most[0], info["used_memory"] / 1e6), max(self._most[1], info["connected_clients"]))

    def tell(self, over: threading.Event) -> None:
        """Print now and then how far it is, until `over`."""
        then, used, done, asked, heard = self.began, self._used(), 0, 0, 0
        while not over.wait(EVERY):
            now, using, jobs = time.monotonic(), self._used(), self._done()
            answers, lags = self._answers[asked:], self._lags[heard:]
            info: Any = self._server.info()
            row = {
                "seconds": now - self.began,
                "jobs": jobs,
                "jobs_per_second": (jobs - done) / (now - then),
                **{name: (using[name] - used[name]) / (now - then) for name in PARTS},
                "api": statistics.median(answers or [0.0]),
                "event_lag": statistics.median(lags or [0.0]),
                "valkey_mb": info["used_memory"] / 1e6,
            }
            asked, heard = asked + len(answers), heard + len(lags)
            then, used, done = now, using, jobs
            self._progress.append(row)
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)

    def run(self, workers: int, jobs: int, delay: float, submitting: float, *, complete: bool) -> Run:
        """Return what a fleet did until now."""
        took, done = time.monotonic() - self.began, self._done()
        after, said = self._counts(), self._said()
        spent = {
            kind: {name: value - self._before[kind].get(name, 0.0) for name, value in values.items()}
            for kind, values in after.items()
        }
        each = {
            kind: {name: round(value / max(done, 1), 3) for name, value in values.items() if value >= 0.01 * done}
            for kind, values in spent.items()
        }
        cores = {name: spent["cpu"][name] / took for name in PARTS}
        gaps = [gap for one in said for gap in one["gaps"]]
        claims = [claim for one in said for claim in one["claims"]]
        return Run(
            workers=workers,
            jobs=jobs,
            delay_ms=delay,
            complete=complete,
            jobs_done=done,
            seconds=took,
            submitting=submitting,
            jobs_per_second=done / took,
            makespan_to_bound=None,
            makespan_to_same_order=None,
            # Real workers sleep as much as played ones.
            slots_in_timers=sum(one["slept"] for one in said) / took / sum(one["workers"] for one in said),
            claim_median=_middle(claims),
            claim_p99=_late(claims),
            gap_median=_middle(gaps),
            gap_p99=_late(gaps),
            commands_per_job=spent["valkey"]["commands"] / max(done, 1),
            round_trips_per_job=spent["valkey"]["reads"] / max(done, 1),
            storage_requests_per_job=sum(
                value
                for kind in ("requests", "server_requests")
                for name, value in each[kind].items()
                if name.startswith("storage:")
            ),
            valkey_core=cores["valkey"],
            valkey_mb=self._most[0],
            valkey_connections=self._most[1],
            storage_core=cores["storage"],
            server_core=cores["server"],
            server_ms_per_job=1000 * spent["cpu"]["server"] / max(done, 1),
            players_core=cores["players"],
            api_median=_middle(self._answers),
            api_p99=_late(self._answers),
            event_lag_median=_middle(self._lags),
            event_lag_p99=_late(self._lags),
            page_first=None,
            page_again=None,
            commands=_sorted(each["commands"]),
            requests=_sorted(each["requests"]),
            server_requests=_sorted(each["server_requests"]),
            progress=self._progress,
        )

    def _counts(self) -> dict[str, dict[str, float]]:
        """Return what was used and asked so far."""
        info: Any = self._server.info("everything")
        said = self._said()
        names = {name for one in said for name in one["requests"]}
        return {
            "cpu": self._used(),
            "valkey": {"commands": info["total_commands_processed"], "reads": info["total_reads_processed"]},
            "commands": {
                name.removeprefix("cmdstat_"): stat["calls"]
                for name, stat in info.items()
                if name.startswith("cmdstat_")
            },
            "requests": {name: sum(one["requests"].get(name, 0.0) for one in said) for name in names},
            "server_requests": self._server_requests(),
        }

    def _server_requests(self) -> dict[str, float]:
        found = {}
        for line in self._client.transport.request("GET", "/metrics").text.splitlines():
            for what, start in (("store:", "farm_store_seconds_count{"), ("storage:", "farm_storage_seconds_count{")):
                if line.startswith(start):
                    found[f"{what} {line.split(chr(34))[1]}"] = float(line.split()[-1])
        return found

    def _used(self) -> dict[str, float]:
        """Return seconds of CPU of each part so far."""
        info: Any = self._server.info("cpu")
        used = {name: sum(map(_seconds, processes)) for name, processes in self._processes.items()}
        return {**used, "valkey": info["used_cpu_user"] + info["used_cpu_sys"]}

    def _states(self, *fields: str) -> list[list[Any]]:
        """Return fields of the builds' records."""
        with self._server.pipeline(transaction=False) as pipeline:
            for build in self.builds:
                pipeline.hmget(f"{{farm}}:build:{build}", *fields)
            return pipeline.execute()

    def _done(self) -> int:
        return sum(int(count or 0) for ended in self._states("n:succeeded", "n:failed") for count in ended)

    def _said(self) -> list[dict[str, Any]]:
        said = []
        for players in self._players:
            assert players.stdin
            assert players.stdout
            players.stdin.write("\n")
            players.stdin.flush()
            said.append(json.loads(players.stdout.readline()))
        return said


def _seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _late(values: Sequence[float]) -> float | None:
    return float(np.quantile(values, 0.99)) if values else None


def _sorted(counts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def write_manifests(
    folder: Path, builds: int, batches: int, given: argparse.Namespace, name: str = "fleet"
) -> list[Path]:
    """Write the models, and a manifest for each build that makes models x precisions x `batches` cells of its own."""
    entries, numbers = [], ", ".join(map(str, range(1, batches + 1)))
    for number in range(given.models):
        write_net(folder, number)
        entries.append(f"  - {{name: net{number}, source: {{path: net{number}.onnx}}, batches: [{numbers}]}}")
    head = f"version: 1\nname: {name}\ntargets: [onnxruntime/cpu]\nprecisions: [{given.precisions}]\nmodels:\n"
    manifests = []
    for number in range(builds):
        manifests.append(folder / f"{name}-{number}.yaml")
        manifests[-1].write_text(head + "\n".join(entries) + f"\nsalt: {name}-{number}\n")
    return manifests


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw runs against their workers if these differ, else the one with the most jobs against its jobs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Picture

    groups = {
        f"delay {delay:g} ms" if delay else "no delay": sorted(
            (run for run in runs if run["delay_ms"] == delay), key=lambda run: int(run["workers"])
        )
        for delay in sorted({run["delay_ms"] for run in runs})
    }
    panels: list[tuple[str, Mapping[str, Callable[[Mapping[str, Any]], Any]]]] = [
        ("jobs a second", {"": lambda run: run["jobs_per_second"]}),
        ("shares of a core", {name: lambda run, name=name: run[f"{name}_core"] for name in PARTS}),
        ("requests to Valkey for a job", {"": lambda run: run["round_trips_per_job"]}),
        ("queue to claim, ms", {"": lambda run: run["claim_median"] and run["claim_median"] * 1000}),
        ("API answer, ms", {"": lambda run: run["api_median"] and run["api_median"] * 1000}),
        ("event lag, ms", {"": lambda run: run["event_lag_median"] and run["event_lag_median"] * 1000}),
        ("Valkey, MB", {"": lambda run: run["valkey_mb"]}),
        ("Valkey, connections", {"": lambda run: run["valkey_connections"]}),
    ]
    longest = max(runs, key=lambda run: int(run["jobs_done"]))
    over: list[tuple[str, Sequence[str], float]] = [
        ("jobs a second", ["jobs_per_second"], 1.0),
        ("shares of a core", PARTS, 1.0),
        ("API answer and event lag, ms", ["api", "event_lag"], 1000.0),
        ("Valkey, MB", ["valkey_mb"], 1.0),
    ]
    style = {"svg.fonttype": "none", "svg.hashsalt": "fleet", "font.size": 8.0, "font.family": "DejaVu Sans"}
    with mpl.rc_context(style):
        if len({run["workers"] for run in runs}) == 1:
            panels = []
        else:
            over = []
        rows = max(1, len(panels) // 4)
        picture = Picture(figsize=(11, 0.3 + 2.2 * rows), layout="constrained")
        axes = list(picture.subplots(rows, 4).flat)
        for panel, (title, lines) in zip(axes, panels, strict=False):
            for (group, found), mark in zip(groups.items(), ("o-", "s--", "^:"), strict=False):
                for colour, (name, value) in enumerate(lines.items()):
                    points = [(run["workers"], value(run)) for run in found if value(run) is not None]
                    label = ", ".join(filter(None, [name, group if len(groups) > 1 else ""]))
                    panel.plot(*zip(*points, strict=True), mark, color=f"C{colour}", markersize=3, label=label)
            panel.set(title=title, xlabel="workers", ylim=(0, None))
            if len(lines) > 1 or len(groups) > 1:
                panel.legend(frameon=False, fontsize=6)
        for panel, (title, names, scale) in zip(axes[len(panels) :], over, strict=True):
            for name in names:
                panel.plot(
                    [row["jobs"] for row in longest["progress"]],
                    [row[name] * scale for row in longest["progress"]],
                    linewidth=1,
                    label=name.replace("_", " "),
                )
            panel.set(title=title, xlabel=f"jobs done by {longest['workers']} workers", ylim=(0, None))
            if len(names) > 1:
                panel.legend(frameon=False, fontsize=6)
        for panel in axes:
            panel.locator_params(nbins=4)
        drawn = io.StringIO()
        picture.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = drawn.getvalue()
    for pattern, shorter in SHORTER:
        text = re.sub(pattern, shorter, text)
    path.write_text(text)


if __name__ == "__main__":
    main()
