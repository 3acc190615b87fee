"""How long `farm` takes to say something about itself, against an interpreter that does nothing.

    python tests/benchmarks/startup.py [RUNS]

Exits with 1 where a limit is broken. The limits are for two quiet cores. What asks a farm
asks a stub that knows nothing, so that the farm's own time is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.figures import figure

LIMITS: dict[tuple[str, ...], float] = {
    ("-m", "farm", "--version"): 150,
    ("-m", "farm", "--help"): 250,
    ("-m", "farm", "run", "--help"): 250,
    ("-m", "farm", "status"): 300,
    ("-m", "farm", "ls"): 300,
    ("-m", "farm", "lint", "--no-models", "farm.yaml"): 300,
    ("-m", "farm", "lint", "farm.yaml"): 300,
    ("-m", "farm", "plan", "farm.yaml"): 300,
}
"""Milliseconds. The facts of the manifest's model are known before the first measurement."""


class Stub(BaseHTTPRequestHandler):
    """A farm without builds, cells and refs."""

    def do_GET(self) -> None:
        """Answer any question with nothing."""
        ref = {"tag": "latest", "generation": 1, "snapshot": "0" * 64, "previous": None, "moved": "", "schema": 1}
        self._answer(json.dumps({"items": [], "cells": {}, **ref}).encode())

    def do_POST(self) -> None:
        """Answer any plan with no cells."""
        self.rfile.read(int(self.headers["Content-Length"]))
        none = dict.fromkeys(("eta", "slot_seconds", "gpu_hours"))
        outlook = {**none, "spent_seconds": 0, "spent_gpu_hours": 0, "unknown": 0, "unserved": [], "paused": []}
        plan = {"build_id": "b-1", "name": "n", "cells": [], "outlook": outlook, "warnings": [], "missing_blobs": []}
        self._answer(json.dumps(plan).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def somewhere() -> Iterator[None]:
    """Work in a folder with a manifest, a model and samples, and with a stub of a farm."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ |= {"FARM_API_URL": f"http://127.0.0.1:{server.server_port}", "XDG_CACHE_HOME": folder}
        ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
        nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
        graph = onnx.helper.make_graph(nodes, "net", ports[:1], ports[1:])
        opsets = [onnx.helper.make_opsetid("", 17)]
        onnx.save_model(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), "net.onnx")
        np.savez("samples.npz", x=np.ones((3, 4), np.float32))
        Path("farm.yaml").write_text(
            "version: 1\nname: n\ntargets: [onnxruntime/cpu]\nmodels:\n"
            "  - {name: net, source: {path: net.onnx}, samples: {path: samples.npz}, batches: [2]}\n"
        )
        milliseconds(1, ("-m", "farm", "plan", "farm.yaml"))
        yield
    server.shutdown()


def milliseconds(runs: int, arguments: tuple[str, ...]) -> list[float]:
    """Return the wall times of starting this interpreter with these arguments, from bytecode as if installed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ)
        times.append(1000 * (time.perf_counter() - begun))
    return times


def main() -> int:
    """Measure, print, judge."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    least = milliseconds(runs, ("-c", "pass"))
    figure("python -c pass", least, "ms")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    met = True
    with somewhere():
        for arguments, limit in LIMITS.items():
            took = milliseconds(runs, arguments)
            name = " ".join(arguments[1:])
            met &= bool(figure(name, took, "ms", limit).meets_goal)
            figure(f"{name}, against python -c pass", [each / statistics.median(least) for each in took], "x")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
