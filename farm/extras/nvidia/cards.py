"""What ONNX Runtime does on NVIDIA's GPUs, as data."""

from __future__ import annotations

from farm.targets.compilers import NATIVE, DeviceKind, Option, TuningMode

_PRECISIONS = (NATIVE, "fp32", "tf32", "fp16", "bf16", "int8")
_TUNING = {"quick": TuningMode(), "exhaustive": TuningMode()}

_OPTIONS = {
    "gpu_mem_limit": Option(
        0,
        "most bytes of GPU memory that a session's arena takes; 0: no limit",
        newer=True,
        devices=("cuda", "tensorrt"),
    ),
    "arena_extend_strategy": Option(
        "kNextPowerOfTwo",
        "how the arena of GPU memory grows",
        choices=("kNextPowerOfTwo", "kSameAsRequested"),
        newer=True,
        devices=("cuda", "tensorrt"),
    ),
    "cudnn_conv_algo_search": Option(
        "EXHAUSTIVE",
        "CUDA: how cuDNN's convolutions are chosen, each time the program is loaded",
        choices=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        newer=True,
        devices=("cuda",),
    ),
    "prefer_nhwc": Option(False, "CUDA: convolutions in NHWC", newer=True, devices=("cuda",)),
    "engine": Option(
        True,
        "the program holds TensorRT's engine (an EPContext node); false: plain ONNX, built at each load",
        newer=True,
        devices=("tensorrt",),
    ),
    "trt_max_workspace_size": Option(
        0, "TensorRT: most bytes of GPU memory for one layer; 0: all", newer=True, devices=("tensorrt",)
    ),
    "trt_builder_optimization_level": Option(
        3,
        "TensorRT: how long the builder looks for a faster engine",
        choices=(0, 1, 2, 3, 4, 5),
        newer=True,
        devices=("tensorrt",),
    ),
    "trt_sparsity_enable": Option(
        False, "TensorRT: use that two of four weights are zero", newer=True, devices=("tensorrt",)
    ),
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
