"""Where the time of one cell goes, from the manifest to the report that the client reads.

    python tests/benchmarks/one_cell.py [RUNS] [TARGET] [PICTURE.svg]

Makes a cell of a small net several times in an embedded farm with one slot, one after the other, and prints the median
seconds between any two moments that the farm records, in their order, with a bar; then the commands of the job store
and the requests of the client for a cell. On a card: `one_cell.py 5 onnxruntime/cuda`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import redis

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.client.client import FarmClient  # noqa: E402
from farm.client.freezing import freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402

MANIFEST = """\
version: 1
name: one-cell
targets: [{target}]
precisions: [fp32]
salt: {salt}
models:
  - name: magika
    source: {{package: magika/models/standard_v3_3/model.onnx}}
    inputs:
      bytes: {{shape: [batch, 2048], range: [0, 256]}}
    batches: [8]
"""


PHASES = {
    "fetching": "worker: fetch the files",
    "compiling": "child: compile",
    "measuring": "child: load and measure",
    "verifying": "child: verify",
}
"""Steps by the phase that an attempt reports."""


def main(runs: int = 5, target: str = "onnxruntime/cpu", picture: str = "") -> None:
    """Make the cell `runs` times and print what each step took; draw it if a picture is named."""
    steps: defaultdict[str, list[float]] = defaultdict(list)
    commands = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = load_settings(data_dir=folder / "data", log_level="warning", cpu_slots=1)
        with EmbeddedFarm(settings) as up, FarmClient.from_settings(up) as client:
            server = redis.Redis.from_url(up.redis_url.get_secret_value())
            for number in range(runs + 1):
                manifest = folder / "one.yaml"
                manifest.write_text(MANIFEST.format(target=target, salt=f"run-{number}"))
                idle = command_rate(server)
                before, began = commands_of(server), time.time()
                took = one(client, manifest)
                if number:  # The first one starts templates and connections.
                    commands.append(commands_of(server) - before - idle * (time.time() - began))
                    for step, seconds in took.items():
                        steps[step].append(seconds)
    medians = {step: statistics.median(seconds) for step, seconds in steps.items()}
    longest = max(medians.values())
    for step, seconds in medians.items():
        print(f"{step:44} {seconds * 1000:8.1f} ms  {'█' * round(40 * seconds / longest)}")
    if picture:
        draw(medians, Path(picture))
    figure(f"one cell of {target}, without measuring", sum(medians.values()) - medians[PHASES["measuring"]], "s")
    figure(f"one cell of {target}: commands of the job store", commands, "")


def one(client: FarmClient, manifest: Path) -> dict[str, float]:
    """Make one cell; return the seconds of each step, in their order."""
    moments = [("", time.time())]
    frozen = freeze(manifest)
    moments.append(("client: read, check and hash the model", time.time()))
    client.plan(frozen)
    moments.append(("API: plan", time.time()))
    build = client.submit(frozen)
    for event in client.watch(build["id"]):
        if event["type"] == "accepted":
            moments.append(("API: keep the submission, upload, store jobs", event["at"]))
        elif event["type"] == "cell" and event.get("state") == "running":
            moments.append(("broker: hand out, send, claim", event["at"]))
            doing = "worker: begin the attempt"
        elif event["type"] == "phase":
            moments.append((doing, event["at"]))
            reference = event.get("phase") == "verifying" and not any("compile" in step for step, _ in moments)
            doing = "child: make the reference" if reference else PHASES.get(event["phase"], f"child: {event['phase']}")
        elif event["type"] == "cell":
            moments.append(("worker: publish and finish", event["at"]))
        elif event.get("state") == "reported":
            moments.append(("server: judge and report", event["at"]))
    client.report(build["id"])
    moments.append(("client: hear of it and read the report", time.time()))
    took: defaultdict[str, float] = defaultdict(float)
    for (_, earlier), (step, later) in pairwise(moments):
        took[step] += later - earlier
    return took


def draw(medians: Mapping[str, float], path: Path) -> None:
    """Draw the steps one below the other, each from where the last one ended."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Picture

    style = {"svg.fonttype": "none", "svg.hashsalt": "one cell", "font.size": 8.0, "font.family": "DejaVu Sans"}
    with mpl.rc_context(style):
        picture = Picture(figsize=(9, 0.5 + 0.22 * len(medians)), layout="constrained")
        axes = picture.add_subplot()
        began = 0.0
        for place, (step, seconds) in enumerate(medians.items()):
            colour = {"child": "#2a78d6", "worker": "#1d8a5c"}.get(step.partition(":")[0], "#898781")
            axes.barh(place, 1000 * seconds, left=1000 * began, color=colour)
            axes.annotate(
                f"{1000 * seconds:.0f}", (1000 * (began + seconds), place), (3, -3), textcoords="offset points"
            )
            began += seconds
        axes.set_yticks(range(len(medians)), list(medians))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(b=False)
        axes.set_xlabel("milliseconds")
        picture.savefig(path, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def commands_of(server: redis.Redis) -> int:
    """Return the commands that the job store has run, also within scripts."""
    return int(server.info("stats")["total_commands_processed"])  # type: ignore[index]


def command_rate(server: redis.Redis) -> float:
    """Return the commands a second of a farm that does nothing."""
    before, began = commands_of(server), time.monotonic()
    time.sleep(2.0)
    return (commands_of(server) - before) / (time.monotonic() - began)


if __name__ == "__main__":
    main(*[int(each) if each.isdecimal() else each for each in sys.argv[1:]])  # type: ignore[arg-type]
