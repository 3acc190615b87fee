"""Environment variables that a manifest may set, as data. Whatever is not in these tables never reaches a compiler.

Sources: MIGraphX `docs/reference/MIGraphX-dev-env-vars.rst` and how its code reads each variable (`src/env.cpp`);
MIOpen `docs/reference/env_variables.rst`; hipBLASLt `docs/reference/env-variables.rst`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

FILE = "sha256:"  # How the value of a variable that names a file begins in a spec; the file's SHA-256 follows.

_TEXT = r"[A-Za-z0-9_.,:;~!+-]{1,200}"  # No separator of paths, no blank: an allowed value names no file of the worker.


class Variable(NamedTuple):
    """What values an environment variable takes.

    A `flag` is on or as if it were not there; a `switch` is on or off; a `number` is whole and at least `low`; a `text`
    matches `pattern`; a `file` is brought by the submitter and read by the compiler.
    """

    kind: Literal["flag", "switch", "number", "text", "file"] = "flag"
    low: int = 0
    pattern: str = _TEXT
    refused: str = ""  # Why no value may be set, if so.

    def spelt(self, value: Any) -> str:
        """Return the one spelling of a value, or an empty string if it means the same as no variable.

        Raises ValueError that says what the value should be.
        """
        if self.refused:
            raise ValueError(f"is refused: {self.refused}")
        text = {True: "1", False: "0"}.get(value, "") if isinstance(value, bool) else str(value)
        if self.kind == "file":
            if not re.fullmatch(rf"{FILE}[0-9a-f]{{64}}", text):
                raise ValueError("is a file: write {path: FILE}")
            return text
        if self.kind in ("flag", "switch"):
            text = {"true": "1", "false": "0"}.get(text.lower(), text)
            if text not in ("0", "1"):
                raise ValueError(f"is true or false (or 1 or 0), not {value!r}")
            return "" if self.kind == "flag" and text == "0" else text
        if self.kind == "number":
            # MIGraphX throws where such a variable is not a number.
            if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < self.low:
                raise ValueError(f"is a whole number from {self.low} on, not {value!r}")
            return str(int(text))
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"cannot be {value!r}: it has to match {self.pattern}")
        return text


_FLAGS = """
    COPY_LITERALS DISABLE_FP16_INSTANCENORM_CONVERT DISABLE_FP32_SOFTMAX DISABLE_MIOPEN_FUSION DISABLE_MLIR
    DISABLE_MULTI_OUTPUT_FUSION DISABLE_POINTWISE_FUSION DISABLE_REDUCE_FUSION DISABLE_SCHEDULE_PASS ENABLE_CK
    ENABLE_FULL_DYNAMIC ENABLE_LAYERNORM_FUSION ENABLE_MIOPEN_POOLING ENABLE_MLIR_GEG_FUSION ENABLE_MLIR_INPUT_FUSION
    ENABLE_MLIR_REDUCE_FUSION ENABLE_NHWC ENABLE_NULL_STREAM ENABLE_REWRITE_DOT FLASH_DECODING_ENABLED GPU_DEBUG
    GPU_DEBUG_SYM MLIR_ENABLE_SPLITK REWRITE_LRN USE_FAST_SOFTMAX
"""
_OPERATION = "[~!]?(attention|convolution|convolution_backwards|dot|fused|fused_convolution|fused_dot)"

MIGRAPHX_ENV: Mapping[str, Variable] = {
    **{f"MIGRAPHX_{name}": Variable() for name in _FLAGS.split()},
    "MIGRAPHX_DISABLE_PASSES": Variable("text", pattern="[a-z0-9_:]+(,[a-z0-9_:]+)*"),
    "MIGRAPHX_FLASH_DECODING_MAX_SPLITS": Variable("number", low=1),
    "MIGRAPHX_FLASH_DECODING_MIN_CHUNK_SIZE": Variable("number", low=1),
    "MIGRAPHX_FLASH_DECODING_NUM_SPLITS": Variable("number"),
    "MIGRAPHX_FLASH_DECODING_THRESHOLD": Variable("number", low=1),
    "MIGRAPHX_GPU_OPTIMIZE": Variable("text", pattern="[0-3sz]|fast"),
    "MIGRAPHX_MLIR_USE_SPECIFIC_OPS": Variable("text", pattern=f"{_OPERATION}(,{_OPERATION})*"),
    "MIGRAPHX_NSTREAMS": Variable("number", low=1),
    "MIGRAPHX_SET_GEMM_PROVIDER": Variable("text", pattern="hipblaslt|rocblas"),
    "MIGRAPHX_SPLIT_REDUCE_SIZE": Variable("number", low=-1),
    # Most are on unless they are 0; some take names or numbers.
    "MIOPEN_DEBUG_*": Variable("text"),
    "HIPBLASLT_TUNING_OVERRIDE_FILE": Variable("file"),
    "HIPBLASLT_TUNING_USER_MAX_WORKSPACE": Variable("number"),
}
"""What changes MIGraphX's programs, by name or pattern."""

MIGRAPHX_REFUSED_ENV: Mapping[str, str] = {
    "MIGRAPHX_GPU_HIP_FLAGS": "flags of a C++ compiler can put any readable file of the worker into a kernel",
    "MIGRAPHX_GPU_COMPILE_PARALLEL": "the worker divides its cores between its slots",
    "MIGRAPHX_*TUN*": "write `tuning`: the farm keeps tuning databases itself",
    "MIGRAPHX_PROBLEM_CACHE": "write `tuning`: the farm keeps tuning databases itself",
    "MIGRAPHX_*BENCHMARK*": "write `tuning`: the farm keeps tuning databases itself",
    "MIGRAPHX_*DUMP*": "it writes files, or stops the compile",
    "MIGRAPHX_DEBUG_SAVE_TEMP_DIR": "it leaves files on the worker",
    "MIGRAPHX_TRACE_*": "it only writes to the log, and would be part of the cache key",
    "MIGRAPHX_TIME_*": "it only writes to the log, and would be part of the cache key",
    "MIGRAPHX_LOG_*": "it only writes to the log, and would be part of the cache key",
    "MIOPEN_DEBUG_ENFORCE_DEVICE": "the program is published for the GPU that the worker has",
    "MIOPEN_DEBUG_SAVE_TEMP_DIR": "it leaves files on the worker",
    "MIOPEN_DEBUG_COMGR_LOG_*": "it only writes to the log, and would be part of the cache key",
    "MIOPEN_FIND_*": "write `tuning`: the farm keeps tuning databases itself",
    "MIOPEN_*DB*": "write `tuning`: the farm keeps tuning databases itself",
    "HIPBLASLT_TUNING_FILE": "hipBLASLt writes it; what it wrote is brought by HIPBLASLT_TUNING_OVERRIDE_FILE",
    "HSA_OVERRIDE_GFX_VERSION": "a GPU that claims to be another breaks rocMLIR",
}
"""Known variables that the farm does not pass on, and why; this table is asked before that of allowed variables."""
