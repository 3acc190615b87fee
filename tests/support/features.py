"""Features that some releases of MIGraphX have: what workers may say of theirs."""

from collections.abc import Mapping

FEATURES: Mapping[str, str] = {
    "autocast_fp8": "fp8 inputs and outputs become float32",
    "dim_params": "dynamic dimensions by the model's own names",
    "exhaustive_tune": "tuning modes above quick",
    "external_data_path": "models from memory with their weights in other files",
    "get_onnx_operators": "lists the ONNX operators that it has",
    "gpu_arch": "compiles for architectures that are not in the machine",
    "limit_max_iterations": "a bound for loops whose count only the run knows",
    "load_buffer": "programs from memory",
    "map_dyn_input_dims": "dynamic dimensions of inputs",
    "max_loop_iterations": "iterations of a loop whose count is not known",
    "problem_cache": "what tuning learnt is kept in a file",
    "quantize_bf16": "precision bf16",
    "quantize_fp16": "precision fp16",
    "quantize_fp8": "precision fp8",
    "quantize_int8": "precision int8",
    "save_buffer": "programs to memory",
    "to_gpu": "arrays in GPU memory",
    "unpack_int4": "precision int4",
    "use_debug_symbols": "instructions that name the model's nodes",
}
