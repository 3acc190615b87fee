"""A text encoder such as exporters write it: symbolic batch and sequence, shapes computed in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS = 4


def save_encoder(path: Path, layers: int = 3) -> Path:
    """Write an encoder with `layers` equal layers; its input `ids` is int64 [batch, seq], and it has one output."""
    width, classes = 32, 5
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    tensors: list[onnx.TensorProto] = []

    def op(kind: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(nodes)}_0"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def weight(*shape: int) -> str:
        return constant((random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def constant(value: np.ndarray) -> str:  # type: ignore[type-arg]
        tensors.append(numpy_helper.from_array(np.asarray(value), f"c{len(tensors)}"))
        return tensors[-1].name

    def numbers(*values: int) -> str:
        return constant(np.array(values, np.int64))

    def norm(x: str) -> str:
        centred = op("Sub", x, op("ReduceMean", x, axes=[-1], keepdims=1))
        variance = op("ReduceMean", op("Mul", centred, centred), axes=[-1], keepdims=1)
        return op("Div", centred, op("Sqrt", op("Add", variance, constant(np.float32(1e-5)))))

    def heads(x: str, source: str) -> str:
        shape = op("Shape", source)
        batch = op("Unsqueeze", op("Gather", shape, constant(np.int64(0))), numbers(0))
        sequence = op("Unsqueeze", op("Gather", shape, constant(np.int64(1))), numbers(0))
        sizes = op("Concat", batch, sequence, numbers(HEADS), numbers(width // HEADS), axis=0)
        return op("Transpose", op("Reshape", x, sizes), perm=[0, 2, 1, 3])

    x = op("Gather", weight(100, width), "ids")
    for _ in range(layers):
        query, key, value = (heads(op("MatMul", x, weight(width, width)), x) for _ in range(3))
        scores = op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2]))
        weights = op("Softmax", op("Div", scores, constant(np.float32(np.sqrt(width // HEADS)))), axis=-1)
        mixed = op("Transpose", op("MatMul", weights, value), perm=[0, 2, 1, 3])
        x = norm(op("Add", x, op("MatMul", op("Reshape", mixed, numbers(0, 0, width)), weight(width, width))))
        hidden = op("Relu", op("Add", op("MatMul", x, weight(width, 4 * width)), weight(4 * width)))
        x = norm(op("Add", x, op("MatMul", hidden, weight(4 * width, width))))
    first = op("Gather", x, constant(np.int64(0)), axis=1)
    nodes.append(helper.make_node("Gemm", [first, weight(width, classes), weight(classes)], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "seq"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        tensors,
    )
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path
