"""MIGraphX for real, on its `cpu` and `ref` targets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.cli import main
from farm.jobs.state import FailureKind
from farm.node.survey import survey
from farm.settings import load_settings
from tests.support.compiling import PNET, RNET, Case, Refused, inputs_of, needs_target
from tests.support.features import FEATURES

NewCase = Callable[..., Case]

pytestmark = pytest.mark.migraphx


@pytest.fixture
def folder() -> str:
    """Where the module is, for a child that has no import path of ours."""
    import migraphx

    return str(Path(migraphx.__file__).resolve().parent)


@pytest.fixture
def case(tmp_path: Path, folder: str) -> NewCase:
    def make(path: Path, shapes: dict[str, list[int]] | None = None, **fields: Any) -> Case:
        fields = {"compiler": "migraphx", "search": [folder], **fields}
        inputs = fields.pop("inputs", None) or inputs_of(path, **(shapes or {}))
        return Case(tmp_path, path, inputs, **fields)

    return make


@pytest.mark.parametrize(
    ("precision", "weights", "tolerance"),
    [
        ("native", "float32", 1e-4),
        ("fp32", "float32", 1e-4),
        ("fp16", "", 3e-2),
        ("bf16", "", 1.5e-1),
        ("int8", "", 2e-1),
        ("int8-fp16", "", 2e-1),
        ("int8-bf16", "", 2e-1),
    ],
)
def test_every_precision_on_cpu(case: NewCase, precision: str, weights: str, tolerance: float) -> None:
    """A detector compiles, loads from its file and is as accurate as its precision allows; 8-bit pairs stay 8-bit."""
    net = case(PNET, {"input_1": [1, 32, 32, 3]}, ranges={"input_1": {"range": [-1, 1]}})
    net.reference()
    compiled = net.compile(precision)
    evaluated = net.evaluate(precision)
    assert [output["name"] for output in compiled["outputs"]] == ["conv2d_4", "softmax"]
    assert compiled["inputs"] == [
        {"name": "input_1", "dtype": "float32", "shape": [1, 32, 32, 3], "strides": [3072, 96, 3, 1]}
    ]
    assert compiled["offload_copy"] is True
    assert compiled["quantized"] == ({"convolution": 5} if precision.startswith("int8") else {})
    if weights:
        assert set(compiled["weight_dtypes"]) == {weights}
    assert max(evaluated["verification"]["errors"].values()) < tolerance
    assert evaluated["measurements"]["latency"]["median"] > 0


def test_ref_needs_two_samples(case: NewCase) -> None:
    """`ref` is slow: two runs are verified, one is enough to measure."""
    net = case(PNET, {"input_1": [1, 24, 24, 3]}, device="ref")
    net.reference()
    net.compile("fp32")
    evaluated = net.evaluate("fp32", measure_seconds=1e-9)
    assert evaluated["verification"]["samples"] == 2
    assert evaluated["measurements"]["latency"]["repeats"] == 1
    assert max(evaluated["verification"]["errors"].values()) < 1e-4


def test_fp8_is_real_on_ref_and_refused_on_cpu(case: NewCase) -> None:
    """`cpu` drops the rounding to fp8: a program of float32 is not passed off as fp8."""
    ranges = {"input_1": {"range": [-1, 1]}}
    real = case(PNET, {"input_1": [1, 24, 24, 3]}, device="ref", ranges=ranges)
    real.reference()
    compiled = real.compile("fp8")
    assert compiled["quantized"] == {"convolution": 5}
    assert "float8e4m3fn" in compiled["weight_dtypes"]
    # Less than rounding to four significant bits would mean that there was none.
    assert 1e-2 < max(real.evaluate("fp8", measure_seconds=1e-9)["verification"]["errors"].values()) < 2.5e-1
    for precision in ("fp8", "fp8-fp16", "fp8-bf16"):
        with pytest.raises(Refused) as refused:
            case(PNET, {"input_1": [1, 24, 24, 3]}, ranges=ranges).compile(precision)
        assert refused.value.kind is FailureKind.NOTHING_QUANTIZED


def test_static_batch(case: NewCase) -> None:
    """The batch asked for is the program's."""
    net = case(RNET, {"input_2": [4, 24, 24, 3]}, batch=4)
    net.reference()
    assert [output["shape"] for output in net.compile("fp32")["outputs"]] == [[4, 4], [4, 2]]
    assert max(net.evaluate("fp32")["verification"]["errors"].values()) < 1e-4


def save(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> Path:
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [numpy_helper.from_array(array, name) for name, array in weights.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, folder / "model.onnx")
    return folder / "model.onnx"


def tensor(name: str, shape: list[Any], dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "uint8", "bool"])
def test_every_dtype_crosses_the_border(case: NewCase, tmp_path: Path, dtype: str) -> None:
    """Inputs and outputs of every dtype arrive as they are."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = save(
        tmp_path, [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", [2, 3], kind)], [tensor("y", [2, 3], kind)]
    )
    net = case(path, batch=None)
    net.reference(compiler="migraphx", search=net.search, device="ref")
    net.compile("native")
    verification = net.evaluate("native")["verification"]
    assert {**verification["errors"], **verification["equal"]} in ({"y": 0.0}, {"y": 1.0})


def test_bfloat16_comes_out_and_cannot_go_in(case: NewCase, tmp_path: Path) -> None:
    """Outputs without a numpy format are read; inputs of that kind are refused in a sentence."""
    half, single = TensorProto.BFLOAT16, TensorProto.FLOAT
    path = save(
        tmp_path, [helper.make_node("Cast", ["x"], ["y"], to=half)], [tensor("x", [2, 3])], [tensor("y", [2, 3], half)]
    )
    net = case(path, batch=None)
    net.reference(compiler="migraphx", search=net.search, device="ref")
    assert net.compile("native")["outputs"][0]["dtype"] == "bfloat16"
    assert net.evaluate("native")["verification"]["errors"] == {"y": 0.0}
    path = save(
        tmp_path, [helper.make_node("Cast", ["x"], ["y"], to=single)], [tensor("x", [2], half)], [tensor("y", [2])]
    )
    with pytest.raises(Refused) as refused:
        case(path, batch=None).reference(compiler="migraphx", search=net.search, device="ref")
    assert refused.value.kind is FailureKind.UNVERIFIABLE
    net = case(path, batch=None)
    net.reference(compiler="onnx", search=[])
    net.compile("native")
    assert list(net.evaluate("native")["verification"]["unverified"]) == ["y"]


def test_scalar_inputs(case: NewCase, tmp_path: Path) -> None:
    """MIGraphX has no scalars: one element goes in, and what it means stays the same."""
    path = save(
        tmp_path, [helper.make_node("Mul", ["x", "s"], ["y"])], [tensor("x", [4]), tensor("s", [])], [tensor("y", [4])]
    )
    net = case(path, batch=None)
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=x, s=np.arange(8, dtype=np.float32))
    net.reference({"path": str(tmp_path / "samples.npz")})
    net.compile("fp32")
    assert net.evaluate("fp32")["verification"]["errors"]["y"] < 1e-6
    with np.load(tmp_path / "sample.npz") as sample:
        assert {name: array.shape for name, array in sample.items()} == {"y": (4,), "x": (4,), "s": ()}


def test_unknown_operator(case: NewCase, tmp_path: Path) -> None:
    """An ONNX operator that MIGraphX lacks is the compiler's limit, by name."""
    path = save(
        tmp_path,
        [helper.make_node("StringNormalizer", ["x"], ["y"])],
        [tensor("x", [2], TensorProto.STRING)],
        [tensor("y", [2], TensorProto.STRING)],
    )
    with pytest.raises(Refused) as refused:
        case(path, batch=None).compile("native")
    assert refused.value.kind is FailureKind.UNSUPPORTED_OPERATOR


def test_empty_file_does_not_reach_the_compiler(case: NewCase, tmp_path: Path) -> None:
    """MIGraphX would die of an empty file by SIGSEGV."""
    path = tmp_path / "empty.onnx"
    path.touch()
    with pytest.raises(Refused) as refused:
        case(path, inputs={"x": {"dtype": "float32", "shape": [1]}}).compile("fp32")
    assert refused.value.kind is FailureKind.BAD_MODEL


def test_misspelt_input_is_an_error(case: NewCase) -> None:
    """MIGraphX ignores a shape for an input that is not there; the farm does not."""
    with pytest.raises(Refused) as refused:
        case(RNET, inputs={"input": {"dtype": "float32", "shape": [1, 24, 24, 3]}}).compile("fp32")
    assert "no input 'input'" in refused.value.message


def test_calibration_is_checked_before_migraphx_sees_it(case: NewCase, tmp_path: Path) -> None:
    """MIGraphX would fill a missing input with whatever is in memory."""
    np.savez(tmp_path / "data.npz", other=np.zeros((4, 24, 24, 3), np.float32))
    with pytest.raises(Refused) as refused:
        case(RNET).compile("int8", {"path": str(tmp_path / "data.npz")})
    assert refused.value.kind is FailureKind.BAD_CALIBRATION


def test_nothing_to_quantize(case: NewCase, tmp_path: Path) -> None:
    """A model without dot or convolution is not passed off as int8."""
    path = save(tmp_path, [helper.make_node("Sin", ["x"], ["y"])], [tensor("x", [2, 3])], [tensor("y", [2, 3])])
    with pytest.raises(Refused) as refused:
        case(path, batch=None).compile("int8")
    assert refused.value.kind is FailureKind.NOTHING_QUANTIZED


def test_no_gpu_is_said(case: NewCase) -> None:
    """Asked for a GPU that this build or node has not, the answer is a kind of the farm's."""
    with pytest.raises(Refused) as refused:
        case(RNET, device="gfx942").compile("fp32")
    assert refused.value.kind in (FailureKind.TOOLCHAIN_MISMATCH, FailureKind.GPU_FAULT)


def test_program_of_another_version_is_refused(case: NewCase, tmp_path: Path) -> None:
    """A damaged or foreign program file does not load, and the sentence says so."""
    net = case(RNET)
    net.reference()
    net.compile("fp32")
    net.program.write_bytes(net.program.read_bytes()[:100])
    with pytest.raises(Refused) as refused:
        net.evaluate("fp32")
    assert refused.value.message == "the program is damaged: it is cut at byte 100"


# --- TensorFlow --------------------------------------------------------------------------------------------------


def field(number: int, content: bytes | int) -> bytes:
    """One protobuf field: text and messages with their length, numbers below 128 as they are."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | 2]) + length + content


def node(name: str, operator: str, *inputs: str, **attributes: bytes) -> bytes:
    content = field(1, name.encode()) + field(2, operator.encode())
    content += b"".join(field(3, text.encode()) for text in inputs)
    content += b"".join(field(5, field(1, key.encode()) + field(2, value)) for key, value in attributes.items())
    return field(1, content)


def shape(*sizes: int) -> bytes:
    return b"".join(field(2, field(1, size)) for size in sizes)


@pytest.fixture
def frozen_graph(tmp_path: Path) -> Path:
    """A frozen TensorFlow graph: y = relu(x + c) on a 4-D NHWC input."""
    constant = np.arange(3, dtype=np.float32)
    float_type = field(6, 1)
    value = field(8, field(1, 1) + field(2, shape(3)) + field(4, constant.tobytes()))
    path = tmp_path / "model.pb"
    path.write_bytes(
        node("x", "Placeholder", dtype=float_type, shape=field(7, shape(1, 4, 5, 3)))
        + node("c", "Const", dtype=float_type, value=value)
        + node("sum", "BiasAdd", "x", "c", T=float_type)
        + node("y", "Relu", "sum", T=float_type)
    )
    return path


def test_tensorflow_graph(case: NewCase, frozen_graph: Path, tmp_path: Path) -> None:
    """A frozen graph compiles; its NHWC samples and expected outputs hold for the NCHW program."""
    inputs = {"x": {"dtype": "float32", "shape": [1, 4, 5, 3]}}
    net = case(frozen_graph, format="tf", inputs=inputs)
    x = np.random.default_rng(0).standard_normal((8, 4, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=x, y=np.maximum(x + np.arange(3, dtype=np.float32), 0))
    net.reference({"path": str(tmp_path / "samples.npz")}, compiler="migraphx", search=net.search, device="ref")
    assert net.compile("fp32")["inputs"][0]["shape"] == [1, 3, 4, 5]
    found = net.evaluate("fp32")["verification"]
    assert found["origin"] == {"y": "expected"}
    assert found["errors"]["y"] < 1e-6


def test_a_tensorflow_graph_is_compiled_without_a_farm(
    frozen_graph: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`farm optimize` compares it with its fp32 program: ONNX Runtime does not read it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_MIGRAPHX_PATH", folder)
    monkeypatch.setenv("FARM_MEASURE_SECONDS", "0.05")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["optimize", str(frozen_graph), "-t", "ref", "--fp16", "--input", "x=1,4,5,3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"]["reference"] == "migraphx"
    assert found["before"]["target"] == "migraphx/ref"


def test_tensorflow_reference_is_migraphx_ref(case: NewCase, frozen_graph: Path) -> None:
    """Without expected outputs `ref` makes them, since ONNX Runtime reads no TensorFlow."""
    net = case(frozen_graph, format="tf", inputs={"x": {"dtype": "float32", "shape": [1, 4, 5, 3]}})
    net.reference(compiler="migraphx", search=net.search, device="ref")
    net.compile("fp16")
    found = net.evaluate("fp16")["verification"]
    assert found["origin"] == {"y": "migraphx"}
    assert found["errors"]["y"] < 3e-2


def numbers(*values: int) -> bytes:
    """An attribute that is a list of numbers."""
    return field(1, b"".join(field(3, value) for value in values))


def convolution_graph(path: Path, layout: str) -> Path:
    """A frozen graph in one of TensorFlow's layouts: conv = x * w, then y = relu(conv)."""
    float_type, data_format = field(6, 1), field(2, layout.encode())
    weights = np.random.default_rng(1).standard_normal((2, 2, 3, 4)).astype(np.float32)
    value = field(8, field(1, 1) + field(2, shape(*weights.shape)) + field(4, weights.tobytes()))
    sizes = (1, 4, 5, 3) if layout == "NHWC" else (1, 3, 4, 5)
    attributes = {
        "data_format": data_format,
        "strides": numbers(1, 1, 1, 1),
        "dilations": numbers(1, 1, 1, 1),
        "padding": field(2, b"VALID"),
    }
    path.write_bytes(
        node("x", "Placeholder", dtype=float_type, shape=field(7, shape(*sizes)))
        + node("w", "Const", dtype=float_type, value=value)
        + node("conv", "Conv2D", "x", "w", T=float_type, **attributes)
        + node("y", "Relu", "conv", T=float_type)
    )
    return path


def convolved(x: Any) -> Any:
    """What the graph's convolution makes of NHWC samples."""
    weights = np.random.default_rng(1).standard_normal((2, 2, 3, 4)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows, weights)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_tensorflow_layouts_and_chosen_outputs(case: NewCase, tmp_path: Path, layout: str) -> None:
    """Samples and outputs have the model's layout, the program is NCHW; a node in the middle can be an output."""
    x = np.random.default_rng(0).standard_normal((8, 4, 5, 3)).astype(np.float32)
    conv = convolved(x)
    if layout == "NCHW":
        x, conv = x.transpose(0, 3, 1, 2), conv.transpose(0, 3, 1, 2)
    np.savez(tmp_path / "samples.npz", x=x, conv=conv, y=np.maximum(conv, 0))
    net = case(
        convolution_graph(tmp_path / "net.pb", layout),
        format="tf",
        inputs={"x": {"dtype": "float32", "shape": [1, *x.shape[1:]]}},
        options={"nhwc": layout == "NHWC"},
        outputs=["y", "conv"],
    )
    samples = {"path": str(tmp_path / "samples.npz")}
    net.reference(samples, compiler="migraphx", search=net.search, device="ref")
    compiled = net.compile("fp32")
    assert compiled["inputs"][0]["shape"] == [1, 3, 4, 5]
    assert [output["name"] for output in compiled["outputs"]] == ["y", "conv"]
    found = net.evaluate("fp32")["verification"]
    assert found["origin"] == {"y": "expected", "conv": "expected"}
    assert max(found["errors"].values()) < 1e-5


def test_an_output_that_the_graph_does_not_have(case: NewCase, tmp_path: Path) -> None:
    """A misspelt output is named, with those that the graph has; MIGraphX would raise a bare IndexError."""
    graph = convolution_graph(tmp_path / "net.pb", "NHWC")
    net = case(graph, format="tf", inputs={"x": {"dtype": "float32", "shape": [1, 4, 5, 3]}}, outputs=["logits"])
    with pytest.raises(Refused, match="no node 'logits' that could be an output; it ends in y"):
        net.compile("fp32")


def test_a_program_as_json(case: NewCase) -> None:
    """With `format: json` the program's file is text that loads back and verifies like any other."""
    net = case(PNET, {"input_1": [1, 32, 32, 3]}, options={"format": "json"})
    net.reference()
    net.compile("fp16")
    assert net.program.suffix == ".json"
    assert json.loads(net.program.read_bytes())["migraphx_version"]
    assert max(net.evaluate("fp16")["verification"]["errors"].values()) < 3e-2


# --- what a node finds ---------------------------------------------------------------------------------------------


def test_node_finds_its_targets(folder: str, tmp_path: Path) -> None:
    """The pools carry one toolchain id, which says the version and depends on the libraries' builds."""
    needs_target("cpu")
    settings = load_settings({}, migraphx_path=folder)
    pools = {str(pool.target): pool for pool in survey(settings).pools}
    assert {"migraphx/cpu", "migraphx/ref", "onnxruntime/cpu"} <= set(pools)
    toolchain = pools["migraphx/cpu"].toolchain
    assert toolchain == pools["migraphx/ref"].toolchain
    label, _, digest = toolchain.rpartition("-")
    assert label.startswith(("migraphx", "rocm"))
    assert len(digest) == 8
    import migraphx

    features = pools["migraphx/cpu"].features
    assert set(features) <= set(FEATURES)
    assert {name for name in FEATURES if name.startswith("quantize_")} <= set(features)
    assert ("dim_params" in features) == ("dim_params" in str(migraphx.parse_onnx.__doc__))
    assert "exhaustive_tune" in features


def test_placeholder_package_is_not_taken_for_migraphx(tmp_path: Path) -> None:
    """PyPI has a placeholder of that name: it is named, not used."""
    (tmp_path / "migraphx").mkdir()
    (tmp_path / "migraphx" / "__init__.py").write_text("")
    settings = load_settings({}, migraphx_path=str(tmp_path))
    findings = survey(settings)
    assert [str(pool.target) for pool in findings.pools] == ["onnxruntime/cpu"]
    assert any("placeholder without parse_onnx" in str(note) for note in findings.notes)


def test_module_for_another_python_is_named(tmp_path: Path) -> None:
    """Where the module is there, but for another Python, the note says which."""
    (tmp_path / "migraphx.cpython-36m-x86_64-linux-gnu.so").touch()
    (tmp_path / "migraphx").mkdir()
    settings = load_settings({}, migraphx_path=str(tmp_path))
    assert any("there is migraphx.cpython-36m" in str(note) for note in survey(settings).notes)


def test_interpreter_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A wrong `migraphx_python` is a note, not an accident."""
    settings = load_settings({}, migraphx_python=str(tmp_path / "python"))
    assert any("cannot start" in str(note) for note in survey(settings).notes)
    assert sys.executable not in "".join(map(str, survey(settings).notes))
