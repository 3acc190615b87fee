"""What is asked of ONNX Runtime's TensorRT provider, by its documents. It has never run: no registry has TensorRT.

Sessions are a stand-in's, which run on the CPU and write what the provider would write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from farm.compiling.failures import ChildEnd, ChildLimits, EndedBy, classify
from farm.extras.nvidia.runner import onnxruntime_cuda, onnxruntime_tensorrt
from farm.runner import actions, onnxruntime_compiler, onnxruntime_sessions
from farm.runner.launcher import Messages
from farm.runner.onnx_models import at_least_opset
from farm.runner.protocol import RequestFailed
from farm.targets.compilers import child_modules
from tests.support.compiling import RNET, inputs_of

_SESSION = onnxruntime.InferenceSession


@pytest.fixture(autouse=True)
def _modules_are_known_as_in_a_child() -> None:
    actions.add_modules(child_modules())


class StandInOnTensorrt:
    """Stands in for a session by TensorRT: its engine is a copy of the model, and it knows all operators but some."""

    asked: list[dict[str, str]] = []  # noqa: RUF012 (one list for all)
    unknown: tuple[str, ...] = ()

    def __init__(self, path: str, options: Any = None, providers: Sequence[Any] = (), **more: Any) -> None:
        options = more.pop("sess_options", options)
        self.names = [name if isinstance(name, str) else name[0] for name in providers]
        self.on_card = self.names[0] == onnxruntime_sessions.TENSORRT
        self.model = onnx.load_model(path)
        if self.on_card:
            chosen = providers[0][1]
            self.asked.append({**chosen, "tf32": os.environ.get("NVIDIA_TF32_OVERRIDE", "")})
            assert not options.optimized_model_filepath, "compiled nodes cannot be written"
            if folder := chosen.get("trt_timing_cache_path"):
                (Path(folder) / "TensorrtExecutionProvider_cache_sm90.timing").write_bytes(b"timings")
            if chosen.get("trt_dump_ep_context_model") == "1" and not self._left():
                shutil.copy(path, chosen["trt_ep_context_file_path"])
        self.real = _SESSION(path, options, providers=[onnxruntime_sessions.CPU], **more)

    def _left(self) -> list[Any]:
        return [node for node in self.model.graph.node if node.op_type in self.unknown]

    def get_providers(self) -> list[str]:
        return self.names

    def get_provider_graph_assignment_info(self) -> list[Any]:
        places = {onnxruntime_sessions.TENSORRT: [], onnxruntime_sessions.CUDA: self._left()}
        places[onnxruntime_sessions.TENSORRT] = [node for node in self.model.graph.node if node not in self._left()]
        return [SimpleNamespace(ep_name=name, get_nodes=lambda of=nodes: of) for name, nodes in places.items()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a child is asked that compiles a net by TensorRT."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", StandInOnTensorrt)
    monkeypatch.setattr(StandInOnTensorrt, "asked", [])
    monkeypatch.setattr(onnxruntime_tensorrt, "_settled", set())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    (tmp_path / "database").mkdir()
    return {
        "compiler": "onnxruntime",
        "device": "tensorrt",
        "threads": 1,
        "precision": "fp32",
        "model": {"path": str(RNET), "format": "onnx", "outputs": []},
        "inputs": inputs_of(RNET, input_2=[2, 24, 24, 3]),
        "batch": None,
        "options": {
            "engine": True,
            "gpu_mem_limit": 1 << 30,
            "trt_max_workspace_size": 1 << 28,
            "trt_builder_optimization_level": 3,
        },
        "quantization": {},
        "tuning": {"mode": "off"},
        "calibration": {"generate": 2, "seed": 0, "ranges": {}},
        "program": str(tmp_path / "net.onnx"),
        "database": str(tmp_path / "database"),
        "key": "k",
    }


def test_the_program_is_the_engine_and_runs_as_it_was_built(asked: dict[str, Any]) -> None:
    compiled = onnxruntime_compiler.compile(asked, _quiet())
    [built] = StandInOnTensorrt.asked
    assert built["trt_ep_context_file_path"] == asked["program"]
    assert (built["trt_dump_ep_context_model"], built["trt_ep_context_embed_mode"]) == ("1", "1")
    assert (built["trt_max_workspace_size"], built["trt_builder_optimization_level"]) == (str(1 << 28), "3")
    assert "trt_timing_cache_path" not in built, "tuning is off"
    assert built["tf32"] == "0"
    assert compiled["placement"]["fallback"] == {}
    assert set(compiled["placement"]["nodes"]) == {onnxruntime_sessions.TENSORRT}
    assert compiled["compute_dtypes"]["float32"]
    onnxruntime_compiler.load(asked)
    loaded = StandInOnTensorrt.asked[-1]
    assert "trt_dump_ep_context_model" not in loaded and loaded["tf32"] == "0"


def test_a_model_that_tensorrt_takes_in_part_has_no_engine(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInOnTensorrt, "unknown", ("Softmax",))
    with pytest.raises(RequestFailed, match=r"TensorRT does not take Softmax; .*engine: false") as raised:
        onnxruntime_compiler.compile(asked, _quiet())
    assert raised.value.kind == "unsupported_operator"
    compiled = onnxruntime_compiler.compile({**asked, "options": {"engine": False}}, _quiet())
    [(operator, names)] = compiled["placement"]["fallback"].items()
    assert operator == "Softmax on CUDA" and len(names) == 1
    assert onnx.load_model(asked["program"]).graph.node


@pytest.mark.parametrize(
    ("precision", "dtype", "tf32"),
    [("tf32", "float32", ""), ("fp16", "float16", "0"), ("int8", "float32", "0"), ("native", "float32", "0")],
)
def test_the_model_itself_is_converted_and_no_flag_of_a_precision_is_asked(
    asked: dict[str, Any], precision: str, dtype: str, tf32: str
) -> None:
    asked["precision"] = precision
    asked["quantization"] = {
        "operators": "dense", "per_channel": False, "activations": "int8", "weights": "int8", "method": "minmax",
        "reduce_range": False,
    }  # fmt: skip
    compiled = onnxruntime_compiler.compile(asked, _quiet())
    assert next(iter(compiled["compute_dtypes"])) == dtype
    [built] = StandInOnTensorrt.asked
    assert built["tf32"] == tf32
    assert not {name for name in built if "fp16" in name or "int8" in name or "bf16" in name}
    if precision == "int8":
        model = onnx.load_model(asked["program"])
        zeros = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if "zero_point" in t.name}
        assert compiled["quantized"] and zeros and not any(value.any() for value in zeros.values())
        assert {value.dtype for value in zeros.values()} == {np.dtype(np.int8)}


def test_a_conversion_that_changes_nothing_is_refused() -> None:
    onnxruntime_tensorrt.refuse_wider("fp16", {"float16": 3, "float32": 1})
    for precision in ("fp16", "bf16"):
        with pytest.raises(RequestFailed, match=f"{precision} left every operator") as raised:
            onnxruntime_tensorrt.refuse_wider(precision, {"float32": 4})
        assert raised.value.kind == "nothing_quantized"


def test_a_model_in_bf16_computes_in_it_throughout() -> None:
    """By ONNX's own types, which its checker compares, and its own evaluator."""
    from onnx.reference import ReferenceEvaluator

    model = at_least_opset(onnx.load_model(RNET), onnxruntime_tensorrt.BF16_OPSET)
    converted = onnxruntime_tensorrt.Tensorrt().to_bf16(onnx.ModelProto.FromString(model.SerializeToString()))
    onnx.checker.check_model(converted, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(converted, strict_mode=True)
    computed = onnxruntime_compiler.compute_dtypes(inferred)
    assert computed["bfloat16"] and not computed.get("float16")
    assert {value.type.tensor_type.elem_type for value in (*converted.graph.input, *converted.graph.output)} == {
        TensorProto.FLOAT
    }
    weights = {t.name: t for t in model.graph.initializer}
    for tensor in converted.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            whole = onnx.numpy_helper.to_array(weights[tensor.name])
            np.testing.assert_allclose(onnx.numpy_helper.to_array(tensor).astype(np.float32), whole, rtol=2**-7)
    small = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
            [onnx.numpy_helper.from_array(np.full((4, 4), 1e6, np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", onnxruntime_tensorrt.BF16_OPSET)],
    )
    [value] = ReferenceEvaluator(onnxruntime_tensorrt.Tensorrt().to_bf16(small)).run(
        None, {"x": np.ones((2, 4), np.float32)}
    )
    np.testing.assert_allclose(value, np.full((2, 4), 4e6), rtol=2**-6, err_msg="larger than fp16 holds")


def test_one_process_has_one_setting_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_tensorrt, "_settled", set())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    onnxruntime_tensorrt.settle_tf32("fp32")
    onnxruntime_tensorrt.settle_tf32("fp16")
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    with pytest.raises(RequestFailed, match="one process"):
        onnxruntime_tensorrt.settle_tf32("tf32")


def test_sizes_that_vary_get_a_profile(tmp_path: Path) -> None:
    request: Any = {
        "inputs": {
            "x": {"dtype": "float32", "shape": [{"min": 1, "max": 8, "optimals": [2, 4]}, 3]},
            "n": {"dtype": "float32", "shape": [{"min": 1, "max": 8, "optimals": []}]},
        }
    }
    assert onnxruntime_tensorrt.Tensorrt(request).building(None, tmp_path) == {
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(tmp_path),
        "trt_profile_min_shapes": "n:1,x:1x3",
        "trt_profile_opt_shapes": "n:8,x:4x3",
        "trt_profile_max_shapes": "n:8,x:8x3",
    }


def test_tuning_times_the_builders_levels_and_keeps_tensorrts_timings(asked: dict[str, Any]) -> None:
    asked["tuning"] = {"mode": "quick"}
    onnxruntime_compiler.tune(asked, _quiet())
    folder = Path(asked["database"])
    timed = set(onnxruntime_sessions.read_records(folder)["k"])
    assert timed == {"basic/1/builder3", "basic/1/builder4"}, "no memory of a card can be bound here"
    assert (folder / "TensorrtExecutionProvider_cache_sm90.timing").read_bytes() == b"timings"
    onnxruntime_sessions.add_record(folder, "k", {"basic/1/builder3": 2.0, "basic/1/builder4": 1.0})
    asked["tuning"] = {"mode": "quick", "slices": [{"key": "k", "count": 1}]}
    tuned = onnxruntime_compiler.compile(asked, _quiet())
    built = StandInOnTensorrt.asked[-1]
    assert (built["trt_builder_optimization_level"], built["trt_timing_cache_path"]) == ("4", str(folder))
    assert tuned["session"]["trt_builder_optimization_level"] == "4"


def test_what_is_missing_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "onnxruntime"
    (place / "capi").mkdir(parents=True)
    monkeypatch.setattr(onnxruntime, "__file__", str(place / "__init__.py"))
    assert onnxruntime_tensorrt.libraries().missing == {"provider": "ONNX Runtime has no TensorRT provider"}
    (place / "capi" / "libonnxruntime_providers_tensorrt.so").write_bytes(b"\0libcudart.so.13\0libnvinfer.so.10\0")
    found = onnxruntime_tensorrt.libraries()
    assert (found.versions, onnxruntime_tensorrt.needed_major()) == ({}, "10")
    assert found.missing["nvinfer"].startswith("libnvinfer.so.10: ")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [onnxruntime_sessions.CUDA])
    versions = {"cuda": "13.0", "cudnn": "9.28.1", "cublas": "13.10.0"}
    monkeypatch.setattr(onnxruntime_cuda, "libraries", lambda: onnxruntime_cuda.DeviceLibraries(versions, {}, 75))
    with pytest.raises(RequestFailed, match=r"libnvinfer\.so\.10") as raised:
        onnxruntime_compiler.probe({"device": "tensorrt"})  # type: ignore[typeddict-item]
    assert "TensorRT 10" in raised.value.detail and "LD_LIBRARY_PATH" in raised.value.detail
    there = onnxruntime_compiler.DeviceLibraries({"tensorrt": onnxruntime_cuda.spelt(101303)}, {}, 0)
    monkeypatch.setattr(onnxruntime_tensorrt, "libraries", lambda: there)
    answer = onnxruntime_compiler.probe({"device": "tensorrt"})  # type: ignore[typeddict-item]
    assert answer["toolchain"].startswith(f"onnxruntime{onnxruntime.__version__}-tensorrt10.13.3-cuda13.0-")
    assert answer["targets"] == ["tensorrt"]
    assert onnxruntime_sessions.device_of("sm_90:h200", answer["toolchain"]) == "tensorrt"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("the program does not load, on TensorRT: [TensorRT EP] Error Code 2: OutOfMemory (Requested 9)", "gpu_memory"),
        ("Target GPU SM 61 is not supported by this TensorRT release.", "gpu_unserved"),
        ("The engine plan file is not compatible with this version of TensorRT, expecting", "toolchain_mismatch"),
        ("libnvinfer.so.10: cannot open shared object file: No such file or directory", "gpu_library"),
    ],
)
def test_failures_of_tensorrt_have_their_kinds(message: str, kind: str) -> None:
    end = ChildEnd(by=EndedBy.ITSELF, limits=ChildLimits(), error={"kind": "", "message": message, "detail": ""})
    failure = classify(end)
    assert failure and failure.kind == kind


def _quiet() -> Messages:
    return Messages(os.open(os.devnull, os.O_WRONLY))
