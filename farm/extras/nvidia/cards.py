"""What ONNX Runtime does on NVIDIA's GPUs, as data."""

from __future__ import annotations

from functools import partial

from farm.targets.compilers import NATIVE, DeviceKind, Option, TuningMode

_PRECISIONS = (NATIVE, "fp32", "tf32", "fp16", "bf16", "int8")
_TUNING = {"quick": TuningMode(), "exhaustive": TuningMode()}

_on_both = partial(Option, newer=True, devices=("cuda", "tensorrt"))
_on_cuda = partial(Option, newer=True, devices=("cuda",))
_on_tensorrt = partial(Option, newer=True, devices=("tensorrt",))

_OPTIONS = {
    "gpu_mem_limit": _on_both(0, "most bytes of GPU memory that a session's arena takes; 0: no limit"),
    "arena_extend_strategy": _on_both(
        "kNextPowerOfTwo", "how the arena of GPU memory grows", choices=("kNextPowerOfTwo", "kSameAsRequested")
    ),
    "cudnn_conv_algo_search": _on_cuda(
        "EXHAUSTIVE",
        "CUDA: how cuDNN's convolutions are chosen, each time the program is loaded",
        choices=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    ),
    "prefer_nhwc": _on_cuda(False, "CUDA: convolutions in NHWC"),
    "engine": _on_tensorrt(
        True, "the program holds TensorRT's engine (an EPContext node); false: plain ONNX, built at each load"
    ),
    "trt_max_workspace_size": _on_tensorrt(0, "TensorRT: most bytes of GPU memory for one layer; 0: all"),
    "trt_builder_optimization_level": _on_tensorrt(
        3, "TensorRT: how long the builder looks for a faster engine", choices=(0, 1, 2, 3, 4, 5)
    ),
    "trt_sparsity_enable": _on_tensorrt(False, "TensorRT: use that two of four weights are zero"),
}

ON_CARDS = {
    "onnxruntime": (
        DeviceKind(
            "cuda",
            _PRECISIONS,
            tuning=_TUNING,
            maker="nvidia",
            lowest={"tf32": 80},
            options=_OPTIONS,
            module="farm.extras.nvidia.runner.onnxruntime_cuda",
        ),
        DeviceKind(
            "tensorrt",
            _PRECISIONS,
            tuning=_TUNING,
            maker="nvidia",
            # TensorRT takes scales without a zero point alone.
            quantization={
                "activations": Option("int8", "type of quantized activations", choices=("int8",)),
                "weights": Option("int8", "type of quantized weights", choices=("int8",)),
            },
            lowest={"tf32": 80, "bf16": 80},
            computes=("bf16",),
            module="farm.extras.nvidia.runner.onnxruntime_tensorrt",
            optional=True,
        ),
    )
}
