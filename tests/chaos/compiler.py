"""A compiler that follows a script: the child of a chaos worker, under the farm's real guard and seal.

A request's `step` says how the compile goes (`evaluate` and `reference` are only quick):

    say         what it prints first
    seconds     how long it takes
    wait        it goes on once this file exists
    die         the name of a signal to die by
    exit        the code to exit with, without an answer
    lack        a field that no answer of it has
    eat         bytes to take, to run into the memory limit
    hostile     what it does first of `tests/support/hostile_child.py`
    alone       it measures alone until `wait` exists, and says `tuning` meanwhile
    hang        it does nothing for ever, and has a child of its own that does the same
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "farm" / "runner"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import child

from tests.support import hostile_child

PORT = {"dtype": "float32", "shape": [1, 4], "strides": [4, 1]}


def work(request: dict, messages) -> dict:
    answer = globals()[f"do_{request['action']}"](request, messages)
    answer.pop(request["step"].get("lack"), None)
    return answer


def do_reference(request: dict, messages) -> dict:
    Path(request["reference"]).write_bytes(b"reference")
    return {}


def do_compile(request: dict, messages) -> dict:
    messages.phase("compiling")
    step = request["step"]
    print(step.get("say", ""), flush=True)
    if step.get("hang"):
        subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        signal.pause()
    if "eat" in step:
        held = []
        while len(held) * (8 << 20) < step["eat"]:
            held.append(b"x" * (8 << 20))
            time.sleep(0.01)
        signal.pause()
    if "hostile" in step:
        getattr(hostile_child, f"do_{step['hostile']}")(step, messages)
    with messages.alone() if "alone" in step else nullcontext():
        if "alone" in step:
            messages.phase("tuning")
        while "wait" in step and not Path(step["wait"]).exists():
            time.sleep(0.1)
    time.sleep(step.get("seconds", 0.0))
    if "die" in step:
        os.kill(os.getpid(), getattr(signal, step["die"]))
        signal.pause()
    if "exit" in step:
        os._exit(step["exit"])
    Path(request["program"]).write_text(json.dumps([request["inputs"], request["batch"], step]))
    return {
        "inputs": [{"name": "x", **PORT}],
        "outputs": [{"name": "y", **PORT}],
        "weight_dtypes": {"float32": 4},
        "compute_dtypes": {"float32": 1},
        "quantized": {},
        "size": 100,
        "offload_copy": None,
    }


def do_evaluate(request: dict, messages) -> dict:
    assert Path(request["program"]).exists()
    Path(request["sample"]).write_bytes(b"sample")
    verification = {
        **{"errors": {"y": 0.0}, "rms": {}, "equal": {}, "nonfinite": [], "spread": {"y": 1.0}, "weak": False},
        **{"samples": 8, "runs": 1, "origin": {"y": "expected"}, "unverified": {}},
    }
    return {"verification": verification, "measurements": {"load": 0.001, "latency": {"median": 0.001}}}


if __name__ == "__main__":
    sys.exit(child.start(work))
