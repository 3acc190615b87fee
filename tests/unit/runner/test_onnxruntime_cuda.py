"""What is read of ONNX Runtime's CUDA provider. No card here: the assignment is a stand-in's, in the runtime's form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto, helper

from farm.cli import check_commands
from farm.runner import onnxruntime_cuda


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
        return [onnxruntime_cuda.CPU]


def test_nodes_on_the_cpu_on_purpose_are_told_from_those_without_a_kernel() -> None:
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
    assert onnxruntime_cuda.placement(session, helper.make_model(graph)) == {
        "nodes": {
            "CUDAExecutionProvider": {"MatMul": 2, "MemcpyToHost": 1},
            "CPUExecutionProvider": {"Det": 1, "Gather": 2, "Shape": 1},
        },
        "on_purpose": {"Shape": ["shape"], "Gather": ["gather"]},
        "fallback": {"Gather": ["floats"], "Det": ["det"]},
    }


def test_a_session_that_was_made_without_the_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = onnxruntime_cuda.CudaLibraries({}, {"cudnn": "libcudnn.so.9: cannot open shared object file"}, 0)
    monkeypatch.setattr(onnxruntime_cuda, "libraries", lambda: found)
    with pytest.raises(onnxruntime_cuda.RequestFailed, match="cannot be loaded: libcudnn") as raised:
        onnxruntime_cuda.refuse_without_provider(StandInSession())
    assert raised.value.kind == "gpu_library"


@pytest.mark.parametrize(
    ("names", "count"), [(["onnxruntime"], 0), (["onnxruntime_gpu"], 0), (["onnxruntime", "onnxruntime-gpu"], 1)]
)
def test_the_doctor_says_that_two_packages_overwrite_each_other(
    monkeypatch: pytest.MonkeyPatch, names: list[str], count: int
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [SimpleNamespace(name=name) for name in names])
    found = check_commands._overwritten()
    assert len(found) == count and all(check.state == "broken" and "pip uninstall" in check.fix for check in found)
