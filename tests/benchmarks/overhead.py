"""What the farm costs: the quickstart matrix against one plain process, and a plain loop over the same children.

    python tests/benchmarks/overhead.py [RUNS]

Each side makes every cell again, with one thread: the process takes the same steps without any child; the loop runs the
reference, compile and evaluate children, started cold, one after the other and keeps their files in a folder; the farm
does it through API, store, broker, worker and object storage, with one slot and with two. Ratios are to the process, in
all and without the seconds for which programs are measured; the loop runs with default threads for children, too.
"""

from __future__ import annotations

import os
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

from farm.client.client import FarmClient  # noqa: E402
from farm.client.freezing import freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.plain_loop import plain_loop, plain_process, work_orders  # noqa: E402

GOALS = {"one slot": (1.15, 1.8)}
"""The most times as long as one process that a side takes, in all and outside measuring."""
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
    figure("quickstart: measuring", measured, "s")
    process, one = (statistics.median(seconds[side]) for side in ("one process", "one slot"))
    for name, values in seconds.items():
        in_all, outside = GOALS.get(name, (None, None))
        figure(f"quickstart: {name}", values, "s")
        figure(f"quickstart: {name}, against one process", [each / process for each in values], "x", in_all)
        ratios = [(each - measured) / (process - measured) for each in values]
        figure(f"quickstart: {name}, against it outside measuring", ratios, "x", outside)
    two = seconds["two slots"]
    figure("quickstart: two slots against one", [each / one for each in two], "x", 0.95)
    ratios = [(each - measured) / (one - measured) for each in two]
    figure("quickstart: two slots against one, outside measuring", ratios, "x", 0.85)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
