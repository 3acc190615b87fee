"""What a job costs in Redis and in object storage, once it has ended, and what its build's end costs the server.

    python tests/benchmarks/sizing.py [--jobs 1000]

One build of so many cells whose jobs are played: the records, plans, reports, sidecars and logs are real, a program has
100 bytes: add the size of your programs and logs. What Redis needs for itself and for the farm's scripts is left out: a
small build has gone all the way before.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

import redis

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.app import Farm  # noqa: E402
from farm.artifacts.storage import build_key  # noqa: E402
from farm.local import servers  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.api_farm import POOL, freeze_manifest  # noqa: E402
from tests.support.helpers import wait_until  # noqa: E402
from tests.support.played import Player  # noqa: E402

MANIFEST = """\
version: 1
name: sizing
targets: [onnxruntime/cpu]
models:
"""
MODEL = "  - {{name: net{first}, source: {{path: net.onnx}}, batches: [{batches}]}}\n"
MOST = 1000
"""Batches of one model."""


def measure(folder: Path, jobs: int) -> None:
    """Run the build, and print what it left."""
    keys = secrets.token_hex(8), secrets.token_hex(16)
    valkey = servers.start_valkey(folder / "valkey", secrets.token_hex(8))
    weed = servers.start_weed(folder / "weed", *keys, bucket="farm")
    try:
        settings = load_settings(
            {},
            data_dir=folder,
            redis_url=valkey.url,
            s3_endpoint=weed.url,
            s3_bucket="farm",
            s3_access_key=keys[0],
            s3_secret_key=keys[1],
            log_level="error",
        )
        farm, raw = Farm(settings), redis.Redis.from_url(valkey.url)
        player = Player(farm, [])
        player.join(POOL)
        spent: list[float] = []

        def used() -> int:
            wait_until(lambda: not raw.info("memory")["lazyfree_pending_objects"])
            return int(raw.info("memory")["used_memory"])

        def run(cells: range) -> list[int]:
            """Run a build of so many batches; return what is used before, while it waits, at its end, and packed."""
            models = [
                MODEL.format(first=first, batches=", ".join(map(str, range(first, min(first + MOST, cells.stop)))))
                for first in range(cells.start, cells.stop, MOST)
            ]
            frozen = freeze_manifest(folder, MANIFEST + "".join(models), "batch")
            for digest, path in frozen.files.items():
                farm.artifacts.put_blob_file(path, digest=digest)
            found = [used()]
            build = farm.builds.submit("main", frozen.submission, by="sizing")["id"]
            found.append(used())
            while farm.store.jobs.pending(POOL.name):
                player.work()
            began = time.process_time()
            farm.build_finisher.finish(build)
            spent.append(time.process_time() - began)
            found.append(used())
            farm.store.jobs.pack(build, farm.store.builds.jobs(build).values())
            farm.store.builds.pack(build)
            return [*found, used()]

        run(range(jobs + 1, jobs + 11))
        objects = set(stored(farm))
        before, queued, ended, packed = run(range(1, jobs + 1))
        report = farm.artifacts.get_object(build_key("main", farm.build_reader.list("main")[0]["id"], "report.json"))
        assert report
        began = time.process_time()
        json.loads(report.data)
        least = time.process_time() - began
        entries = [size for key, size in stored(farm).items() if key not in objects]
    finally:
        valkey.stop()
        weed.stop()
    figure("Redis, a waiting job", (queued - before) / jobs / 1000, "kB")
    figure("Redis, an ended job, for an hour", (ended - before) / jobs / 1000, "kB")
    figure("Redis, an ended job, then until keep_days", (packed - before) / jobs / 1000, "kB", 1.5)
    figure("server, judge a job at its build's end", spent[-1] / jobs * 1e6, "µs of CPU")
    figure("server, judge a build, against reading its report", spent[-1] / least, "x", 15)
    figure("objects in storage, a job", len(entries) / jobs, "")
    figure("bytes in storage, a job, without its program", (sum(entries) / jobs - 100) / 1000, "kB")


def stored(farm: Farm) -> dict[str, int]:
    """Return the sizes of the objects in storage."""
    entries = [*farm.artifacts.list_entries("ns/"), *farm.artifacts.list_entries("blobs/")]
    return {entry.key: entry.size for entry in entries}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=1000)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options.parse_args().jobs)
