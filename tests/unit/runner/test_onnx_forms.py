"""Which forms of operators the `onnx` package's evaluator may get wrong, by ONNX's own cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from farm.runner.onnx_evaluator import LIST, doubted_outputs
from tests.operators.forms import agrees, cases_of, right_forms


def model_of(nodes: Sequence[Any], inputs: dict[str, list[int]], outputs: Sequence[str], **more: Any) -> Any:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "net", ports, made)
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **more)


def lstm(*inputs: str, **attributes: Any) -> Any:
    node = helper.make_node("LSTM", ["x", "w", "r", *inputs], ["y"], hidden_size=3, **attributes)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = {"x": [4, 2, 5], "w": [directions, 12, 5], "r": [directions, 12, 3]}
    return model_of([node], shapes, ["y"])


FALSE_THEN = helper.make_graph(
    [helper.make_node("Neg", ["x"], ["t"])], "then", [], [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)]
)


@pytest.mark.parametrize("start", ["lstm", "clip", "matmul_"])
def test_the_list_is_what_the_cases_say(start: str) -> None:
    """A slice of what `make forms` does; all of it takes minutes."""
    known = json.loads(LIST.read_text())
    assert known["onnx"] == onnx.__version__, "`make forms` after an upgrade of onnx"
    cases = cases_of(start)
    found = right_forms(cases, {case.name: agrees(case) for case in cases})
    assert all(set(parts) <= set(known["right"][name]) for name, parts in found.items())
    if start == "lstm":
        assert found["LSTM"] == known["right"]["LSTM"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lstm(activations=["Relu", "Tanh", "Tanh"]), "LSTM with activations=Relu,Tanh,Tanh"),
        (lstm("", "lengths", input_forget=1), "LSTM with input sequence_lens, input_forget"),
        (lstm(clip=0.01), "LSTM with clip"),
    ],
)
def test_a_form_that_no_case_proves_is_doubted(model: Any, said: str) -> None:
    assert doubted_outputs(model) == {"y": f"the onnx package's evaluator is not known to be right for {said}"}


def test_a_form_that_cases_prove_is_not_doubted() -> None:
    assert doubted_outputs(lstm(direction="bidirectional")) == {}
    assert doubted_outputs(lstm()) == {}


def test_what_is_doubted_is_wrong() -> None:
    """The evaluator takes activations of an LSTM and computes without them."""
    model, rng = lstm(activations=["Relu", "Relu", "Relu"]), np.random.default_rng(0)
    shapes = {port.name: [size.dim_value for size in port.type.tensor_type.shape.dim] for port in model.graph.input}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (right,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    (made,) = ReferenceEvaluator(model).run(None, feeds)
    assert np.linalg.norm(made - right) > 0.1 * np.linalg.norm(right)


def test_only_outputs_behind_a_doubted_node_are_doubted() -> None:
    """Also if it is in a graph of another node, or in a function that the model brings."""
    clipped = helper.make_node("Clip", ["x"], ["a"])
    hidden = helper.make_function(
        "own", "Hidden", ["x"], ["y"], [helper.make_node("Elu", ["x"], ["y"], own=1.0)], [helper.make_opsetid("", 17)]
    )
    choice = helper.make_node("If", ["c"], ["b"], then_branch=FALSE_THEN, else_branch=FALSE_THEN)
    called = helper.make_node("Hidden", ["a"], ["d"], domain="own")
    model = model_of([clipped, choice, called], {"x": [2]}, ["a", "b", "d"], functions=[hidden])
    assert [name for name, why in doubted_outputs(model).items() if "right for If" in why] == ["b"]
    assert "right for Elu with own" in doubted_outputs(model)["d"]
    assert "a" not in doubted_outputs(model)


def test_of_another_release_of_onnx_everything_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "__version__", "1.0.0")
    assert doubted_outputs(lstm())["y"].startswith("the evaluator of onnx 1.0.0 was not checked, only that of ")
