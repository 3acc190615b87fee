"""Precisions of ONNX Runtime, in the child's own words: an interpreter of `other_toolchains` may have an older onnx."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.runner.launcher import Messages
from farm.runner.onnxruntime_compiler import device_of
from farm.runner.precisions import CONVERSIONS


def test_an_onnx_that_makes_no_tensor_of_ml_dtypes_stores_weights_as_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in ("x", "y")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    made = numpy_helper.from_array

    def of_old(array: np.ndarray[Any, Any], name: str | None = None) -> TensorProto:
        """Make a tensor as onnx 1.18 does: only one version is installed."""
        if array.dtype.isbuiltin != 1:
            raise ValueError(f"Unable to convert type {array.dtype!r} into TensorProto element type.")
        return made(array, name)

    monkeypatch.setattr(numpy_helper, "from_array", of_old)
    target = tmp_path / "bf16.onnx"
    said = os.open(os.devnull, os.O_WRONLY)
    assert CONVERSIONS["bf16"](tmp_path / "model.onnx", target, device_of(None), Messages(said)) == {"weights": 1}
    os.close(said)
    (stored,) = onnx.load(target).graph.initializer
    assert stored.data_type == TensorProto.BFLOAT16
    assert np.allclose(numpy_helper.to_array(stored).astype(np.float32), weights, rtol=2**-8)
