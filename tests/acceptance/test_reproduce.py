"""`farm reproduce`: an attempt again, alone, without a farm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.farm_command import Command

MANIFEST = """
version: 1
name: again
targets: [onnxruntime/cpu]
precisions: [fp32, int8]
models:
  - name: net
    source: {path: net.onnx}
    calibration: {generate: 8}
"""


def rerun(folder: Path, *arguments: str, python: str = sys.executable) -> tuple[int, dict[str, Any], str]:
    """Run the folder the way a stranger does: no farm installed, none of its settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTHON"))}
    done = subprocess.run(
        ["sh", str(folder / "run.sh"), *arguments],
        env={**environment, "PYTHON": python},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    result = folder / "work" / "result.json"
    return done.returncode, json.loads(result.read_text()) if result.exists() else {}, done.stdout + done.stderr


@pytest.fixture
def folders(quickstart: Command, tmp_path: Path) -> dict[str, tuple[dict[str, Any], Path]]:
    """A cell that succeeded and one that failed, each with its folder."""
    farm = Command(tmp_path, quickstart.environ)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "net", value[:1], value[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    (tmp_path / "farm.yaml").write_text(MANIFEST)
    report = farm.json("submit", "farm.yaml")
    found = {}
    for cell in report["cells"]:
        assert farm("reproduce", report["build"]["id"], cell["identifier"], "-o", cell["precision"]).returncode == 0
        found[cell["precision"]] = cell, tmp_path / cell["precision"]
    refused = farm("reproduce", found["fp32"][0]["key"], "-o", "fp32")
    assert (refused.returncode, "is not empty" in refused.stderr) == (2, True)
    artifact = farm.json("reproduce", found["fp32"][0]["key"], "-o", "artifact")
    assert artifact["key"] == found["fp32"][0]["key"]
    return found


def test_an_attempt_again_without_the_farm(folders: dict[str, tuple[dict[str, Any], Path]], tmp_path: Path) -> None:
    cell, folder = folders["fp32"]
    files = {path.relative_to(folder) for path in folder.rglob("*")}
    assert files == {path.relative_to(tmp_path / "artifact") for path in (tmp_path / "artifact").rglob("*")}
    assert Path("inputs/reference.npz") in files
    (folder / "inputs" / "reference.npz").unlink()  # It is made again, from the same seed.
    code, result, said = rerun(folder)
    assert code == 0, said
    assert result["key"] == cell["key"] == result["expected_key"]
    assert result["record"]["verification"]["errors"] == pytest.approx(cell["facts"]["errors"], abs=1e-6)
    assert Path(result["program"]).stat().st_size == cell["facts"]["program"]["size"]
    assert result["toolchain"] == result["expected_toolchain"]

    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    code, _, said = rerun(folder, python=str(bare / "bin" / "python"))
    assert (code, "bin/python has no numpy and no onnx: pip install numpy onnx" in said) == (2, True), said
    assert "PYTHON=/path/to/python sh run.sh" in said
    code, _, said = rerun(folder, python="/bin/false")
    assert (code, "/bin/false is not a Python 3.11 or newer: PYTHON=" in said) == (2, True), said

    cell, folder = folders["int8"]
    code, result, said = rerun(folder)
    assert (code, cell["kind"]) == (1, "nothing_quantized")
    assert (result["key"], result["ended"]["kind"]) == (cell["key"], cell["kind"])
    assert result["ended"]["message"] == cell["message"]
    assert f"key        {cell['key']}, the job's" in said
    assert f"the farm   nothing_quantized: {cell['message']}" in said

    (folder / "inputs" / "model" / "net.onnx").write_bytes(b"another")
    code, _, said = rerun(folder)
    assert (code, "the attempt's had" in said) == (2, True)


def test_a_strangers_variables_act_on_nothing_outside_the_seal(
    folders: dict[str, tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    """A work order of a farm that nobody should trust: what starts a child, and watches it, would load its code."""
    _, folder = folders["fp32"]
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "env": {"PYTHONPATH": str(tmp_path / "strange")}}))
    code, result, said = rerun(folder)
    assert not (tmp_path / "owned").exists()
    assert code == 1 and "`PYTHONPATH` is not a variable of onnxruntime" in result["ended"]["message"], said
