"""A build's judgement: gates, expectations, the verdict and its exit code, JUnit."""

from __future__ import annotations

from typing import Any

import pytest

from farm.errors import ExitCode
from farm.jobs.state import FailureKind, policy_of
from farm.results.verdict import changes_of, expected_failure, judge_cell, verdict_of

KEY = "a" * 64
FACTS = {
    "key": KEY,
    "program": {"path": "p.onnx", "digest": "b" * 64, "size": 10},
    "toolchain": "onnxruntime1-00000000",
    "device": "cpu",
    "verified": True,
    "errors": {"out": 0.01},
    "rms": {"out": 0.005},
    "equal": {},
    "nonfinite": [],
    "spread": {"out": 0.9},
    "weak": False,
    "latency": 0.001,
    "shared": False,
    "seconds": 1.0,
}


def planned(tolerance: float = 0.1, on_fail: str = "fail", expected: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "identifier": "net/onnxruntime-cpu/int8/b1",
        "model": "net",
        "target": "onnxruntime/cpu",
        "precision": "int8",
        "shape": "b1",
        "sizes": {"batch": 1},
        "sweep": None,
        "key": KEY,
        "pool": "onnxruntime-cpu.x",
        "line": 7,
        "gates": {"tolerance": {"*": tolerance}, "weak": "warn", "on_fail": on_fail},
        "expected": expected,
    }


def expectation(kind: str, until: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "reason": "known", "until": until}


def row(state: str, **others: Any) -> dict[str, Any]:
    """A cell as the store returns it."""
    names = ("kind", "phase", "progress", "job", "worker", "elapsed", "facts", "log")
    return {
        **dict.fromkeys(names),
        "state": state,
        "hit": False,
        "message": "",
        "detail": "",
        "attempt": 1,
        "spent": 0.0,
        **others,
    }


def succeeded(facts: dict[str, Any] = FACTS) -> dict[str, Any]:
    return row("succeeded", facts=facts)


def failed(kind: str) -> dict[str, Any]:
    return row("failed", kind=kind, message="it broke", detail="line\x1b[31m1")


def code(*cells: dict[str, Any]) -> int:
    return int(verdict_of(list(cells))["exit_code"])


def test_an_inaccurate_program_fails_the_builds_gate_though_its_job_succeeded() -> None:
    cell = judge_cell(planned(tolerance=0.001), succeeded())
    assert (cell["state"], cell["kind"], cell["fault"]) == ("failed", "accuracy", "user")
    assert "out" in cell["message"]
    assert code(cell) == ExitCode.GATE_FAILED


def test_a_kind_of_failure_that_a_newer_release_recorded_is_read_after_a_rollback() -> None:
    cell = judge_cell(planned(), failed("of_a_newer_release"))
    assert (cell["state"], cell["kind"], cell["fault"]) == ("failed", "of_a_newer_release", "farm")
    assert code(cell) == ExitCode.FARM_FAULT


UNVERIFIED = {**FACTS, "verified": False, "unverified": "not verified: no reference can run the model", "errors": {}}


def test_a_program_that_nothing_was_compared_with_is_never_green_in_silence() -> None:
    cell = judge_cell(planned(), succeeded(UNVERIFIED))
    assert (cell["state"], cell["warning"]) == ("succeeded", UNVERIFIED["unverified"])
    verdict = verdict_of([cell, judge_cell(planned(), succeeded())])
    assert verdict["text"] == "2 of 2 cells succeeded (1 not or only partly verified)"
    assert verdict["exit_code"] == ExitCode.OK


def test_a_manifest_that_wants_everything_verified_gets_a_failed_gate() -> None:
    strict = planned()
    strict["gates"]["unverifiable"] = "fail"
    cell = judge_cell(strict, succeeded(UNVERIFIED))
    assert (cell["state"], cell["kind"], cell["fault"]) == ("failed", "unverifiable", "user")
    assert (cell["message"], code(cell)) == (UNVERIFIED["unverified"], ExitCode.GATE_FAILED)
    expected = judge_cell({**strict, "expected": expectation("unverifiable")}, succeeded(UNVERIFIED))
    assert code(expected) == ExitCode.OK


def test_a_gate_that_warns_keeps_the_success() -> None:
    cell = judge_cell(planned(tolerance=0.001, on_fail="warn"), succeeded())
    assert cell["state"] == "succeeded"
    assert cell["warning"]
    assert code(cell) == ExitCode.OK


@pytest.mark.parametrize(
    ("kinds", "exit_code"),
    [
        ([], ExitCode.OK),
        (["bad_model"], ExitCode.CELL_FAILED),
        (["accuracy"], ExitCode.GATE_FAILED),
        (["accuracy", "bad_model"], ExitCode.CELL_FAILED),
        (["accuracy", "bad_model", "worker_lost"], ExitCode.FARM_FAULT),
    ],
)
def test_the_worst_cell_decides_the_exit_code(kinds: list[str], exit_code: ExitCode) -> None:
    cells = [judge_cell(planned(), failed(kind)) for kind in kinds]
    assert code(judge_cell(planned(), succeeded()), *cells) == exit_code


def test_a_cell_that_fails_as_the_manifest_expects_keeps_the_verdict_green() -> None:
    cell = judge_cell(planned(expected=expectation("compiler_error")), failed("compiler_error"))
    assert cell["as_expected"]
    verdict = verdict_of([cell])
    assert verdict["exit_code"] == ExitCode.OK
    assert "as expected" in verdict["text"]


def test_another_kind_than_the_expected_one_is_a_failure() -> None:
    assert code(judge_cell(planned(expected=expectation("accuracy")), failed("bad_model"))) == ExitCode.CELL_FAILED


def test_an_expectation_that_ran_out_no_longer_excuses() -> None:
    entry = expectation("bad_model", until="2020-01-01")
    assert code(judge_cell(planned(expected=entry), failed("bad_model"))) == ExitCode.CELL_FAILED


def test_a_success_against_the_expectation_is_reported() -> None:
    cell = judge_cell(planned(expected=expectation("accuracy")), succeeded())
    verdict = verdict_of([cell])
    assert verdict["exit_code"] == ExitCode.GATE_FAILED
    assert "against the manifest's expectation" in verdict["text"]


def test_what_runs_on_the_cpu_for_want_of_a_kernel_is_said_or_refused_and_what_is_there_on_purpose_is_not() -> None:
    facts = {**FACTS, "fallback": {"Det": ["det1", "det2"]}}
    cell = judge_cell(planned(), succeeded(facts))
    words = "runs on the CPU, with no kernel on the GPU: Det (`det1`)"
    assert (cell["state"], cell["warning"]) == ("succeeded", words)
    for gate, state, kind, warning in (("fail", "failed", "fallback", ""), ("allow", "succeeded", None, "")):
        plan = planned()
        plan["gates"]["fallback"] = gate
        cell = judge_cell(plan, succeeded(facts))
        assert (cell["state"], cell["kind"], cell["warning"]) == (state, kind, warning)
    plan = planned()
    plan["gates"]["fallback"] = "fail"
    assert judge_cell(plan, succeeded(FACTS))["state"] == "succeeded"
    assert verdict_of([judge_cell(plan, succeeded(facts))])["exit_code"] == ExitCode.GATE_FAILED


def test_a_cell_that_the_store_does_not_have_waits_and_has_done_nothing() -> None:
    cell = judge_cell(planned(), None)
    done = {name: cell[name] for name in ("state", "attempt", "spent", "elapsed", "hit", "job", "facts", "message")}
    assert done == {
        "state": "queued", "attempt": 0, "spent": 0.0, "elapsed": None, "hit": False, "job": None, "facts": None,
        "message": "",
    }  # fmt: skip
    assert (cell["as_expected"], cell["advice"], cell["fault"], cell["held"]) == (False, "", None, "")


def test_a_failure_says_what_to_try_and_whose_it_is() -> None:
    cell = judge_cell(planned(), row("failed", kind="time_limit"))
    assert cell["advice"] == policy_of(FailureKind.TIME_LIMIT).advice != ""
    assert cell["fault"] == policy_of(FailureKind.TIME_LIMIT).fault


def test_what_failed_as_expected_is_in_no_list_of_failures() -> None:
    expected = {"kind": "regression", "reason": "r", "until": None}
    known, new = (
        judge_cell({**planned(), "identifier": name, "expected": entry}, row("failed", kind="regression"))
        for name, entry in (("known", expected), ("new", None))
    )
    passed = judge_cell({**planned(), "identifier": "passed"}, row("succeeded", facts=None))
    found = changes_of([known, new, passed])
    assert [each["identifier"] for each in found["new_failures"]] == ["new"]
    assert [each["identifier"] for each in found["regressions"]] == ["new"]
    assert found["still_failing"] == []
    assert verdict_of([known, passed])["counts"]["expected"] == 1


def test_a_cell_whose_build_is_not_accepted_yet_waits_and_nothing_is_said_of_it() -> None:
    cell = judge_cell(planned(expected=expectation("accuracy")), None)
    assert (cell["state"], cell["attempt"], cell["spent"], cell["elapsed"]) == ("queued", 0, 0.0, None) and cell[
        "expected"
    ]
    said = {name: cell[name] for name in ("hit", "as_expected", "warning", "held", "message", "advice", "fault")}
    assert not any(said.values()), said
    assert judge_cell(planned(), succeeded())["as_expected"] is False
    assert judge_cell(planned(tolerance=0.001, expected=expectation("accuracy")), succeeded())["as_expected"] is True


def test_the_verdict_counts_each_sort_of_end_and_says_it_in_words() -> None:
    mended = expectation("accuracy") | {"by": "somebody", "link": "https://x"}
    good = judge_cell(planned(), succeeded())
    cells = [
        good | {"hit": True},
        judge_cell(planned(expected=mended), succeeded()),
        judge_cell(planned(expected=expectation("accuracy")), succeeded()),
        judge_cell(planned(expected=expectation("hang")), failed("hang")),
        *(judge_cell(planned(), failed("hang")) for _ in range(2)),
        *(judge_cell(planned(), failed("storage")) for _ in range(3)),
        *(judge_cell(planned(tolerance=0.001), succeeded()) for _ in range(4)),
        *(judge_cell(planned(), failed("undecided")) for _ in range(5)),
        *(judge_cell(planned(), row("cancelled")) for _ in range(6)),
        good | {"held": "gate size=10% refused it"},
    ]
    verdict = verdict_of(cells)
    assert verdict["text"] == (
        "4 of 25 cells succeeded, 1 failed as expected, 2 failed, 4 failed a gate, 5 that a gate cannot judge,"
        " 3 ended by the farm's fault, 1 succeeded against the manifest's expectation, 6 cancelled,"
        " 1 that `latest` does not take"
    )
    counts = {"queued": 0, "running": 0, "succeeded": 4, "failed": 15, "cancelled": 6, "hits": 1, "expected": 1}
    assert verdict["counts"] == counts
    assert verdict["exit_code"] == ExitCode.FARM_FAULT
    assert code(*cells[-1:], cells[-2]) == ExitCode.CELL_FAILED
    assert code(cells[1]) == ExitCode.OK
    assert code(cells[2]) == code(cells[9]) == ExitCode.GATE_FAILED
    assert code(cells[4]) == ExitCode.CELL_FAILED


def test_an_expectation_says_why_and_ends_with_its_last_day() -> None:
    linked = expectation("accuracy", until="2999-01-01") | {"link": "https://x"}
    cell = judge_cell(planned(tolerance=0.001, expected=linked), succeeded())
    assert (cell["as_expected"], cell["expected_reason"], cell["expected_link"]) == (True, "known", "https://x")
    cell = judge_cell(planned(tolerance=0.001, expected=expectation("accuracy")), succeeded())
    assert (cell["expected_reason"], cell["expected_link"]) == ("known", "")
    cell = judge_cell(planned(tolerance=0.001), succeeded())
    assert (cell["expected"], cell["expected_reason"], cell["expected_link"]) == (False, "", "")
    by_somebody = expectation("accuracy") | {"by": "somebody"}
    assert judge_cell(planned(tolerance=0.001, expected=by_somebody), succeeded())["expected"] is True
    assert judge_cell(planned(expected=by_somebody), succeeded())["expected"] is False
    assert judge_cell(planned(expected=expectation("accuracy")), succeeded())["expected"] is True
    found = expected_failure(planned(expected=expectation("accuracy", until="1970-01-01")))
    assert found == {"kind": "accuracy", "before": 86_400.0}
    assert expected_failure(planned()) is None


def test_what_changed_names_each_cell_under_what_it_is() -> None:
    def cell(name: str, of: dict[str, Any], **more: Any) -> dict[str, Any]:
        return judge_cell({**planned(), "identifier": name}, of) | more

    past = {"state": "failed", "kind": "hang", "build": "b-1"}
    unread = {"state": "unknown", "kind": "not read yet", "build": ""}
    new_row = {"outcome": "new", "measure": "size", "against": "prod", "limit": 0.1, "why": ""}
    cells = [
        cell("fresh", failed("regression")),
        cell("again", failed("hang"), before=past),
        cell("expected", failed("hang"), as_expected=True),
        cell("waits", row("queued")),
        cell("open", failed("hang"), before=unread),
        cell("good", succeeded(), before=unread, reason="first compile"),
        cell("hit", succeeded(), hit=True, reason="asked", held="held", compared=[new_row]),
    ]
    changes = changes_of(cells)
    names = {sort: [each["identifier"] for each in found] for sort, found in changes.items() if sort != "hits"}
    assert names == {
        "new_failures": ["fresh"],
        "still_failing": ["again"],
        "regressions": ["fresh"],
        "improvements": [],
        "fixed": [],
        "unjudged": [],
        "held": ["hit"],
        "new": ["hit"],
        "undecided": ["open"],
        "recompiled": ["good"],
    }
    assert changes["hits"] == ["hit"]
    assert changes["undecided"][0]["text"] == "hang: it broke; it is not known if it failed before: not read yet"
    assert changes["held"][0]["text"] == "held"
    assert changes["regressions"][0]["text"] == "regression: it broke"
