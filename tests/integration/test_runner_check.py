"""Hostile models: refused with the place named, before any compiler opens a file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.jobs.state import FailureKind
from farm.runner.onnx_check import BadModel, check_onnx
from farm.runner.tf_check import check_tf
from tests.compiling import PNET, Case, Refused

CANARY = b"canary-secret-in-a-file-outside"


def model(**changes: Any) -> onnx.ModelProto:
    """A sound little model: y = relu(x @ w)."""
    nodes = changes.pop("nodes", None) or [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    weights = changes.pop("weights", None) or [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        changes.pop("inputs", None) or [value("x", TensorProto.FLOAT, ["N", 3])],
        changes.pop("outputs", None) or [value("y", TensorProto.FLOAT, ["N", 2])],
        initializer=weights,
    )
    opsets = changes.pop("opsets", None) or [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **changes)


def weight(**fields: Any) -> TensorProto:
    tensor = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    for name, content in fields.items():
        if isinstance(content, list):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(content)
        else:
            setattr(tensor, name, content)
    return tensor


def nested(depth: int) -> onnx.NodeProto:
    """An If inside an If inside …"""
    value = helper.make_tensor_value_info("o", TensorProto.FLOAT, [1])
    node = leaf = helper.make_node("Identity", ["x"], ["o"])
    for _ in range(depth):
        deep, flat = (helper.make_graph([made], "branch", [], [value]) for made in (node, leaf))
        node = helper.make_node("If", ["x"], ["o"], then_branch=deep, else_branch=flat)
    return node


def calls_itself() -> onnx.ModelProto:
    body = [helper.make_node("F", ["a"], ["b"], domain="local")]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("local", 1)])
    return model(
        nodes=[helper.make_node("F", ["x"], ["y"], domain="local")],
        opsets=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
        functions=[function],
    )


def laughs() -> onnx.ModelProto:
    """Functions that each call the one before ten times: ten to the twelfth nodes in a few hundred bytes."""
    local = helper.make_opsetid("local", 1)
    functions = []
    for level in range(12):
        called = ("Relu", "") if level == 0 else (f"F{level - 1}", "local")
        names = ["a", *[f"t{i}" for i in range(9)], "b"]
        body = [helper.make_node(called[0], [names[i]], [names[i + 1]], domain=called[1]) for i in range(10)]
        opsets = [helper.make_opsetid("", 17), local]
        functions.append(helper.make_function("local", f"F{level}", ["a"], ["b"], body, opsets))
    nodes = [helper.make_node("F11", ["x"], ["y"], domain="local")]
    return model(nodes=nodes, opsets=[helper.make_opsetid("", 17), local], functions=functions)


MALFORMED: dict[str, tuple[Callable[[], bytes | onnx.ModelProto], str]] = {
    "empty": (lambda: b"", "empty (0 bytes)"),
    "text": (lambda: b"this is not a model, it is text\n" * 10, "not an ONNX model"),
    "random": (lambda: random.Random(1).randbytes(4096), "not an ONNX model"),
    "cut": (lambda: PNET.read_bytes()[:-4000], "not an ONNX model"),
    "no graph": (lambda: onnx.ModelProto(ir_version=8), "no graph"),
    "no opset": (lambda: model(opsets=[helper.make_opsetid("", 0)]), "opset 0 is not known"),
    "future opset": (lambda: model(opsets=[helper.make_opsetid("", 999)]), "opset 999 is not known"),
    "short raw data": (lambda: model(weights=[weight(raw_data=b"1234")]), "'w': its shape needs 24 bytes of raw data"),
    "long raw data": (lambda: model(weights=[weight(raw_data=b"1" * 64)]), "'w': its shape needs 24 bytes"),
    "overflowing shape": (lambda: model(weights=[weight(dims=[2**62, 2**62])]), "initializer 'w'"),
    "negative shape": (lambda: model(weights=[weight(dims=[-3, 2])]), "initializer 'w' has the shape [-3, 2]"),
    "unknown dtype": (lambda: model(weights=[weight(data_type=77)]), "unknown element type 77"),
    "missing input": (
        lambda: model(nodes=[helper.make_node("Relu", ["nowhere"], ["y"], name="r")]),
        "nothing makes 'nowhere', which node 'r' needs",
    ),
    "missing output": (lambda: model(nodes=[helper.make_node("Relu", ["x"], ["z"])]), "nothing makes output 'y'"),
    "cycle": (
        lambda: model(
            nodes=[helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
                   helper.make_node("Relu", ["b"], ["y"])]
        ),
        "depends on its own output",
    ),
    "made twice": (
        lambda: model(nodes=[helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])]),
        "two nodes make 'y'",
    ),
    "no operator": (lambda: model(nodes=[helper.make_node("", ["x"], ["y"])]), "has no operator"),
    "deep": (lambda: model(nodes=[nested(28)]), "nest deeper than 24"),
    "recursion": (calls_itself, "calls itself"),
    "a billion laughs": (laughs, "stands for more than"),
    "huge input": (
        lambda: model(inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**40, 2**40])]),
        "input 'x' has the shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models_are_refused_with_the_place(tmp_path: Path, name: str) -> None:
    """Whatever is wrong, the answer is bad_model and one sentence, quickly."""
    make, words = MALFORMED[name]
    made = make()
    path = tmp_path / "model.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    with pytest.raises(BadModel) as refused:
        check_onnx(path)
    assert refused.value.kind == "bad_model"
    assert words in refused.value.message
    assert "\n" not in refused.value.message.strip()


def external(location: str, **more: str) -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 2], data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": "0", "length": "24", **more}
    for key, content in entries.items():
        tensor.external_data.add(key=key, value=content)
    return model(weights=[tensor])


def _link(folder: Path, outside: Path) -> None:
    (folder / "link").symlink_to(outside / "secret")


def _linked_folder(folder: Path, outside: Path) -> None:
    (folder / "sub").symlink_to(outside)


def _hard_link(folder: Path, outside: Path) -> None:
    (folder / "hard").hardlink_to(outside / "secret")


def _pipe(folder: Path, outside: Path) -> None:
    os.mkfifo(folder / "pipe")


def _nothing(folder: Path, outside: Path) -> None:
    (folder / "data").write_bytes(CANARY)


ESCAPES: dict[str, tuple[Callable[[Path], str], Callable[[Path, Path], None]]] = {
    "absolute": (lambda outside: str(outside / "secret"), _nothing),
    "parent": (lambda outside: "../outside/secret", _nothing),
    "hidden parent": (lambda outside: "a/../../outside/secret", _nothing),
    "dot": (lambda outside: "./data", _nothing),
    "double slash": (lambda outside: "a//data", _nothing),
    "backslash": (lambda outside: "..\\outside\\secret", _nothing),
    "drive": (lambda outside: "C:/secret", _nothing),
    "nul": (lambda outside: "data\0/../secret", _nothing),
    "empty": (lambda outside: "", _nothing),
    "process files": (lambda outside: "/proc/self/environ", _nothing),
    "long": (lambda outside: "a/" * 600 + "data", _nothing),
    "missing": (lambda outside: "elsewhere", _nothing),
    "folder": (lambda outside: "sub", lambda folder, outside: (folder / "sub").mkdir()),
    "symbolic link": (lambda outside: "link", _link),
    "linked folder": (lambda outside: "sub/secret", _linked_folder),
    "hard link": (lambda outside: "hard", _hard_link),
    "named pipe": (lambda outside: "pipe", _pipe),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_external_data_cannot_escape(tmp_path: Path, name: str) -> None:
    """Every way out of the model's folder is refused, and nothing is opened on the way (a pipe would block)."""
    location, prepare = ESCAPES[name]
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_bytes(CANARY)
    prepare(folder, outside)
    path = folder / "model.onnx"
    path.write_bytes(external(location(outside)).SerializeToString())
    with pytest.raises(BadModel) as refused:
        check_onnx(path)
    assert refused.value.kind == "bad_model"
    assert "'w'" in refused.value.message
    assert CANARY.decode() not in refused.value.message


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "-1"},
        {"offset": "99999999999999999999"},
        {"offset": "0x10"},
        {"length": "23"},
        {"length": "1000000000000"},
        {"offset": "16"},
        {"checksum": "x", "__class__": "y"},
    ],
)
def test_external_data_entries_are_sane(tmp_path: Path, entries: dict[str, str]) -> None:
    """Numbers are numbers, fit the shape and the file; unknown keys are refused."""
    (tmp_path / "data").write_bytes(b"\0" * 32)
    path = tmp_path / "model.onnx"
    path.write_bytes(external("data", **entries).SerializeToString())
    with pytest.raises(BadModel):
        check_onnx(path)


def test_external_data_entries_come_in_the_order_that_migraphx_reads(tmp_path: Path) -> None:
    """MIGraphX reads by position: a checksum in front would be opened as a file."""
    (tmp_path / "data").write_bytes(b"\0" * 32)
    sound = external("data")
    tensor = sound.graph.initializer[0]
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    path = tmp_path / "model.onnx"
    path.write_bytes(sound.SerializeToString())
    assert check_onnx(path)["external_files"] == ["data"]
    del tensor.external_data[:]
    for key, content in [("checksum", "/etc/passwd"), *entries]:
        tensor.external_data.add(key=key, value=content)
    path.write_bytes(sound.SerializeToString())
    with pytest.raises(BadModel):
        check_onnx(path)


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


def test_mutated_models_never_crash_the_check(tmp_path: Path) -> None:
    """Flipped and cut bytes of a real model pass or are refused; nothing else is raised."""
    chance = random.Random(7)
    whole = PNET.read_bytes()
    path = tmp_path / "model.onnx"
    for _ in range(200):
        content = bytearray(whole[: chance.choice([len(whole), chance.randrange(1, len(whole))])])
        for _ in range(chance.randrange(1, 8)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(bytes(content))
        try:
            check_onnx(path)
        except BadModel as refused:
            assert refused.message


def graph_def(*nodes: bytes) -> bytes:
    return b"".join(b"\x0a" + bytes([len(node)]) + node for node in nodes)


def node_def(name: bytes, op: bytes, *inputs: bytes) -> bytes:
    fields = [(0x0A, name), (0x12, op), *[(0x1A, text) for text in inputs]]
    return b"".join(bytes([key, len(text)]) + text for key, text in fields)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b"plain text that is no graph", "not a TensorFlow frozen graph"),
        (graph_def(node_def(b"a", b"Relu", b"nowhere")), "needs 'nowhere'"),
        (graph_def(node_def(b"a", b"Placeholder"), node_def(b"a", b"Relu", b"a")), "two nodes are named 'a'"),
        (graph_def(node_def(b"v", b"VariableV2"), node_def(b"r", b"Relu", b"v")), "not frozen"),
        (graph_def(node_def(b"a", b"Placeholder"))[:-3], "not a TensorFlow frozen graph"),
        (graph_def(node_def(b"a", b"Placeholder")), "no outputs"),
    ],
)
def test_malformed_tensorflow_graphs_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Frozen graphs are checked without TensorFlow."""
    path = tmp_path / "model.pb"
    path.write_bytes(content)
    with pytest.raises(BadModel) as refused:
        check_tf(path)
    assert words in refused.value.message


def test_tensorflow_graph_is_described(tmp_path: Path) -> None:
    """Placeholders are inputs, unused nodes are outputs."""
    path = tmp_path / "model.pb"
    path.write_bytes(graph_def(node_def(b"x", b"Placeholder"), node_def(b"y", b"Relu", b"x:0")))
    found = check_tf(path)
    assert [value["name"] for value in found["inputs"]] == ["x"]
    assert [value["name"] for value in found["outputs"]] == ["y"]
    assert found["operators"] == {"Placeholder": 1, "Relu": 1}
