"""A model's slices: together they are the model, and each compiles by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.runner.slicing import TUNABLE, cut
from tests.support.compiling import MAGIKA, PNET, RNET, SWIFT_F0, Case, inputs_of, package_file
from tests.support.transformer import save_encoder

LIGHT = "backend/test/data/light/light_{}.onnx"


def encoder(folder: Path) -> Path:
    return save_encoder(folder / "encoder.onnx")


MODELS: Mapping[str, tuple[Callable[[Path], Path], dict[str, list[int]]]] = {
    "pnet": (lambda _: PNET, {"input_1": [1, 24, 24, 3]}),
    "rnet": (lambda _: RNET, {"input_2": [1, 24, 24, 3]}),
    "magika": (lambda _: MAGIKA, {}),
    "swift-f0": (lambda _: SWIFT_F0, {"audio": [1, 16000]}),
    "squeezenet": (lambda _: package_file("onnx", LIGHT.format("squeezenet")), {}),
    "shufflenet": (lambda _: package_file("onnx", LIGHT.format("shufflenet")), {}),
    "inception-v1": (lambda _: package_file("onnx", LIGHT.format("inception_v1")), {}),
    "densenet121": (lambda _: package_file("onnx", LIGHT.format("densenet121")), {}),
    "encoder": (encoder, {"ids": [2, 16]}),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    make, shapes = MODELS[request.param]
    path = make(tmp_path)
    ranges = {"bytes": {"range": [0, 256]}, "ids": {"range": [0, 99]}}
    return Case(tmp_path, path, inputs_of(path, **shapes), ranges=ranges)


def operations(path: Path) -> int:
    return sum(node.op_type in TUNABLE for node in onnx.load(path, load_external_data=False).graph.node)


def sliced(case: Case) -> dict[str, Any]:
    (case.folder / "slices").mkdir()
    return case.run("slice", slices=str(case.folder / "slices"), compiler="onnxruntime", device="cpu", search=[])


def tune(case: Case, piece: Mapping[str, Any], **fields: Any) -> None:
    case.run(
        "tune",
        **{
            "model": {"path": piece["path"], "format": "onnx"},
            "inputs": piece["inputs"],
            "batch": None,
            "precision": "fp32",
            "quantization": {},
            "tuning": {"mode": "quick"},
            "calibration": {"generate": 2, "seed": 0, "ranges": case.ranges},
            "database": str(case.folder),
            "key": piece["signature"],
            **fields,
        },
    )


def run(model: onnx.ModelProto | str, feeds: Mapping[str, Any]) -> dict[str, Any]:
    import onnxruntime

    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(None, wanted), strict=True))


def test_slices_are_the_model(case: Case) -> None:
    """Run one after the other, the slices give the model's own outputs, and hold its operations exactly once."""
    from farm.runner.samples import make_samples

    feeds = make_samples({"generate": 2, "seed": 3, "ranges": case.ranges}, case.inputs, None, what="samples")[0]
    tensors, count, rest = dict(feeds), 0, []
    for model, piece in cut(str(case.path), case.inputs):
        onnx.checker.check_model(model, full_check=True)
        count += piece["operations"]
        rest.append(piece["operations"])
        tensors |= run(model, tensors)
    assert count == operations(case.path)
    assert max(rest) <= 6
    for name, expected in run(str(case.path), feeds).items():
        np.testing.assert_allclose(tensors[name], expected, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", ["pnet", "swift-f0", "encoder"], indirect=True)
def test_one_slice_is_tuned_with_onnxruntime(case: Case) -> None:
    """The child finds slices, and measures one under every candidate; its figures are in the database's folder."""
    found = sliced(case)
    assert sum(piece["operations"] * piece["count"] for piece in found["slices"]) == operations(case.path)
    piece = found["slices"][-1]
    tune(case, piece)
    assert '"basic/1": ' in (case.folder / "onnxruntime.json").read_text()


@pytest.mark.migraphx
@pytest.mark.parametrize("device", ["cpu", "ref"])
@pytest.mark.parametrize("case", ["pnet", "magika", "swift-f0", "squeezenet", "encoder"], indirect=True)
def test_every_slice_compiles_with_migraphx(case: Case, device: str) -> None:
    import migraphx

    found = sliced(case)
    case.compiler, case.device, case.search = "migraphx", device, [str(Path(migraphx.__file__).parent)]
    for piece in found["slices"]:
        tune(case, piece)


def test_equal_layers_are_one_slice(tmp_path: Path) -> None:
    """Layers that differ in their weights alone are tuned once; attention is not cut through."""
    path = save_encoder(tmp_path / "encoder.onnx", layers=12)
    pieces = list(cut(str(path), inputs_of(path, ids=[1, 16]), per_slice=8))
    assert sum(piece["operations"] for _, piece in pieces) == 12 * 8 + 1
    assert len(pieces) == 13
    assert len({piece["signature"] for _, piece in pieces}) == 4, (
        "the first, those between, the last, and the classifier"
    )
    for model, _ in cut(str(path), inputs_of(path, ids=[1, 16]), per_slice=1):
        kinds = [node.op_type for node in model.graph.node]
        assert "Softmax" not in kinds or "MatMul" in kinds[kinds.index("Softmax") :]


def test_slices_whose_inner_shapes_differ_are_two(tmp_path: Path) -> None:
    """Only the scales say how large the convolution is: inputs, outputs and attributes are the same."""

    def signature(scale: float) -> str:
        nodes = [
            helper.make_node("Resize", ["x", "", "scales"], ["large"]),
            helper.make_node("Conv", ["large", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("GlobalAveragePool", ["c"], ["y"]),
        ]
        tensors = [
            numpy_helper.from_array(np.array([1, 1, scale, scale], np.float32), "scales"),
            numpy_helper.from_array(np.ones((4, 4, 3, 3), np.float32), "w"),
        ]
        ports = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, size, size])
            for name, size in (("x", 8), ("y", 1))
        ]
        graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], tensors)
        path = tmp_path / "net.onnx"
        onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        ((_, piece),) = cut(str(path), inputs_of(path))
        return piece["signature"]

    assert signature(2) == signature(2) != signature(4)


def test_dequantized_weights_go_with_their_convolution(tmp_path: Path) -> None:
    """Of a quantized model no slice takes a weight, or a dequantized activation, from outside."""
    nodes, tensors = [], []
    for index in range(3):
        x = f"x{index}"
        names = {name: f"{name}{index}" for name in ("q", "d", "w", "s", "y")}
        tensors.append(numpy_helper.from_array(np.ones((4, 4, 3, 3), np.int8), names["w"]))
        tensors.append(numpy_helper.from_array(np.float32(0.1), names["s"]))
        nodes += [
            helper.make_node("QuantizeLinear", [x, names["s"]], [names["q"]]),
            helper.make_node("DequantizeLinear", [names["q"], names["s"]], [names["d"]]),
            helper.make_node("DequantizeLinear", [names["w"], names["s"]], [f"{names['w']}d"]),
            helper.make_node("Conv", [names["d"], f"{names['w']}d"], [f"x{index + 1}"], pads=[1, 1, 1, 1]),
        ]
    graph = helper.make_graph(
        nodes,
        "qdq",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, 4, 8, 8])],
        [helper.make_tensor_value_info("x3", TensorProto.FLOAT, [1, 4, 8, 8])],
        tensors,
    )
    path = tmp_path / "qdq.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    pieces = list(cut(str(path), inputs_of(path), per_slice=1))
    assert [[*piece["inputs"]] for _, piece in pieces] == [["x0"], ["q1"], ["q2"]]


def test_no_cut_where_a_shape_is_not_known(tmp_path: Path) -> None:
    """How many rows NonZero finds is known when it runs; what depends on it stays in one slice."""
    tensors = [numpy_helper.from_array(np.ones((1, 4), np.float32), name) for name in ("w0",)]
    tensors += [numpy_helper.from_array(np.ones((4, 4), np.float32), f"w{index}") for index in (1, 2)]
    graph = helper.make_graph(
        [
            helper.make_node("NonZero", ["x"], ["rows"]),
            helper.make_node("Cast", ["rows"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["floats"], ["t"]),
            helper.make_node("MatMul", ["t", "w0"], ["a"]),
            helper.make_node("MatMul", ["a", "w1"], ["b"]),
            helper.make_node("MatMul", ["b", "w2"], ["y"]),
        ],
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4])],
        tensors,
    )
    path = tmp_path / "rows.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    ((model, piece),) = cut(str(path), inputs_of(path), per_slice=1)
    assert piece["operations"] == 3
    feeds = {"x": np.array([0, 1, 0, 2, 3, 0, 0, 4], np.float32)}
    np.testing.assert_array_equal(run(model, feeds)["y"], run(str(path), feeds)["y"])
