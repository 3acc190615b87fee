"""Programs without Python: the samples of `docs/samples`, built with CMake, and MIGraphX's driver.

`ROCM` names a tree with MIGraphX's C++ headers and library (default `/opt/rocm`), `ONNXRUNTIME_INCLUDE` the folder of
ONNX Runtime's C header, which its Python wheel does not have. The driver is found by `PATH` or in `ROCM`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.support.compiling import needs_target
from tests.support.places import ROOT

SAMPLES = ROOT / "docs" / "samples"
ROCM = Path(os.environ.get("ROCM", "/opt/rocm"))


def build(folder: Path, sample: str, **definitions: object) -> Path:
    """Return a sample that was built."""
    if missing := [tool for tool in ("cmake", "make", "g++") if not shutil.which(tool)]:
        pytest.skip(f"needs {', '.join(missing)}")
    options = [part for key, value in definitions.items() for part in ("-D", f"{key}={value}")]
    for words in (["-S", SAMPLES, "-B", folder, "-D", "CMAKE_BUILD_TYPE=Release", *options], ["--build", folder]):
        done = subprocess.run(["cmake", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / sample


def model(folder: Path) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 4]) for name in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16, dtype=np.float32))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", values[:1], values[1:], [weight])
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


SHOWN = ["input x: 32 values", "32 values, sum 480"]
"""Each of 8 rows is 0.5 times the sum of the columns: 0.5 * 120 * 8."""


def shown(*words: object) -> list[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    return [first, second.partition(": ")[2]]


@pytest.mark.migraphx
def test_a_program_runs_by_migraphxs_api_for_c_plus_plus(tmp_path: Path) -> None:
    if not (ROCM / "include/migraphx/migraphx.hpp").exists():
        pytest.skip("needs MIGraphX's C++ headers: ROCM names their tree")
    import migraphx

    program = migraphx.parse_onnx(str(model(tmp_path)))
    program.compile(migraphx.get_target("ref"))
    migraphx.save(program, str(tmp_path / "net.mxr"))
    assert shown(build(tmp_path / "build", "run_migraphx", CMAKE_PREFIX_PATH=ROCM), tmp_path / "net.mxr") == SHOWN


@pytest.mark.migraphx
@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_a_program_runs_by_migraphxs_driver(device: str, tmp_path: Path) -> None:
    driver = shutil.which("migraphx-driver") or shutil.which("migraphx-driver", path=ROCM / "bin")
    if not driver:
        pytest.skip("needs migraphx-driver, on PATH or in ROCM")
    needs_target(device)
    import migraphx

    program = migraphx.parse_onnx(str(model(tmp_path)))
    program.compile(migraphx.get_target(device))
    path = tmp_path / "net.mxr"
    migraphx.save(program, str(path))
    words = [driver, "run", path, "--migraphx", f"--{device}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{device}::" in done.stdout, "it prints the instructions that it ran"


def test_a_program_runs_by_onnx_runtimes_api_for_c(tmp_path: Path) -> None:
    header = Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime"))
    if not (header / "onnxruntime_c_api.h").exists():
        pytest.skip("needs ONNX Runtime's C header: ONNXRUNTIME_INCLUDE names its folder")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("this wheel of ONNX Runtime has no libonnxruntime.so")
    # As a release of ONNX Runtime names it: programs ask for the second.
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    place = tmp_path / "libonnxruntime.so"
    sample = build(tmp_path / "build", "run_onnxruntime", ONNXRUNTIME_INCLUDE=header, ONNXRUNTIME_LIBRARY=place)
    path = model(tmp_path)
    assert shown(sample, path) == SHOWN
    # The CPU's build has no MIGraphX: it must say so, and not run on the CPU.
    refused = subprocess.run([sample, path, tmp_path], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "MIGraphX" in refused.stderr
