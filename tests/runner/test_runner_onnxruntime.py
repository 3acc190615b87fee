"""ONNX Runtime as a compiler: real models through every precision, and what it must refuse."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.jobs.state import FailureKind
from farm.runner import onnxruntime_compiler, precisions
from farm.targets.compilers import ONNXRUNTIME
from tests.support.compiling import MAGIKA, PNET, RNET, SWIFT_F0, Case, Refused, inputs_of

NewCase = Callable[..., Case]


@pytest.fixture
def case(tmp_path: Path) -> NewCase:
    def make(path: Path, shapes: dict[str, list[int]] | None = None, **fields: Any) -> Case:
        return Case(tmp_path, path, inputs_of(path, **(shapes or {})), **fields)

    return make


def save(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **fields: Any) -> Path:
    """Write a model of a few nodes; `weights` are its constants by name."""
    weights = [numpy_helper.from_array(array, name) for name, array in fields.pop("weights", {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=weights)
    opset = fields.pop("opset", 17)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save_model(model, folder / "model.onnx")
    return folder / "model.onnx"


def tensor(name: str, shape: list[Any], dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


PNET_INPUT = {"input_1": {"range": [-1, 1]}}


@pytest.mark.parametrize(
    ("precision", "weights", "tolerance"),
    [
        ("native", "float32", 1e-6),
        ("fp32", "float32", 1e-6),
        ("fp16", "float16", 3e-2),
        ("bf16", "bfloat16", 1.5e-1),
        ("int8", "int8", 2e-1),
    ],
)
def test_every_precision_of_a_detector(case: NewCase, precision: str, weights: str, tolerance: float) -> None:
    """A real detector compiles at every precision, loads back, and its error is what the precision allows."""
    net = case(PNET, {"input_1": [1, 64, 64, 3]}, ranges=PNET_INPUT)
    net.reference()
    compiled = net.compile(precision)
    evaluated = net.evaluate(precision)
    assert next(iter(compiled["weight_dtypes"])) == weights
    assert [output["name"] for output in compiled["outputs"]] == ["conv2d_4", "softmax"]
    assert compiled["inputs"][0]["shape"] == [1, 64, 64, 3]
    assert compiled["inputs"][0]["strides"] == [12288, 192, 3, 1]
    assert set(evaluated["verification"]["errors"]) == {"conv2d_4", "softmax"}
    assert max(evaluated["verification"]["errors"].values()) < tolerance
    assert evaluated["verification"]["samples"] == 8
    measured = evaluated["measurements"]
    latency = measured["latency"]
    assert 0 < latency["median"] <= latency["p90"] <= latency["p99"]
    assert measured["throughput"] == pytest.approx(1 / latency["median"])
    assert measured["load"] > 0


def test_a_child_compiles_only_for_the_key_that_it_is(case: NewCase) -> None:
    """It states what it is itself: what is installed may have changed since the worker looked."""
    here = {**onnxruntime_compiler.probe({}), "recipe": ONNXRUNTIME.recipe}
    assert ONNXRUNTIME.recipe == onnxruntime_compiler.RECIPE
    same = {**here, "libraries": {"sympy": here["libraries"]["sympy"]}, "arch": "cpu"}
    net = case(RNET)
    assert net.compile("fp32", expected=same)["outputs"]
    assert net.compile("fp32", expected={**same, "libraries": {}, "cpu_family": None})["outputs"]
    net.program.unlink()
    for changed, says in (
        ({"toolchain": "onnxruntime1.0.0-00000000"}, f"toolchain {here['toolchain']}, not onnxruntime1.0.0-00000000"),
        ({"recipe": 99}, f"recipe {here['recipe']}, not 99"),
        ({"libraries": {"sympy": "0.1"}}, f"sympy {here['libraries']['sympy']}, not 0.1"),
        ({"libraries": {"gone": "1.0"}}, "gone missing, not 1.0"),
        ({"cpu_family": "x86-64-v0"}, f"CPU family {here['cpu_family']}, not x86-64-v0"),
    ):
        with pytest.raises(Refused, match=says) as refused:
            net.compile("fp32", expected={**same, **changed})
        assert refused.value.kind is FailureKind.TOOLCHAIN_MISMATCH
        assert not net.program.exists()


def test_a_compiler_that_is_gone_is_another_toolchain(case: NewCase, tmp_path: Path) -> None:
    """A worker whose libraries went while it ran has to rest: that is no mistake of the farm's."""
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "onnxruntime.py").write_text("raise ImportError('libonnxruntime.so.1 is gone')")
    expected = {**onnxruntime_compiler.probe({}), "recipe": ONNXRUNTIME.recipe, "libraries": {}, "arch": "cpu"}
    with pytest.raises(Refused, match=r"cannot import onnxruntime: libonnxruntime.so.1 is gone") as refused:
        case(RNET, search=[str(gone)], templates=None).compile("fp32", expected=expected)
    assert refused.value.kind is FailureKind.TOOLCHAIN_MISMATCH


def test_int8_counts_what_it_quantized(case: NewCase) -> None:
    """Quantized operators are counted by kind, and the file is smaller."""
    net = case(RNET)
    compiled = net.compile("int8", per_channel=True)
    assert compiled["quantized"] == {"Conv": 3, "Gemm": 3}
    assert net.program.stat().st_size < RNET.stat().st_size / 2


@pytest.mark.parametrize(
    ("family", "options", "saturates"),
    [
        ("x86-64-v3", {}, True),
        ("x86-64-v4", {}, True),
        ("x86-64-v4-vnni", {}, False),
        ("aarch64", {}, False),
        ("x86-64-v3", {"weights": "uint8"}, False),
        ("x86-64-v3", {"activations": "int8"}, False),
        ("x86-64-v3", {"reduce_range": True}, False),
    ],
)
def test_a_cpu_whose_sums_of_8_bit_products_saturate_is_known(
    monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any], saturates: bool
) -> None:
    """There swift-f0 at int8 is off by 1.4 with the options' defaults, by 0.02 with unsigned weights."""
    monkeypatch.setattr(onnxruntime_compiler, "cpu_family", lambda: family)
    defaults = {name: option.default for name, option in ONNXRUNTIME.quantization["int8"].items()}
    device = onnxruntime_compiler.RuntimeDevice()
    assert precisions.sums_saturate({**defaults, **options}, device) is saturates


def test_int4_weights(case: NewCase) -> None:
    """int4 packs the weights of matrix products, and counts them."""
    net = case(MAGIKA, {"bytes": [1, 2048]})
    compiled = net.compile("int4")
    assert compiled["quantized"] == {"MatMul": 1}
    assert compiled["weight_dtypes"]["uint8"] > 0


def test_static_batch(case: NewCase) -> None:
    """The named batch dimension becomes the batch asked for, outputs included."""
    net = case(RNET, {"input_2": [4, 24, 24, 3]}, batch=4)
    net.reference()
    compiled = net.compile("fp32")
    evaluated = net.evaluate("fp32")
    assert [output["shape"] for output in compiled["outputs"]] == [[4, 4], [4, 2]]
    assert evaluated["verification"]["samples"] == 8
    measured = evaluated["measurements"]
    assert measured["throughput"] == pytest.approx(4 / measured["latency"]["median"])


def test_quantizer_that_crashes_is_a_failure_with_a_sentence(case: NewCase) -> None:
    """With all its operators swift-f0 crashes ONNX Runtime's quantizer: a clean failure, the compiler's."""
    net = case(SWIFT_F0, {"audio": [1, 16000]}, batch=None)
    net.ranges = {"audio": {"range": [-1, 1]}, "fmin": {"value": 46.875}, "fmax": {"value": 2093.75}}
    with pytest.raises(Refused) as refused:
        net.compile("int8", operators="all")
    assert refused.value.kind is FailureKind.COMPILER_ERROR
    assert refused.value.message.startswith("ONNX Runtime's int8 quantizer failed: ")


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_quantizing_nothing_is_a_failure(tmp_path: Path, precision: str) -> None:
    """A model without anything to quantize does not pass as a quantized one."""
    path = save(tmp_path, [helper.make_node("Sin", ["x"], ["y"])], [tensor("x", [2, 3])], [tensor("y", [2, 3])])
    with pytest.raises(Refused) as refused:
        Case(tmp_path, path, inputs_of(path), batch=None).compile(precision)
    assert refused.value.kind is FailureKind.NOTHING_QUANTIZED


def test_tuned_level_is_bound_to_the_cpu_and_right(case: NewCase) -> None:
    """The tuned level uses ONNX Runtime's own operators, which the standard level does not."""
    net = case(RNET)
    net.reference()
    net.compile("fp32")
    standard = Counter(node.op_type for node in onnx.load_model(net.program).graph.node)
    net.options = {"level": "tuned"}
    net.compile("fp32")
    assert max(net.evaluate("fp32")["verification"]["errors"].values()) < 1e-5
    tuned = onnx.load_model(net.program).graph.node
    assert any(node.domain.startswith("com.microsoft") for node in tuned)
    assert standard != Counter(node.op_type for node in tuned)


def test_user_samples_and_expected_outputs_win(tmp_path: Path) -> None:
    """Expected outputs in the data are the reference, and the check is against them."""
    path = save(
        tmp_path, [helper.make_node("Neg", ["x"], ["y"])], [tensor("x", ["batch", 3])], [tensor("y", ["batch", 3])]
    )
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.savez(tmp_path / "samples.npz", x=x, y=-2 * x)
    net = Case(tmp_path, path, {"x": {"dtype": "float32", "shape": [4, 3]}}, batch=4)
    net.reference({"path": str(tmp_path / "samples.npz")})
    net.compile("fp32")
    found = net.evaluate("fp32")["verification"]
    assert found["origin"] == {"y": "expected"}
    assert (found["runs"], found["samples"]) == (3, 10)
    assert found["errors"]["y"] == pytest.approx(0.5)


def test_sample_file_reproduces_the_reference(case: NewCase) -> None:
    """The sample next to an artifact holds inputs and expected outputs by the model's own names."""
    import onnxruntime

    net = case(RNET)
    net.reference()
    net.compile("fp32")
    net.evaluate("fp32")
    with np.load(net.folder / "sample.npz") as sample:
        arrays = dict(sample)
    session = onnxruntime.InferenceSession(str(net.program))
    names = [value.name for value in session.get_outputs()]
    outputs = session.run(names, {name: arrays[name] for name in net.inputs})
    for name, output in zip(names, outputs, strict=True):
        np.testing.assert_allclose(output, arrays[name], rtol=1e-4, atol=1e-6)


def test_vacuous_check_is_weak(case: NewCase) -> None:
    """magika answers the same to any noise: a program that always gave that answer would pass fp16's check."""
    net = case(MAGIKA, {"bytes": [1, 2048]})
    net.ranges = {"bytes": {"range": [0, 256]}}
    net.reference()
    net.compile("fp16")
    verification = net.evaluate("fp16")["verification"]
    assert verification["weak"]
    assert verification["spread"]["target_label"] < 3e-2


def test_integers_and_not_finite_values_are_compared_as_such(tmp_path: Path) -> None:
    """Integer outputs have an equal share; inf and NaN pass where the reference has the same."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["index"], axis=1, keepdims=0),
        helper.make_node("Log", ["x"], ["log"]),
    ]
    outputs = [tensor("index", ["N"], TensorProto.INT64), tensor("log", ["N", 5])]
    path = save(tmp_path, nodes, [tensor("x", ["N", 5])], outputs)
    net = Case(tmp_path, path, {"x": {"dtype": "float32", "shape": [1, 5]}}, ranges={"x": {"range": [-1, 1]}})
    net.reference()
    net.compile("fp32")
    verification = net.evaluate("fp32")["verification"]
    assert verification["equal"] == {"index": 1.0}
    assert verification["nonfinite"] == []
    assert verification["errors"]["log"] < 1e-6


def test_generated_integers_reach_both_ends(tmp_path: Path) -> None:
    """A declared range of integers includes both ends."""
    path = save(
        tmp_path,
        [helper.make_node("Identity", ["x"], ["y"])],
        [tensor("x", [1, 4096], TensorProto.INT32)],
        [tensor("y", [1, 4096], TensorProto.INT32)],
    )
    net = Case(tmp_path, path, inputs_of(path), ranges={"x": {"range": [-3, 4]}})
    net.reference()
    net.compile("fp32")
    net.evaluate("fp32")
    with np.load(tmp_path / "sample.npz") as sample:
        assert set(sample["x"].ravel()) == set(range(-3, 5))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"wrong": np.zeros((4, 3), np.float32)}, "no array for input 'x'; there are wrong"),
        ({"x": np.zeros((4, 5), np.float32)}, "array 'x' has shape [4, 5]"),
        ({"x": np.zeros((4, 3), np.complex64)}, "array 'x' is complex64, the model wants float32"),
        ({"x": np.zeros((0, 3), np.float32)}, "holds no sample"),
        (b"not a zip file", "not an .npz file"),
    ],
)
def test_data_that_does_not_fit_is_named(tmp_path: Path, arrays: Any, words: str) -> None:
    """Calibration data is checked by name, shape, dtype and count before a compiler sees it."""
    path = save(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], [tensor("x", ["N", 3])], [tensor("y", ["N", 3])])
    data = tmp_path / "data.npz"
    if isinstance(arrays, bytes):
        data.write_bytes(arrays)
    else:
        np.savez(data, **arrays)
    net = Case(tmp_path, path, {"x": {"dtype": "float32", "shape": [2, 3]}}, batch=2)
    with pytest.raises(Refused) as refused:
        net.compile("int8", {"path": str(data)})
    assert refused.value.kind is FailureKind.BAD_CALIBRATION
    assert words in refused.value.message


def test_operator_that_onnxruntime_lacks(tmp_path: Path) -> None:
    """A valid model with an operator or type that ONNX Runtime does not implement is the compiler's limit."""
    # In float64, an operator of nets of 2012: later releases are not likely to add it.
    path = save(
        tmp_path,
        [helper.make_node("LRN", ["x"], ["y"], size=3)],
        [tensor("x", [1, 1, 2, 2], TensorProto.DOUBLE)],
        [tensor("y", [1, 1, 2, 2], TensorProto.DOUBLE)],
    )
    with pytest.raises(Refused) as refused:
        Case(tmp_path, path, inputs_of(path), batch=None).compile("native")
    assert refused.value.kind is FailureKind.UNSUPPORTED_OPERATOR


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_branch_that_does_not_fit_the_static_shape_leaves_the_models_own(tmp_path: Path, precision: str) -> None:
    """Of a voice detector for two rates, one branch never fits the frame that is compiled for."""

    def branch(size: int) -> Any:
        weights = numpy_helper.from_array(np.ones((size, 4), np.float32), f"w{size}")
        node = helper.make_node("MatMul", ["x", weights.name], [f"y{size}"])
        return helper.make_graph([node], f"of {size}", [], [tensor(f"y{size}", [1, 4])], [weights])

    nodes = [
        helper.make_node("Equal", ["s", "rate"], ["wide"]),
        helper.make_node("If", ["wide"], ["y"], then_branch=branch(512), else_branch=branch(256)),
    ]
    inputs = [tensor("x", [1, "frame"]), tensor("s", [], TensorProto.INT64)]
    path = save(tmp_path, nodes, inputs, [tensor("y", [1, 4])], weights={"rate": np.array(1)})
    net = Case(tmp_path, path, inputs_of(path, x=[1, 512]), batch=None, ranges={"s": {"value": 1}})
    net.reference()
    compiled = net.compile(precision)
    assert "Incompatible dimensions" in compiled["symbolic_shapes"]
    assert compiled["inputs"][0]["shape"] == [1, "frame"]
    assert "static shapes are refused" in (tmp_path / "log.txt").read_text()
    assert net.evaluate(precision)["verification"]["errors"]["y"] < 1e-2


def test_static_shapes_that_fit_are_taken(case: NewCase) -> None:
    assert case(RNET).compile("fp32")["symbolic_shapes"] == ""


def test_without_verification_samples_are_made_and_nothing_is_compared(case: NewCase) -> None:
    """Verification can be off: the program is still loaded, run and measured."""
    net = case(RNET)
    net.reference(compiler="none")
    net.compile("fp32")
    evaluated = net.evaluate("fp32")
    assert evaluated["verification"]["errors"] == {}
    assert not evaluated["verification"]["weak"]
    assert evaluated["measurements"]["latency"]["median"] > 0


def test_slow_programs_report_progress_and_need_one_repeat(case: NewCase) -> None:
    """Where one run exceeds the budget, the figures come from what verification ran."""
    net = case(RNET)
    net.reference()
    net.compile("fp32")
    net.messages.clear()
    measured = net.evaluate("fp32", measure_seconds=1e-9)["measurements"]
    assert measured["latency"]["repeats"] == 1
    assert [message["progress"] for message in net.messages if message["phase"] == "verifying"][-1] == 7 / 8


@pytest.mark.parametrize("megabytes", [6, 9])
def test_a_full_disk_is_no_fault_of_the_model_or_the_compiler(small_disk: Path, tmp_path: Path, megabytes: int) -> None:
    """ONNX Runtime only says that its serialization failed: of the model as it is prepared, or of the program."""
    weights = {"w": np.ones((1000, megabytes * 250), np.float32)}
    node, size = helper.make_node("MatMul", ["x", "w"], ["y"]), megabytes * 250
    path = save(tmp_path, [node], [tensor("x", [1, 1000])], [tensor("y", [1, size])], weights=weights)
    with pytest.raises(Refused) as refused:
        Case(small_disk, path, inputs_of(path)).compile("fp32")
    assert refused.value.kind is FailureKind.STORAGE
    assert refused.value.message == "the worker's disk is full (its operator has to free space)"
    assert "Protobuf serialization failed" in refused.value.detail


def test_overhead_of_one_child_is_the_interpreter(case: NewCase) -> None:
    """A whole compile of a tiny model costs little more than importing the compiler, in seconds of CPU."""
    net = case(PNET, {"input_1": [1, 32, 32, 3]})
    net.compile("fp32")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    net.compile("fp32")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5
