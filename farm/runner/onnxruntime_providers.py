"""ONNX Runtime's providers for a program, and their options: one rule for the child that verifies and measures it, and
for users who load it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"

ON_CARDS = {"cuda": CUDA, "tensorrt": TENSORRT}
"""The provider of each device that is a card."""

_ARENA = ("arena_extend_strategy",)
_CUDA = ("cudnn_conv_algo_search",)
_TENSORRT = ("trt_max_workspace_size", "trt_builder_optimization_level")


def device_of(arch: str, toolchain: str) -> str:
    """Return the device (`cpu`, `cuda`, `tensorrt`) of a program of ONNX Runtime's, by what its key says."""
    if not arch.startswith("sm_"):
        return "cpu"
    return "tensorrt" if "-tensorrt" in toolchain else "cuda"


def environment_of(device: str, precision: str) -> dict[str, str]:
    """Return the variables of a process that runs a program: TensorRT has no option for TF32, and takes it if it may.

    The variable counts for a whole process, from its first session on.
    """
    return {"NVIDIA_TF32_OVERRIDE": "0"} if device == "tensorrt" and precision != "tf32" else {}


def providers_of(
    device: str, precision: str, options: Mapping[str, Any], found: Mapping[str, Any]
) -> list[tuple[str, dict[str, str]]]:
    """Return the providers of a session in order, with their options, for a program of a device and precision.

    `options` are the cell's; what tuning `found` best comes before them. A CUDA graph is not among it: such a session
    reads and writes the same memory at every run, so it is right only for callers that bind it. What TensorRT does not
    take, CUDA runs.
    """
    if device == "cpu":
        return [(CPU, {})]
    chosen = [(CUDA, _cuda(precision, options, found)), (CPU, {})]
    return [(TENSORRT, _tensorrt(options, found)), *chosen] if device == "tensorrt" else chosen


def _cuda(precision: str, options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """TF32 is on for the precision of that name and off for all others, whatever the provider's default."""
    chosen = {"use_tf32": str(int(precision == "tf32"))}
    if options.get("gpu_mem_limit"):
        chosen["gpu_mem_limit"] = str(options["gpu_mem_limit"])
    chosen |= {name: str(options[name]) for name in (*_ARENA, *_CUDA) if name in options}
    if options.get("prefer_nhwc"):
        chosen["prefer_nhwc"] = "1"
    return chosen | {name: str(found[name]) for name in (*_CUDA, "prefer_nhwc") if found.get(name)}


def _tensorrt(options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """What is not asked for stays the provider's default, which no name has to be known for."""
    chosen = {name: str(options[name]) for name in _TENSORRT if options.get(name) is not None}
    if chosen.get("trt_max_workspace_size") == "0":
        del chosen["trt_max_workspace_size"]
    if options.get("trt_sparsity_enable"):
        chosen["trt_sparsity_enable"] = "1"
    return chosen | {name: str(found[name]) for name in _TENSORRT if found.get(name)}
