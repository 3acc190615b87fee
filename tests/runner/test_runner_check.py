"""The check of a model: what sound ones are, and that every action on one begins with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from farm.jobs.state import FailureKind
from farm.runner.onnx_models import BadModel, check_onnx
from farm.runner.tf_check import check_tf
from tests.support.compiling import PNET, Case, Refused, inputs_of
from tests.support.hostile_models import model


def test_unknown_operators_are_the_compilers_limit(tmp_path: Path) -> None:
    """An operator that no compiler knows is named, as unsupported."""
    path = tmp_path / "model.onnx"
    for node, opsets in [
        (helper.make_node("Frobnicate", ["x"], ["y"], name="f"), [helper.make_opsetid("", 17)]),
        (helper.make_node("Relu", ["x"], ["y"], domain="my.own"), [helper.make_opsetid("my.own", 1)]),
    ]:
        path.write_bytes(model(nodes=[node], opsets=opsets).SerializeToString())
        with pytest.raises(BadModel) as refused:
            check_onnx(path)
        assert refused.value.kind == "unsupported_operator"


def test_a_domain_that_is_not_imported_is_reported_and_left_to_the_compilers(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    path.write_bytes(model(nodes=[node], opsets=[helper.make_opsetid("", 17)]).SerializeToString())
    assert check_onnx(path)["doubts"] == ["the model imports no opset of domain 'com.microsoft'"]
    net = Case(tmp_path, path, inputs_of(path), batch=None)
    net.reference()
    net.compile("native")
    found = net.evaluate("native")["verification"]
    assert found["origin"] == {"y": "onnxruntime"}
    assert found["errors"]["y"] < 1e-6


@pytest.mark.parametrize("operator", ["Gelu", "FastGelu"])
def test_an_operator_of_a_later_opset_or_another_domain_is_left_to_the_compilers(tmp_path: Path, operator: str) -> None:
    """MIGraphX knows operators by their names alone; who does not says so itself."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes=[helper.make_node(operator, ["x"], ["y"])]).SerializeToString())
    assert check_onnx(path)["doubts"] == [f"opset 17 has no operator '{operator}'"]
    with pytest.raises(Refused) as refused:
        Case(tmp_path, path, inputs_of(path), batch=None).compile("native")
    assert refused.value.kind is FailureKind.UNSUPPORTED_OPERATOR


def test_nodes_in_any_order_are_fine(tmp_path: Path) -> None:
    """ONNX Runtime takes them; MIGraphX says so itself where it does not."""
    nodes = [helper.make_node("Relu", ["h"], ["y"]), helper.make_node("MatMul", ["x", "w"], ["h"])]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes=nodes).SerializeToString())
    assert check_onnx(path)["operators"] == {"MatMul": 1, "Relu": 1}


def test_real_models_pass(tmp_path: Path) -> None:
    """A sound model is described: inputs with names of open dimensions, outputs, operators, weights."""
    found = check_onnx(PNET)
    assert found["inputs"] == [{"name": "input_1", "dtype": "float32", "shape": ["N", "M1", "M2", 3]}]
    assert [output["name"] for output in found["outputs"]] == ["conv2d_4", "softmax"]
    assert found["opset"] == 12
    assert found["weight_dtypes"] == ["float32"]


@pytest.mark.parametrize("action", ["check", "reference", "compile"])
@pytest.mark.parametrize("content", [b"", b"text", b"\x08\x08"])
def test_a_child_checks_before_a_compiler_opens_the_file(tmp_path: Path, action: str, content: bytes) -> None:
    """Every action on a model refuses it first, with the same kind."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    case = Case(tmp_path, path, {"x": {"dtype": "float32", "shape": [1]}})
    with pytest.raises(Refused) as refused:
        case.compile("fp32") if action == "compile" else getattr(case, action)()
    assert refused.value.kind is FailureKind.BAD_MODEL


def graph_def(*nodes: bytes) -> bytes:
    return b"".join(b"\x0a" + bytes([len(node)]) + node for node in nodes)


def node_def(name: bytes, op: bytes, *inputs: bytes) -> bytes:
    fields = [(0x0A, name), (0x12, op), *[(0x1A, text) for text in inputs]]
    return b"".join(bytes([key, len(text)]) + text for key, text in fields)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b"plain text that is not a graph", "not a TensorFlow frozen graph"),
        (graph_def(node_def(b"a", b"Relu", b"nowhere")), "needs 'nowhere'"),
        (graph_def(node_def(b"a", b"Placeholder"), node_def(b"a", b"Relu", b"a")), "two nodes are named 'a'"),
        (graph_def(node_def(b"v", b"VariableV2"), node_def(b"r", b"Relu", b"v")), "not frozen"),
        (graph_def(node_def(b"a", b"Placeholder"))[:-3], "not a TensorFlow frozen graph"),
        (graph_def(node_def(b"a", b"Placeholder")), "no outputs"),
        (graph_def(node_def(b"a\0", b"Placeholder"), node_def(b"r", b"Relu", b"a\0")), "a zero byte in its name"),
        (graph_def(node_def(b"a", b"Placeholder")) + b"\x22\x04\x0a\x02no", "no outputs"),
    ],
)
def test_malformed_tensorflow_graphs_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Frozen graphs are checked without TensorFlow."""
    path = tmp_path / "model.pb"
    path.write_bytes(content)
    with pytest.raises(BadModel) as refused:
        check_tf(path)
    assert words in refused.value.message


def _message(*parts: tuple[int, bytes | int]) -> bytes:
    """A protobuf message of up to 127 bytes a field."""
    return b"".join(
        bytes([field << 3, value]) if isinstance(value, int) else bytes([field << 3 | 2, len(value)]) + value
        for field, value in parts
    )


def constant(*tensor: tuple[int, bytes | int], value: int = 1, number: int | None = None) -> bytes:
    """A graph of one constant and a node that reads it; its value comes `value` times, and then may be a `number`."""
    values: list[tuple[int, bytes | int]] = [(8, _message(*tensor))] * value
    made = _message((1, b"value"), (2, _message(*values, *([(3, number)] if number is not None else []))))
    return graph_def(_message((1, b"w"), (2, b"Const"), (5, made)), node_def(b"y", b"Identity", b"w"))


FLOATS = (1, 1)
PAIR = (2, _message((2, _message((1, 2)))))


def test_a_tensorflow_constant_is_read_as_migraphx_reads_it(tmp_path: Path) -> None:
    """Protobuf takes the last of two contents, and joins two shapes."""
    path = tmp_path / "model.pb"
    for sound in (
        constant(FLOATS, PAIR, (4, bytes(8))),
        constant(FLOATS, PAIR, (4, bytes(1)), (4, bytes(8))),
        constant(FLOATS, PAIR, PAIR, (4, bytes(16))),
        constant(FLOATS, PAIR, (5, bytes(4)), (5, bytes(4))),
    ):
        path.write_bytes(sound)
        assert check_tf(path)["weight_dtypes"] == ["float32"]
    for cut in (
        constant(FLOATS, PAIR, (4, bytes(8)), (4, bytes(1))),
        constant(FLOATS, PAIR, PAIR, (4, bytes(8))),
        constant(FLOATS, PAIR, (4, bytes(8)), value=2),
    ):
        path.write_bytes(cut)
        with pytest.raises(BadModel, match="its shape needs"):
            check_tf(path)
    path.write_bytes(constant(FLOATS, PAIR, (4, bytes(8)), number=7))
    with pytest.raises(BadModel, match="has no value"):
        check_tf(path)


def test_tensorflow_graph_is_described(tmp_path: Path) -> None:
    """Placeholders are inputs, unused nodes are outputs."""
    path = tmp_path / "model.pb"
    path.write_bytes(graph_def(node_def(b"x", b"Placeholder"), node_def(b"y", b"Relu", b"x:0")))
    found = check_tf(path)
    assert [value["name"] for value in found["inputs"]] == ["x"]
    assert [value["name"] for value in found["outputs"]] == ["y"]
    assert found["operators"] == {"Placeholder": 1, "Relu": 1}
