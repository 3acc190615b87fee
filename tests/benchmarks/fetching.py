"""How fast the client fetches: a large program for the first time against boto3, and a small one that it has kept.

    python tests/benchmarks/fetching.py [--size 500] [--rounds 7]

The client hashes every byte, keeps the program in its cache and writes it into a folder; boto3's `download_file` runs
with its defaults and hashes nothing. Each measurement is a process of its own on the same embedded SeaweedFS; a pair is
in either order. The interval is of the median ratio, 95 %, by bootstrap. Also: verifying a program of that size against
hashing it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from farm.local import servers
from tests.benchmarks.figures import figure

BUCKET = "farm"


def main() -> None:
    """Run all rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=500, help="MB")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": secrets.token_hex(8), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weed = servers.start_weed(folder / "s3", *keys, bucket=BUCKET)
        try:
            report(folder, weed.url, options)
        finally:
            weed.stop()


def report(folder: Path, endpoint: str, options: argparse.Namespace) -> None:
    """Measure pairs, then what the cache has."""
    large, small = (publish(folder, endpoint, size) for size in (options.size * 10**6, 5 * 10**6))
    pairs = []
    for number in range(options.rounds):
        took = {}
        for kind in ("farm", "boto3") if number % 2 else ("boto3", "farm"):
            os.sync()  # Nobody pays for what another has left to write.
            took[kind] = run(kind, folder, endpoint, large)
            shutil.rmtree(folder / "cache", ignore_errors=True)
        pairs.append((took["farm"], took["boto3"]))
    for who, took in zip(("farm", "boto3"), zip(*pairs, strict=True), strict=True):
        speeds = [options.size / each.seconds for each in took]
        figure(f"{who}: first fetch of {options.size} MB", speeds, "MB/s", more_is_better=True)
        figure(f"{who}: processor for it", [each.processor for each in took], "s")
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    figure("first fetch, every byte hashed, against boto3's speed", ratios, "x", more_is_better=True)
    low, _, high = interval(ratios)
    print(f"  the median lies between {low:.2f} and {high:.2f} (95 %)")
    run("farm", folder, endpoint, small)
    kept = [1000 * run("farm", folder, endpoint, small).seconds for _ in range(options.rounds)]
    figure("fetch of 5 MB that the client has kept, after start-up", kept, "ms")
    run("farm", folder, endpoint, large)
    turns = [[run(kind, folder, endpoint, large).seconds for kind in ("farm", "hash")] for _ in range(options.rounds)]
    figure("fetch of what the client has kept, against hashing", [ours / plain for ours, plain in turns], "x")


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median with its 95 % interval, low and high at its sides."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], statistics.median(ratios), medians[1949]


def publish(folder: Path, endpoint: str, size: int) -> str:
    """Store random bytes, and return their digest with their size."""
    from farm.artifacts.s3 import S3Store

    source = folder / f"file-{size}"
    with source.open("wb") as file:
        for start in range(0, size, 10**6):
            file.write(os.urandom(min(10**6, size - start)))
    store = S3Store(bucket=BUCKET, endpoint=endpoint, **_keys())
    digest, _ = store.put_blob_file(source)
    return f"{digest}/{size}"


class Took(NamedTuple):
    """Seconds of a download in a fresh process, after its imports: by the clock, and of the processor."""

    seconds: float
    processor: float


def run(kind: str, folder: Path, endpoint: str, blob: str) -> Took:
    """Measure one download in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, str(folder), endpoint, blob],
        capture_output=True,
        text=True,
        check=True,
    )
    return Took(*json.loads(done.stdout.splitlines()[-1]))


def one(kind: str, folder: Path, endpoint: str, blob: str) -> None:
    """Bring the blob once, and print the seconds."""
    digest, _, size = blob.partition("/")
    target = folder / "target"
    key = f"blobs/sha256/{digest[:2]}/{digest}"
    import boto3
    from botocore.config import Config

    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    s3.head_bucket(Bucket=BUCKET)
    if kind == "farm":
        from farm.client.artifact_apis import Downloads
        from farm.client.transport import Transport

        transport, downloads = Transport(endpoint, "", namespace="", timeout=30), Downloads(folder / "cache")
        url = s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key})
        wanted = {"path": "program", "digest": digest, "size": int(size)}

    start, busy = time.perf_counter(), time.process_time()
    if kind == "farm":
        downloads.bring(
            wanted,
            target,
            lambda first, end, write: transport.read(
                url, "program", first, end, write, whole=end - first == wanted["size"]
            ),
        )
    elif kind == "hash":
        with (folder / f"file-{size}").open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    else:
        s3.download_file(BUCKET, key, str(target))
    took = Took(time.perf_counter() - start, time.process_time() - busy)
    target.unlink(missing_ok=True)
    print(json.dumps(took))


def _keys() -> dict[str, str]:
    return {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        kind, folder, endpoint, blob = sys.argv[2:]
        one(kind, Path(folder), endpoint, blob)
    else:
        main()
