"""What the product may grow to. Whoever raises a number here says why in the commit."""

import ast
from collections import Counter
from pathlib import Path

from tests.support.places import ROOT
from tests.support.record_types import record_types

RECORD_TYPES = 409


def test_there_are_no_more_record_types_than_the_budget_allows() -> None:
    assert len(record_types()) <= RECORD_TYPES


LINES = {
    "api": 1669,
    "artifacts": 2165,
    "builds": 2980,
    "cli": 4638,
    "client": 4493,
    "compiling": 2908,
    "control": 590,
    "extras": 1,
    "extras/ci": 514,
    "extras/convert": 491,
    "extras/nvidia": 836,
    "extras/packs": 922,
    "extras/radar": 1204,
    "extras/reproduce": 299,
    "extras/signing": 1992,
    "extras/telemetry": 150,
    "extras/triggers": 1077,
    "extras/webhooks": 879,
    "jobs": 888,
    "local": 1630,
    "loose": 1783,
    "manifest": 1917,
    "matrix": 1509,
    "metrics": 205,
    "models": 737,
    "node": 3516,
    "pages": 3388,
    "results": 1979,
    "runner": 6348,
    "serving": 425,
    "store": 1730,
    "targets": 1083,
    "tasks": 177,
    "tuning": 2357,
    "wire": 385,
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
