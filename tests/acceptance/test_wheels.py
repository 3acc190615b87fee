"""The wheel that `make dist` builds, in environments that have nothing but what its locks name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from packaging.requirements import Requirement

import farm
from tests.support.farm_command import Command, command
from tests.support.places import ROOT

MANIFEST = """
version: 1
name: net
targets: [onnxruntime/cpu]
models: [{name: net, source: {path: net.onnx}}]
"""


def built(folder: Path) -> Path:
    """Run `make dist` into a folder."""
    words = ["make", "-o", f"{sys.prefix}/.dev", "dist", f"VENV={sys.prefix}", f"DIST={folder}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("dist"))


def installed(lock: str, dist: Path, folder: Path) -> Path:
    """Install a lock, and so the wheel, into an empty environment; return its `farm`. Skips without a registry."""
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check", "-q"]
    any_package = next(dist.glob(f"*.{lock}.txt")).read_text().splitlines()[1].removesuffix("\\")
    words = ["download", "--retries", "0", "--no-deps", "--dest", str(folder / "any"), any_package]
    if subprocess.run([*pip, *words], capture_output=True, check=False).returncode:
        pytest.skip(f"needs a package registry that has {any_package}")
    words = [
        "install",
        "--no-compile",
        "--require-hashes",
        "--find-links",
        str(dist),
        "-r",
        str(next(dist.glob(f"*.{lock}.txt"))),
    ]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "farm"


def linked(lock: str, dist: Path, folder: Path) -> Path:
    """Make an environment of the wheel and of its lock's packages, as they are installed here; return its `farm`.

    Each lock keeps to the one that this environment was made of: to unpack the same files again took 15 s of CPU.
    """
    venv.create(folder)
    (place,) = folder.glob("lib/python*/site-packages")
    for line in next(dist.glob(f"*.{lock}.txt")).read_text().splitlines()[1:]:
        if not re.match(r"\w", line) or (
            (wanted := Requirement(line.strip(" \\"))).marker and not wanted.marker.evaluate()
        ):
            continue
        package = distribution(wanted.name)
        assert package.version in wanted.specifier, f"another {wanted.name} than `make test` installs"
        for name in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (place / name).exists():
                (place / name).symlink_to(Path(str(package.locate_file(name))))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check", "-q"]
    (wheel,) = dist.glob("*.whl")
    subprocess.run([*pip, "install", "--no-compile", "--no-index", wheel], check=True)
    return folder / "bin" / "farm"


def run(program: Path, here: Command, *words: str) -> str:
    """Run the installed command without this repository on its path."""
    environ = {name: value for name, value in here.environ.items() if name != "PYTHONPATH"}
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [program, *words], cwd=here.folder, env=environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def here(tmp_path: Path) -> Command:
    """A folder with a manifest and its model."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", value[:1], value[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    (tmp_path / "net.yaml").write_text(MANIFEST)
    return command(tmp_path)


def test_the_same_commit_makes_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.read_bytes() == (built(tmp_path) / wheel.name).read_bytes()


def test_each_lock_begins_with_the_wheel(dist: Path) -> None:
    locks = {path.stem for path in (ROOT / "deploy" / "locks").iterdir()} - {"dev"}
    assert {path.name.split(".")[-2] for path in dist.glob("*.txt")} == locks
    for path in dist.glob("*.txt"):
        first = path.read_text().partition("\n")[0]
        assert re.fullmatch(rf"migraphx-farm(\[[a-z-]+\])?=={farm.__version__} --hash=sha256:[0-9a-f]{{64}}", first)


def test_a_client_from_the_wheel_builds_and_fetches(dist: Path, here: Command, tmp_path: Path) -> None:
    """With what a farm answers, not only with what it can do alone."""
    program = linked("client", dist, tmp_path / "client")
    assert run(program, here, "--version").split()[1] == farm.__version__
    run(program, here, "lint", "net.yaml")
    with here.up():
        assert "1 of 1 cells succeeded" in run(program, here, "submit", "net.yaml")
        run(program, here, "fetch", "net", "--target", "onnxruntime/cpu", "--precision", "fp32", "-o", "out")
    assert (here.folder / "out" / "net--onnxruntime-cpu--fp32--static.onnx").exists()


@pytest.mark.wheels
def test_a_client_is_installed_by_its_lock(dist: Path, here: Command, tmp_path: Path) -> None:
    run(installed("client", dist, tmp_path / "client"), here, "lint", "net.yaml")


@pytest.mark.wheels
def test_a_whole_farm_from_the_wheel_builds(dist: Path, here: Command, tmp_path: Path) -> None:
    program = installed("embedded", dist, tmp_path / "embedded")
    assert "1 of 1 cells succeeded" in run(program, here, "run", "net.yaml", "-o", "out")
    assert list((here.folder / "out").rglob("*.onnx"))
