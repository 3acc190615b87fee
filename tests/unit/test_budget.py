"""What the product may grow to. Whoever raises a number here says why in the commit."""

import ast
from collections import Counter
from pathlib import Path

from tests.support.places import ROOT
from tests.support.record_types import record_types

RECORD_TYPES = 420


def test_there_are_no_more_record_types_than_the_budget_allows() -> None:
    assert len(record_types()) <= RECORD_TYPES


LINES = {
    "api": 1835,
    "artifacts": 2403,
    "builds": 3178,
    "cli": 5070,
    "client": 4843,
    "compiling": 3277,
    "control": 643,
    "extras/ci": 556,
    "extras/convert": 507,
    "extras/nvidia": 987,
    "extras/packs": 1024,
    "extras/radar": 1313,
    "extras/reproduce": 340,
    "extras/signing": 2148,
    "extras/telemetry": 159,
    "extras/triggers": 1178,
    "extras/webhooks": 920,
    "jobs": 1024,
    "local": 1729,
    "loose": 1864,
    "manifest": 2163,
    "matrix": 1622,
    "metrics": 217,
    "models": 774,
    "node": 3830,
    "pages": 3844,
    "results": 2154,
    "runner": 7034,
    "serving": 448,
    "store": 1882,
    "targets": 1169,
    "tasks": 178,
    "tuning": 2536,
    "wire": 401,
}
"""Lines of each room of `farm/`, of `tasks`, and of the modules that lie in `farm/` itself."""

LONGEST = 700
"""Lines of a file."""

DOCSTRINGS = 0.12
"""Share of all lines, at least."""


def sources() -> list[Path]:
    return [path for folder in ("farm", "tasks") for path in (ROOT / folder).rglob("*.py")]


def room(path: Path) -> str:
    top, *inner = path.relative_to(ROOT).parts[:-1]
    return top if top == "tasks" else "/".join(inner[: 2 if inner[:1] == ["extras"] else 1]) or "loose"


def test_no_room_has_more_lines_than_the_budget_allows() -> None:
    lines = Counter[str]()
    for path in sources():
        lines[room(path)] += len(path.read_text().splitlines())
    assert {name: count for name, count in lines.items() if count > LINES.get(name, 20)} == {}
    assert LINES.keys() - lines.keys() == set()


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: count for name, count in lengths.items() if count > LONGEST} == {}


def test_enough_of_the_product_is_explained() -> None:
    explained = total = 0
    for path in sources():
        text = path.read_text()
        total += len(text.splitlines())
        explained += sum(
            node.end_lineno - node.lineno + 1
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
    assert explained >= DOCSTRINGS * total
