"""The rules of refs, one at a time: which programs are named, and which entries others may replace or drop."""

from __future__ import annotations

from typing import Any

import pytest

from farm.results.ref_rules import (
    UNNAMED_FOR,
    brought,
    entered,
    family,
    given,
    given_up,
    has_passed,
    last,
    promoted,
    replaced,
    rolled_back,
)
from tests.support.places import ROOT

NAME = "net/onnxruntime-cpu/fp32/b1"


def entry(key: str, submitted: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "identifier": NAME,
        "device": "cpu",
        "toolchain": "t1.0-aa",
        "key": key,
        "submitted": submitted,
        "manifest": "demo",
        **more,
    }


@pytest.mark.parametrize("warning", ["output `y` is off by 0.5", "not verified: no reference can run the model"])
def test_latest_takes_no_program_of_which_a_build_warns(warning: str) -> None:
    cell: Any = {"state": "succeeded", "facts": {"key": "a"}, "warning": ""}
    assert has_passed(cell)
    assert not has_passed({**cell, "warning": warning})


def test_a_faster_program_replaces_only_the_one_that_it_was_measured_against() -> None:
    faster, slower = {"cell": entry("fast", 2.0)}, {NAME: "slow"}
    assert replaced({"cell": entry("slow")}, faster, slower) == faster
    assert replaced({"cell": entry("slow", 2.0)}, faster, slower) == faster, (
        "the build that it follows has put it there"
    )
    later = {"cell": entry("slow", 3.0)}
    assert replaced(later, faster, slower) == later
    hidden = replaced({"cell": entry("slow", superseded=1.5)}, faster, slower)
    assert hidden == {"cell": entry("fast", 2.0, superseded=1.5)}, "readers get neither"
    assert replaced({}, faster, slower) == {}
    there = {"cell": entry("another")}
    assert replaced(there, faster, slower) == there, "a build that was submitted before it has put that there"


def test_a_move_brings_what_readers_did_not_get_before() -> None:
    before: Any = {"same": entry("a"), "other": entry("b"), "back": entry("c", superseded=2.0), "gone": entry("d")}
    after: Any = {"same": entry("a"), "other": entry("B"), "back": entry("c"), "gone": entry("d", superseded=3.0)}
    assert [cell["key"] for cell in brought(before, after)] == ["B", "c"]
    assert brought(after, after) == []


def test_a_retry_gives_nothing_up() -> None:
    """It may have some of the cells alone; the others are no longer in a plan, and still wanted."""
    build: Any = {"name": "demo", "created_at": UNNAMED_FOR + 10.0}
    old: Any = entry("a", submitted=1.0)
    assert given_up({"build": build, "cells": []}, [])(old)
    assert not given_up({"build": {**build, "retries": "b-1"}, "cells": []}, [])(old)
    assert not given_up({"build": {**build, "only": ["*/fp16/*"]}, "cells": []}, [])(old), "it has some cells alone"


def test_what_was_not_had_for_30_days_is_given_up_by_its_own_manifest_if_it_does_not_wait_for_it() -> None:
    build: Any = {"name": "demo", "created_at": UNNAMED_FOR + 100.0}
    gone = given_up({"build": build, "cells": []}, [])
    assert [gone(entry("a", submitted=when)) for when in (99.0, 100.0, 101.0, UNNAMED_FOR)] == [
        True,
        False,
        False,
        False,
    ]
    assert not gone(entry("a", submitted=99.0) | {"manifest": "other"})
    cells: Any = [{"identifier": NAME}]
    assert not given_up({"build": build, "cells": cells}, [])(entry("a", submitted=99.0)), "it failed this time"
    assert given_up({"build": build, "cells": cells}, cells)(entry("a", submitted=99.0))
    follow_up = {**build, "submitted": UNNAMED_FOR + 50.0}
    assert not given_up({"build": follow_up, "cells": []}, [])(entry("a", submitted=60.0))


def named(key: str, submitted: float, toolchain: str, **more: Any) -> dict[str, Any]:
    return {f"{NAME}@cpu@{toolchain}": entry(key, submitted, toolchain=toolchain, sidecar=key, **more)}


def test_the_later_submission_is_what_readers_get_whichever_build_ends_last() -> None:
    old, new = named("a", 1.0, "t1"), named("b", 2.0, "t2")
    now = {**named("a", 1.0, "t1", superseded=2.0), **new}
    assert entered(old, new) == now
    assert entered(new, old) == now, "the older one ends last"
    assert entered(now, named("c", 2.0, "t2")) == now, "the same moment: it is there"
    assert entered(old, named("c", 1.0, "t1")) == old
    assert entered(old, named("c", 1.5, "t1")) == named("c", 1.5, "t1")
    unlost = {**named("a", 3.0, "t1", superseded=4.0), **named("b", 2.0, "t2"), **named("c", 1.0, "t3")}
    assert entered(unlost, named("d", 3.5, "t4"))[f"{NAME}@cpu@t4"]["superseded"] == 4.0, "the last moment counts"
    chosen = {**named("a", 1.0, "t1"), **named("b", 2.0, "t2", superseded=9.0)}
    late = entered(chosen, named("c", 8.0, "t2"))
    assert late == {**named("a", 1.0, "t1"), **named("c", 8.0, "t2", superseded=9.0)}, "before somebody chose"
    assert entered(chosen, named("c", 9.0, "t2"))[f"{NAME}@cpu@t2"]["superseded"] == 9.0
    after = entered(chosen, named("c", 10.0, "t2"))
    assert after == {**named("a", 1.0, "t1", superseded=10.0), **named("c", 10.0, "t2")}


def test_what_readers_do_not_get_goes_with_what_they_get() -> None:
    there = {**named("a", 1.0, "t1", superseded=2.0), **named("b", 2.0, "t2")}
    assert entered(there, {}, lambda each: each["toolchain"] == "t2") == {}
    assert entered(there, {}, lambda each: each["toolchain"] == "t1") == named("b", 2.0, "t2")
    assert entered(there, named("c", 3.0, "t2"), lambda each: each["toolchain"] == "t2") == {
        **named("a", 1.0, "t1", superseded=2.0),
        **named("c", 3.0, "t2"),
    }


def test_a_promotion_supersedes_what_readers_got_and_one_of_the_same_programs_changes_nothing() -> None:
    there = {**named("a", 1.0, "t1"), **named("x", 0.5, "t0", superseded=0.7)}
    new = named("b", 2.0, "t2")
    moved = promoted(there, new, 3.0)
    assert moved == {**named("a", 1.0, "t1", superseded=3.0), **named("x", 0.5, "t0", superseded=0.7), **new}
    assert promoted(moved, new, 4.0) is moved
    other = named("c", 2.0, "t2")
    assert promoted(moved, other, 4.0) == {**moved, **other}, "another program under the same name"
    assert promoted(moved, named("a", 1.0, "t1"), 5.0)[f"{NAME}@cpu@t2"]["superseded"] == 5.0


def test_a_rollback_gives_what_readers_lost_last_or_what_a_toolchain_made() -> None:
    there = {
        **named("a", 1.0, "t1.0-x", superseded=2.0),
        **named("b", 2.0, "t2.0-x", superseded=3.0),
        **named("c", 3.0, "t3.0-x"),
    }
    back = rolled_back(there, "", 9.0)
    assert back == {**there, **named("b", 2.0, "t2.0-x"), **named("c", 3.0, "t3.0-x", superseded=9.0)}
    assert rolled_back(there, "t1", 9.0) == {
        **there,
        **named("a", 1.0, "t1.0-x"),
        **named("c", 3.0, "t3.0-x", superseded=9.0),
    }
    assert rolled_back(there, "t3", 9.0) == there, "they get it already"
    for nothing in ("t4", "t"):
        with pytest.raises(LookupError):
            rolled_back({} if nothing == "t" else there, nothing, 9.0)
    with pytest.raises(LookupError):
        rolled_back(named("a", 1.0, "t1.0-x"), "", 9.0)


def test_readers_get_the_last_of_several_and_one_family_of_a_model() -> None:
    lost, now, older = entry("a", 5.0, superseded=6.0), entry("b", 2.0), entry("c", 1.0)
    assert last([now, lost, older])["key"] == "b"
    assert last([lost, entry("d", 1.0, superseded=7.0)])["key"] == "d"
    assert given([lost, now, older])[NAME]["key"] == "b"
    assert given([lost]) == {}
    of_one_moment = [entry("x", 2.0, toolchain="t1.30-aa"), entry("y", 2.0, toolchain="t1.3-bb")]
    assert last(of_one_moment)["key"] == last(of_one_moment[::-1])["key"] == "x", "the newest toolchain's"

    def member(key: str, when: float, toolchain: str, model: str) -> Any:
        return entry(key, when, toolchain=toolchain), {"spec": {"model": {"digest": model}}}

    many = [
        member("a", 1.0, "t", "m"),
        member("b", 1.0, "t", "m"),
        member("c", 2.0, "u", "m"),
        member("d", 1.0, "t", "n"),
    ]
    assert [cell["key"] for cell, _ in family(many)] == ["c"]
    assert [cell["key"] for cell, _ in family([each for each in many if each[0]["key"] != "c"])] == ["a", "b"]
    assert [cell["key"] for cell, _ in family([many[1], many[3]])] == ["b"], "of equal ones, the first"
    assert [cell["key"] for cell, _ in family([many[3], many[1]])] == ["d"]


def test_the_rules_are_short_enough_to_be_read() -> None:
    assert len((ROOT / "docs" / "refs.md").read_text().split()) <= 300
