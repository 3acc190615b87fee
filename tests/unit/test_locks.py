"""What is installed is known to the byte: the locks fit `pyproject.toml`, and name no place to get it from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.places import ROOT

LOCKS = ROOT / "deploy" / "locks"
NAMES = ["client", "cuda", "dev", "embedded", "embedded-cuda", "server", "worker"]
FOR_CUDA = re.compile(r"nvidia-.*|onnxruntime-gpu")
PYTHONS = ["3.11", "3.12", "3.13"]


@cache
def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The packages of a lock, each with its hashes."""
    text = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    return [(Requirement(line.partition(" --hash")[0]), re.findall(r"--hash=(\S+)", line)) for line in lines]


def wanted(extra: str) -> Iterator[Requirement]:
    """What an extra of the farm asks for, with the extras that it names; a client has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            for inner in requirement.extras:
                yield from wanted(inner)
        else:
            yield requirement


def pins(name: str, python: str) -> dict[str, Version]:
    """What a lock installs on Linux under a Python."""
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    found: dict[str, Version] = {}
    for requirement, _ in locked(name):
        if requirement.marker is None or requirement.marker.evaluate(here):
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            assert canonicalize_name(requirement.name) not in found, "one version for one Python"
            found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def test_the_locks_are_these() -> None:
    assert sorted(path.stem for path in LOCKS.iterdir()) == NAMES


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_lock_fits_the_project(name: str, python: str) -> None:
    """Else: `make locks`."""
    found = pins(name, python)
    for requirement in wanted(name):
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {name}.txt"
        assert version in requirement.specifier, f"{requirement} is {version} in {name}.txt"


@pytest.mark.parametrize("python", PYTHONS)
def test_images_have_the_versions_that_were_tested(python: str) -> None:
    tested = pins("dev", python)
    for name in NAMES:
        rest = {package: version for package, version in pins(name, python).items() if not FOR_CUDA.fullmatch(package)}
        assert rest.items() <= tested.items(), name


@pytest.mark.parametrize("name", ["cuda", "embedded-cuda"])
def test_a_worker_for_nvidia_gpus_has_one_onnx_runtime(name: str) -> None:
    """The two packages overwrite each other."""
    assert {"onnxruntime-gpu", "nvidia-ml-py", "nvidia-cudnn-cu13"} <= pins(name, "3.12").keys()
    assert "onnxruntime" not in pins(name, "3.12")


@pytest.mark.parametrize("name", NAMES)
def test_each_package_has_its_hashes_and_no_place(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted-host| @ |/root|/opt|/tmp", text)
    for requirement, hashes in locked(name):
        assert requirement.url is None
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement.name
