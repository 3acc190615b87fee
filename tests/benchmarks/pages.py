"""What pages cost: the time and size of builds' pages, and the share of a core for 200 readers of a build that runs.

    python tests/benchmarks/pages.py [--cells 1000 100000] [--readers 200] [--builds 4]

Real Valkey and SeaweedFS, and the API in this process; what ends a cell is only recorded. A page is read twice: the
second time the server has it in memory. Seconds of CPU are those of the server and of the reader. With 100,000 cells
it takes some minutes; `--readers 0` leaves the readers out. Several builds are shown next to each other, too: copies of
the last build in the index, each with keys and latencies of its own, as if each had compiled all cells again.
"""

import argparse
import asyncio
import gc
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from pydantic import SecretStr

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.app import Farm  # noqa: E402
from farm.cli.main import GARBAGE  # noqa: E402
from farm.local import servers  # noqa: E402
from farm.results.report import Report  # noqa: E402
from farm.serving.server import create_app  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.api_farm import serving  # noqa: E402
from tests.support.shown import GPU, POOL, accept, claim, matrix_of, only_recorded, register  # noqa: E402

SECONDS = 30.0
PLAYED = 1000
"""Cells of a build that compile; the others are cancelled, since to play 100,000 takes a quarter of an hour."""


@contextmanager
def a_farm(folder: Path) -> Iterator[Farm]:
    """A farm on servers of its own."""
    valkey = servers.start_valkey(folder / "valkey", "secret")
    weed = servers.start_weed(folder / "s3", "access", "secret-key", bucket="farm")
    storage = {"s3_endpoint": weed.url, "s3_bucket": "farm", "s3_access_key": "access", "s3_secret_key": "secret-key"}
    try:
        yield Farm(
            load_settings(
                {}, data_dir=folder, redis_url=valkey.url, api_token=SecretStr("sesame"), log_level="error", **storage
            )
        )
    finally:
        valkey.stop()
        weed.stop()


def page(browser: httpx.Client, name: str, path: str) -> None:
    """Read a page until it has the build, and once more; say what each answer took."""
    which, began = "first", time.perf_counter()
    while True:
        asked, used = time.perf_counter(), cpu()
        answer = browser.get(path)
        took, used = time.perf_counter() - asked, cpu() - used
        if answer.status_code == 503:
            which = "reads" if which == "first" else ""
        else:
            answer.raise_for_status()
        if which:
            size = len(answer.content) / 1024
            figure(f"{name}: {which}", took, "s")
            print(f"  {used:.2f} s of CPU, {size:.0f} KiB", flush=True)
        if which == "again":
            return
        if answer.status_code == 200:
            if not which:
                took = time.perf_counter() - began
                figure(f"{name}: there after", took, "s")
            which = "again"
        else:
            which = ""
            time.sleep(0.5)


async def read(client: httpx.AsyncClient, path: str, until: float) -> int:
    """Follow a build for some time; return how many messages came."""
    count = 0
    async with client.stream("GET", path) as answer:
        async for line in answer.aiter_lines():
            count += line.startswith("event: news")
            if time.monotonic() > until:
                break
    return count


def readers(url: str, path: str, many: int) -> None:
    """Let many follow a build in a process of their own, so that this process's time is the API's."""

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=many + 1)
        headers = {"Authorization": "Bearer sesame"}
        async with httpx.AsyncClient(base_url=url, limits=limits, headers=headers, timeout=60, verify=False) as client:
            counts = await asyncio.gather(*(read(client, path, time.monotonic() + SECONDS) for _ in range(many)))
        print(f"{many} readers got {min(counts)} to {max(counts)} messages in {SECONDS:g} s")

    asyncio.run(all_of_them())


def cpu() -> float:
    """Seconds of CPU that this process took."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def judged(browser: httpx.Client, name: str, path: str) -> None:
    """Wait until a page has all of an open build, and say how long that takes."""
    began = time.perf_counter()
    while "are still being read" in browser.get(path).text:
        time.sleep(0.5)
    figure(f"{name}: judged after", time.perf_counter() - began, "s")


def live(farm: Farm, url: str, browser: httpx.Client, readers_at_once: int) -> None:
    """Measure the readers of a build in which two cells a second end."""
    import multiprocessing

    build_id = accept(farm, "live", matrix_of([f"live-{n}" for n in range(20)], targets=["onnxruntime/cpu"]))
    path = f"/ui/ns/main/builds/{build_id}"
    position = browser.get(path).text.partition('data-position="')[2].partition('"')[0]
    costs = []
    for many in (0, readers_at_once):
        process = multiprocessing.get_context("spawn").Process(
            target=readers, args=(url, f"{path}/events?after={position}", many)
        )
        if many:
            process.start()
        began, used = time.monotonic(), cpu()
        while time.monotonic() < began + SECONDS:
            for job, claimed in claim(farm, POOL, 1):
                farm.store.jobs.finish(job, claimed.token, only_recorded(claimed.order, claimed.key))
            time.sleep(0.5)
        costs.append((cpu() - used) / (time.monotonic() - began))
        if many:
            process.join()
    for many, share in zip((0, readers_at_once), costs, strict=True):
        figure(f"a server's core, with {many} readers of a build", share, "x")


def compiled_again(farm: Farm, report: Report, noise: random.Random) -> str:
    """Put a build like this one into the index, in which each cell was compiled again; return its id."""
    copy = f"b-{noise.getrandbits(64):016x}"
    build = {**report["build"], "id": copy, "created_at": report["build"]["created_at"] + noise.random()}
    facts = next(cell["facts"] for cell in report["cells"] if cell["facts"])
    cells = [
        {
            **cell,
            "state": "succeeded",
            "kind": None,
            "facts": {**facts, "key": f"{copy}{number}", "latency": noise.gauss(0.002, 1e-4), "device": "gfx942"},
        }
        for number, cell in enumerate(report["cells"])
    ]
    farm.build_index.add({**report, "build": build, "cells": cells})
    return copy


def measure_index(farm: Farm) -> None:
    """Say what it takes to make the index again of all reports, and how large it is."""
    began, used = time.perf_counter(), cpu()
    count = farm.build_index.rebuild()
    took, size = time.perf_counter() - began, (farm.settings.data_dir / "builds.sqlite3").stat().st_size / (1 << 20)
    figure(f"index of {count} builds made again", took, "s")
    print(f"  {cpu() - used:.1f} s of CPU, {size:.0f} MiB", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", type=int, nargs="*", default=[1000])
    options.add_argument("--readers", type=int, default=200)
    options.add_argument("--builds", type=int, nargs="*", default=[4, 12])
    given = options.parse_args()
    gc.set_threshold(GARBAGE, 50)  # As `farm serve` does.
    print(f"load at the beginning: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name, a_farm(Path(name)) as farm:
        register(farm)
        for number, cells in enumerate(given.cells):
            models = [f"model-{number:05}" for number in range(cells // 20)]
            rows = matrix_of(models, precisions=["fp32", "fp16"], shapes=["b1", "b2", "b4", "b8", "b16"])
            build_id = accept(farm, f"{cells} cells", rows)
            path = f"/ui/ns/main/builds/{build_id}"
            with serving(create_app(farm)) as url, httpx.Client(base_url=url, timeout=600) as browser:
                browser.headers["Authorization"] = "Bearer sesame"
                if given.readers and not number:
                    live(farm, url, browser, given.readers)
                page(browser, f"{cells:,} cells, waiting", path)
                judged(browser, f"{cells:,} cells", path)
                for pool in (POOL, GPU):
                    for job, claimed in claim(farm, pool, min(cells, PLAYED) // 2):
                        farm.store.jobs.finish(job, claimed.token, only_recorded(claimed.order, claimed.key))
                page(browser, f"{cells:,} cells, {min(cells, PLAYED):,} ended", path)
                farm.builds.cancel("main", build_id)
                farm.build_finisher.finish(build_id)
                page(browser, f"{cells:,} cells, reported", path)
            # A server that was restarted has nothing in memory.
            with serving(create_app(farm)) as url, httpx.Client(base_url=url, timeout=600) as browser:
                browser.headers["Authorization"] = "Bearer sesame"
                browser.get("/ui/sign-in")  # The first answer of a process takes longer, whatever it is.
                page(browser, f"{cells:,} cells, a new server", path)
                page(browser, f"{cells:,} cells, one model", f"{path}?model={models[-1]}")
                page(browser, f"{cells:,} cells, cancelled fp16", f"{path}?look=cancelled&precision=fp16")
                page(browser, f"{cells:,} cells, a cell", f"{path}/cells/{rows[-1].identifier}")
                page(browser, f"{cells:,} cells, compared", f"/ui/ns/main/compare/{build_id}/{build_id}")
            measure_index(farm)
            noise = random.Random(7)
            report = farm.build_reader.report("main", build_id)
            copies = [compiled_again(farm, report, noise) for _ in range(max(given.builds, default=0))]
            for many in given.builds:
                with serving(create_app(farm)) as url, httpx.Client(base_url=url, timeout=600) as browser:
                    browser.headers["Authorization"] = "Bearer sesame"
                    browser.get("/ui/sign-in")
                    across = "/ui/ns/main/across?" + "&".join(f"build={copy}" for copy in copies[:many])
                    page(browser, f"{cells:,} cells, {many} builds", across)
                    page(browser, f"{cells:,} cells, {many} builds, one model", f"{across}&text={models[-1]}/")
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
