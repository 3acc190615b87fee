"""How fast a large artifact goes to object storage and back, against plain boto3 on the same server in the
same run.

    python tests/benchmarks/transfer.py [--size 500] [--rounds 5] [--endpoint URL --bucket NAME]

Publishing and fetching include hashing every byte (and what publishing and looking up the artifact takes);
boto3's `upload_file` and `download_file` run with their defaults and do not. Each measurement is a process of
its own, so its memory is its own: `RSS` is the peak above what the process held before the transfer. Without
an endpoint an embedded SeaweedFS is started; for another server the credentials come from AWS_ACCESS_KEY_ID
and AWS_SECRET_ACCESS_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from farm.local import servers
from tests.benchmarks.figures import figure

KINDS = ("farm publish", "boto3 upload", "farm fetch", "boto3 download")


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=500, help="MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--bucket", default="farm")
    parser.add_argument("--folder", help="where the file is made; else the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        weed = None
        if not options.endpoint:
            os.environ |= {"AWS_ACCESS_KEY_ID": secrets.token_hex(8), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
            keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
            weed = servers.start_weed(Path(folder) / "s3", *keys, bucket=options.bucket)
        try:
            report(Path(folder), weed.url if weed else options.endpoint, options)
        finally:
            if weed:
                weed.stop()


def report(folder: Path, endpoint: str, options: argparse.Namespace) -> None:
    """Measure every kind in turn and each pair in either order, so that a busy machine hits all of them
    alike."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    print(f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {platform.machine()}")
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        with (folder / "file").open("wb") as file:
            for _ in range(options.size):
                file.write(os.urandom(10**6))
        uploads, downloads = KINDS[:2], KINDS[2:]
        for kind in (*uploads, *downloads) if number % 2 else (*reversed(uploads), *reversed(downloads)):
            os.sync()  # Nobody pays for what another has left to write.
            results[kind].append(run(kind, folder, endpoint, options.bucket, number))
    for kind, rows in results.items():
        speeds = [options.size / row["seconds"] for row in rows]
        figure(f"{kind} of {options.size} MB", speeds, "MB/s", more_is_better=True)
        figure(f"{kind}: memory for it", [row["rss"] for row in rows], "MiB")
    for ours, plain in (KINDS[:2], KINDS[2:]):
        ratios = [p["seconds"] / o["seconds"] for o, p in zip(results[ours], results[plain], strict=True)]
        figure(f"{ours} against {plain}", ratios, "x", more_is_better=True)


def run(kind: str, folder: Path, endpoint: str, bucket: str, number: int) -> dict[str, float]:
    """Measure one transfer in a fresh process."""
    arguments = ["--one", kind, str(folder), endpoint, bucket, str(number)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def one(kind: str, folder: Path, endpoint: str, bucket: str, number: int) -> None:
    """Transfer the file once, and print seconds and the growth of memory in MiB."""
    source, target = folder / "file", folder / "target"
    key = f"{number:064x}"
    keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    if kind.startswith("farm"):
        from farm.artifacts.s3 import S3Store

        store = S3Store(bucket=bucket, endpoint=endpoint, **keys)
        store.check()

        def publish() -> None:
            digest, size = store.put_blob_file(source)
            store.publish("main", sidecar(key, digest, size))

        def fetch() -> None:
            found = store.lookup(["main"], key)
            assert found is not None
            program = found["blobs"]["program"]
            store.get_blob(program["digest"], target, program["size"])

        work = publish if kind == "farm publish" else fetch
    else:
        import boto3
        from botocore.config import Config

        config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
        client = boto3.client("s3", endpoint_url=endpoint or None, region_name="us-east-1", config=config)
        client.head_bucket(Bucket=bucket)

        def work() -> None:
            if kind == "boto3 upload":
                client.upload_file(str(source), bucket, f"plain/{number}")
            else:
                client.download_file(bucket, f"plain/{number}", str(target))

    idle = status("VmRSS")
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    if target.exists():
        assert target.stat().st_size == source.stat().st_size
        target.unlink()
    print(json.dumps({"seconds": seconds, "rss": status("VmHWM") - idle}))


def sidecar(key: str, digest: str, size: int) -> dict[str, Any]:
    """The least that makes an artifact of a blob."""
    return {
        "schema": 1,
        "key": key,
        "identifier": "transfer/onnxruntime-cpu/fp32/b1",
        "spec": {},
        "blobs": {"program": {"path": "program", "digest": digest, "size": size}},
        "toolchain": "none",
        "device": {"arch": "cpu"},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def status(name: str) -> float:
    """One figure of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        kind, folder, endpoint, bucket, number = sys.argv[2:]
        one(kind, Path(folder), endpoint, bucket, int(number))
    else:
        main()
