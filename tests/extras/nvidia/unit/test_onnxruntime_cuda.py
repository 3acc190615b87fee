"""What is read of ONNX Runtime's CUDA provider, and asked of it.

No card here: the assignment is a stand-in's, in the runtime's form; so are sessions on a card, which run on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from farm.cli import operator_commands
from farm.extras.nvidia.runner import onnxruntime_cuda
from farm.extras.nvidia.runner.onnxruntime_tensorrt import Tensorrt
from farm.runner import actions, onnxruntime_compiler, onnxruntime_sessions
from farm.runner.launcher import Messages
from farm.runner.onnxruntime_compiler import RuntimeDevice
from farm.targets.compilers import child_modules
from tests.support.compiling import RNET, inputs_of


@pytest.fixture(autouse=True)
def _modules_are_known_as_in_a_child() -> None:
    actions.add_modules(child_modules())


class StandInSession:
    """Says what it was given, as `get_provider_graph_assignment_info` of a session does."""

    def __init__(self, *parts: tuple[str, list[tuple[str, str]]]) -> None:
        self.parts = parts

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(
                ep_name=provider,
                get_nodes=lambda nodes=nodes: [
                    SimpleNamespace(domain="", op_type=operator, name=name) for operator, name in nodes
                ],
            )
            for provider, nodes in self.parts
        ]

    def get_providers(self) -> list[str]:
        return [onnxruntime_sessions.CPU]


def test_nodes_on_the_cpu_on_purpose_are_distinguished_from_those_without_a_kernel() -> None:
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["s"], name="shape"),
            helper.make_node("Gather", ["s", "i"], ["g"], name="gather"),
            helper.make_node("Gather", ["x", "i"], ["f"], name="floats"),
            helper.make_node("Det", ["x"], ["d"], name="det"),
        ],
        "g",
        [tensor("x", TensorProto.FLOAT, [2, 2]), tensor("i", TensorProto.INT64, [1])],
        [
            tensor("d", TensorProto.FLOAT, []),
            tensor("f", TensorProto.FLOAT, [1, 2]),
            tensor("g", TensorProto.INT64, [1]),
        ],
    )
    session = StandInSession(
        ("CUDAExecutionProvider", [("MatMul", "a"), ("MatMul", "b"), ("MemcpyToHost", "m")]),
        ("CPUExecutionProvider", [("Shape", "shape"), ("Gather", "gather"), ("Gather", "floats"), ("Det", "det")]),
    )
    assert onnxruntime_cuda.Cuda().placement(session, helper.make_model(graph), None) == {
        "nodes": {
            "CUDAExecutionProvider": {"MatMul": 2, "MemcpyToHost": 1},
            "CPUExecutionProvider": {"Det": 1, "Gather": 2, "Shape": 1},
        },
        "on_purpose": {"Shape": ["shape"], "Gather": ["gather"]},
        "fallback": {"Gather": ["floats"], "Det": ["det"]},
    }


def test_a_session_that_was_made_without_the_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = onnxruntime_cuda.DeviceLibraries({}, {"cudnn": "libcudnn.so.9: cannot open shared object file"}, 0)
    monkeypatch.setattr(onnxruntime_cuda, "libraries", lambda: found)
    with pytest.raises(onnxruntime_cuda.RequestFailed, match="cannot be loaded: libcudnn") as raised:
        onnxruntime_cuda.Cuda(None).refuse_without(StandInSession())
    assert raised.value.kind == "gpu_library"


def test_a_template_finds_what_loads_the_libraries_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, which no import shows: else each child on a card loads them, for a tenth of a second."""
    loaded: list[str] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: loaded.append("cuda"))
    actions.find_module("onnxruntime", "cuda").preload()
    assert loaded == ["cuda"]


def test_a_runtime_that_does_not_say_where_nodes_run_is_not_used_for_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [onnxruntime_sessions.CUDA])
    name = "get_provider_graph_assignment_info"
    owner = next(each for each in onnxruntime.InferenceSession.__mro__ if name in vars(each))
    monkeypatch.delattr(owner, name)
    with pytest.raises(onnxruntime_cuda.RequestFailed, match=r"1\.24 and newer do"):
        onnxruntime_compiler.probe({"device": "cuda"})  # type: ignore[typeddict-item]
    assert onnxruntime_compiler.probe({"device": ""})["available"]  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("names", "count"), [(["onnxruntime"], 0), (["onnxruntime_gpu"], 0), (["onnxruntime", "onnxruntime-gpu"], 1)]
)
def test_the_doctor_says_that_two_packages_overwrite_each_other(
    monkeypatch: pytest.MonkeyPatch, names: list[str], count: int
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [SimpleNamespace(name=name) for name in names])
    found = operator_commands._overwritten()
    assert len(found) == count and all(check.state == "broken" and "pip uninstall" in check.fix for check in found)


# --- tuning on a card -----------------------------------------------------------------------------------------------


class StandInOnCuda:
    """Stands in for a session on a card: it runs on the CPU, and keeps what it was asked for."""

    asked: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012 (one list for all)

    def __init__(self, path: str, options: Any, providers: list[Any], **more: Any) -> None:
        self.on_card = providers[0][0] == onnxruntime_sessions.CUDA
        if self.on_card:
            self.asked.append((options.graph_optimization_level.name, providers[0][1]))
        self.real = _SESSION(path, options, providers=[onnxruntime_sessions.CPU], **more)

    def get_providers(self) -> list[str]:
        return [onnxruntime_sessions.CUDA, onnxruntime_sessions.CPU] if self.on_card else [onnxruntime_sessions.CPU]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class OnCpu(onnxruntime.OrtValue):  # type: ignore[misc]
    """Memory of a card, which is the machine's here."""

    refused = False

    @staticmethod
    def ortvalue_from_shape_and_type(shape: Any, dtype: Any, device: str, number: int) -> Any:
        if OnCpu.refused:
            raise RuntimeError("all compute graph nodes have not been partitioned to the CUDA EP")
        assert (device, number) == ("cuda", 0)
        return _VALUE.ortvalue_from_shape_and_type(shape, dtype, "cpu", 0)


_VALUE = onnxruntime.OrtValue
_SESSION = onnxruntime.InferenceSession


@pytest.fixture
def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a child is asked that tunes or compiles a net for a card."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", StandInOnCuda)
    monkeypatch.setattr(StandInOnCuda, "asked", [])
    monkeypatch.setattr(onnxruntime, "OrtValue", OnCpu)
    return {
        "compiler": "onnxruntime",
        "device": "cuda",
        "threads": 1,
        "precision": "fp32",
        "model": {"path": str(RNET), "format": "onnx", "outputs": []},
        "inputs": inputs_of(RNET, input_2=[2, 24, 24, 3]),
        "batch": None,
        "options": {"cudnn_conv_algo_search": "DEFAULT", "gpu_mem_limit": 1 << 30},
        "quantization": {},
        "calibration": {"generate": 2, "seed": 0, "ranges": {}},
        "program": str(tmp_path / "net.onnx"),
        "database": str(tmp_path),
        "key": "k",
    }


@pytest.mark.parametrize(
    ("mode", "graphs", "count"), [("quick", True, 8), ("quick", False, 4), ("exhaustive", True, 36)]
)
def test_every_candidate_of_a_mode_is_timed_with_its_own_options(
    on_cuda: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, graphs: bool, count: int
) -> None:
    """But not those of CUDA graphs, if the slice cannot be one."""
    monkeypatch.setattr(OnCpu, "refused", not graphs)
    on_cuda["tuning"] = {"mode": mode}
    onnxruntime_compiler.tune(on_cuda, _quiet())
    timed = onnxruntime_sessions.read_records(tmp_path)["k"]
    assert len(timed) == count
    assert {"all/1/EXHAUSTIVE", "all/1/HEURISTIC/nhwc"} <= timed.keys()
    assert ("all/1/HEURISTIC/nhwc/graph" in timed) == graphs
    sessions = StandInOnCuda.asked[1:]  # The first was the slice's own, as it was accepted.
    assert all(options["use_tf32"] == "0" and options["gpu_mem_limit"] == str(1 << 30) for _, options in sessions)
    tried = {
        (level, options["cudnn_conv_algo_search"], options["prefer_nhwc"], options.get("enable_cuda_graph"))
        for level, options in sessions
    }
    assert len(tried) == (count if graphs else 2 * count), "each of its own, and those of graphs were tried"


@pytest.mark.parametrize("graphs", [True, False])
def test_a_program_is_replayed_as_a_graph_only_if_it_can_be(
    on_cuda: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """What comes out is then what a plain session gives, for each input in turn, from the same memory."""
    onnxruntime_sessions.add_record(tmp_path, "k", {"all/1/HEURISTIC/graph": 1.0, "all/1/EXHAUSTIVE": 2.0})
    monkeypatch.setattr(OnCpu, "refused", not graphs)
    tuning = {"mode": "quick", "slices": [{"key": "k", "count": 1}]}
    tuned = onnxruntime_compiler.compile({**on_cuda, "tuning": tuning}, _quiet())
    assert tuned["session"].get("enable_cuda_graph") == ("1" if graphs else None)
    assert tuned["session"]["cudnn_conv_algo_search"] == ("HEURISTIC" if graphs else "EXHAUSTIVE")
    program = onnxruntime_compiler.load({**on_cuda, "session": tuned["session"]})
    plain = _SESSION(on_cuda["program"], providers=[onnxruntime_sessions.CPU])
    for seed in range(3):
        feeds = {"input_2": np.random.default_rng(seed).random((2, 24, 24, 3), np.float32)}
        for value, expected in zip(program.run(feeds), plain.run(None, feeds), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert program.run_on_device(feeds) is not None if graphs else True


def test_a_program_is_loaded_as_its_tuning_found_best_and_stays_plain_onnx(
    on_cuda: dict[str, Any], tmp_path: Path
) -> None:
    onnxruntime_compiler.compile({**on_cuda, "tuning": {"mode": "off"}}, messages := _quiet())
    plain = Path(on_cuda["program"]).read_bytes()
    times = {"basic/1/EXHAUSTIVE": 2.0, "all/1/EXHAUSTIVE": 3.0, "all/1/HEURISTIC/nhwc": 1.0}
    onnxruntime_sessions.add_record(tmp_path, "k", times)
    tuning = {"mode": "quick", "slices": [{"key": "k", "count": 2}]}
    tuned = onnxruntime_compiler.compile({**on_cuda, "tuning": tuning}, messages)
    assert Path(on_cuda["program"]).read_bytes() == plain
    assert tuned["session"] == {
        "level": "all",
        "threads": 1,
        "spinning": False,
        "cudnn_conv_algo_search": "HEURISTIC",
        "prefer_nhwc": "1",
    }
    StandInOnCuda.asked.clear()
    onnxruntime_compiler.load({**on_cuda, "session": tuned["session"]})
    [(level, options)] = StandInOnCuda.asked
    assert (level, options["cudnn_conv_algo_search"], options["prefer_nhwc"]) == ("ORT_ENABLE_ALL", "HEURISTIC", "1")


def _quiet() -> Messages:
    return Messages(os.open(os.devnull, os.O_WRONLY))


def test_a_session_reads_back_as_the_candidate_that_it_is() -> None:
    for kind in (RuntimeDevice, onnxruntime_cuda.Cuda, Tensorrt):
        for candidate in kind({"threads": 2}).candidates("exhaustive"):
            assert onnxruntime_sessions.Candidate.parse(str(candidate)) == candidate
            assert onnxruntime_sessions.Candidate.of_session(candidate.session) == candidate
