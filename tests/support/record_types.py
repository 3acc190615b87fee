"""The product's record types, and which of them look alike: `python -m tests.support.record_types`.

A record type is a class that is a TypedDict, a pydantic model, a dataclass or a NamedTuple, also through its bases.
"""

import ast
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tests.support.places import ROOT

KINDS = {"TypedDict", "BaseModel", "NamedTuple"}


class Record(NamedTuple):
    """One record type: its name, its module and its fields, those of its bases too."""

    name: str
    path: Path
    fields: frozenset[str]
    ancestors: frozenset[str]


def record_types() -> list[Record]:
    """Return every record type of `farm` and `tasks`."""
    classes = dict(_classes())
    return [
        Record(name, path, frozenset(_fields(name, classes)), frozenset(_ancestors(name, classes)))
        for name, (path, node) in classes.items()
        if _is_dataclass(node) or _ancestors(name, classes) & KINDS
    ]


def alike(records: list[Record], share: float = 0.7) -> list[tuple[Record, Record]]:
    """Return the pairs that share this part of the fields of the larger one, and that do not extend each other."""
    return [
        (one, other)
        for one, other in combinations((record for record in records if len(record.fields) > 1), 2)
        if len(one.fields & other.fields) >= share * max(len(one.fields), len(other.fields))
        and not ({one.name} & other.ancestors or {other.name} & one.ancestors)
    ]


def _classes() -> Iterator[tuple[str, tuple[Path, ast.ClassDef]]]:
    for room in ("farm", "tasks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, (path.relative_to(ROOT), node)


def _name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript | ast.Call):
        base = base.value if isinstance(base, ast.Subscript) else base.func
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(_name(decorator) == "dataclass" for decorator in node.decorator_list)


def _ancestors(name: str, classes: dict[str, tuple[Path, ast.ClassDef]]) -> set[str]:
    bases = {_name(base) for base in classes[name][1].bases} - {name}
    return bases.union(*(_ancestors(base, classes) for base in bases if base in classes))


def _fields(name: str, classes: dict[str, tuple[Path, ast.ClassDef]]) -> set[str]:
    nodes = [classes[each][1] for each in {name, *_ancestors(name, classes)} if each in classes]
    own = (line for node in nodes for line in node.body if isinstance(line, ast.AnnAssign))
    return {line.target.id for line in own if isinstance(line.target, ast.Name)}


if __name__ == "__main__":
    found = record_types()
    pairs = sorted(alike(found), key=lambda pair: -len(pair[0].fields & pair[1].fields))
    print(f"{len(found)} record types, {len(pairs)} pairs share 70 % of their fields")
    for one, other in pairs:
        print(f"{len(one.fields & other.fields):3d} {one.path}:{one.name}  {other.path}:{other.name}")
