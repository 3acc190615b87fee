"""The walk: follows one ONNX cell from `farm submit` to the fetched file, and counts how often it enters a file.

    python -m tests.walk            run a farm, follow a cell, print the walk
    python -m tests.walk --sites    also print every hop with its place, most frequent pairs of files first
    python -m tests.walk --write    also write it to docs/walk.md, which a test compares with a run of its own

A *hop* is each time control enters another file, scripts of the job store included, also again into the same file; each
call site counts once in each process. Returns do not count, nor do calls of files that every room may use (`SHARED`).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx
import redis
from onnx import TensorProto, helper

from tests.support.farm_command import Command, command
from tests.support.places import ROOT
from tests.walk.recorder import FOLDER, HOOK, NOTES, SHARED

PAGE = ROOT / "docs" / "walk.md"

MANIFEST = """
version: 1
name: {name}
targets: [onnxruntime/cpu]
models: [{{name: {name}, source: {{path: {name}.onnx}}}}]
"""

PROCESSES = {
    "farm submit": "what the user types. Reads the manifest and the model, sends both, and watches the build.",
    "server": "the API and the control loops. Plans the build, hands out its job, and reports its end.",
    "supervisor": "`farm worker` on a node. Started the worker process, and keeps it consuming.",
    "worker process": "Celery's process on a node. Runs the attempt.",
    "child that answers `reference`": "a sealed process. Checks the model and makes the right outputs.",
    "child that answers `compile`": "a sealed process. Compiles the model.",
    "child that answers `evaluate`": "a sealed process. Loads the program, compares its outputs, measures it.",
    "farm fetch": "what the user types. Downloads the program and checks it.",
}
"""The processes of a walk in their order, and what each is."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A call site in one file from which another one is entered, in one process."""

    role: str
    source: str
    line: int
    file: str
    function: str
    within: tuple[tuple[str, str], ...]
    """Files and functions that wait for it, the nearest first."""


def follow(folder: Path) -> list[Hop]:
    """Run a farm in a folder, follow one cell through it, and return the hops in their order."""
    record = folder / "walk"
    record.mkdir()
    (record / "on").write_bytes(b"\0")
    (record / "calls").touch()
    here = Path(__file__).parent
    path = f"{ROOT}:{here / 'hook'}"
    # A child that starts cold can be recorded; a warm one is the same from its launcher on.
    settings = {"FARM_MEASURE_SECONDS": "0.1", "FARM_COLD_CHILDREN": "*"}
    farm = command(folder, **{FOLDER: str(record), HOOK: str(here), "PYTHONPATH": path, **settings})
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
        notes = _notes(folder / "data")
    calls = [json.loads(line) for line in [*(record / "calls").read_text().splitlines(), *sorted(notes)]]
    return [Hop(**call | {"within": tuple(map(tuple, call["within"]))}) for call in calls]


def _notes(data: Path) -> set[str]:
    """Return the calls within scripts, as JSON."""
    where = json.loads((data / "farm.json").read_text())
    with redis.Redis.from_url(where["redis_url"], decode_responses=True) as store:
        return set(store.smembers(NOTES))


def _run(farm: Command, *arguments: str) -> None:
    done = farm(*arguments)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, ["farm", *arguments], done.stdout, done.stderr)


def _write_model(path: Path, operator: str) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "net", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def counts(hops: Sequence[Hop]) -> str:
    """Return the sentence that counts a walk."""
    return f"{len(hops)} hops into {len({hop.file for hop in hops})} files."


def sites(hops: Sequence[Hop]) -> Iterator[str]:
    """Yield every hop with its place, under its pair of files; the pair with most of them first."""
    pairs = Counter((hop.role, hop.source, hop.file) for hop in hops)
    for (role, source, file), number in pairs.most_common():
        yield f"{number:4} {role}: {source or '(from outside)'} -> {file}"
        yield from (
            f"         {hop.line} {hop.function}"
            for hop in hops
            if (hop.role, hop.source, hop.file) == (role, source, file)
        )


def page(hops: Sequence[Hop]) -> str:
    """Return `docs/walk.md`."""
    shared = ", ".join(f"`{name.removeprefix('farm/')}`" for name in SHARED)
    parts = [_HEAD.format(counts=counts(hops), shared=shared, drawing="\n".join(_drawing(hops)))]
    for role, about in PROCESSES.items():
        own = [hop for hop in hops if hop.role == role]
        lines = list(_tree(own))
        count = f"{len(own)} hops into {len({hop.file for hop in own})} files."
        parts.append("\n".join([f"## {role[0].upper()}{role[1:]}", "", f"This is {about} {count}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def files_of(text: str) -> set[tuple[str, str]]:
    """Return the files that a page names, each with its process."""
    found = set()
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        role = next(role for role in PROCESSES if role.lower() == title.lower())
        found |= {(role, name) for name in re.findall(r"^ *- \[.*?\]\(\.\./([\w/]+[.]\w+)\)", body, re.MULTILINE)}
    return found


def _tree(hops: Sequence[Hop]) -> Iterator[str]:
    """Yield a line for each file, below that of the file which enters it first."""
    firsts = {hop.file: hop.source for hop in reversed(hops)}
    seen: set[str] = set()

    def lines(file: str, depth: int) -> Iterator[str]:
        seen.add(file)
        names = matter(file, hops)
        functions = ", ".join(f"`{name}`" for name in names)
        yield f"{'  ' * depth}- [`{file.removeprefix('farm/')}`](../{file}) {functions}: {purpose(file, names[0])}"
        for below in files:
            if firsts[below] == file and below not in seen:
                yield from lines(below, depth + 1)

    files = dict.fromkeys(hop.file for hop in hops)
    # What is entered from outside comes first, then what loops call that had begun before.
    for file in sorted(files, key=lambda file: (firsts[file] in files, firsts[file] != "")):
        if file not in seen:
            yield from lines(file, 0)


def matter(file: str, hops: Sequence[Hop]) -> list[str]:
    """Return the functions of a file that matter in a process: those below which most hops are, at most six.

    Of functions that enter no other file, the longest one. Private ones and constructors only without any other.
    """
    below = Counter(name for hop in hops for name in {name for at, name in hop.within if at == file})
    names = dict.fromkeys([*(hop.function for hop in hops if hop.file == file), *below])

    def weight(name: str) -> tuple[bool, int, int]:
        is_public = not any(part.startswith(("_", "<")) for part in name.split("."))
        return is_public, below[name], length(file, name)

    first, *others = sorted(names, key=weight, reverse=True)
    return [first, *(name for name in others[:5] if weight(name)[0] and 0 < below[first] <= 8 * below[name])]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def nodes(file: str, function: str) -> list[ast.AST]:
    """Return the nodes of a module, a class in it, and a function, as far as they are found."""
    found: list[ast.AST] = [tree(file)]
    for name in function.split("."):
        inner = [each for each in ast.walk(found[-1]) if getattr(each, "name", "") == name and hasattr(each, "body")]
        if not inner:
            break
        found.append(inner[0])
    return found


def length(file: str, function: str) -> int:
    """Return the number of lines of a function; of one in a script 0."""
    node: ast.AST = nodes(file, function)[-1] if file.endswith(".py") else ast.Pass()
    return node.end_lineno - node.lineno if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno else 0


def purpose(file: str, function: str) -> str:
    """Return the first line of the docstring of a function, or of its class or module; of a script, of its comment."""
    if file.endswith(".lua"):
        found = (
            re.sub(r"\s*\n-- ", " ", (ROOT / file).read_text().removeprefix("-- "))
            .partition(". ")[0]
            .partition("\n")[0]
        )
    else:
        texts = [ast.get_docstring(node) for node in nodes(file, function)]  # type: ignore[arg-type]
        found = next(filter(None, reversed(texts)), "").partition("\n\n")[0].replace("\n", " ")
    return found if found.endswith(".") else f"{found}."


def _drawing(hops: Sequence[Hop]) -> Iterator[str]:
    """Yield a Mermaid flow chart of rooms: each process with the rooms that the cell goes through."""
    names = {role: f"p{index}" for index, role in enumerate(PROCESSES)}
    yield "flowchart TB"
    for role, short in names.items():
        own = [hop for hop in hops if hop.role == role]
        yield f'  subgraph {short}["{role.replace("`", "")}"]'
        yield "    direction LR"
        yield from (f'    {short}_{room}["{room}"]' for room in dict.fromkeys(_room(hop.file) for hop in own))
        firsts = {hop.file: hop for hop in reversed(own)}
        pairs = dict.fromkeys(
            (_room(hop.source), _room(hop.file)) for hop in own if hop.source and firsts[hop.file] == hop
        )
        yield from (f"    {short}_{source} --> {short}_{room}" for source, room in pairs if source != room)
        yield "  end"
    submit, server, supervisor, worker, *children, fetch = names.values()
    yield f"  {submit} -- HTTP --> {server}"
    yield f"  {server} -- a Celery message --> {worker}"
    yield f"  {supervisor} -- a lifeline --> {worker}"
    yield from (f"  {worker} -- a request on a pipe --> {child}" for child in children)
    yield f"  {fetch} -- HTTP --> {server}"


def _room(file: str) -> str:
    return file.removeprefix("farm/").partition("/")[0].removesuffix(".py")


_HEAD = """# The walk

Read this page first. It follows one ONNX model from `farm submit` to the file that `farm fetch` writes, through every
process that has a part in it. `python -m tests.walk --write` made it from a real run; a test compares it with another.

{counts}

A hop is each time control enters another file, also again into the same file; each call site counts once in each
process. Returns do not count, nor do files that every room may use ({shared}).
At the commit where this count began, 232dc12, it was 968 hops into 134 files.

Each file is listed under the one that enters it first, with the functions that matter: those below which most of the
way is. The text is the first line of what the code says about itself. `python -m tests.walk --sites` prints every hop.

The processes share nothing but Redis (`farm/store/`), object storage (`farm/artifacts/`) and messages. The boxes are
the rooms that each process enters; `CONTRIBUTING.md` says what a room is for.

```mermaid
{drawing}
```"""


def main() -> int:
    """Follow a cell; print the walk, and write the page if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", action="store_true", help="print every hop")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hops = follow(Path(folder))
    if arguments.sites:
        print("\n".join(sites(hops)))
    for role in PROCESSES:
        print(f"{role}: {counts([hop for hop in hops if hop.role == role])}")
    print(counts(hops))
    if arguments.write:
        PAGE.write_text(page(hops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
