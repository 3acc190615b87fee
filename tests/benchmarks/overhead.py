"""What the farm costs: the quickstart matrix against a plain loop over the same children.

    python tests/benchmarks/overhead.py [RUNS]

Both sides make every cell again, with one thread per child: the loop runs the reference, compile and evaluate children
one after the other and keeps their files in a folder; the farm does it through API, store, broker, worker and object
storage, with one slot and with two. Prints the medians and the ratios, and the loop with default threads.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient, freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.support.plain_loop import plain_loop, work_orders  # noqa: E402

MANIFEST = ROOT / "configs" / "manifests" / "quickstart.yaml"


@contextmanager
def farm_with(slots: int, folder: Path) -> Iterator[FarmClient]:
    """A farm that is up, with so many slots of one thread each."""
    settings = load_settings(data_dir=folder, cpu_slots=slots, threads=1, log_level="warning")
    with EmbeddedFarm(settings) as up, FarmClient.from_settings(up) as client:
        yield client


def through_farm(client: FarmClient, salt: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from submission to the last cell's end, for a build that has nothing in common with earlier ones."""
    with tempfile.TemporaryDirectory() as folder:
        text = MANIFEST.read_text().replace("../../", f"{ROOT}/")
        manifest = Path(folder) / "quickstart.yaml"
        manifest.write_text(f"{text}\nsalt: {salt}\n")
        frozen = freeze(manifest)
        client.plan(frozen)
        start = time.monotonic()
        build = client.submit(frozen)
        for _ in client.watch(build["id"]):
            pass
        seconds = time.monotonic() - start
        report = client.report(build["id"])
    assert not any(cell["hit"] for cell in report["cells"])
    return seconds, report["cells"]


def main(runs: int) -> None:
    """Measure each side `runs` times, in turn, and print medians and ratios."""
    subprocess.run([sys.executable, str(ROOT / "configs" / "demo_data.py"), str(ROOT / ".farm" / "demo")], check=True)
    frozen = freeze(MANIFEST)
    seconds: dict[str, list[float]] = {"loop": [], "loop, default threads": [], "one slot": [], "two slots": []}
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings()
        with farm_with(1, Path(folder) / "one") as one:
            _, cells = through_farm(one, "warm")
            orders = work_orders(one, cells)
            files = dict(frozen.files)
            for run in range(runs):
                seconds["one slot"].append(through_farm(one, f"one-{run}")[0])
                seconds["loop"].append(plain_loop(orders, files, 1, settings.measure_seconds))
        with farm_with(2, Path(folder) / "two") as two:
            through_farm(two, "warm")
            for run in range(runs):
                seconds["two slots"].append(through_farm(two, f"two-{run}")[0])
                seconds["loop, default threads"].append(
                    plain_loop(orders, files, os.cpu_count() or 1, settings.measure_seconds)
                )
    loop = statistics.median(seconds["loop"])
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {runs} runs each, medians"
    )
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(
            f"{name:24} {middle:7.2f} s   {middle / loop:5.2f} x the loop   {json.dumps([round(v, 2) for v in values])}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
