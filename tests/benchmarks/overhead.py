"""What the farm costs: the quickstart matrix against one plain process, and a plain loop over the same children.

    python tests/benchmarks/overhead.py [RUNS]

Each side makes every cell again, with one thread: the process takes the same steps without any child; the loop runs the
reference, compile and evaluate children, started cold, one after the other and keeps their files in a folder; the farm
does it through API, store, broker, worker and object storage, with one slot and with two. Prints medians and their
ratios to the process, in all and without the seconds for which programs are measured, and the loop with default threads
for children.
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
from tests.support.plain_loop import plain_loop, plain_process, work_orders  # noqa: E402

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
    sides = ("one process", "loop", "loop, default threads", "one slot", "two slots")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings()
        with farm_with(1, Path(folder) / "one") as one:
            _, cells = through_farm(one, "warm")
            orders = work_orders(one, cells)
            files = dict(frozen.files)
            for run in range(runs):
                seconds["one slot"].append(through_farm(one, f"one-{run}")[0])
                seconds["one process"].append(plain_process(orders, files, 1, settings.measure_seconds))
                seconds["loop"].append(plain_loop(orders, files, 1, settings.measure_seconds))
        with farm_with(2, Path(folder) / "two") as two:
            through_farm(two, "warm")
            for run in range(runs):
                seconds["two slots"].append(through_farm(two, f"two-{run}")[0])
                seconds["loop, default threads"].append(
                    plain_loop(orders, files, os.cpu_count() or 1, settings.measure_seconds)
                )
    measured = settings.measure_seconds * sum(cell["state"] == "succeeded" for cell in cells)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {runs} runs each, medians, "
        f"measuring takes {measured:.0f} s"
    )
    process = statistics.median(seconds["one process"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        outside = (middle - measured) / (process - measured)
        spread = json.dumps([round(value, 2) for value in values])
        print(f"{name:24} {middle:7.2f} s   {middle / process:5.2f} x in all  {outside:5.2f} x outside   {spread}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
