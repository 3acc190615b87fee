"""What a child may answer: nothing in it is believed that was not asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from farm.compiling.answers import WrongAnswer, read_answer

PORT = {"name": "y", "dtype": "float32", "shape": [1, 4], "strides": [4, 1]}
CHECK = {"action": "check"}
CHECKED: dict[str, Any] = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", None, 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": None}],
    "opset": 17,
    "operators": {"Relu": 1},
    "weight_dtypes": ["float32"],
    "external_files": ["weights/a.bin"],
}
COMPILE = {"action": "compile", "inputs": {"x": {}}, "model": {"names": ["y", "z"]}}
COMPILED: dict[str, Any] = {
    "inputs": [{**PORT, "name": "x"}],
    "outputs": [PORT],
    "weight_dtypes": {"float32": 4},
    "compute_dtypes": {"float32": 1},
    "quantized": {},
}
EVALUATE = {"action": "evaluate", "outputs": ["y"]}
EVALUATED: dict[str, Any] = {
    "verification": {"errors": {"y": 0.0}, "spread": {"y": 1.0}, "samples": 8, "weak": False},
    "measurements": {"load": 0.1, "latency": None},
}
SLICE = {"action": "slice", "slices": "/attempt/slices"}
PIECE = {"path": "/attempt/slices/slice-0000.onnx", "signature": "ab" * 32, "operations": 1, "count": 1, "inputs": {}}
SLICED: dict[str, Any] = {"slices": [PIECE], "operations": 1}
BENCH = {"action": "bench", "programs": [{}, {}], "rounds": 1}
TIMES = {"load": 0.1, "first": [0.5], "rounds": [[0.1, 0.2]]}
BENCHED: dict[str, Any] = {"programs": [TIMES, TIMES]}
ASKED = ((CHECK, CHECKED), (COMPILE, COMPILED), (EVALUATE, EVALUATED), (SLICE, SLICED), (BENCH, BENCHED))


def changed(answer: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a place such as `outputs.0.name`."""
    whole: Any = copy.deepcopy(answer)
    inner = whole
    *way, last = place.split(".")
    for step in way:
        inner = inner[int(step) if isinstance(inner, list) else step]
    inner[int(last) if isinstance(inner, list) else last] = value
    return dict(whole)


@pytest.mark.parametrize(("request_", "answer"), ASKED, ids=[str(request["action"]) for request, _ in ASKED])
def test_an_honest_answer_is_taken_as_it_is_and_what_nobody_asked_is_left_out(
    request_: dict[str, Any], answer: dict[str, Any]
) -> None:
    assert read_answer(request_, {**answer, "more": "x" * 1000}) == answer


@pytest.mark.parametrize(
    ("asked", "place", "value", "words"),
    [
        ("compile", "outputs.0.name", "of nobody", "an output that the model does not have: 'of nobody'"),
        ("compile", "inputs.0.name", "of nobody", "an input that the model does not have"),
        ("compile", "outputs.0.name", 5, "no text"),
        ("compile", "outputs.0.shape", [[1]], "no text"),
        ("compile", "outputs.0.shape", [1] * 65, "no list of at most 64"),
        ("compile", "output_parameters", ["a", "b"], "another number of outputs"),
        ("compile", "quantized", {"x" * 300: 1}, "no text of at most 256 characters"),
        ("compile", "quantized", {"\udcff": 1}, "half a character"),
        ("compile", "quantized", {"Conv": -1}, "below 0"),
        ("compile", "quantized", {"Conv": True}, "no finite number"),
        ("compile", "quantized", {"Conv": 10**30}, "beyond 64 bits"),
        ("compile", "session", {"level": {"deep": "object"}}, "no text"),
        ("evaluate", "verification.errors", {"y": 0.0, "secret": 0.0}, "does not have: 'secret'"),
        ("evaluate", "verification.nonfinite", ["secret"], "does not have: 'secret'"),
        ("evaluate", "verification.unverified", {"secret": ""}, "does not have: 'secret'"),
        ("evaluate", "verification.origin", {"secret": ""}, "does not have: 'secret'"),
        ("evaluate", "verification.unverified", {"y": "x" * 5000}, "no text of at most 4000 characters"),
        ("evaluate", "verification.errors", {"y": float("nan")}, "no finite number"),
        ("evaluate", "verification.weak", "yes", "neither true nor false"),
        ("evaluate", "measurements.latency", float("inf"), "no finite number"),
        ("evaluate", "measurements.points", [{}], "lacks 'batch'"),
        ("check", "external_files", ["../../../etc/passwd"], "not in the model's folder"),
        ("check", "external_files", ["/etc/passwd"], "not in the model's folder"),
        ("check", "external_files", ["a\0b"], "not in the model's folder"),
        ("check", "external_files", ["f"] * 10_001, "no list of at most 10000"),
        ("check", "inputs.0.name", "x" * 1025, "no text of at most 1024 characters"),
        ("check", "opset", "17", "no whole number"),
        ("check", "operators", ["Relu"], "no object"),
        ("slice", "slices.0.path", "/etc/shadow", "not in its folder"),
        ("slice", "slices.0.path", "/attempt/slices/../slice-0000.onnx", "not in its folder"),
        ("slice", "slices.0.path", "/attempt/slices/other.onnx", "not in its folder"),
        ("slice", "slices.0.signature", "../../main", "no text"),
        ("bench", "programs", [TIMES], "another number of programs"),
        ("bench", "programs.1.rounds", [], "not measured in each round"),
        ("bench", "programs.1.first", [], "not measured in each round"),
        ("bench", "programs.1.rounds.0", [], "a round without runs"),
        ("bench", "programs.1.rounds.0", [0.1, 0.0], "a run that took no time"),
    ],
)
def test_what_a_child_makes_up_is_refused(asked: str, place: str, value: Any, words: str) -> None:
    request, answer = next((request, answer) for request, answer in ASKED if request["action"] == asked)
    with pytest.raises(WrongAnswer, match=words):
        read_answer(request, changed(answer, place, value))


@pytest.mark.parametrize(
    ("request_", "answer", "field"),
    [(request, answer, field) for request, answer in ASKED for field in answer],
)
def test_a_field_that_lacks_is_named(request_: dict[str, Any], answer: dict[str, Any], field: str) -> None:
    with pytest.raises(WrongAnswer, match=f"lacks '{field}'"):
        read_answer(request_, {name: value for name, value in answer.items() if name != field})


def test_a_compiler_that_can_be_used_says_what_it_is() -> None:
    assert read_answer({"action": "probe"}, {"available": False, "reason": "no module"})["reason"] == "no module"
    with pytest.raises(WrongAnswer, match="lacks 'version'"):
        read_answer({"action": "probe"}, {"available": True})


def test_where_a_work_order_does_not_know_the_outputs_any_name_is_taken() -> None:
    """Those of release 0.1.0 do not."""
    assert read_answer({**COMPILE, "model": {"format": "onnx"}}, COMPILED) == COMPILED
