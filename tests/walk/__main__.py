"""The walk: follows one ONNX cell from `farm submit` to the fetched file, and counts the files that it enters.

    python -m tests.walk            run a farm, follow a cell, print the walk
    python -m tests.walk --write    also write it to docs/walk.md, which a test compares with a run of its own

A *hop* is the first call that enters a file from another file, in each process. Files that every room may use (see
`SHARED`) do not count, nor do calls back into a file that waits for the caller. A hop is a *step* if the file calls
further files: it hands the cell on. All others are *tools*: you need not open them to follow the cell.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.support.farm_command import Command, command
from tests.support.places import ROOT
from tests.walk.recorder import FOLDER, HOOK

PAGE = ROOT / "docs" / "walk.md"
SHARED_NAMES = (
    "cli/quick_start",
    "errors",
    "files",
    "inert",
    "logging",
    "metrics/instruments",
    "settings",
    "spec",
    "units",
)
SHARED = {f"farm/{name}.py" for name in SHARED_NAMES}
"""Files that every room may use: they are words, not places. All dataclasses of a command use the first."""

MANIFEST = """
version: 1
name: {name}
targets: [onnxruntime/cpu]
models: [{{name: {name}, source: {{path: {name}.onnx}}}}]
"""

PROCESSES = {
    "farm submit": "what the user types. Reads the manifest and the model, sends both, and watches the build.",
    "server": "the API and the control loops. Plans the build, hands out its job, and reports its end.",
    "worker process": "Celery's process on a node, which the supervisor started. Runs the attempt.",
    "child that answers `reference`": "a sealed process. Checks the model and makes the right outputs.",
    "child that answers `compile`": "a sealed process. Compiles the model.",
    "child that answers `evaluate`": "a sealed process. Loads the program, compares its outputs, measures it.",
    "farm fetch": "what the user types. Downloads the program and checks it.",
}
"""The processes of a walk in their order, and what each is."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The first call that enters a file in one process, and the file that it comes from."""

    role: str
    source: str
    file: str
    function: str
    is_step: bool


def follow(folder: Path) -> list[Hop]:
    """Run a farm in a folder, follow one cell through it, and return the hops in their order."""
    record = folder / "walk"
    record.mkdir()
    (record / "on").write_bytes(b"\0")
    (record / "calls").touch()
    here = Path(__file__).parent
    path = f"{ROOT}:{here / 'hook'}"
    farm = command(folder, **{FOLDER: str(record), HOOK: str(here), "PYTHONPATH": path, "FARM_MEASURE_SECONDS": "0.1"})
    for name, operator in (("first", "Relu"), ("net", "Tanh")):
        _write_model(folder / f"{name}.onnx", operator)
        (folder / f"{name}.yaml").write_text(MANIFEST.format(name=name))
    with farm.up():
        # What a farm does only once, such as to read its index, is done for another model.
        _run(farm, "submit", "first.yaml")
        with (record / "on").open("r+b") as switch:
            switch.write(b"\1")
        _run(farm, "submit", "net.yaml")
        _run(farm, "fetch", "net", "-t", "onnxruntime/cpu", "-p", "fp32", "-o", "out")
        with (record / "on").open("r+b") as switch:
            switch.write(b"\0")
    return list(_hops((record / "calls").read_text().splitlines()))


def _run(farm: Command, *arguments: str) -> None:
    done = farm(*arguments)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, ["farm", *arguments], done.stdout, done.stderr)


def _write_model(path: Path, operator: str) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "net", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _hops(lines: Sequence[str]) -> Iterator[Hop]:
    calls = [call for call in map(json.loads, lines) if not {call["from"], call["to"]} & SHARED]
    steps = {(call["role"], call["from"]) for call in calls}
    seen: set[tuple[str, str]] = set()
    for call in calls:
        role, file = call["role"], call["to"]
        if (role, file) not in seen:
            seen.add((role, file))
            yield Hop(role, call["from"], file, call["function"], (role, file) in steps)


def counts(hops: Sequence[Hop]) -> str:
    """Return the sentence that counts a walk."""
    steps = [hop for hop in hops if hop.is_step]
    return (
        f"{len(hops)} hops into {len({hop.file for hop in hops})} files; "
        f"{len(steps)} of them are steps, in {len({hop.file for hop in steps})} files."
    )


def page(hops: Sequence[Hop]) -> str:
    """Return `docs/walk.md`."""
    parts = [
        _HEAD.format(
            counts=counts(hops),
            shared=", ".join(f"`{name}`" for name in SHARED_NAMES),
            drawing="\n".join(_drawing(hops)),
        )
    ]
    for role, about in PROCESSES.items():
        own = [hop for hop in hops if hop.role == role]
        files = {hop.file for hop in own}
        roots = [hop for hop in own if hop.source not in files]
        lines = [line for root in roots for line in _tree(root, own, 0)]
        parts.append("\n".join([f"## {role[0].upper()}{role[1:]}", "", f"This is {about}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def files_of(text: str) -> set[tuple[str, str]]:
    """Return the files that a page names, each with its process."""
    found = set()
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        role = next(role for role in PROCESSES if role.lower() == title.lower())
        found |= {(role, name) for name in re.findall(r"\]\(\.\./([\w/]+[.]py)\)", body)}
        for tools in re.findall(r" Uses ((?:`[\w/]+[.]py`(?:, )?)+)[.]$", body, re.MULTILINE):
            names = re.findall(r"`([\w/]+[.]py)`", tools)
            found |= {(role, name if name.startswith("tasks/") else f"farm/{name}") for name in names}
    return found


def _tree(hop: Hop, hops: Sequence[Hop], depth: int) -> Iterator[str]:
    """Yield a step with its tools, and the steps below it."""
    below = [other for other in hops if other.source == hop.file]
    tools = [f"`{other.file.removeprefix('farm/')}`" for other in below if not other.is_step]
    uses = f" Uses {', '.join(tools)}." if tools else ""
    name = hop.file.removeprefix("farm/")
    yield f"{'  ' * depth}- [`{name}`](../{hop.file}) `{hop.function}`: {_purpose(hop)}{uses}"
    for other in below:
        if other.is_step:
            yield from _tree(other, hops, depth + 1)


def _purpose(hop: Hop) -> str:
    """Return the first line of the docstring of the function that is entered, or of its class or module."""
    node: ast.AST = ast.parse((ROOT / hop.file).read_text())
    found = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    for name in hop.function.split("."):
        inner = [each for each in ast.walk(node) if getattr(each, "name", "") == name and hasattr(each, "body")]
        if not inner:
            break
        node = inner[0]
        found = ast.get_docstring(node) or found  # type: ignore[arg-type]
    line = found.partition("\n\n")[0].replace("\n", " ")
    return line if line.endswith(".") else f"{line}."


def _drawing(hops: Sequence[Hop]) -> Iterator[str]:
    """Yield a Mermaid flow chart of rooms: each process with the rooms that the cell goes through."""
    names = {role: f"p{index}" for index, role in enumerate(PROCESSES)}
    yield "flowchart TB"
    for role, short in names.items():
        rooms = dict.fromkeys(_room(hop.file) for hop in hops if hop.role == role)
        yield f'  subgraph {short}["{role.replace("`", "")}"]'
        yield "    direction LR"
        yield from (f'    {short}_{room.replace("/", "_")}["{room}"]' for room in rooms)
        pairs = {
            (_room(hop.source), _room(hop.file)): None
            for hop in hops
            if hop.role == role and hop.is_step and hop.source
        }
        for source, room in pairs:
            if source != room and source in rooms:
                yield f"    {short}_{source.replace('/', '_')} --> {short}_{room.replace('/', '_')}"
        yield "  end"
    submit, server, worker, *children, fetch = names.values()
    yield f"  {submit} -- HTTP --> {server}"
    yield f"  {server} -- a Celery message --> {worker}"
    yield from (f"  {worker} -- a request on a pipe --> {child}" for child in children)
    yield f"  {fetch} -- HTTP --> {server}"


def _room(file: str) -> str:
    return file.removeprefix("farm/").partition("/")[0].removesuffix(".py")


_HEAD = """# The walk

Read this page first. It follows one ONNX model from `farm submit` to the file that `farm fetch` writes, through every
process that has a part in it. `python -m tests.walk --write` made it from a real run; a test compares it with another.

{counts}

A hop is the first call that enters a file from another one, in each process. It is a step if that file calls further
files. The steps are listed below, each under the file that calls it, with the first line of what the code says of
itself. All other files are tools of the step that uses them: you need not open them to follow the cell. Calls back into
a file that waits for the caller do not count, nor do files that every room may use ({shared}).

The processes share nothing but Redis (`farm/store/`), object storage (`farm/artifacts/`) and messages. The boxes are
the rooms that each process enters; `CONTRIBUTING.md` says what a room is for.

```mermaid
{drawing}
```"""


def main() -> int:
    """Follow a cell; print the walk, and write the page if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hops = follow(Path(folder))
    for hop in hops:
        print(f"{hop.role:32} {'step' if hop.is_step else 'tool'}  {hop.source or '-':36} -> {hop.file} {hop.function}")
    print(counts(hops))
    if arguments.write:
        PAGE.write_text(page(hops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
