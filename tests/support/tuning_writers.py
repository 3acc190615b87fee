"""Writers of one tuning database, many at once or killed at a chosen step: for tests and benchmarks."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, cast

from farm.artifacts.s3 import S3Store
from farm.errors import FarmFault
from farm.tuning.database import Restored, TuningDatabase
from farm.tuning.formats import write_folder
from farm.tuning.records import Log, Record, RecordSource, RecordStore, Session, Snapshot, TuningWork

NAME = ("main", "migraphx-gfx942-304cu.rocm7.2-00000000", "gfx942-304cu-8xcc", "quick")


def delta(number: int, records: int = 3) -> Snapshot:
    """Return what the attempt of that number learnt: records of its own, and one that all attempts measure."""
    source = RecordSource(f"2026-01-01T00:00:{number % 60:02}+00:00", f"worker-{number}", f"job-{number}", seconds=2.0)
    session = Session(f"job-{number}/1", "2999-01-01T00:00:00+00:00", TuningWork(tuned=records, seconds=2.0 * records))
    keys = [f"own-{number}-{index}" for index in range(records - 1)] + ["shared"]
    entries = [
        Record(RecordStore.PROBLEM_CACHE, "", f'{{"name":"gpu::mlir_op","problem":"{key}"}}', f'"v4:{number}"', source)
        for key in keys
    ]
    return Snapshot.of(entries, Log({session.id: session}))


def restore(database: TuningDatabase, folder: Path) -> Restored:
    """Write what is known into a folder, as an attempt does; return it."""
    found = database.since(frozenset())
    write_folder(found.snapshot, folder)
    return found


def race(connect: Callable[[], S3Store], commits: int, *, committers: int, mergers: int) -> tuple[Snapshot, int]:
    """Let many commit while others merge all the time; return what all deltas come to, and the number of merges."""
    over, database = Event(), TuningDatabase(connect(), *NAME)

    def merge() -> int:
        merges = 0
        while not over.is_set():
            with suppress(FarmFault):  # Others were faster 64 times: the next round finds what is left.
                merges += database.merge()["deltas"] > 0
        return merges

    with ThreadPoolExecutor(committers) as writers, ThreadPoolExecutor(mergers) as merging:
        merges = [merging.submit(merge) for _ in range(mergers)]
        try:
            list(writers.map(lambda number: database.commit(delta(number)), range(commits)))
        finally:
            over.set()
        count = sum(done.result() for done in merges)
    return Snapshot().join(*map(delta, range(commits))), count


@dataclass
class DyingStore:
    """An artifact store whose process is killed when it has had so many requests answered and sends the next."""

    store: S3Store
    left: Iterator[int]

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self.store, verb)

        def request(*arguments: Any, **options: Any) -> Any:
            if next(self.left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return request


def merge_and_die(store: dict[str, str], answered: int) -> None:
    """Merge, but be killed after so many requests; ends normally where it needs fewer."""
    dying = DyingStore(S3Store(**store), itertools.count(answered, -1))
    TuningDatabase(cast("S3Store", dying), *NAME).merge()


def kill_writers(store: dict[str, str]) -> Iterator[bool]:
    """Kill a writer (a real process) at every step of a merge; yield after each whether there was such a step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["farm.artifacts.s3", "tests.support.tuning_writers"])
    for answered in itertools.count():
        writer = context.Process(target=merge_and_die, args=(store, answered))
        writer.start()
        writer.join()
        if writer.exitcode not in (0, -signal.SIGKILL):
            raise AssertionError(f"the writer failed with {writer.exitcode}")
        yield writer.exitcode != 0
        if writer.exitcode == 0:
            return
