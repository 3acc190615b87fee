"""A manifest of 10,000 cells: planning it, submitting it when all are hits, and again just after Redis was flushed.

    python tests/benchmarks/ten_thousand.py [RUNS]

The client runs as a process of its own, as a user's would; the farm is the embedded one. Ratios are to what
is the least that anything could do: writing the canonical JSON of 10,000 specs and hashing it. First a manifest of
50,000 cells is planned, with the most memory that client and server need for it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import redis
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.app import Farm  # noqa: E402
from farm.client.client import FarmClient  # noqa: E402
from farm.client.freezing import freeze  # noqa: E402
from farm.local.embedded import EmbeddedFarm  # noqa: E402
from farm.settings import load_settings  # noqa: E402
from farm.spec import digest_of  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402
from tests.support.helpers import wait_until  # noqa: E402

MODELS, BATCHES, PRECISIONS = 25, 100, ("fp32", "fp16", "bf16", "int4")
MANY = 125
"""Models of 50,000 cells."""


def write_net(folder: Path, number: int) -> None:
    """Write `net<number>.onnx`, a small model that no other number gives."""
    weight = numpy_helper.from_array(np.full((8, 8), number, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / f"net{number}.onnx")


def write_models(folder: Path, models: int) -> Path:
    """Write so many small models and a manifest that makes 400 cells of each."""
    lines = ["version: 1", "name: ten-thousand", "targets: [onnxruntime/cpu]", f"precisions: [{', '.join(PRECISIONS)}]"]
    lines += ["models:"]
    for number in range(models):
        write_net(folder, number)
        lines += [f"  - name: net{number}", f"    source: {{path: net{number}.onnx}}"]
        lines += [f"    batches: [{', '.join(map(str, range(1, BATCHES + 1)))}]"]
    manifest = folder / f"{models}-models.yaml"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def publish_all(farm: Farm, orders: list[dict[str, Any]]) -> None:
    """Write a sidecar for every cell, as if each had been compiled; they share one program."""
    artifacts = farm.artifacts
    digest, size = artifacts.put_blob_bytes(b"a program")

    def publish(order: dict[str, Any]) -> None:
        key = digest_of(order["spec"])
        sidecar = {
            "schema": 1,
            "key": key,
            "namespace": "main",
            "identifier": order["identifier"],
            "spec": order["spec"],
            "blobs": {"program": {"path": "p.onnx", "digest": digest, "size": size}},
            "toolchain": order["spec"]["toolchain"],
            "device": {"arch": "cpu"},
            "verification": {"reference": "onnxruntime", "samples": 8, "errors": {"y": 1e-6}, "spread": {"y": 0.9}},
            "measurements": {"latency": {"median": 1e-4}},
            "created": "2026-01-01T00:00:00Z",
        }
        artifacts.publish("main", sidecar)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(publish, orders))


def timed(action: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.monotonic()
    action()
    return time.monotonic() - start


def server_memory() -> float:
    """Peak memory of the largest server process of the embedded farm, in MB."""
    peaks = []
    for process in psutil.process_iter():
        try:
            if "serve" in process.cmdline():
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks += [int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith("VmHWM")]
        except (psutil.Error, OSError):
            continue
    return max(peaks, default=0.0)


def main(runs: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, many = write_models(folder, MODELS), write_models(folder, MANY)
        settings = load_settings(data_dir=folder / "data", log_level="warning", cpu_slots=1)
        with EmbeddedFarm(settings) as up, FarmClient.from_settings(up) as client:
            environ = {**os.environ, "FARM_DATA_DIR": str(settings.data_dir), "PYTHONPATH": str(ROOT)}

            def plan(which: Path) -> None:
                command = [sys.executable, "-m", "farm", "plan", str(which), "--json"]
                subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)

            def plan_anew() -> None:
                """Plan what the server did not keep."""
                many.write_text(f"{many.read_text()}# {time.monotonic()}\n")
                plan(many)

            plan(many)  # The client learns what is in the models, once.
            figure("farm plan, 50,000 cells", [timed(plan_anew) for _ in range(runs)], "s", 4)
            figure("farm plan, 50,000 cells, again", [timed(lambda: plan(many)) for _ in range(runs)], "s")
            client_memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
            figure("farm plan, 50,000 cells: client, most", client_memory, "MB", 400)
            figure("farm plan, 50,000 cells: server, most", server_memory(), "MB", 400)
            plans = [timed(lambda: plan(manifest)) for _ in range(runs)]
            farm = Farm(up)
            frozen = freeze(manifest)
            read = farm.builds._planner._read("main", frozen.submission, "", farm.store.workers.pools())
            orders = [dict(cell.order) for cell in read.cells]
            baseline = statistics.median(
                timed(lambda: [digest_of(order["spec"]) for order in orders]) for _ in range(runs)
            )
            publish_all(farm, orders)
            server = redis.Redis.from_url(up.redis_url.get_secret_value())
            server.flushall()

            made: list[str] = []

            def submit() -> None:
                build = client.submit(freeze(manifest))
                assert build["counts"]["succeeded"] == len(orders), build["counts"]
                made.append(build["id"])

            def wait_for_report() -> None:
                wait_until(lambda: client.build(made[-1])["state"] == "reported", timeout=60)

            def wait_for_workers() -> None:
                wait_until(lambda: any(pool["live_workers"] for pool in client.pools.all()), timeout=60)

            wait_for_workers()
            first = timed(submit)
            hits, flushed = [], []
            for _ in range(runs):
                wait_for_report()
                hits.append(timed(submit))
                wait_for_report()
                server.flushall()
                wait_for_workers()
                flushed.append(timed(submit))
    figure("least: JSON and SHA-256 of 10,000 specs", baseline, "s")
    for label, seconds, goal in (
        ("farm plan, 10,000 misses", plans, None),
        ("submit, 10,000 hits", hits, 1.5),
        ("submit, 10,000 hits, Redis just flushed", flushed, None),
        ("submit, 10,000 hits, without a checkpoint", [first], None),
    ):
        figure(label, seconds, "s", goal)
        figure(f"{label}, against the least", [each / baseline for each in seconds], "x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
