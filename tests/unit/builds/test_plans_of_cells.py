"""What a plan says of its cells: hits, misses and why; and what is left of it when cells are tried again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from farm.builds.plan import EXPLAINED, background_cells, make_plan, plan_follow_up, plan_retry, unsuccessful
from farm.errors import UsageError
from farm.matrix.cells import Cell
from farm.results.verdict import CellLine

FACTS: Any = {"key": "published", "against": None}
ESTIMATE: Any = {"low": 5.0, "expected": 10.0, "high": 20.0, "how": "x"}


def cell(name: str, key: str = "", **fields: Any) -> Cell:
    key = key or f"key-{name}"
    order = {
        "model": {"name": "net", "files": [{"path": "m", "digest": f"digest-{name}", "size": 7}]},
        "calibration": None,
        "samples": {"path": "s", "digest": "samples", "size": 9},
        "env": {"F": {"path": "f", "digest": "file", "size": 11}},
        "spec": {"salt": name},
        **fields.pop("order", {}),
    }
    return Cell(
        **{
            "identifier": name,
            "model": "net",
            "target": "onnxruntime/cpu",
            "precision": "fp32",
            "shape": "b1",
            "sizes": {},
            "key": key,
            "job": key,
            "pool": "pool",
            "order": order,
            "emulated": (),
            "limits": {"time": 60.0, "memory": 0},
            "priority": 3,
            "gates": {},
            "expected": None,
            "sweep": None,
            "line": 4,
            **fields,
        }
    )


def planned(*cells: Cell, **more: Any) -> Any:
    said: dict[str, Any] = {"known": {}, "running": [], "last": {}, "read_spec": lambda key: None, "estimates": {}}
    return make_plan(cells, **{**said, "live_workers": {"pool": 2}, **more})


def test_a_cell_is_a_hit_or_joins_a_job_or_is_compiled_and_the_plan_says_why() -> None:
    cells = [cell(name) for name in ("hit", "joined", "new", "changed", "gone")]
    specs: Mapping[str, Any] = {"old-key": {"salt": "before"}}
    plan = planned(
        *cells,
        known={"key-hit": FACTS},
        running=["key-joined", "key-hit"],
        last={
            name: {"key": key}
            for name, key in [("changed", "old-key"), ("gone", "lost"), ("hit", "x"), ("joined", "x")]
        },
        read_spec=specs.get,
        estimates={"new": ESTIMATE, "hit": ESTIMATE},
    )
    assert [(row["identifier"], row["state"], row["reason"]) for row in plan.cells] == [
        ("hit", "hit", ""),
        ("joined", "joined", ""),
        ("new", "miss", "first compile"),
        ("changed", "miss", "salt: before -> changed"),
        ("gone", "miss", "the cache key changed"),
    ]
    hit, joined, new, *_ = plan.cells
    assert (hit["facts"], hit["estimate"], hit["expected_seconds"], hit["live_workers"]) == (FACTS, None, None, 2)
    assert (new["estimate"], new["expected_seconds"], joined["expected_seconds"]) == (ESTIMATE, 10.0, None)
    assert (new["before"], new["baseline"], new["priority"], new["line"]) == (None, None, 3, 4)
    inputs = {f"digest-{name}": 7 for name in ("joined", "new", "changed", "gone")}
    assert plan.needed == {**inputs, "samples": 9, "file": 11}
    assert plan.warnings == () and plan.conversions == {}


def test_what_changed_is_looked_up_for_the_first_misses_only() -> None:
    asked: list[str] = []
    cells = [cell(f"c{number}") for number in range(EXPLAINED + 2)]
    plan = planned(
        cell("first"),
        *cells,
        last={each.identifier: {"key": f"old-{each.identifier}"} for each in cells},
        read_spec=lambda key: asked.append(key) or {"salt": "before"},
    )
    assert asked == [f"old-c{number}" for number in range(EXPLAINED)]
    assert [row["reason"] for row in plan.cells[-3:]] == [
        f"salt: before -> c{EXPLAINED - 1}",
        "the cache key changed",
        "the cache key changed",
    ]


def test_a_plan_warns_of_what_a_person_may_not_expect() -> None:
    fallback: Any = {**FACTS, "fallback": {"Gelu": ["n1"]}}
    plan = planned(
        cell("a", pool="none", emulated=("fp8",), warnings=("slow",)),
        cell("b", pool="none", emulated=("fp8",), warnings=("slow", "large")),
        cell("c", pool="gone", emulated=("int8",), warnings=("slow",)),
        cell("d", order={"cross": True}),
        cell("e", key="key-d", order={"cross": True}),
        cell("f", order={"debug": {"level": 1}}),
        cell("g", order={"debug": {"level": 1}}),
        cell("h", gates={"fallback": "warn"}),
        cell("i", gates={"fallback": "allow"}),
        cell("j"),
        cell("k", order={"debug": {"level": 1}}),
        known={"key-f": FACTS, "key-h": fallback, "key-i": fallback, "key-j": fallback},
        running=["key-g"],
    )
    assert plan.warnings == (
        "no live worker serves gone: 1 cell would wait (start `farm worker` on a node with it)",
        "no live worker serves none: 2 cells would wait (start `farm worker` on a node with it)",
        "onnxruntime/cpu has no units for fp8: 2 cells can only round to it, and compute no faster",
        "onnxruntime/cpu has no units for int8: 1 cell can only round to it, and compute no faster",
        "pool compiles without the GPU: its programs are not tuned, verified or measured",
        "3 cells (a, b, c): slow",
        "b: large",
        "e is the same compile as d; they share the job",
        "`debug` shows nothing for what is compiled already or just now (2 cells, such as f); "
        "another `salt` compiles it again",
        "h: runs on the CPU, with no kernel on the GPU: Gelu (`n1`)",
    )


def test_the_digest_of_a_plan_is_that_of_keys_and_pools_whatever_is_there_by_now() -> None:
    one = planned(cell("a"), cell("b"))
    assert planned(cell("a"), cell("b"), known={"key-a": FACTS}).digest == one.digest
    assert planned(cell("b"), cell("a")).digest != one.digest
    assert planned(cell("a"), cell("b", pool="other")).digest != one.digest
    assert planned(cell("a"), cell("b", key="other")).digest != one.digest


BUILD = {
    "id": "b-1",
    "name": "demo",
    "created_at": 5.0,
    "cells": 3,
    "hits": 1,
    "fail_fast": True,
    "warnings": ["w"],
    "request": "r",
    "concurrency": {"group": "g", "cancels": True},
    "max_parallel": 4,
}


def document(*rows: Any, **more: Any) -> Any:
    return {"schema": 1, "build": {**BUILD, "cells": len(rows)}, "cells": list(rows), **more}


def test_a_retry_has_hits_jobs_that_run_and_cells_that_are_tried_again() -> None:
    rows = planned(
        cell("a", expected={"kind": "crash"}, sweep={"metric": "x"}),
        cell("b", expected={"kind": "crash", "by": "me"}),
        cell("c", pool="gone"),
    ).cells
    again = plan_retry(
        document(*rows), rows, known={"a": FACTS}, running={"key-b"}, live_workers={"pool": 1}, build_id="b-2"
    )
    assert [(row["state"], row["reason"], row["facts"], row["live_workers"]) for row in again["cells"]] == [
        ("hit", "", FACTS, 1),
        ("joined", "", None, 1),
        ("miss", "tried again", None, 0),
    ]
    assert [row["expected"] for row in again["cells"]] == [{"kind": "crash"}, None, None], "who took it back said so"
    assert again["cells"][0]["sweep"] == {"metric": "x"}
    left = {name: value for name, value in BUILD.items() if name != "concurrency"}
    assert again["build"] == {**left, "id": "b-2", "retries": "b-1", "warnings": [], "cells": 3, "hits": 1}
    assert again["schema"] == 1 and "shadow" not in again
    shadowing: Any = document(*rows, shadow={"ref": "prod"})
    some = plan_retry(shadowing, rows[:2], known={}, running=(), live_workers={}, build_id="b-3")
    assert [row["sweep"] for row in some["cells"]] == [None, None], "of some sizes it would name another best"
    assert [row["state"] for row in some["cells"]] == ["miss", "miss"]
    assert (some["shadow"], some["build"]["hits"]) == ({"ref": "prod"}, 0)


def test_what_was_there_before_its_build_and_is_gone_is_not_tried_again() -> None:
    (row,) = planned(cell("a"), known={"key-a": FACTS}).cells
    row = {**row, "order": None}
    with pytest.raises(UsageError, match="a existed before the build, and is gone now"):
        plan_retry(document(row), [row], known={}, running=["key-a"], live_workers={}, build_id="b-2")
    hit = plan_retry(document(row), [row], known={"a": FACTS}, running=(), live_workers={}, build_id="b-2")
    assert hit["cells"][0]["state"] == "hit"


def test_a_follow_up_has_the_cells_that_passed_and_tunes_them_longer_behind_all_others() -> None:
    later = {"tuning": {"mode": "deep"}}
    order = {"background": later, "budget": 60.0, "limit": 0.05}
    rows = planned(
        cell("a", order=order, gates={"limits": {"latency": 0.1, "size": 0.2}, "baseline": "prod"}, warnings=("w",)),
        cell("b", order=order, gates={"limits": {"latency": 0.1}}),
        cell("c"),
        cell("d", order=order),
    ).cells
    passed: Any = [{"identifier": name, "facts": {"key": f"made-{name}"}} for name in "abc"]
    passed.append({"identifier": "d", "facts": None})
    found = background_cells(rows, passed)
    assert [row["identifier"] for row in found] == ["a", "b"]
    one, other = found
    assert one["order"]["against"] == "made-a" and one["order"]["spec"] == {"salt": "a", **later}
    assert not {"background", "budget", "limit"} & one["order"].keys()
    assert one["gates"] == {"limits": {"size": 0.2}, "baseline": "prod"} and other["gates"] == {}
    assert (one["priority"], one["limits"], one["state"]) == (-1000, {"time": 0.0, "memory": 0}, "miss")
    assert (one["reason"], one["warnings"], one["facts"]) == ("tuning deep, in the background", [], None)
    assert one["key"] != "key-a" and rows[0]["order"]["budget"] == 60.0, "the plan of the build stays"
    follow = plan_follow_up(document(*rows), found, "b-2", 9.0)
    left = {name: value for name, value in BUILD.items() if name not in {"concurrency", "request"}}
    assert follow["build"] == {
        **left, "id": "b-2", "follows": "b-1", "submitted": 5.0, "created_at": 9.0, "cells": 2, "hits": 0,
        "fail_fast": False, "retries": None, "warnings": [],
    }  # fmt: skip


def test_what_failed_as_expected_is_not_tried_again() -> None:
    states = [("a", "succeeded", False), ("b", "failed", False), ("c", "failed", True), ("d", "cancelled", False)]
    report: Any = {
        "cells": [{"identifier": name, "state": state, "as_expected": known} for name, state, known in states]
    }
    assert unsuccessful(report) == {"b", "d"}


def test_the_line_of_a_cell_that_nobody_judged_yet_says_its_place_and_key_alone() -> None:
    (hit, miss) = planned(cell("a"), cell("b"), known={"key-a": FACTS}).cells
    place = ("net", "onnxruntime/cpu", "fp32", "b1")
    rest = ("", False, "", "", "", "", "", None, "", "", "")
    nothing, none = (False, None, None, False, "", "", ""), (None, None, None, "", None, "", "[]", "[]")
    assert tuple(CellLine.planned(hit, "succeeded")) == ("a", *place, "hit", *rest, "key-a", *nothing, "", "{}", *none)
    assert tuple(CellLine.planned(miss, "running")) == (
        "b", *place, "running", *rest, "key-b", *nothing, "first compile", "{}", *none,
    )  # fmt: skip
