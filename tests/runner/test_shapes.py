"""Shapes for real: a transformer block with a KV cache, in prefill (an empty past) and in decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.matrix.cells import REFUSED, REFUSED_ON_CPU
from tests.support.compiling import PNET, Case, Refused, needs_target
from tests.support.kv_cache import HEAD, HEADS, HIDDEN, write_block

MIGRAPHX = pytest.mark.migraphx


def block_inputs(batch: int, seq: int, past: int) -> dict[str, Any]:
    cache = {"dtype": "float32", "shape": [batch, HEADS, past, HEAD], "batch_axis": 0}
    return {
        "x": {"dtype": "float32", "shape": [batch, seq, HIDDEN], "batch_axis": 0},
        "past_key_values.0.key": cache,
        "past_key_values.0.value": dict(cache),
        "attention_mask": {"dtype": "int64", "shape": [batch, past + seq], "batch_axis": 0},
    }


def module_folder(compiler: str) -> list[str]:
    if compiler == "onnxruntime":
        return []
    import migraphx

    return [str(Path(migraphx.__file__).parent)]


@pytest.mark.parametrize(("batch", "seq", "past"), [(1, 12, 0), (4, 1, 11)], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("compiler", "device", "precision"),
    [
        ("onnxruntime", "cpu", "fp32"),
        ("onnxruntime", "cpu", "int8"),
        pytest.param("migraphx", "cpu", "fp32", marks=MIGRAPHX),
        pytest.param("migraphx", "ref", "fp32", marks=MIGRAPHX),
        pytest.param("migraphx", "ref", "int8-fp16", marks=MIGRAPHX),
    ],
)
def test_a_block_with_a_cache_in_prefill_and_decode(
    tmp_path: Path, compiler: str, device: str, batch: int, seq: int, past: int, precision: str
) -> None:
    net = Case(
        tmp_path,
        write_block(tmp_path / "block.onnx"),
        block_inputs(batch, seq, past),
        batch=batch,
        ranges={"attention_mask": {"value": 1}},
        compiler=compiler,
        device=device,
        search=module_folder(compiler),
    )
    net.reference()
    compiled = net.compile(precision)
    shapes = {port["name"]: port["shape"] for port in (*compiled["inputs"], *compiled["outputs"])}
    assert shapes["past_key_values.0.key"] == [batch, HEADS, past, HEAD]
    assert shapes["present.0.value"] == [batch, HEADS, past + seq, HEAD]
    found = net.evaluate(precision)["verification"]
    assert set(found["errors"]) == {"y", "present.0.key", "present.0.value"}
    assert max(found["errors"].values()) < 1e-5 if precision == "fp32" else 0.1
    assert not found["nonfinite"]
    assert not found["weak"]


# --- one program for a range ----------------------------------------------------------------------------------------


def span(low: int, high: int, *optimals: int) -> dict[str, Any]:
    return {"min": low, "max": high, "optimals": list(optimals)}


def dynamic(path: Path, **fields: Any) -> dict[str, Any]:
    batch = span(1, 6, 3)
    inputs = {"input_1": {"dtype": "float32", "shape": [batch, 24, 24, 3], "batch_axis": 0}}
    compiler = fields.get("compiler", "onnxruntime")
    net = Case(
        path, PNET, inputs, batch, ranges={"input_1": {"range": [-1, 1]}}, search=module_folder(compiler), **fields
    )  # type: ignore[arg-type]
    precision = fields.pop("precision", "fp32")
    net.reference()
    compiled = net.compile(precision)
    return {**net.evaluate(precision), "compiled": compiled}


@pytest.mark.parametrize(
    "target",
    [("onnxruntime", "cpu"), pytest.param(("migraphx", "ref"), marks=MIGRAPHX)],
    ids="/".join,
)
def test_one_program_is_checked_and_measured_at_the_ends_of_its_range_and_at_the_optimals(
    tmp_path: Path, target: tuple[str, str]
) -> None:
    found = dynamic(tmp_path, compiler=target[0], device=target[1])
    assert max(found["verification"]["errors"].values()) < 1e-5
    assert not found["verification"]["weak"]
    points = found["measurements"]["points"]
    assert [point["batch"] for point in points] == [1, 3, 6]
    assert [point["shapes"]["input_1"][0] for point in points] == [1, 3, 6]
    assert all(point["throughput"] == pytest.approx(point["batch"] / point["latency"]["median"]) for point in points)
    assert found["measurements"]["latency"] == points[-1]["latency"]


WEIGHTS = {
    "BatchNormalization": [(3,)] * 4, "Conv": [(4, 3, 3, 3)], "ConvTranspose": [(3, 4, 3, 3)], "Gemm": [(8, 4), (4,)],
    "InstanceNormalization": [(3,), (3,)], "LayerNormalization": [(8,)], "MatMul": [(8, 4)],
    **{name: [(1, 3, 8, 8)] for name in ("Add", "Div", "Max", "Mul", "Pow")},
}  # fmt: skip
"""Of operators with more than one input, the shapes of the others."""


@MIGRAPHX
@pytest.mark.parametrize(
    ("device", "operator"),
    [(device, name) for device, names in (("ref", REFUSED), ("cpu", REFUSED_ON_CPU)) for name in sorted(names)],
)
def test_what_a_plan_says_of_operators_and_ranges_is_so(device: str, operator: str, tmp_path: Path) -> None:
    """The same operator compiles at a fixed size: it is the range that is refused."""
    import migraphx

    needs_target(device)
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.uniform(0.5, 1, shape).astype(np.float32), f"w{index}")
        for index, shape in enumerate(WEIGHTS.get(operator, []))
    ]
    # What pairs the open batch with a fixed one is asked without it.
    attributes = {"kernel_shape": [2, 2]} if operator in ("AveragePool", "MaxPool") else {}
    attributes |= {"axis": 1} if operator == "Concat" else {}
    names = ["x", "x"] if operator == "Concat" else ["x", *(tensor.name for tensor in weights)]
    shape = ["n", 8] if operator == "Gemm" else ["n", 3, 8, 8]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", shape), ("y", None))
    ]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], "net", ports[:1], ports[1:], [] if operator == "Concat" else weights)
    path = str(tmp_path / "net.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    migraphx.parse_onnx(path, default_dim_value=2).compile(migraphx.get_target(device))
    with pytest.raises(RuntimeError, match=r"[Dd]ynamic shape"):
        migraphx.parse_onnx(path, default_dyn_dim_value=migraphx.shape.dynamic_dimension(1, 4)).compile(
            migraphx.get_target(device)
        )


@MIGRAPHX
def test_a_target_that_takes_no_dynamic_dimensions_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="Dynamic shapes not supported") as caught:
        dynamic(tmp_path, compiler="migraphx", device="cpu")
    assert caught.value.kind == "compiler_error"
