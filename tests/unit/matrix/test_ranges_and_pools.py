"""What a dynamic program costs or is refused for, and which of several pools gets a cell."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from farm.matrix.cells import FULL_DYNAMIC, PoolChoice, price, refusal
from farm.matrix.combinations import data_key
from farm.models.shapes import Input, Span
from farm.targets.pools import Target

LOW, HIGH = Span(1, 8), Span(8, 64)
GPU, CPU, REF = (Target("migraphx", device) for device in ("gfx942", "cpu", "ref"))


def tensors(*shapes: tuple[Any, ...]) -> list[Input]:
    return [Input(f"x{place}", "float32", shape, None) for place, shape in enumerate(shapes)]


ONE = [tensors((LOW, 3)), tensors((LOW, 3), (2, LOW)), tensors((4, 4), (LOW,))]
"""Those with equal ranges count as one."""
SEVERAL = [tensors((LOW, HIGH)), tensors((LOW, LOW)), tensors((LOW, 3), (HIGH,))]
NONE = [tensors((4, 3)), tensors()]


@pytest.mark.parametrize("inputs", ONE)
def test_one_range_is_built_for_each_size_and_refused_by_nobody(inputs: list[Input]) -> None:
    assert refusal(GPU, "onnx", inputs, {}) == ""
    (said,) = price(GPU, "int8", inputs, [])
    assert said.startswith("8 submodules, one for each size from 1 to 8:")


@pytest.mark.parametrize("inputs", SEVERAL)
def test_several_ranges_are_refused_on_a_gpu_unless_they_are_asked_for(inputs: list[Input]) -> None:
    assert "these inputs have several" in refusal(GPU, "onnx", inputs, {})
    assert "these inputs have several" in refusal(GPU, "onnx", inputs, {FULL_DYNAMIC: "0"})
    for yes in ("1", "enable", "enabled", "yes", "true"):
        assert refusal(GPU, "onnx", inputs, {FULL_DYNAMIC: yes}) == ""
    for target in (CPU, REF, Target("onnxruntime", "cpu")):
        assert refusal(target, "onnx", inputs, {}) == ""
    (said,) = price(GPU, "int8", inputs, [])
    assert said.startswith("several dynamic dimensions")


@pytest.mark.parametrize("inputs", [*ONE, *SEVERAL, *NONE])
def test_a_range_in_a_tensorflow_graph_is_refused_by_migraphx(inputs: list[Input]) -> None:
    assert bool(refusal(CPU, "tf", inputs, {})) == (inputs not in NONE)
    assert refusal(Target("onnxruntime", "cpu"), "tf", inputs, {}) == ""


def test_nothing_is_said_where_there_is_no_range_or_no_migraphx() -> None:
    for inputs in NONE:
        assert price(GPU, "int8", inputs, ["LayerNormalization"]) == []
    assert price(Target("onnxruntime", "cpu"), "int8", ONE[0], ["LayerNormalization"]) == []


@pytest.mark.parametrize(
    ("precision", "is_said"), [("fp32", False), ("int8", True), ("fp8", True), ("int8-fp16", True), ("fp16", False)]
)
def test_the_ref_target_quantizes_no_ranges_and_the_cpu_target_says_nothing_of_it(
    precision: str, is_said: bool
) -> None:
    assert bool(price(REF, precision, ONE[0], [])) == is_said
    assert price(CPU, precision, ONE[0], []) == []


def test_five_operators_are_named_and_the_others_counted() -> None:
    operators = ["Relu", "Conv", "Add", "Exp", "Div", "Max", "Softmax", "LayerNormalization", "Sigmoid"]
    for count, names in (
        (5, "Add, Conv, Div, Exp, Relu, which"),
        (6, "Add, Conv, Div, Exp, Max and 1 more operators, which"),
        (9, "Add, Conv, Div, Exp, LayerNormalization and 3 more operators, which"),
    ):
        (found,) = price(CPU, "fp32", ONE[0], operators[:count])
        assert found.startswith(f"MIGraphX's cpu target refuses a range in {names}")
    assert price(REF, "fp32", ONE[0], operators)[0].startswith("MIGraphX refuses a range in LayerNormalization, which")
    assert price(REF, "fp32", ONE[0], operators[:7]) == []


def test_pools_that_serve_alike_get_cells_by_their_slots_and_each_keeps_its_cells() -> None:
    nobody: Any = SimpleNamespace(complain=None)
    cells = [f"net/onnxruntime-cpu/fp32/b{number}" for number in range(400)]

    def given(slots: dict[str, int]) -> list[str]:
        choice = PoolChoice((), (), slots, nobody)
        return [choice.spread(cell, list(slots)) for cell in cells]

    counts = Counter(given({"a": 1, "b": 3, "c": 0}))
    assert counts.keys() == {"a", "b"}
    assert counts["b"] == pytest.approx(300, abs=30)
    assert Counter(given({"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}))["e"] == pytest.approx(200, abs=30)
    alike = Counter(given({"a": 0, "b": 0}))
    assert alike["a"] == pytest.approx(200, abs=30), "nobody takes jobs now"
    assert set(given({"c": 0})) == {"c"}
    before, after = given({"a": 1, "b": 1, "c": 1}), given({"a": 1, "b": 1})
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "c")


def test_data_is_named_by_its_model_and_use() -> None:
    assert data_key("net", "samples") == "net/samples"
    assert data_key("net", "calibration", 0) == "net/calibration/0"
