"""A transformer block with a KV cache, as decoders are exported: prefill has no past yet, decode adds one token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, HEAD = 2, 8
HIDDEN = HEADS * HEAD


def write_block(path: Path) -> Path:
    """Write attention over past and new tokens with a mask, then a feed-forward layer, and return its path.

    Inputs are `x` [batch, seq, 16], `past_key_values.0.key` and `.value` [batch, 2, past, 8] and `attention_mask`
    [batch, past + seq] (1: may be looked at); outputs `y`, `present.0.key` and `present.0.value`.
    """
    random = np.random.default_rng(0)
    weights = {
        name: (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in {
            **{f"w_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "o")},
            "w_up": (HIDDEN, 4 * HIDDEN),
            "w_down": (4 * HIDDEN, HIDDEN),
        }.items()
    }
    constants = {
        "split": np.array([0, 0, HEADS, HEAD], dtype=np.int64),
        "join": np.array([0, 0, HIDDEN], dtype=np.int64),
        "mask_axes": np.array([1, 2], dtype=np.int64),
        "scale": np.array(HEAD**-0.5, dtype=np.float32),
        "one": np.array(1, dtype=np.float32),
        "far": np.array(-1e4, dtype=np.float32),
    }
    node = helper.make_node
    nodes = []
    for part in ("q", "k", "v"):
        nodes += [
            node("MatMul", ["x", f"w_{part}"], [f"{part}_flat"]),
            node("Reshape", [f"{part}_flat", "split"], [f"{part}_split"]),
            node("Transpose", [f"{part}_split"], [f"{part}_new"], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        node("Concat", ["past_key_values.0.key", "k_new"], ["present.0.key"], axis=2),
        node("Concat", ["past_key_values.0.value", "v_new"], ["present.0.value"], axis=2),
        node("Transpose", ["present.0.key"], ["k_turned"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q_new", "k_turned"], ["scores_raw"]),
        node("Mul", ["scores_raw", "scale"], ["scores_scaled"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Sub", ["one", "mask"], ["hidden"]),
        node("Mul", ["hidden", "far"], ["penalty_flat"]),
        node("Unsqueeze", ["penalty_flat", "mask_axes"], ["penalty"]),
        node("Add", ["scores_scaled", "penalty"], ["scores"]),
        node("Softmax", ["scores"], ["weights"], axis=-1),
        node("MatMul", ["weights", "present.0.value"], ["mixed"]),
        node("Transpose", ["mixed"], ["mixed_turned"], perm=[0, 2, 1, 3]),
        node("Reshape", ["mixed_turned", "join"], ["mixed_flat"]),
        node("MatMul", ["mixed_flat", "w_o"], ["attended"]),
        node("Add", ["x", "attended"], ["residual"]),
        node("MatMul", ["residual", "w_up"], ["up"]),
        node("Relu", ["up"], ["active"]),
        node("MatMul", ["active", "w_down"], ["down"]),
        node("Add", ["residual", "down"], ["y"]),
    ]
    value, floats = helper.make_tensor_value_info, TensorProto.FLOAT
    past, present = ["batch", HEADS, "past", HEAD], ["batch", HEADS, "past + seq", HEAD]
    graph = helper.make_graph(
        nodes,
        "block",
        [
            value("x", floats, ["batch", "seq", HIDDEN]),
            value("past_key_values.0.key", floats, past),
            value("past_key_values.0.value", floats, past),
            value("attention_mask", TensorProto.INT64, ["batch", "past + seq"]),
        ],
        [
            value("y", floats, ["batch", "seq", HIDDEN]),
            value("present.0.key", floats, present),
            value("present.0.value", floats, present),
        ],
        [numpy_helper.from_array(array, name) for name, array in {**weights, **constants}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
