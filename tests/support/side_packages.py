"""Packages that are installed apart from this environment, in front of it, and command lines that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MANIFEST = """\
version: 1
name: extended
targets: [{target}]
models:
  - {{name: net, source: {{path: net.onnx}}}}
"""


def write_project(folder: Path, target: str) -> None:
    """Write a manifest and its model: a layer of a real network, that ONNX Runtime compiles in an instant."""
    weights = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, folder / "net.onnx")
    (folder / "farm.yaml").write_text(MANIFEST.format(target=target))


def install(place: Path, *packages: Path) -> Path:
    """Install sources of packages, or wheels, into a folder; return the folder to import them from."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", place, *packages], check=True)
    return place


def command(folder: Path, packages: Path, *arguments: str, code: int = 0, **settings: str) -> str:
    """Run a command line in a folder, with packages in front of what is installed; return what it prints.

    It ends with this exit code; what failed has printed errors.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    script = "import sys; from farm.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={
            **environment,
            "PYTHONPATH": str(packages),
            "FARM_CPU_SLOTS": "1",
            "FARM_MEASURE_SECONDS": "0.1",
            **settings,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout
