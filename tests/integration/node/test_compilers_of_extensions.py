"""A compiler of somebody else: found by its entry point, run in sealed children, and taken along to reruns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farm.targets.compilers import compilers
from farm.targets.pools import understand_target
from tests.support.places import ROOT

COMPILER = '''
"""Acme's compiler, as data."""

from farm.targets.compilers import Compiler, DeviceKind

ACME = Compiler(
    name="acme",
    recipe=1,
    devices=(DeviceKind("cpu", ("fp32",), module="acme_farm.runner.compiler"),),
    formats=("onnx",),
    extension=".acme.onnx",
    options={},
    quantization={},
    calibrated=frozenset(),
    toolchains=("acme",),
)
'''

RUNNER = '''
"""Acme's compiler, as children run it: it keeps the model as it is."""

from pathlib import Path

from farm.runner import onnxruntime_compiler
from farm.runner.onnxruntime_compiler import load_reference

from .names import TOOLCHAIN

RECIPE = 1


def probe(request):
    return {**onnxruntime_compiler.probe(request), "label": "acme1.0", "toolchain": TOOLCHAIN}


def compile(request, messages):
    try:
        Path(CANARY).read_text()
    except PermissionError:
        pass
    else:
        raise RuntimeError("the seal lets it read everything")
    plain = {**request, "options": {"level": "standard"}}
    return onnxruntime_compiler.compile(plain, messages)


def load(request):
    return onnxruntime_compiler.load(request)
'''

SCRIPT = """
import hashlib, json, sys
from pathlib import Path
from farm.extras.reproduce import reproduction
from farm.compiling.pipeline import StepSettings
from farm.extras.reproduce.reproduction import rerun
from tests.support.compiling import PNET, inputs_of

folder = Path(sys.argv[1])
spec = {
    "schema": 1, "compiler": {"name": "acme", "recipe": 1, "libraries": {}},
    "device": {"arch": "cpu", "compute_units": None, "xcc": None, "cpu_family": None},
    "options": {}, "inputs": inputs_of(PNET, input_1=[1, 24, 24, 3]), "batch": None, "salt": "",
    "toolchain": "acme1.0-12345678", "precision": "fp32", "quantization": {}, "tuning": {"mode": "off"},
    "calibration": None, "env": {}, "model": {"digest": "a" * 64, "format": "onnx"},
    "verification": {"reference": "onnxruntime", "samples": {"generate": 2, "seed": 0, "ranges": {}}},
}
file = {"path": "net.onnx", "digest": hashlib.sha256(PNET.read_bytes()).hexdigest(), "size": PNET.stat().st_size}
order = {
    "identifier": "net/acme-cpu/fp32", "target": "acme/cpu", "spec": spec,
    "model": {"format": "onnx", "files": [file], "names": ["conv2d_4", "softmax"]}, "tolerance": 0.001, "equal": 1.0,
}
document = {
    "schema": 1, "farm": "0", "job": "j", "attempt": 1, "namespace": "main", "build": "b", "worker": "w", "key": "k",
    "limits": {"time": 120.0, "memory": 0}, "previous": [], "ended": None, "reference": None, "order": order,
}
machine = StepSettings(measure_seconds=0.05)
reproduction.write(document, folder, machine, lambda _, place: place.write_bytes(PNET.read_bytes()))
print(json.dumps(rerun(folder, machine)["ended"]))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder into which somebody installed the package `acme-farm`."""
    place = tmp_path / "installed"
    runner = place / "acme_farm" / "runner"
    runner.mkdir(parents=True)
    canary = tmp_path / "canary"
    canary.write_text("a secret of the node's")
    (place / "acme_farm" / "__init__.py").write_text("")
    (place / "acme_farm" / "data.py").write_text(COMPILER)
    (runner / "__init__.py").write_text("")
    (runner / "names.py").write_text('TOOLCHAIN = "acme1.0-12345678"\n')
    (runner / "compiler.py").write_text(RUNNER.replace("CANARY", repr(str(canary))))
    info = place / "acme_farm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-farm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[farm.compilers]\nacme = acme_farm.data:ACME\n")
    return place


def test_it_compiles_in_sealed_children_and_again_without_the_package(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    log = folder / "work" / "log.txt"
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) is None, log.read_text()
    assert len(list((folder / "work" / "program").glob("*.acme.onnx"))) == 1
    shutil.rmtree(installed)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    again = subprocess.run(
        ["sh", str(folder / "run.sh")],
        env={**plain, "PYTHON": sys.executable},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "toolchain  acme1.0-12345678, the job's" in again.stdout


def test_a_compiler_whose_programs_no_client_takes_is_refused_when_it_is_loaded(installed: Path) -> None:
    data = installed / "acme_farm" / "data.py"
    data.write_text(data.read_text().replace(".acme.onnx", ".acme.bin"))
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    (installed / "farm.yaml").write_text("version: 1\nname: n\ntargets: [acme/cpu]\nmodels: []\n")
    linted = subprocess.run(
        [sys.executable, "-m", "farm", "lint", installed / "farm.yaml"],
        env=environment, cwd=installed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert linted.returncode == 2
    assert "the compiler acme of acme_farm.data names programs *.acme.bin" in linted.stderr
    assert "clients take files that end with" in linted.stderr


def test_a_farm_without_the_extension_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(understand_target("onnxruntime/cuda").served) == "onnxruntime/cuda"
    monkeypatch.setattr("farm.entry_points.load", lambda _: [])
    monkeypatch.setattr("farm.targets.pools.compilers", compilers.__wrapped__)
    for text in ("onnxruntime/cuda", "onnxruntime/tensorrt:h200", "h200", "sm_90"):
        with pytest.raises(ValueError, match="needs the extension nvidia, which is not installed"):
            understand_target(text)
    assert understand_target("onnxruntime/cpu")
