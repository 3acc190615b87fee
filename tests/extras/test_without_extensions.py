"""The farm without its extensions: somebody deleted the folder from what a wheel installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.side_packages import command, install, write_project


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the farm as its wheel installs it, without `farm/extras`."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    place = install(folder / "installed", *folder.glob("*.whl"))
    assert (place / "farm" / "extras").is_dir()
    shutil.rmtree(place / "farm" / "extras")
    return place


def test_a_farm_without_any_extension_does_the_main_job(bare: Path, tmp_path: Path) -> None:
    """It plans, compiles, checks and measures with ONNX Runtime, stores, names and gives programs to readers."""
    write_project(tmp_path, "onnxruntime/cpu")
    built = json.loads(command(tmp_path, bare, "run", "farm.yaml", "-o", "built", "--json"))
    assert built["build"]["verdict"]["exit_code"] == 0
    (program,) = (tmp_path / "built").glob("**/*.onnx")
    sidecar = json.loads(program.with_name(program.name + ".artifact.json").read_text())
    assert sidecar["verification"]["errors"]["y"] < 1e-3
    assert sidecar["measurements"]["latency"]["median"] > 0
    assert "Extensions:" not in command(tmp_path, bare, "--help")
    checks = json.loads(command(tmp_path, bare, "doctor", "--json"))["checks"]
    assert "extension" not in json.dumps([each["name"] for each in checks])


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("ls",)])
def test_what_asks_for_signatures_does_not_go_on_without_their_reader(
    bare: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Else a farm that was installed in part would take and name what nobody has signed."""
    settings = {"FARM_TRUST_POLICY": "trust.toml", "FARM_API_URL": "http://127.0.0.1:9", "FARM_REDIS_URL": "redis://x"}
    said = command(tmp_path, bare, *arguments, code=2, **settings)
    assert "`trust_policy` is set, and no installed extension reads it" in said
