"""What the parent must know of each compiler, as data. The code that calls them is in `farm/runner/`.

`recipe` is the number of our own module for a compiler: it is part of the cache key and goes up whenever our
conversion or quantization changes what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

OptionValue = bool | int | str

NATIVE = "native"
"""The precision that converts nothing: for models exported as fp16, bf16 or with QDQ nodes."""

OFF = "off"
"""The tuning mode that looks for nothing: what the compiler does by itself, and the baseline of all others."""

TOLERANCES: Mapping[str, float] = {
    "native": 3e-2,
    "fp32": 1e-3,
    "fp16": 3e-2,
    "bf16": 1.5e-1,
    "fp8": 2e-1,
    "int8": 2e-1,
    "int4": 2e-1,
}
"""Default tolerance of rel_l2 by precision; a pair has that of its coarser half."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its default (which also gives the type), allowed values, and what it is for.

    `choices` empty means any value of the type from `low` on. `family_bound` lists the values that tie the
    program to the CPU family of the machine that made it.
    """

    default: OptionValue
    help: str
    choices: tuple[OptionValue, ...] = ()
    family_bound: tuple[OptionValue, ...] = ()
    low: int = 0
    newer: bool = False
    """Younger than cache keys that are out: at its default the option is left out of the spec, so that they hold."""

    @property
    def type(self) -> type[OptionValue]:
        """The Python type of the option's values: bool, int or str."""
        return type(self.default)

    def problem(self, value: Any) -> str:
        """Return what is wrong with a value, or an empty string."""
        if type(value) is not self.type:
            return f"must be {_TYPE_NAMES[self.type]}, not {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(str(choice) for choice in self.choices)}, not {value!r}"
        if isinstance(value, int) and not isinstance(value, bool) and value < self.low:
            return f"must be at least {self.low}, not {value}"
        return ""


_TYPE_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", str: "text"}


@dataclass(frozen=True, slots=True)
class TuningMode:
    """What a tuning mode sets in the children that tune, and in no other: environment and compile arguments.

    `{database}` in a value stands for the job's private folder, into which the mode's shared database was restored.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def environment_in(self, database: str) -> dict[str, str]:
        """Return the environment for a database in this folder."""
        return {name: value.format(database=database) for name, value in self.environment.items()}


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices of one kind (`gfx…`, `cpu`, `ref`): what can be asked of them."""

    pattern: str
    """Matches the device part of a target (`fnmatch`)."""
    precisions: tuple[str, ...]
    tuning: Mapping[str, TuningMode] = field(default_factory=dict)
    """The modes beside `off`; each has a shared database of its own, since a hit stops tuning for good."""
    min_samples: int = 8
    """Distinct samples that verification runs at least."""
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler as its users see it."""

    name: str
    recipe: int
    devices: tuple[DeviceKind, ...]
    formats: tuple[str, ...]
    extension: str
    """Ending of a program's file, where no option says otherwise."""
    options: Mapping[str, Option]
    quantization: Mapping[str, Mapping[str, Option]]
    """Quantization options by precision; a pair has those of both halves."""
    calibrated: frozenset[str]
    """Precisions that need calibration data."""
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Libraries beside the toolchain that rewrite the model, by precision; `*` is every precision."""
    env: frozenset[str] = frozenset()
    """Environment variables that a manifest may set; they are part of the cache key."""
    tuning_binds: bool = False
    """Whether what tuning chooses depends on the CPU family."""
    find_enforce: str = ""
    """The variable that `tuning.miopen_find_enforce` sets; empty where there is none."""
    portable: bool = True
    """Whether a program made for one device runs on every device of the same target."""

    def device(self, name: str) -> DeviceKind | None:
        """Return the kind that a device (`gfx942`, `cpu`) is of, or None where it is not served."""
        return next((kind for kind in self.devices if fnmatchcase(name, kind.pattern)), None)

    def precisions(self, device: str) -> tuple[str, ...]:
        """Return the precisions that can be asked of a device; none where it is not served."""
        kind = self.device(device)
        return kind.precisions if kind else ()

    def needs_calibration(self, precision: str) -> bool:
        """Whether a precision (a pair too) needs calibration data."""
        return any(part in self.calibrated for part in precision.split("-"))

    def quantization_options(self, precision: str) -> dict[str, Option]:
        """Return the quantization options that a precision (a pair too) has."""
        return {
            name: option for part in precision.split("-") for name, option in self.quantization.get(part, {}).items()
        }

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Return the compile options with the defaults filled in.

        Raises ValueError that names each unknown option and each wrong value.
        """
        return _resolve(self.options, given, f"{self.name} option")

    def resolve_quantization(self, precision: str, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Return the quantization options of a precision with the defaults filled in.

        Raises ValueError that names each unknown option and each wrong value.
        """
        return _resolve(self.quantization_options(precision), given, f"quantization option of {precision}")

    def family_bound(self, options: Mapping[str, Any], tuning: str) -> bool:
        """Whether options and tuning mode tie the program to the CPU family of the machine that makes it."""
        return (tuning != OFF and self.tuning_binds) or any(
            options.get(name) in option.family_bound for name, option in self.options.items()
        )

    def program_extension(self, options: Mapping[str, Any]) -> str:
        """Return the ending of a program's file."""
        return ".json" if options.get("format") == "json" else self.extension

    def libraries_of(self, precision: str) -> tuple[str, ...]:
        """Return the names of the libraries beside the toolchain that rewrite a model at this precision."""
        parts = ["*", *precision.split("-")]
        return tuple(sorted({name for part in parts for name in self.libraries.get(part, ())}))


def _resolve(options: Mapping[str, Option], given: Mapping[str, Any], what: str) -> dict[str, OptionValue]:
    problems = [
        f"{what} `{name}` {options[name].problem(value)}" if name in options else f"no {what} `{name}`"
        for name, value in given.items()
        if name not in options or options[name].problem(value)
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return {
        name: value
        for name, option in options.items()
        if (value := given.get(name, option.default)) != option.default or not option.newer
    }


def canonical_precision(text: str) -> str:
    """Return a precision as identifiers spell it, 8-bit half first: `fp16+int8` -> `int8-fp16`."""
    parts = re.split(r"[+-]", text.strip().lower())
    return "-".join(sorted(parts, key=lambda part: (not part.endswith("8"), part)))


def default_tolerance(precision: str) -> float:
    """Return the default tolerance of rel_l2 for a precision; a pair has that of its coarser half."""
    return max(TOLERANCES[part] for part in precision.split("-"))


def default_equal_share(precision: str) -> float:
    """Return the share of equal values that integer and bool outputs need by default."""
    return 1.0 if precision == "fp32" else 0.99


ONNXRUNTIME = Compiler(
    name="onnxruntime",
    recipe=1,
    devices=(
        DeviceKind(
            "cpu",
            (NATIVE, "fp32", "fp16", "bf16", "int8", "int4"),
            tuning={"quick": TuningMode(), "exhaustive": TuningMode()},
        ),
    ),
    tuning_binds=True,
    formats=("onnx",),
    extension=".onnx",
    options={
        "level": Option(
            "standard",
            "standard: plain ONNX that runs on every CPU; tuned: ONNX Runtime's own operators and layouts",
            choices=("standard", "tuned"),
            family_bound=("tuned",),
        ),
    },
    quantization={
        "int8": {
            # With all operators a text classifier's layer norms are wiped out (rel_l2 1.5 instead of 0.05).
            "operators": Option(
                "dense",
                "what is quantized: convolutions and matrix products (dense), or whatever the quantizer can (all)",
                choices=("dense", "all"),
            ),
            "per_channel": Option(False, "one scale for each channel of a weight"),
            "activations": Option("uint8", "type of quantized activations", choices=("uint8", "int8")),
            "weights": Option("int8", "type of quantized weights", choices=("int8", "uint8")),
            # Entropy and percentile keep every activation: 4.5 GB for 32 samples of a 21 MB model.
            "method": Option("minmax", "how ranges are found", choices=("minmax", "entropy", "percentile")),
            "reduce_range": Option(False, "7-bit weights, for CPUs whose 8-bit sums saturate (no VNNI)"),
        },
        "int4": {
            "block_size": Option(32, "values that share one scale", choices=(16, 32, 64, 128, 256)),
            "symmetric": Option(True, "scales without a zero point"),
        },
    },
    calibrated=frozenset({"int8"}),
    # The onnx version is part of the toolchain id.
    libraries={"bf16": ("ml_dtypes",), "int8": ("sympy",), "int4": ("onnx_ir",)},
)

# Both stores in the job's private folder: MIGraphX's problem cache and MIOpen's user databases.
_QUICK = {
    "MIOPEN_USER_DB_PATH": "{database}",
    "MIOPEN_CUSTOM_CACHE_DIR": "{database}/kernels",
    "MIOPEN_FIND_ENFORCE": "3",
    "MIGRAPHX_PROBLEM_CACHE": "{database}/problem_cache.json",
    # With it MIGraphX (ROCm 7.0 and newer) writes its cache after every operation, else when a program is done.
    "MIGRAPHX_TRACE_BENCHMARKING": "1",
}
# Enforcement 3 skips what the system database holds, so that is put where nothing is but what was tuned here.
_EXHAUSTIVE = {**_QUICK, "MIOPEN_SYSTEM_DB_PATH": "{database}"}
_MIGRAPHX_TUNING = {
    "quick": TuningMode(_QUICK),
    "exhaustive": TuningMode(_EXHAUSTIVE, {"exhaustive_tune": True}),
    "full": TuningMode({**_EXHAUSTIVE, "MIGRAPHX_MLIR_TUNE_EXHAUSTIVE": "1"}, {"exhaustive_tune": True}),
}

# GPU_HIP_FLAGS is left out: compiler flags can pull any readable file of the worker into a kernel.
_MIGRAPHX_RESULT_ENV = """
    ENABLE_NHWC DISABLE_MLIR ENABLE_CK SET_GEMM_PROVIDER MLIR_USE_SPECIFIC_OPS ENABLE_MLIR_INPUT_FUSION
    ENABLE_MLIR_REDUCE_FUSION ENABLE_MLIR_GEG_FUSION MLIR_ENABLE_SPLITK ENABLE_LAYERNORM_FUSION
    ENABLE_MIOPEN_POOLING USE_FAST_SOFTMAX DISABLE_FP32_SOFTMAX DISABLE_FP16_INSTANCENORM_CONVERT
    ENABLE_REWRITE_DOT SPLIT_REDUCE_SIZE REWRITE_LRN FLASH_DECODING_ENABLED FLASH_DECODING_NUM_SPLITS
    FLASH_DECODING_MIN_CHUNK_SIZE FLASH_DECODING_MAX_SPLITS FLASH_DECODING_THRESHOLD COPY_LITERALS
    ENABLE_FULL_DYNAMIC DISABLE_POINTWISE_FUSION DISABLE_REDUCE_FUSION DISABLE_MULTI_OUTPUT_FUSION
    DISABLE_MIOPEN_FUSION DISABLE_SCHEDULE_PASS DISABLE_PASSES NSTREAMS ENABLE_NULL_STREAM GPU_OPTIMIZE
    GPU_DEBUG GPU_DEBUG_SYM
"""

_MIGRAPHX_PRECISIONS = (
    NATIVE, "fp32", "fp16", "bf16", "int8", "fp8", "int8-fp16", "int8-bf16", "fp8-fp16", "fp8-bf16",
)  # fmt: skip

MIGRAPHX = Compiler(
    name="migraphx",
    recipe=1,
    devices=(
        DeviceKind("gfx*", _MIGRAPHX_PRECISIONS, tuning=_MIGRAPHX_TUNING, gpu=True),
        DeviceKind("cpu", _MIGRAPHX_PRECISIONS),
        # One inference of a small net takes 12 s on ref.
        DeviceKind("ref", _MIGRAPHX_PRECISIONS, min_samples=2),
    ),
    formats=("onnx", "tf"),
    extension=".mxr",
    options={
        "offload_copy": Option(True, "the program copies its inputs and outputs between host and GPU itself"),
        "fast_math": Option(True, "approximate functions; double and int64 become narrower inside"),
        "nhwc": Option(True, "TensorFlow: the model's 4-D inputs are NHWC (the program's own are NCHW)"),
        "max_loop_iterations": Option(10, "iterations that a Loop of unknown count may take", low=1),
        "format": Option(
            "msgpack",
            "of the program's file: msgpack (.mxr), or json (.json), which people can read and is larger",
            choices=("msgpack", "json"),
            newer=True,
        ),
    },
    quantization={},
    calibrated=frozenset({"int8", "fp8"}),
    env=frozenset(f"MIGRAPHX_{name}" for name in _MIGRAPHX_RESULT_ENV.split()),
    find_enforce="MIOPEN_FIND_ENFORCE",
    portable=False,
)

COMPILERS: Mapping[str, Compiler] = {compiler.name: compiler for compiler in (ONNXRUNTIME, MIGRAPHX)}
"""Every compiler that the farm knows, by name."""
