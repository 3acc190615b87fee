"""MIGraphX's options, environment and precisions for real, on its `cpu` and `ref` targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.jobs.state import FailureKind
from farm.node.survey import survey
from farm.runner.migraphx_module import takes
from farm.settings import load_settings
from farm.targets.compilers import MIGRAPHX
from tests.support.compiling import Case, Refused, inputs_of

NewCase = Callable[..., Case]

pytestmark = pytest.mark.migraphx


@pytest.fixture
def case(tmp_path: Path) -> NewCase:
    import migraphx

    def make(path: Path, **fields: Any) -> Case:
        search = [str(Path(migraphx.__file__).parent)]
        return Case(tmp_path, path, inputs_of(path), compiler="migraphx", search=search, **{"device": "ref", **fields})

    return make


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A MatMul, a Gemm with transposed weights, and a MatMul whose weights no block of 32 fits."""
    random = np.random.default_rng(0)
    weights = {
        "a": random.normal(size=(64, 96)).astype(np.float32),
        "b": random.normal(size=(48, 96)).astype(np.float32),
        "c": random.normal(size=(48, 6)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["xa"]),
        helper.make_node("Gemm", ["xa", "b"], ["xb"], transB=1),
        helper.make_node("MatMul", ["xb", "c"], ["y"]),
    ]
    return save(tmp_path, nodes, [("x", [4, 64])], [("y", [4, 6])], **weights)


def save(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> Path:
    def tensor(name: str, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "net",
        [tensor(*each) for each in inputs],
        [tensor(*each) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = folder / "net.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


# --- int4 weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "symmetric"), [("int4", True), ("int4", False), ("int4-fp16", True), ("int4-bf16", True)]
)
def test_int4_weights_are_packed_counted_and_still_right(
    case: NewCase, layers: Path, precision: str, symmetric: bool
) -> None:
    """Two of three weights fit; the program holds them in half a byte each, and computes what was asked."""
    net = case(layers)
    net.reference(minimum=2)
    full = net.compile("fp32")
    net.pack(precision, symmetric=symmetric)
    compiled = net.compile(precision)
    assert compiled["quantized"] == {"weights": 2}
    packed_bytes = compiled["weight_dtypes"]["int8" if symmetric else "uint8"]
    assert 0 <= packed_bytes - (64 * 96 + 48 * 96) // 2 <= 300, "the zero points of blocks are added"
    assert full["weight_dtypes"] == {"float32": (64 * 96 + 48 * 96 + 48 * 6) * 4}
    assert net.evaluate(precision)["verification"]["errors"]["y"] < 0.2


def test_weights_that_cannot_be_packed_are_said(case: NewCase, layers: Path) -> None:
    with pytest.raises(Refused, match="MatMul and Gemm need at least two blocks of 256") as caught:
        case(layers).pack("int4", block_size=256)
    assert caught.value.kind is FailureKind.NOTHING_QUANTIZED


def test_a_weight_that_others_use_as_well_stays_what_it_was_for_them(case: NewCase, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Neg", ["w"], ["z"])]
    net = case(save(tmp_path, nodes, [("x", [2, 64])], [("y", [2, 4]), ("z", [64, 4])], w=weight))
    net.reference(minimum=2)
    net.pack("int4")
    net.compile("int4")
    errors = net.evaluate("int4")["verification"]["errors"]
    assert errors["z"] == 0
    assert 0 < errors["y"] < 0.2


def test_the_cpu_target_has_no_int4_because_it_stops(case: NewCase, layers: Path) -> None:
    """The table of precisions leaves int4 out for `cpu`: the day that this compiles it can have it."""
    assert "int4" not in MIGRAPHX.device("cpu").precisions
    net = case(layers, device="cpu")
    net.pack("int4")
    with pytest.raises(Refused, match="UNPACK_INT4"):
        net.compile("int4")


# --- options --------------------------------------------------------------------------------------------------------


def test_only_the_operators_that_are_named_become_half(case: NewCase, tmp_path: Path) -> None:
    weight = np.random.default_rng(2).normal(size=(32, 8)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    net = case(save(tmp_path, nodes, [("x", [2, 32])], [("y", [2, 8])], w=weight))
    every = net.compile("fp16")["compute_dtypes"]
    only = net.compile("fp16", fp16_operators=["dot"])["compute_dtypes"]
    assert only["float16"] == every["float16"] - 1
    assert only["float32"] == every["float32"] + 1
    assert net.compile("bf16", bf16_operators=["dot"])["compute_dtypes"]["bfloat16"] == only["float16"]
    with pytest.raises(Refused, match="fp16 left every operator of the model as it was") as caught:
        net.compile("fp16", fp16_operators=["dott"])
    assert caught.value.kind is FailureKind.NOTHING_QUANTIZED


def needs_newest() -> None:
    """Skip with a MIGraphX older than 2.16."""
    import migraphx

    if not takes(migraphx, "parse_onnx", "use_debug_symbols"):
        pytest.skip(f"MIGraphX {migraphx.__version__} has no debug symbols")


def test_debug_symbols_are_in_the_program(case: NewCase, layers: Path) -> None:
    needs_newest()
    with_symbols = case(layers, options={"use_debug_symbols": True})
    with_symbols.compile("fp32")
    assert b"migx_uid" in with_symbols.program.read_bytes()
    plain = case(layers)
    plain.compile("fp32")
    assert b"migx_uid" not in plain.program.read_bytes()


def test_a_loop_takes_as_many_iterations_as_the_options_say(case: NewCase, tmp_path: Path) -> None:
    """What a Loop collects has a place for each iteration: 20 as the graph says, unless the limit is lower."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["b"], ["go"]),
            helper.make_node("Identity", ["c"], ["next"]),
            helper.make_node("Neg", ["c"], ["scan"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("a", TensorProto.INT64, []),
            helper.make_tensor_value_info("b", TensorProto.BOOL, []),
            helper.make_tensor_value_info("c", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1]),
            helper.make_tensor_value_info("scan", TensorProto.FLOAT, [1]),
        ],
    )
    nodes = [helper.make_node("Loop", ["count", "true", "x"], ["y", "each"], body=body)]
    constants = {"count": np.array(20, np.int64), "true": np.array(True)}
    path = save(tmp_path, nodes, [("x", [1])], [("each", [20, 1])], **constants)

    def places(**options: int) -> list[int]:
        return list(case(path, options=options).compile("fp32")["outputs"][0]["shape"])

    assert places() == [20, 1]
    assert places(limit_max_iterations=5) == [5, 1]


def test_a_worker_lists_what_its_release_offers(tmp_path: Path) -> None:
    """Every feature that the table of releases names is one that a worker with a new MIGraphX reports."""
    import migraphx

    needs_newest()
    settings = load_settings({}, migraphx_path=str(Path(migraphx.__file__).parent))
    pools = [pool for pool in survey(settings).pools if pool.target.compiler == "migraphx"]
    assert pools
    for pool in pools:
        assert set(MIGRAPHX.features) <= set(pool.features)
