"""A build's judgement: gates, expectations, the verdict and its exit code, JUnit."""

from __future__ import annotations

from typing import Any

import pytest

from farm.errors import ExitCode
from farm.results.verdict import judge_cell, verdict_of

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


@pytest.mark.parametrize(("state", "seconds"), [("running", 12.5), ("queued", 10.0), ("succeeded", 10.0)])
def test_a_cell_took_what_its_ended_attempts_took_and_the_one_that_runs(state: str, seconds: float) -> None:
    assert judge_cell(planned(), row(state, facts=None, spent=10.0, elapsed=2.5))["spent"] == seconds


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
