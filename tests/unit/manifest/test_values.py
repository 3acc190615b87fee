"""Every value of a manifest at its limits: the parser takes and refuses the same as the published schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from farm.manifest import values
from farm.manifest.values import MAX_DIMENSION, MAX_OPTIMALS
from farm.models.shapes import Span

MOST = MAX_DIMENSION


def span(**more: Any) -> dict[str, Any]:
    return {"min": 1, "max": 8, **more}


TAKEN: list[tuple[str, list[tuple[Any, Any]]]] = [
    ("Version", [(1, 1)]),
    ("Dimension", [(0, 0), (MOST, MOST), ("batch", "batch"), ("past + seq", "past+seq")]),
    (
        "Sizes",
        [
            (0, (0,)),
            (MOST, (MOST,)),
            ([1], (1,)),
            (list(range(1000)), tuple(range(1000))),
            (span(), (Span(1, 8),)),
            (span(min=7, optimals=[8, 7]), (Span(7, 8, (7, 8)),)),
            (span(min=0, max=MOST, optimals=[0, MOST]), (Span(0, MOST, (0, MOST)),)),
            (
                span(max=1000, optimals=list(range(1, MAX_OPTIMALS + 1))),
                (Span(1, 1000, tuple(range(1, MAX_OPTIMALS + 1))),),
            ),
            ([2, span()], (2, Span(1, 8))),
        ],
    ),
    ("BatchSizes", [([1], (1,)), ([MOST, 1], (MOST, 1)), (list(range(1, 1001)), tuple(range(1, 1001)))]),
    ("Patterns", [("a", ("a",)), ("a" * 200, ("a" * 200,)), (["a", "b*"], ("a", "b*"))]),
    ("Number", [(0, 0), (-1.5, -1.5)]),
    ("InputRange", [([0, 0], (0, 0)), ([-1, 2.5], (-1, 2.5))]),
    ("Rate", [(1e-9, 1e-9), (3, 3.0)]),
    ("Count", [(1, 1), (100_000, 100_000)]),
    (
        "Tolerances",
        [(1e-9, {"*": {"*": 1e-9}}), ({"fp16": {"y": 1}}, {"fp16": {"y": 1.0}}), ({"*": 2}, {"*": {"*": 2.0}})],
    ),
    ("Date", [("2027-01-31", "2027-01-31")]),
    ("Priority", [(-100, -100), (100, 100)]),
    ("Salt", [("", ""), ("s" * 100, "s" * 100)]),
    ("Text", [("t", "t"), ("t" * 1000, "t" * 1000)]),
    ("Reason", [("", ""), ("r" * 1000, "r" * 1000)]),
    ("Link", [("https://a", "https://a"), ("http://" + "a" * 501, "http://" + "a" * 501)]),
    ("RefTag", [("a" * 64, "a" * 64), ("1.0-rc_1", "1.0-rc_1")]),
    ("Toolchain", [("a" * 100, "a" * 100)]),
    ("Labels", [({}, {}), ({f"l{number}": "v" * 256 for number in range(64)}, None)]),
    ("Options", [({"a": True}, {"a": True}), ({"a" * 64: 1}, {"a" * 64: 1}), ({"a": ["x", "y"]}, {"a": ("x", "y")})]),
    ("Env", [({"A": True}, {"A": True}), ({"A" * 100: "x"}, {"A" * 100: "x"}), ({"A": {"path": "p"}}, None)]),
    ("Glob", [("*.onnx", {"*.onnx": ()}), ({"*": ["a", "b"]}, {"*": ("a", "b")})]),
    ("Address", [("https://host/a", "https://host/a"), ("https://host:1/a", "https://host:1/a")]),
]

REFUSED: list[tuple[str, list[Any]]] = [
    ("Version", [0, 2, "1"]),
    ("Dimension", [-1, MOST + 1, 1.5, "1a", "a+", None]),
    ("Sizes", [-1, MOST + 1, "1", [], list(range(1001)), [1, 1], [1, 2, 1.5], {"min": 1}, span(more=1), span(max="8")]),
    ("Sizes", [span(min=-1), span(max=MOST + 1), span(optimals=list(range(1, MAX_OPTIMALS + 2)), max=1000)]),
    ("BatchSizes", [[0], [], 1, [MOST + 1], list(range(1, 1002)), [2, 2], ["1"]]),
    ("Patterns", ["", "a" * 201, [], ["a", ""], ["a", "a" * 201], [1], 1]),
    ("Number", ["1", None, [1]]),
    ("InputRange", [[0], [0, 1, 2], [], 1, "01", ["0", 1]]),
    ("Rate", [0, -1, "1"]),
    ("Count", [0, 100_001, 1.5, "1"]),
    ("Tolerances", [0, -1, {"fp16": {}}, {"fp17": 1}, {"fp16": 0}]),
    ("Date", ["2027-1-31", "2027-01-311", 20270131, ""]),
    ("Priority", [-101, 101]),
    ("Salt", ["s" * 101]),
    ("Text", ["", "t" * 1001]),
    ("Reason", ["r" * 1001]),
    ("Link", ["http://" + "a" * 502, "ftp://a", "https://a b"]),
    ("RefTag", ["a" * 65, "", "A"]),
    ("Toolchain", ["a" * 101, "1"]),
    ("Labels", [{f"l{number}": "" for number in range(65)}, {"a": "v" * 257}]),
    ("Options", [{"a": 1.5}, {"a": []}, {"a": [1]}, {"a": ["x", 1]}]),
    ("Env", [{"A": 1.5}, {"A": {"path": ""}}, {"A": {"path": "p", "more": 1}}]),
    ("Glob", ["", {}, {"*": []}, {"*": ["a"], "b": ["c"]}, {"*": [""]}, {"*": ["a", 1]}, []]),
    ("Address", ["host/a", ""]),
]

BEYOND_SCHEMA: list[tuple[str, Any, str]] = [
    ("Version", True, "write 1"),
    ("Dimension", True, "is not a dimension"),
    ("Sizes", True, "is not a size"),
    ("Sizes", [1, True, -1], "are not sizes"),
    ("Sizes", span(min=8), "`min` 8 must be below `max` 8"),
    ("Sizes", span(min=9), "`min` 9 must be below `max` 8"),
    ("Sizes", span(optimals=[0]), "sizes from 1 to 8"),
    ("Sizes", span(optimals=[9]), "sizes from 1 to 8"),
    ("Sizes", span(optimals=4), "must be a list"),
    ("BatchSizes", [True], "from 1 on"),
    ("Number", True, "must be a number"),
    ("InputRange", [2, 1], "the lower end 2 is above the upper end 1"),
    ("InputRange", [False, 1], "must be a number"),
    ("Count", True, "must be a whole number"),
    ("Rate", True, "must be a number"),
    ("Date", "2027-02-29", "there is no day 2027-02-29"),
    ("Options", {"a" * 65: 1}, "should match pattern"),
    ("Env", {"A" * 101: 1}, "should match pattern"),
    ("Address", "https://host:0/a", "names no port"),
    ("Address", "https://:80/a", "names no host"),
]


def schema_of(name: str) -> Any:
    return TypeAdapter(getattr(values, name)).json_schema()


@pytest.mark.parametrize(("name", "cases"), TAKEN, ids=[name for name, _ in TAKEN])
def test_what_is_within_the_limits_is_taken(name: str, cases: list[tuple[Any, Any]]) -> None:
    for given, read in cases:
        found = TypeAdapter(getattr(values, name)).validate_python(given)
        assert read is None or found == read
        jsonschema.validate(given, schema_of(name))


@pytest.mark.parametrize(("name", "cases"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_is_beyond_a_limit_is_refused_by_both(name: str, cases: list[Any]) -> None:
    for given in cases:
        with pytest.raises(ValidationError):
            TypeAdapter(getattr(values, name)).validate_python(given)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(given, schema_of(name))


@pytest.mark.parametrize(("name", "given", "said"), BEYOND_SCHEMA)
def test_what_no_schema_can_say_is_refused_with_its_reason(name: str, given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(getattr(values, name)).validate_python(given)


@pytest.mark.parametrize(("count", "said"), [(1, "'a0' is not a size"), (5, "'a4' are"), (6, "'a4', … are")])
def test_five_wrong_sizes_are_named(count: int, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(values.Sizes).validate_python([f"a{number}" for number in range(count)])
