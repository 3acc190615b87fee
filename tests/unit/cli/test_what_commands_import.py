"""What a command imports is what it costs: importing onnx and numpy alone takes longer than a command may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.places import ROOT

FRAMEWORK = {"typer", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
FRAMEWORK |= {"annotated_doc", "shellingham", "platformdirs"}
HTTP = {"httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio"}
YAML = {"ruamel"}

TALKING = {
    "artifacts",
    "cli",
    "client",
    "entry_points",
    "errors",
    "files",
    "inert",
    "jobs",
    "matrix",
    "models",
    "results",
    "settings",
    "spec",
}
TALKING |= {"runner", "units", "wire"}
CHECKING = (TALKING - {"artifacts", "results", "settings"}) | {"manifest", "targets"}
CHECKING |= {"entry_points", "extras"}  # Extensions add targets.
ROOMS = {"status": TALKING, "ls": TALKING, "lint": CHECKING, "plan": CHECKING | TALKING | {"extension"}}
"""The first word of commands, and the rooms that each may import."""

LIBRARIES = {
    "status": FRAMEWORK | HTTP,
    "ls": FRAMEWORK | HTTP,
    "ls refs": FRAMEWORK | HTTP,
    "lint farm.yaml --no-models": FRAMEWORK | YAML,
    "lint farm.yaml": FRAMEWORK | YAML,
    "plan farm.yaml": FRAMEWORK | YAML | HTTP,
}
"""Commands, and the libraries that each may import."""

PROFILE = """
import sys, time
before = set(sys.modules)
time.sleep = lambda seconds: None
from farm.cli import main
status = main(sys.argv[1:])
import json
print(json.dumps([status, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest with a model and samples, whose facts a first `farm lint` has found."""
    place = tmp_path_factory.mktemp("fast")
    port = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", port[:1], port[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, place / "net.onnx")
    np.savez(place / "samples.npz", x=np.ones((3, 4), np.float32))
    (place / "farm.yaml").write_text(
        "version: 1\nname: fast\ntargets: [onnxruntime/cpu]\nmodels:\n"
        "  - {name: net, source: {path: net.onnx}, samples: {path: samples.npz}, batches: [2]}\n"
    )
    first = profile(place, "plan farm.yaml")[1]
    assert {"onnx", "numpy"} <= {name.split(".")[0] for name in first}, "nothing was known yet"
    return place


def profile(folder: Path, command: str) -> tuple[int, list[str]]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FARM_")},
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "FARM_API_URL": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROFILE, *command.split()],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    status, modules = json.loads(done.stderr.splitlines()[-1])
    return status, modules


@pytest.mark.parametrize("command", LIBRARIES)
def test_a_command_imports_what_it_needs_and_no_more(folder: Path, command: str) -> None:
    status, modules = profile(folder, command)
    assert status == (0 if command.startswith("lint") else 6)
    libraries = {name.split(".")[0] for name in modules if not name.startswith("_")} - sys.stdlib_module_names
    assert libraries - {"farm"} <= LIBRARIES[command]
    rooms = {name.split(".")[1] for name in modules if name.startswith("farm.")}
    assert rooms <= ROOMS[command.split(maxsplit=1)[0]]
    # Their parts that cost most, for what a command does not do.
    assert {"asyncio", "concurrent.futures", "farm.artifacts.sidecar", "httpx._main"} & set(modules) == set()
    if command.startswith("lint"):  # It asks no farm and shows no plan.
        asking = {"ssl", "urllib.request", "http.client"}
        planning = {"farm.matrix.planned", "farm.jobs.rows", "farm.jobs.facts", "farm.wire.asked"}
        assert (asking | planning) & set(modules) == set()


DOCUMENTS = """
import sys
import farm.matrix.planned
from farm.client import client
from farm.wire import checking
from typing import ForwardRef
from typing_extensions import is_typeddict
rooms = [each for name, each in sys.modules.items() if name.startswith("farm.")]
found = [(room.__name__, each) for room in rooms for each in vars(room).values() if is_typeddict(each)]
own = [each for room, each in found if each.__module__ == room]
print(sum(isinstance(field, ForwardRef) for each in own for field in each.__annotations__.values()), len(own))
"""


def test_the_fields_of_few_documents_are_compiled_from_text_when_they_are_imported() -> None:
    """Under `from __future__ import annotations` each field costs a call of the compiler, and another to check it."""
    done = subprocess.run([sys.executable, "-c", DOCUMENTS], cwd=ROOT, capture_output=True, text=True, check=True)
    texts, documents = map(int, done.stdout.split())
    assert documents > 50
    assert texts < 50  # Of 1,000.
