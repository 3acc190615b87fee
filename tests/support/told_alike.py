"""What a farm tells of its builds is the same wherever it is asked: whole, in short, in lists, in a new index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.app import Farm
from farm.artifacts.inventory import rebuild
from farm.builds.past_builds import BuildIndex
from farm.builds.reading import BuildChanges
from farm.errors import FarmError
from farm.results.verdict import CellEnd, CellLine

MOVING = {"elapsed": None, "waiting": "", "detail": "", "phase": ""}
"""What is another one a moment later."""
MANY = 500
"""Cells of one build: more are about numbers."""


def differences(farm: Farm, folder: Path) -> list[str]:
    """Return a sentence for each thing that is told in two ways."""
    found: list[str] = []
    for namespace in farm.artifacts.list_folders("ns/"):
        fresh = BuildIndex(folder / f"{namespace}.sqlite", farm.store, farm.artifacts)
        fresh.fill()
        for build_id in farm.store.builds.ids(namespace):
            try:
                farm.build_reader.report(namespace, build_id)
                farm.build_reader.read_plan(namespace, build_id)
            except FarmError as error:  # Its documents are gone or damaged: that is what the test is about.
                print("not compared", build_id, error.message)
                continue
            found += [f"{build_id}: {each}" for each in _of_build(farm, fresh, namespace, build_id)]
        found += _of_lists(farm, fresh, namespace)
    return found


def _of_build(farm: Farm, fresh: BuildIndex, namespace: str, build_id: str) -> Iterator[str]:
    reader, row = farm.build_reader, farm.store.builds.get(build_id)
    if not row or row["accepted"] < row["cells"] or row["cells"] > MANY:
        return
    start = build_id[:-1]
    whole = reader.report(namespace, start)
    build, cells, ended = whole["build"], whole["cells"], whole["build"]["state"] == "reported"
    lines = {line.identifier: line for line in map(CellLine.of, cells)}
    alone = _outlined(reader.get(namespace, start))
    if any(alone[name] != build[name] for name in alone.keys() - ({} if ended else {"counts", "verdict"})):
        yield f"alone it is {alone}, and with its cells {build}"
    if [cell["identifier"] for cell in cells] != [
        cell["identifier"] for cell in reader.read_plan(namespace, build_id)["cells"]
    ]:
        yield "its cells are in another order than in its plan"
    if farm.store.builds.states(build_id) != {cell["identifier"]: cell["state"] for cell in cells} and not ended:
        yield "the store has other states"
    counts = Counter(cell["state"] for cell in cells)
    if any(build["counts"][state] != counts[state] for state in ("queued", "running", "cancelled")):
        yield f"counts {build['counts']}, and has {counts}"
    # In short, and what comparisons need.
    short = reader.lines(namespace, start)
    if [_still(line) for line in short.cells] != [_still(line) for line in lines.values()] and row["state"] != "ended":
        yield f"in short it is {short.cells}, and as a whole {list(lines.values())}"
    if list(reader.ends(namespace, start)[1]) != list(map(CellEnd.of, short.cells)) and ended:
        yield "its ends are not those of its lines"
    if _outlined(short.build) != _outlined(build) and ended:
        yield f"in short it is {short.build}, and as a whole {build}"
    if not ended:
        some = list(lines)[:3]
        if [_still(CellLine.of(cell)) for cell in reader.some_cells(namespace, build_id, some)] != [
            _still(lines[name]) for name in some
        ]:
            yield "some of its cells are told otherwise than all"
        if set(reader.running(namespace, build_id)) != {name for name, line in lines.items() if line.look == "running"}:
            yield "others are running"
        yield from _of_changes(farm, namespace, build_id, lines)
        return
    again = fresh.cells(namespace, build_id, CellLine)
    if not again or again[1] != list(lines.values()) or _outlined(again[0]) != _outlined(build):
        yield f"a new index has {again}"
    if not farm.build_index.cells(namespace, build_id, CellLine):
        return  # It is read when somebody asks for it.
    if fresh.cells(namespace, build_id, CellEnd) != farm.build_index.cells(namespace, build_id, CellEnd):
        yield "a new index has other ends"
    for name in lines:
        one, other = (
            [past for past in index.of(namespace, name) if past["build"] == build_id]
            for index in (fresh, farm.build_index)
        )
        if one != other:
            yield f"a new index has another past of {name}: {one}, {other}"


def _of_changes(farm: Farm, namespace: str, build_id: str, lines: dict[str, CellLine]) -> Iterator[str]:
    """Who follows a build from its beginning knows it."""
    known: dict[str, CellLine] = {}
    changes = BuildChanges(farm.build_reader, namespace, build_id, f"{farm.store.epoch()}.0-0")
    for change in changes.after(0):
        known |= {cell["identifier"]: CellLine.of(cell) for cell in change.get("cells", ())}
    if {name: _still(line) for name, line in known.items()} != {name: _still(line) for name, line in lines.items()}:
        yield f"who follows it knows {known}, and it is {lines}"


def _of_lists(farm: Farm, fresh: BuildIndex, namespace: str) -> Iterator[str]:
    listed = farm.build_reader.list(namespace, 1000)
    if [build["id"] for build in listed] != [
        build["id"] for build in sorted(listed, key=lambda build: build["created_at"], reverse=True)
    ]:
        yield "the newest build is not the first of the list"
    if missing := set(farm.store.builds.ids(namespace)) - {build["id"] for build in listed}:
        yield f"the list lacks {missing}"
    # A hit may be of another namespace, and an artifact may have been damaged.
    known = farm.store.index.get_many(namespace, sorted(farm.store.index.keys(namespace)))
    whole = dict(rebuild(farm.artifacts, namespace))
    for key in known.keys() & whole.keys():
        if known[key] != whole[key]:
            yield f"the store has {known[key]} of {key}, and object storage {whole[key]}"


def _still(line: CellLine) -> CellLine:
    return line._replace(**MOVING) if line.look in {"running", "queued"} else line


def _outlined(build: Any) -> dict[str, Any]:
    return {name: value for name, value in build.items() if name != "outlook"}
