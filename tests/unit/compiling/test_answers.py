"""What a child may answer: nothing in it is believed that was not asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from farm.compiling.asking import ANSWERS, WrongAnswer, read_answer, read_as, require_sound

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
    "verification": {
        **{"errors": {"y": 0.0}, "rms": {}, "equal": {}, "nonfinite": [], "spread": {"y": 1.0}, "weak": False},
        **{"samples": 8, "runs": 1, "origin": {}, "unverified": {}},
    },
    "measurements": {
        "load": 0.1,
        "latency": None,
        "points": [{"batch": 1, "shapes": {"x": [1]}, "latency": {"median": 0.5}}],
    },
}
SLICE = {"action": "slice", "slices": "/attempt/slices"}
PIECE = {"path": "/attempt/slices/slice-0000.onnx", "signature": "ab" * 32, "operations": 1, "count": 1, "inputs": {}}
OPEN = {"min": 1, "max": 4, "optimals": []}
SLICED: dict[str, Any] = {"slices": [PIECE]}
BENCH = {"action": "bench", "programs": [{}, {}], "rounds": 1}
TIMES = {"load": 0.1, "first": [0.5], "rounds": [[0.1, 0.2]]}
BENCHED: dict[str, Any] = {"programs": [TIMES, TIMES], "peak_memory": 5}
ASKED = (
    (CHECK, CHECKED),
    (COMPILE, COMPILED),
    (EVALUATE, EVALUATED),
    (SLICE, SLICED),
    (BENCH, BENCHED),
)


def everything() -> list[tuple[str, dict[str, Any]]]:
    """One answer to each action that is answered with more than a word, with nearly all of its fields."""
    session = {"level": "all", "threads": 1, "spinning": True}
    placement = {"nodes": {"CPU": {"Conv": 1}}, "on_purpose": {}, "fallback": {"Conv": ["a"]}}
    compiled = {**COMPILED, "session": session, "placement": placement, "output_parameters": ["p"]}
    latency = {"median": 0.5, "p99": 0.5, "repeats": 3}
    speed = {"load": 0.1, "latency": latency, "throughput": 1, "device_latency": {"median": 0.1, "repeats": 5}}
    return [
        ("check", {**CHECKED, "opsets": {"": 17}, "doubts": ["it may"], "weights": {"float32": 4}}),
        ("compile", {**compiled, "symbolic_shapes": "", "offload_copy": None}),
        ("evaluate", {**EVALUATED, "measurements": {**EVALUATED["measurements"], **speed}}),
        ("slice", changed(SLICED, "slices.0.inputs", {"x": {"dtype": "float32", "shape": [1, OPEN], "batch_axis": 0}})),
        ("bench", BENCHED),
        ("probe", {"available": True, "libraries": {"onnx": "1.2"}, "lowest": 75}),
    ]


def places(value: Any, way: str = "") -> list[str]:
    """Every place in a document, as `changed` takes it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, inner in items if name for place in (f"{way}{name}", *places(inner, f"{way}{name}."))]


JSON = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False, allow_infinity=False)),
    *(st.text(max_size=3), st.sampled_from(["x" * 300, "../x", "a.mxr", "0" * 64])),
    *(st.just([]), st.just({}), st.lists(st.integers(-1, 2), max_size=70), st.just({"a": 1}), st.just({"a": "b"})),
)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(data=st.data())
def test_pydantic_takes_and_refuses_the_same(data: st.DataObject) -> None:
    action, answer = data.draw(st.sampled_from(everything()))
    for _ in range(data.draw(st.integers(0, 2))):
        answer = changed(answer, data.draw(st.sampled_from(places(answer))), data.draw(JSON))

    def ours() -> Any:
        require_sound(answer)
        return with_defaults(read_as(ANSWERS[action], answer))

    def with_defaults(read: Any) -> Any:
        return pydantic_of(action).validate_python(read, strict=True)

    def theirs() -> Any:
        require_sound(answer)
        return with_defaults(answer)

    assert outcome(ours) == outcome(theirs)


@cache
def pydantic_of(action: str) -> TypeAdapter[Any]:
    """pydantic's own reader of the same type."""
    return TypeAdapter(ANSWERS[action])


def outcome(read: Callable[[], Any]) -> Any:
    """What was read, or None if it was refused."""
    try:
        return read()
    except (WrongAnswer, ValidationError):
        return None


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
        ("compile", "outputs.0.shape", [1] * 65, "more than 64 entries"),
        ("compile", "output_parameters", ["a", "b"], "another number of outputs"),
        ("compile", "quantized", {"x" * 300: 1}, "more than 256 characters"),
        ("compile", "quantized", {"\udcff": 1}, "half a character"),
        ("compile", "quantized", {"Conv": -1}, "below 0"),
        ("compile", "quantized", {"Conv": True}, "no whole number"),
        ("compile", "quantized", {"Conv": 10**30}, "beyond 64 bits"),
        ("compile", "session", {"level": {"deep": "object"}, "threads": 1, "spinning": True}, "no text"),
        ("evaluate", "verification.errors", {"y": 0.0, "secret": 0.0}, "does not have: 'secret'"),
        ("evaluate", "verification.nonfinite", ["secret"], "does not have: 'secret'"),
        ("evaluate", "verification.unverified", {"secret": ""}, "does not have: 'secret'"),
        ("evaluate", "verification.origin", {"secret": ""}, "does not have: 'secret'"),
        ("evaluate", "verification.unverified", {"y": "x" * 5000}, "a text of more than 4000 characters"),
        ("evaluate", "verification.errors", {"y": float("nan")}, "not finite"),
        ("evaluate", "verification.weak", "yes", "no true or false"),
        ("evaluate", "measurements.latency", float("inf"), "not finite"),
        ("evaluate", "measurements.points", [{}], "lacks 'batch'"),
        ("check", "external_files", ["../../../etc/passwd"], "not in the model's folder"),
        ("check", "external_files", ["/etc/passwd"], "not in the model's folder"),
        ("check", "external_files", ["a\0b"], "not in the model's folder"),
        ("check", "external_files", ["f"] * 10_001, "more than 10000 entries"),
        ("check", "inputs.0.name", "x" * 1025, "more than 1024 characters"),
        ("check", "opset", "17", "no whole number"),
        ("check", "operators", ["Relu"], "no object"),
        ("slice", "slices.0.path", "/etc/shadow", "not in its folder"),
        ("slice", "slices.0.path", "/attempt/slices/../slice-0000.onnx", "not in its folder"),
        ("slice", "slices.0.path", "/attempt/slices/other.onnx", "not in its folder"),
        ("slice", "slices.0.inputs", {"x": {"dtype": "float32", "shape": [OPEN]}}, "of an open size"),
        ("slice", "slices.0.signature", "../../main", "of another form"),
        ("slice", "slices.0.operations", "x", "no whole number"),
        ("slice", "slices.0.count", 0, "below 1"),
        ("slice", "slices.0.count", 1 << 40, "above 4"),
        ("bench", "programs", [TIMES], "another number of programs"),
        ("bench", "programs.1.rounds", [], "not measured in each round"),
        ("bench", "programs.1.first", [], "not measured in each round"),
        ("bench", "programs.1.rounds.0", [], "too few entries"),
        ("bench", "programs.1.rounds.0", [0.1, 0.0], "not above 0"),
    ],
)
def test_what_a_child_makes_up_is_refused(asked: str, place: str, value: Any, words: str) -> None:
    request, answer = next((request, answer) for request, answer in ASKED if request["action"] == asked)
    with pytest.raises(WrongAnswer, match=words):
        read_answer(request, changed(answer, place, value))


@pytest.mark.parametrize(
    ("request_", "answer", "field"),
    [(request, answer, field) for request, answer in ASKED for field in answer if field != "peak_memory"],
)
def test_a_field_that_lacks_is_named(request_: dict[str, Any], answer: dict[str, Any], field: str) -> None:
    with pytest.raises(WrongAnswer, match=f"lacks '{field}'"):
        read_answer(request_, {name: value for name, value in answer.items() if name != field})


def test_a_compiler_that_can_be_used_says_what_it_is() -> None:
    assert read_answer({"action": "probe"}, {"available": False, "reason": "no module"})["reason"] == "no module"
    with pytest.raises(WrongAnswer, match="lacks 'version'"):
        read_answer({"action": "probe"}, {"available": True})


def test_where_a_work_order_does_not_know_the_outputs_any_name_is_taken() -> None:
    """Stored ones of release 0.1.0 do not."""
    assert read_answer({**COMPILE, "model": {"format": "onnx"}}, COMPILED) == COMPILED
