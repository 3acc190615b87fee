"""How soon small builds start during a huge one, and what it loses to a stream of them.

    python tests/benchmarks/fair_turns.py [--slots 1 2 6] [--jobs 2000] [--builds 8] [--seconds 0.5]

Real Valkey, control plane and worker; the compiles only wait. First builds of three jobs are submitted behind the huge
one, at any moment of the jobs that run; then builds of one job in a stream: more than the pool can do, and half of what
it can. All times are the store's. A job length is the time from one claim of a slot to its next, so what the machine
adds to each job is in it. Fails where a small build starts later than two job lengths, or the huge one gets less than
a fifth.
"""

import argparse
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.local import servers  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from farm.store import Store  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.helpers import wait_until  # noqa: E402
from tests.support.jobs import Reports, control_plane, new_cell, running_worker, submit  # noqa: E402

STREAM_TURNS = 24
"""Job lengths that each stream lasts."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--slots", type=int, nargs="+", default=[1, 2, 6])
    options.add_argument("--jobs", type=int, default=2000)
    options.add_argument("--builds", type=int, default=8)
    options.add_argument("--seconds", type=float, default=0.5)
    given = options.parse_args()
    good = [measure(slots, given.jobs, given.builds, given.seconds) for slots in given.slots]
    raise SystemExit(not all(good))


def measure(slots: int, jobs: int, builds: int, seconds: float) -> bool:
    """Measure one pool and print its line; return whether it kept its promises."""
    with tempfile.TemporaryDirectory() as folder:
        server = servers.start_valkey(Path(folder), secrets.token_hex(8))
        try:
            settings = load_settings(redis_url=server.url, data_dir=Path(folder), log_level="error")
            store = Store.connect(settings)
            with running_worker(settings, store, slots=slots), control_plane(settings, store) as reports:
                return Farm(store, reports, slots, seconds).measure(jobs, builds)
        finally:
            server.stop()


class Farm:
    """A farm at work on a huge build."""

    def __init__(self, store: Store, reports: Reports, slots: int, seconds: float) -> None:
        self._store, self._reports, self._slots, self._seconds = store, reports, slots, seconds
        self._chance = random.Random(slots)

    def measure(self, jobs: int, builds: int) -> bool:
        huge = self._submit(jobs)
        wait_until(lambda: self._running() == self._slots, message="every slot is at work")
        small = []
        for _ in range(builds):
            time.sleep(self._chance.uniform(0, 2 * self._seconds))
            small.append(self._submit(3))
            self._reports.wait(small[-1], timeout=600)
        shares = [self._share_beside(huge, part) for part in (1.5, 0.5)]
        self._store.builds.cancel(huge)
        self._reports.wait(huge)
        first, third = self._waits(huge, small)
        name = f"{self._slots} slots, a small build behind a huge one"
        figure(f"{name}: first job", first, "job lengths", 2)
        figure(f"{name}: third job", third, "job lengths")
        figure(f"{name}: the huge one's share", shares, "x", 0.2, more_is_better=True)
        return max(first) <= 2 and min(shares) >= 0.2

    def _submit(self, jobs: int) -> str:
        script = [{"do": "last", "seconds": self._seconds}]
        return submit(self._store, *[new_cell(script=script) for _ in range(jobs)])

    def _running(self) -> int:
        return sum(pool["running"] for pool in self._store.workers.pools())

    def _done(self, build: str) -> int:
        row = self._store.builds.get(build)
        assert row
        return int(row["counts"]["succeeded"])

    def _share_beside(self, huge: str, part: float) -> float:
        """The huge build's share of what ends while a stream of builds wants `part` of the pool."""
        before, stream, start = self._done(huge), [], time.monotonic()
        while (elapsed := time.monotonic() - start) < STREAM_TURNS * self._seconds:
            if len(stream) < part * self._slots * elapsed / self._seconds:
                stream.append(self._submit(1))
            time.sleep(0.01)
        mine, others = self._done(huge) - before, sum(map(self._done, stream))
        for build in stream:
            self._store.builds.cancel(build)
        return mine / (mine + others)

    def _waits(self, huge: str, small: list[str]) -> tuple[list[float], list[float]]:
        """Job lengths until the first and the third job of each small build started, from its last job on."""
        builds = [self._jobs(build) for build in small]
        since = [max(job["created_at"] for job in jobs) for jobs in builds]
        begun = [sorted(job["started_at"] for job in jobs) for jobs in builds]
        everything = [job["started_at"] for jobs in (*builds, self._jobs(huge)) for job in jobs if job["started_at"]]
        span = sorted(start for start in everything if since[0] <= start <= begun[-1][-1])
        length = (span[-1] - span[0]) / (len(span) - 1) * self._slots
        first, third = ([(starts[n] - at) / length for starts, at in zip(begun, since, strict=True)] for n in (0, 2))
        return first, third

    def _jobs(self, build: str) -> list[dict[str, Any]]:
        found = (self._store.jobs.get(cell["job"]) for cell in self._store.builds.cells(build))
        return [job for job in found if job]


if __name__ == "__main__":
    main()
