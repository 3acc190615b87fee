"""A model of 10 GB, a program of 5 GB, a log of 1 GB through a whole farm: time and memory of each step.

    python tests/benchmarks/large_things.py [model] [--model 10] [--program 5]
    python tests/benchmarks/large_things.py log [--log 1]

Sizes are in GB; seven times the mean of model and program must be free on the disk. The weights are external data. The
compiler is a scripted one, which copies a piece until the program is large enough, and never runs it; the farm around
it is the real one: `farm up` in a process of its own, then commands. Memory is the most that any process of a part has
needed. A log above 1.07 GB passes its limit.
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
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
import time
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
    line, written, found = 0, 0, False
    while written < LOG:
        lines = "".join(f"[{number:9d}] \\x1b[33mpass\\x1b[0m {'of a compiler that says much ' * 2}\\n"
            for number in range(line, line + 50_000)).encode()
        if written >= LOG // 2 and not found:
            lines, found = lines + b"the needle\\n", True
        line += 50_000
        written += len(lines)
        while lines:
            lines = lines[os.write(1, lines):]
        time.sleep(0.05)
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
    """Make what is large, bring it through the farm, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("model", "log"), default="model")
    parser.add_argument("--model", type=float, default=10)
    parser.add_argument("--program", type=float, default=5)
    parser.add_argument("--log", type=float, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as scratch:
        if given.what == "model":
            model_and_program(Path(scratch), given.model, given.program)
        else:
            long_log(Path(scratch), given.log)


def model_and_program(folder: Path, model: float, program: float) -> None:
    """Submit the model, compile it, and fetch the program."""
    write_model(folder, int(model * GB))
    write_package(folder / "scripted", int(program * GB))
    title = f"{model:g} and {program:g} GB"
    with a_farm(folder) as farm:
        began = time.monotonic()
        hash_file(folder / "net.data")
        figure(f"{title}: hash the model", time.monotonic() - began, "s")
        with farm.step(f"{title}: from submit to the fetched program"):
            farm.command("run", "farm.yaml", "-o", "out")
        (sidecar,) = (folder / "out").rglob("*artifact.json")
        for phase, seconds in json.loads(sidecar.read_text())["phases"].items():
            figure(f"{title}: {phase}", seconds, "s")
        (fetched,) = (folder / "out").rglob("*.scripted.onnx")
        assert fetched.stat().st_size == int(program * GB)
        farm.say_memory()


def long_log(folder: Path, size: float) -> None:
    """Compile with a long log, follow it, and read it in each way that there is."""
    write_model(folder, 4000)
    write_package(folder / "scripted", 1000, int(size * GB))
    title = f"a log of {size:g} GB"
    with a_farm(folder) as farm:
        build = farm.command("submit", "farm.yaml", "--detach").strip()
        with farm.step(f"{title}: follow it to its end"):
            farm.command("logs", "--follow", build)
        with farm.step(f"{title}: until the build is reported"):
            farm.command("watch", build, code=None)
        (cell,) = json.loads(farm.command("status", build, "--json", code=None))["cells"]
        print(cell["state"], cell["kind"], cell["message"])
        for phase, seconds in json.loads(farm.read(f"/v1/jobs/{cell['job']}"))["attempts"][-1]["phases"].items():
            figure(f"{title}: {phase}", seconds, "s")
        with farm.step(f"{title}: farm logs"):
            farm.command("logs", build)
        for name, path in {
            "its page": f"/ui/ns/main/jobs/{cell['job']}/log",
            "the page of its beginning": f"/ui/ns/main/jobs/{cell['job']}/log?part=0",
            "search it": f"/ui/ns/main/jobs/{cell['job']}/log?q=needle",
            "search what each line has": f"/ui/ns/main/jobs/{cell['job']}/log?q=compiler",
            "search the logs of its build": f"/ui/ns/main/builds/{build}/log?q=needle",
            "raw": f"/ui/ns/main/jobs/{cell['job']}/log/raw",
            "over the API": f"/v1/jobs/{cell['job']}/log",
        }.items():
            with farm.step(f"{title}: {name}"):
                print(f"{len(farm.read(path))} bytes")
        if cell["state"] == "succeeded":
            with farm.step(f"{title}: fetch it with the program"):
                farm.command("fetch", f"{cell['identifier'].rpartition('/')[0]}@{build}", "--log", "-o", "out")
            assert max(path.stat().st_size for path in (folder / "out").rglob("*")) >= size * GB
            again = json.loads(farm.command("submit", "farm.yaml", "--json"))["build"]["id"]
            with farm.step(f"{title}: farm logs of a hit"):
                farm.command("logs", again)
        farm.say_memory()


@contextmanager
def a_farm(folder: Path, **settings: str) -> Iterator[WatchedFarm]:
    """Run `farm up` with the scripted compiler, and watch its memory."""
    packages = install(folder / "installed", folder / "scripted")
    known = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    environment = {**known, "PYTHONPATH": f"{packages}:{ROOT}", "FARM_CPU_SLOTS": "1", **settings}
    up = subprocess.Popen([sys.executable, "-m", "farm", "up"], cwd=folder, env=environment)
    try:
        wait_until((folder / ".farm" / "farm.json").exists, timeout=60)
        farm = WatchedFarm(folder, environment, Peaks(up.pid))
        with in_a_thread(farm.peaks.watch):
            yield farm
    finally:
        up.terminate()
        up.wait()


class WatchedFarm:
    """A farm that runs, and the most memory that its parts and clients have needed."""

    def __init__(self, folder: Path, environment: dict[str, str], peaks: Peaks) -> None:
        self.folder, self.environment, self.peaks = folder, environment, peaks
        self._whole: dict[str, float] = defaultdict(float)

    def command(self, *words: str, code: int | None = 0) -> str:
        """Run a command line, which ends with this code (None: any); return the end of what it prints."""
        with tempfile.TemporaryFile(dir=self.folder) as out:
            run = [sys.executable, "-m", "farm", *words]
            client = subprocess.Popen(run, cwd=self.folder, env=self.environment, stdout=out)
            _, status, usage = os.wait4(client.pid, 0)
            client.returncode = os.waitstatus_to_exitcode(status)
            assert code in (None, client.returncode)
            self.peaks.most["the client"] = max(self.peaks.most["the client"], usage.ru_maxrss * 1024)
            out.seek(max(0, out.tell() - (1 << 20)))
            return out.read().decode(errors="replace")

    def read(self, path: str) -> bytes:
        """Read an address of the API or of a page."""
        known = json.loads((self.folder / ".farm" / "farm.json").read_text())
        request = urllib.request.Request(
            known["api_url"] + path, headers={"Authorization": f"Bearer {known['api_token']}"}
        )
        with urllib.request.urlopen(request) as answer:
            return bytes(answer.read())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say how long the block takes, and what memory each part needed meanwhile."""
        self._keep()
        began = time.monotonic()
        yield
        figure(name, time.monotonic() - began, "s")
        parts = (f"{part} {most / 1e6:.0f}" for part, most in sorted(self.peaks.most.items()) if part not in OTHERS)
        print(f"    MB: {', '.join(parts)}", flush=True)

    def _keep(self) -> None:
        for part, most in self.peaks.most.items():
            self._whole[part] = max(self._whole[part], most)
        self.peaks.most.clear()

    def say_memory(self) -> None:
        """Say what each part needed at most."""
        self._keep()
        for part, most in sorted(self._whole.items()):
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


def write_package(folder: Path, size: int, log: int = 0) -> None:
    """Write an extension of the farm with a compiler whose programs and logs are so large."""
    for name, text in {
        "pyproject.toml": PROJECT,
        "scripted/__init__.py": "",
        "scripted/facts.py": FACTS,
        "scripted/runner/__init__.py": "",
        "scripted/runner/compiler.py": MODULE.replace("SIZE", str(size)).replace("LOG", str(log)),
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
