"""What a death loses of tuning, and what a second model saves: a scripted tuner, a real database, real kills.

    python tests/benchmarks/tuning_kills.py [--kills 100] [--operations 40] [--slots 1]

Workers that tune slice by slice are killed (SIGKILL) at random points; the next one goes on from the database. Printed:
the candidates that each kill lost, how many deltas could not be read (a head that cannot ends the run), and what a
model costs that shares 80 % of its operations with one that was tuned, none of its slices being the same. The S3 server
is an embedded SeaweedFS.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from farm.artifacts.s3 import S3Store
from farm.compiling.attempt import FreeSlots, Slot
from farm.local import servers
from farm.settings import Settings, load_settings
from farm.tuning import search
from farm.tuning.records import RecordStore
from tests.benchmarks.figures import figure
from tests.support.scripted_tuner import CANDIDATES, PER_SLICE, database, save_model, tried, tuner_for, worked


class Kills(NamedTuple):
    """What a number of kills came to: candidates that each lost, and deltas that could not be read."""

    kills: int
    lost: list[int]
    models: int
    records: int
    deltas: int
    unreadable: frozenset[str]


def tune(artifacts: S3Store, settings: Settings, folder: Path, name: str, model: Path, slots: int = 1) -> None:
    """Tune a model in this process, in so many slots."""
    free = FreeSlots([Slot(f"GPU-{index}") for index in range(slots)])
    with free.one(threading.Event()) as slot:
        assert slot
        search.COLLECT_SECONDS = 0.5
        tuner = tuner_for(artifacts, settings, folder, name, slot=slot, free=free)
        tuner.compile(model, None)


def kill_at_random(settings: Settings, folder: Path, *, kills: int, operations: int, slots: int = 1) -> Kills:
    """Tune models in processes that are killed at a random point, one after the other, until so many were.

    It goes on until a delta was merged, too: on a busy machine the first kills may all come before a slice is kept.

    Raises ArtifactGone for a head that cannot be read, AssertionError for a record that is lost.
    """
    artifacts = S3Store.from_settings(settings)
    chance = random.Random(7)
    lost: list[int] = []
    unreadable: set[str] = set()
    models = attempts = known = deltas = 0
    while len(lost) < kills or not deltas:
        models += 1
        model = save_model(folder / f"model-{models}", [f"{models}-{index}" for index in range(operations)])
        ended = False
        while not ended and (len(lost) < kills or not deltas):
            attempts += 1
            before = worked(model)
            pid = os.fork()
            if pid == 0:
                try:
                    tune(S3Store.from_settings(settings), settings, folder, f"attempt-{attempts}", model, slots)
                finally:
                    os._exit(0 if sys.exc_info()[0] is None else 1)
            more = chance.randrange(operations * CANDIDATES // 2)
            ended = _wait(pid, model, before + more, chance.uniform(0, 0.3))
            if chance.random() < 0.3 or len(lost) + 1 >= kills:
                merged = database(artifacts).merge()
                deltas += merged["deltas"]
                unreadable |= {*merged["unreadable"]}
            found = database(artifacts).read().snapshot.counts()[RecordStore.PROBLEM_CACHE]
            assert found >= known, f"{known - found} records are lost"
            if not ended:
                lost.append(worked(model) - before - (found - known) * CANDIDATES)
            known = found
    return Kills(len(lost), lost, models, known, deltas, frozenset(unreadable))


def _wait(pid: int, model: Path, candidates: int, seconds: float) -> bool:
    """Kill the process that tunes a model, some seconds after so many candidates; say whether it ended before."""
    end = math.inf
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        if end == math.inf and tried(model) >= candidates:
            end = time.monotonic() + seconds
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def second_model(settings: Settings, folder: Path, operations: int, slowest: float) -> tuple[float, float]:
    """Return candidates and seconds of a model that shares 80 % of its operations, as parts of one that shares none."""
    artifacts = S3Store.from_settings(settings)
    names = [f"shared-{index}" for index in range(operations)]
    # Every fifth is new, so that no slice is one that was tuned.
    other = [f"new-{index}" if index % 5 == 0 else name for index, name in enumerate(names)]
    figures = []
    for name, model in (("first", names), ("second", other)):
        path = save_model(folder / name, model, slowest)
        started = time.monotonic()
        tune(artifacts, settings, folder, f"attempt-{name}", path)
        figures.append((worked(path), time.monotonic() - started))
    (work, seconds), (again, then) = figures
    return again / work, then / seconds


@contextmanager
def storage_of_its_own() -> Iterator[Settings]:
    """Settings with a folder that goes afterwards and an S3 server in it."""
    with tempfile.TemporaryDirectory() as name:
        access, secret = secrets.token_hex(8), secrets.token_hex(16)
        server = servers.start_weed(Path(name) / "s3", access, secret, bucket="farm")
        try:
            yield load_settings(
                {},
                data_dir=Path(name),
                s3_endpoint=server.url,
                s3_access_key=access,
                s3_secret_key=secret,
                s3_bucket="farm",
            )
        finally:
            server.stop()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--operations", type=int, default=40)
    parser.add_argument("--slots", type=int, default=1, help="how many slots tune a model at once")
    arguments = parser.parse_args()
    with storage_of_its_own() as settings:
        folder = settings.data_dir
        kills = kill_at_random(
            settings, folder, kills=arguments.kills, operations=arguments.operations, slots=arguments.slots
        )
        most = max(kills.lost)
        in_hand = PER_SLICE * CANDIDATES * arguments.slots
        print(f"kills                        {kills.kills}, {kills.models} models of {arguments.operations}")
        print(f"at most {most} candidates lost, {in_hand} in hand; more than {kills.deltas} deltas merged")
        figure("candidates that a death loses", kills.lost, "", in_hand)
        figure("deltas that cannot be read", len(kills.unreadable), "", 0)
        print(f"records in the head          {kills.records}, none lost")
        work, time_ = second_model(settings, folder, arguments.operations, slowest=0.2)
        figure("a second model that shares 80 % of its operations: work", work, "x")
        figure("the same: time", time_, "x", 0.25)
    if most > in_hand or time_ > 0.25 or kills.unreadable:
        sys.exit("more was lost, or less saved, than promised")


if __name__ == "__main__":
    main()
