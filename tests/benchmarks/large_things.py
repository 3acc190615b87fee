"""A model of 10 GB and a program of 5 GB through a whole farm: how long each step takes, and in how much memory.

    python tests/benchmarks/large_things.py [--model 10] [--program 5]

Sizes are in GB; seven times their mean must be free on the disk. The weights are external data. The compiler is a
scripted one, which copies a piece until the program is large enough and never runs it; the farm around it is the real
one: `farm up` in a process of its own, then `farm run`. Memory is the most that any process of a part has needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import onnx
import psutil
from onnx import TensorProto, helper

from farm.files import hash_file
from tests.benchmarks.figures import figure
from tests.support.helpers import in_a_thread, wait_until
from tests.support.places import ROOT
from tests.support.side_packages import install

GB = 10**9
OTHERS = ("SeaweedFS", "Valkey")
"""Parts whose memory is not the farm's to promise."""
FACTS = """
from farm.targets.compilers import Compiler, DeviceKind
LARGE = Compiler(name="scripted", recipe=1, devices=(DeviceKind("cpu", ("fp32",), module="scripted.runner.compiler"),),
    formats=("onnx",), extension=".scripted.onnx", options={}, quantization={}, calibrated=frozenset(),
    toolchains=("scripted",))
"""
MODULE = """
import os
from farm.runner import onnxruntime_compiler
from farm.runner.measuring import Program
RECIPE = 1
class Nothing(Program):
    outputs = ["y"]
    def run(self, prepared):
        return [prepared["x"]]
def load(request):
    return Nothing()
load_reference = load
def probe(request):
    known = {"label": "scripted1.0", "toolchain": "scripted1.0-00000001"}
    return {**onnxruntime_compiler.probe(request), **known}
def compile(request, messages):
    piece, size = os.urandom(1 << 24), SIZE
    with open(request["program"], "wb") as file:
        while size > 0:
            size -= file.write(piece[:size])
    port = {"dtype": "float32", "shape": [1]}
    return {"inputs": [{"name": "x", **port}], "outputs": [{"name": "y", **port}],
            "weight_dtypes": {"float32": SIZE}, "compute_dtypes": {"float32": 1}, "quantized": {}}
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "scripted"
version = "1.0"
[project.entry-points."farm.compilers"]
scripted = "scripted.facts:LARGE"
"""


def main() -> None:
    """Make the model, bring it through the farm, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=float, default=10)
    parser.add_argument("--program", type=float, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as scratch:
        folder = Path(scratch)
        write_model(folder, int(given.model * GB))
        write_package(folder / "scripted", int(given.program * GB))
        packages = install(folder / "installed", folder / "scripted")
        known = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
        environment = {**known, "PYTHONPATH": f"{packages}:{ROOT}", "FARM_CPU_SLOTS": "1"}
        up = subprocess.Popen([sys.executable, "-m", "farm", "up"], cwd=folder, env=environment)
        peaks = Peaks(up.pid)
        title = f"{given.model:g} and {given.program:g} GB"
        try:
            wait_until((folder / ".farm" / "farm.json").exists, timeout=60)
            began = time.monotonic()
            hash_file(folder / "net.data")
            figure(f"{title}: hash the model", time.monotonic() - began, "s")
            with in_a_thread(peaks.watch):
                began = time.monotonic()
                run = [sys.executable, "-m", "farm", "run", "farm.yaml", "-o", "out"]
                client = subprocess.Popen(run, cwd=folder, env=environment)
                _, status, usage = os.wait4(client.pid, 0)
                client.returncode = os.waitstatus_to_exitcode(status)
                assert client.returncode == 0
                figure(f"{title}: from submit to the fetched program", time.monotonic() - began, "s")
            peaks.most["the client"] = usage.ru_maxrss * 1024
            (sidecar,) = (folder / "out").rglob("*artifact.json")
            for phase, seconds in json.loads(sidecar.read_text())["phases"].items():
                figure(f"{title}: {phase}", seconds, "s")
        finally:
            up.terminate()
            up.wait()
        (fetched,) = (folder / "out").rglob("*.scripted.onnx")
        assert fetched.stat().st_size == int(given.program * GB)
    for part, most in sorted(peaks.most.items()):
        figure(f"memory of {part}", most / 1e6, "MB", None if part in OTHERS else 200)


def write_model(folder: Path, size: int) -> None:
    """Write a net whose weights are `size` bytes in a file of their own, and a manifest for it."""
    piece, left = os.urandom(1 << 24), size
    with (folder / "net.data").open("wb") as file:
        while left > 0:
            left -= file.write(piece[:left])
    weights, at = [], 0
    while at < size:
        length = min(GB, size - at)
        weight = TensorProto(name=f"w{at}", data_type=TensorProto.FLOAT, dims=[length // 4])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "net.data"), ("offset", at), ("length", length)):
            weight.external_data.add(key=key, value=str(value))
        weights.append(weight)
        at += length
    port = helper.make_tensor_value_info
    sums = ["x", *(f"s{number}" for number in range(len(weights)))]
    nodes = [
        node
        for number, weight in enumerate(weights)
        for node in (
            helper.make_node("ReduceSum", [weight.name], [f"r{number}"], keepdims=1),
            helper.make_node("Add", [sums[number], f"r{number}"], [sums[number + 1]]),
        )
    ]
    nodes.append(helper.make_node("Identity", [sums[-1]], ["y"]))
    ends = [port("x", TensorProto.FLOAT, [1])], [port("y", TensorProto.FLOAT, [1])]
    net = helper.make_model(
        helper.make_graph(nodes, "net", *ends, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    (folder / "net.onnx").write_bytes(net.SerializeToString())
    onnx.checker.check_model(str(folder / "net.onnx"))
    (folder / "farm.yaml").write_text(
        "version: 1\nname: scripted\ntargets: [scripted/cpu]\nverify: {mode: 'off'}\n"
        "models: [{name: net, source: {path: net.onnx}}]\n"
    )


def write_package(folder: Path, size: int) -> None:
    """Write an extension of the farm with a compiler whose programs are so large."""
    for name, text in {
        "pyproject.toml": PROJECT,
        "scripted/__init__.py": "",
        "scripted/facts.py": FACTS,
        "scripted/runner/__init__.py": "",
        "scripted/runner/compiler.py": MODULE.replace("SIZE", str(size)),
    }.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


class Peaks:
    """The most memory that a process of each part of a farm has needed, mapped files left out."""

    def __init__(self, pid: int) -> None:
        self.most: dict[str, float] = defaultdict(float)
        self._farm = psutil.Process(pid)

    def watch(self, over: threading.Event) -> None:
        """Look at all of its processes until `over`."""
        while not over.wait(0.2):
            for process in self._farm.children(recursive=True):
                with suppress(psutil.Error):
                    words = " ".join(process.cmdline())
                    known = {"weed": "SeaweedFS", "valkey": "Valkey", "farm serve": "the server", "tasks": "the worker"}
                    part = next((name for word, name in known.items() if word in words), "children of the worker")
                    used = process.memory_info()
                    self.most[part] = max(self.most[part], used.rss - used.shared)


if __name__ == "__main__":
    main()
