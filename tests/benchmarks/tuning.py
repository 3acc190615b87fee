"""How fast the tuning database merges and restores, and whether anything is lost when many write at once.

    python tests/benchmarks/tuning.py [--records 400000] [--head 50] [--races 500] [--kills 40]

Each figure is taken in a process of its own, so its memory is its own; so is a baseline in the same run that
does with plain JSON what cannot be left out. The S3 server is an embedded SeaweedFS; a warm head is in its
page cache. It fails where a limit is exceeded (see LIMITS).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from farm.artifacts.s3 import S3Store
from farm.errors import FarmError
from farm.local import servers
from farm.tuning.database import TuningDatabase
from farm.tuning.formats import canonical, read_folder, write_folder
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from tests.benchmarks.figures import figure
from tests.support import tuning_writers

LIMITS = {"merge seconds": 20.0, "merge MiB": 1024.0, "restore seconds": 2.0, "records lost": 0, "corrupt heads": 0}
"""What was promised for the numbers that are the default, on a machine that does nothing else."""

POOL = ("main", "migraphx-gfx942-304cu.rocm7.2-00000000", "gfx942-304cu-8xcc", "quick")
FIND_DB = "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"
PERF_DB = "gfx942130.HIP.3_5_1_4dddc24.udb.txt"


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--head", type=int, default=50, help="MB of the files that are restored")
    parser.add_argument("--races", type=int, default=500, help="commits at once; 0 leaves them out")
    parser.add_argument("--kills", type=int, default=40, help="writers killed; 0 leaves them out")
    parser.add_argument("--one", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(MEASURES[options.one](options)))
        return
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        os.environ |= {"AWS_ACCESS_KEY_ID": secrets.token_hex(8), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
        keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        weed = servers.start_weed(options.folder / "s3", *keys, bucket="farm")
        options.endpoint = weed.url
        try:
            figures = report(options)
        finally:
            weed.stop()
    missed = [
        name for name, limit in LIMITS.items() if not figure(f"tuning: {name}", figures[name], "", limit).meets_goal
    ]
    if missed:
        sys.exit(f"more than promised: {', '.join(missed)}")


def report(options: argparse.Namespace) -> dict[str, float]:
    """Print each figure with its baseline; return those that have limits."""
    run("folders", options)
    merge, plain = run("merge", options), run("plain merge", options)
    print(f"merging {options.records} records from two folders into one: {merge['seconds']:.1f} s", end="")
    print(f" ({plain['seconds']:.1f} s for plain json load, dict update, dump: {ratio(merge, plain)}),", end="")
    print(f" {merge['rss']:.0f} MiB RSS ({plain['rss']:.0f})")
    run("head", options)
    restore, plain = run("restore", options), run("plain restore", options)
    print(f"restoring {restore['size'] / 1e6:.0f} MB of files, {restore['records']} records:", end="")
    print(f" {restore['seconds']:.2f} s ({plain['seconds']:.2f} s for plain json load and dump:", end="")
    print(f" {ratio(restore, plain)}), {restore['rss']:.0f} MiB RSS ({plain['rss']:.0f})")
    figures = {"merge seconds": merge["seconds"], "merge MiB": merge["rss"], "restore seconds": restore["seconds"]}
    figures |= {"records lost": 0, "corrupt heads": 0}
    if options.races:
        raced = run("race", options)
        print(
            f"{options.races} commits at once, 4 writers merging ({raced['merges']} merges, {raced['seconds']:.0f} s):"
        )
        print(f"  {raced['lost']} records lost, {raced['sessions']} sessions counted")
        figures["records lost"] += raced["lost"]
    if options.kills:
        killed = run("kill", options)
        print(f"{killed['kills']} writers killed with SIGKILL, one at each request of a merge in turn:", end="")
        print(f" {killed['corrupt']} corrupt heads, {killed['lost']} records lost")
        figures["records lost"] += killed["lost"]
        figures["corrupt heads"] = killed["corrupt"]
    return figures


def ratio(ours: dict[str, Any], plain: dict[str, Any]) -> str:
    """Say how often ours takes as long on a CPU: what other processes do meanwhile says nothing of it."""
    return f"{ours['cpu']:.1f} against {plain['cpu']:.1f} s of CPU, {ours['cpu'] / plain['cpu']:.2f} times"


def run(name: str, options: argparse.Namespace) -> Any:
    """Take one measure in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--folder", str(options.folder)]
    command += ["--endpoint", options.endpoint, "--records", str(options.records), "--head", str(options.head)]
    command += ["--races", str(options.races), "--kills", str(options.kills)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])  # Before it, the farm's own log.


def workload(number: int) -> tuple[dict[str, Any], str]:
    """Return an entry of a problem cache that looks like those of rocMLIR."""
    problem = f"gfx942:sramecc+:xnack-\t304\t8\tconv -F 1 -f GNC01 -I NGC01 -O NGC01 --n {number} --c 64 --H 56 --W 56"
    return {"name": "gpu::mlir_op", "problem": problem}, f"v4:64,{number % 256},8,16,16,1,1,1,1"


def two_folders(options: argparse.Namespace) -> list[Path]:
    """Write what two attempts left: half the records are in both."""
    folders = []
    for part, (first, last) in enumerate([(0, 2), (1, 3)]):
        folder = options.folder / f"part{part}"
        folders.append(folder)
        if folder.exists():
            continue
        third = options.records // 3
        source = RecordSource("2026-01-01T00:00:00+00:00", "worker", f"job{part}")
        records = []
        for number in range(first * third, last * third):
            key, solution = workload(number)
            records.append(Record(RecordStore.PROBLEM_CACHE, "", canonical(key), canonical(solution), source))
        write_folder(Snapshot.of(records), folder)
    return folders


def merge(options: argparse.Namespace) -> dict[str, float]:
    """Read both folders, merge them through the database, write the result."""
    folders = two_folders(options)
    database = TuningDatabase(store(options), "main", *POOL[1:3], "merge")

    def work() -> None:
        for number, folder in enumerate(folders):
            database.commit(read_folder(folder, RecordSource(f"2026-01-0{number + 1}")).snapshot)
        database.merge()
        tuning_writers.restore(database, options.folder / "merged")

    return measured(work)


def plain_merge(options: argparse.Namespace) -> dict[str, float]:
    """Do the same with nothing but dicts."""
    folders = two_folders(options)

    def work() -> None:
        known: dict[str, Any] = {}
        for folder in folders:
            for key, solution in json.loads((folder / "problem_cache.json").read_text()):
                known.setdefault(json.dumps(key), solution)
        entries = [[json.loads(key), solution] for key, solution in known.items()]
        (options.folder / "plain.json").write_text(json.dumps(entries))

    return measured(work)


def head(options: argparse.Namespace) -> dict[str, float]:
    """Make a head whose files have so many MB."""
    records, size, number = [], 0, 0
    source = RecordSource("2026-01-01T00:00:00+00:00", "worker", "job")
    while size < options.head * 1e6:
        key, solution = workload(number)
        record = Record(RecordStore.PROBLEM_CACHE, "", canonical(key), canonical(solution), source)
        records.append(record)
        size += len(record.key) + len(record.value)
        if number % 4 == 0:
            contents = f"ConvBinWinogradRxSf2x3g1:{number % 97 / 100 + 0.01},0,miopenConvolutionFwdAlgoWinograd"
            records.append(
                Record(RecordStore.FIND_DB, FIND_DB, f"64-56-56-3x3-{number}-56-56-1-NCHW-FP16-F", contents, source)
            )
            size += len(contents) + 40
        number += 1
    database = TuningDatabase(store(options), *POOL)
    database.commit(Snapshot.of(records))
    return {"records": database.merge()["records"]}


def restore(options: argparse.Namespace) -> dict[str, float]:
    """Restore that head into an empty folder."""
    database, folder = TuningDatabase(store(options), *POOL), options.folder / "restored"
    figures = measured(lambda: tuning_writers.restore(database, folder))
    records = len(read_folder(folder, RecordSource("")).snapshot)
    return {**figures, "size": sum(path.stat().st_size for path in folder.iterdir()), "records": records}


def plain_restore(options: argparse.Namespace) -> dict[str, float]:
    """Load and dump the restored problem cache."""
    path = options.folder / "restored" / "problem_cache.json"
    return measured(lambda: (options.folder / "plain.json").write_text(json.dumps(json.loads(path.read_text()))))


def race(options: argparse.Namespace) -> dict[str, float]:
    """Let many commit at once while others merge; count what is missing after one more merge."""
    start = time.perf_counter()
    connection = store(options)
    expected, merges = tuning_writers.race(lambda: connection, options.races, committers=32, mergers=4)
    seconds = time.perf_counter() - start
    database = TuningDatabase(connection, *tuning_writers.NAME)
    database.merge()
    found = database.read().snapshot
    return {
        "seconds": seconds,
        "merges": merges,
        "lost": len(expected.minus(found)),
        "sessions": found.log.total().sessions,
    }


def kill(options: argparse.Namespace) -> dict[str, int]:
    """Kill writers at every step, round after round; after each kill look at the head, and for what is missing."""
    connection = store(options)
    database = TuningDatabase(connection, *tuning_writers.NAME)
    database.delete()
    figures = {"kills": 0, "corrupt": 0, "lost": 0}
    committed = 0
    while figures["kills"] < options.kills:
        keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
        for killed in tuning_writers.kill_writers({"bucket": "farm", "endpoint": options.endpoint, **keys}):
            figures["kills"] += killed
            try:
                found = database.read().snapshot
            except FarmError:
                figures["corrupt"] += 1
                continue
            expected = Snapshot().join(*map(tuning_writers.delta, range(committed)))
            figures["lost"] += len(expected.minus(found))
            for _ in range(2):
                database.commit(tuning_writers.delta(committed))
                committed += 1
            if killed and figures["kills"] % 3 == 0:
                database.merge()
    return figures


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Run something once; return its seconds, those of them on a CPU, and the process's highest memory in MiB."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    figures = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    return {**figures, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def store(options: argparse.Namespace) -> S3Store:
    """Return the artifact store on the benchmark's server."""
    return S3Store(
        bucket="farm",
        endpoint=options.endpoint,
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
    )


MEASURES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "folders": lambda options: [str(path) for path in two_folders(options)],
    "merge": merge,
    "plain merge": plain_merge,
    "head": head,
    "restore": restore,
    "plain restore": plain_restore,
    "race": race,
    "kill": kill,
}

if __name__ == "__main__":
    main()
