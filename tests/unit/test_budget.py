"""What the product may grow to. Whoever raises a number here says why in the commit."""

import ast
from collections import Counter
from pathlib import Path

from tests.support.places import ROOT
from tests.support.record_types import record_types

RECORD_TYPES = 470


def test_there_are_no_more_record_types_than_the_budget_allows() -> None:
    assert len(record_types()) <= RECORD_TYPES


LINES = {
    "api": 1750,
    "artifacts": 2170,
    "builds": 3240,
    "cli": 5080,
    "client": 4790,
    "compiling": 3210,
    "control": 640,
    "extras/ci": 650,
    "extras/convert": 560,
    "extras/nvidia": 1070,
    "extras/packs": 1200,
    "extras/radar": 1420,
    "extras/reproduce": 360,
    "extras/signing": 1760,
    "extras/triggers": 1270,
    "extras/webhooks": 980,
    "jobs": 1100,
    "local": 1770,
    "loose": 1890,
    "manifest": 2300,
    "matrix": 1690,
    "metrics": 230,
    "models": 890,
    "node": 4040,
    "pages": 3420,
    "results": 1920,
    "runner": 7070,
    "serving": 650,
    "store": 1630,
    "targets": 1220,
    "tasks": 200,
    "tuning": 2680,
    "wire": 400,
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
