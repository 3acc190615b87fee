"""What the parent must know of each compiler, as data. The code that calls them is in `farm/runner/`.

`recipe` is the number of our own module for a compiler: it is part of the cache key and goes up whenever our
conversion or quantization changes what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from farm import entry_points
from farm.errors import UsageError
from farm.spec import SUFFIXES, OptionValue
from farm.targets.environment import MIGRAPHX_ENV, MIGRAPHX_REFUSED_ENV, Variable

if TYPE_CHECKING:
    from farm.jobs.state import DebugWish

Maker = Literal["amd", "nvidia"]  # The maker of a GPU: children see it by that maker's driver.
NATIVE = "native"  # The precision that converts nothing: for models exported as fp16, bf16 or with QDQ nodes.
OFF = "off"  # The tuning mode without a search: the compiler's own choice, and the baseline of all other modes.
TUNING_MODES = (OFF, "quick", "exhaustive", "full")  # Each mode tries more than the ones before it.

TOLERANCES: Mapping[str, float] = {
    "native": 3e-2,
    "fp32": 1e-3,
    "tf32": 1e-2,
    "fp16": 3e-2,
    "bf16": 1.5e-1,
    "fp8": 2e-1,
    "int8": 2e-1,
    "int4": 2e-1,
}
"""Default tolerance of rel_l2 by precision; a pair has that of its coarser half."""

LOG_LEVELS = ("error", "warning", "info", "debug", "trace")
"""How much a compiler logs, from little to all; a missing level means the next more verbose one."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its default (which also gives the type), allowed values, and what it is for.

    `choices` empty means any value of the type from `low` on; of a list they are what may be in it. `family_bound`
    lists the values that tie the program to the CPU family of the machine that made it. `feature` is what the
    installed compiler must offer for another value than the default.
    """

    default: OptionValue
    help: str
    choices: tuple[OptionValue, ...] = ()
    family_bound: tuple[OptionValue, ...] = ()
    low: int = 0
    feature: str = ""
    newer: bool = False
    """Newer than published cache keys: at its default it is left out of the spec, so they stay valid."""
    devices: tuple[str, ...] = ("*",)  # The devices that have the option (`fnmatch`).

    @property
    def type(self) -> type[OptionValue]:
        """The Python type of the option's values: bool, int, str, or tuple for a list of names."""
        return type(self.default)

    def problem(self, value: Any) -> str:
        """Return what is wrong with a value, or an empty string."""
        if isinstance(self.default, tuple):
            return _list_problem(value, self.choices)
        if type(value) is not self.type:
            return f"must be {_TYPE_NAMES[self.type]}, not {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(str(choice) for choice in self.choices)}, not {value!r}"
        if isinstance(value, int) and not isinstance(value, bool) and value < self.low:
            return f"must be at least {self.low}, not {value}"
        return ""


_OPERATOR = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _list_problem(value: Any, choices: Sequence[OptionValue]) -> str:
    if not isinstance(value, list | tuple) or not value:
        return f"must be a list of names, not {value!r}"
    for name in value:
        if not isinstance(name, str) or not _OPERATOR.fullmatch(name):
            return f"must be a list of names, and {name!r} is not a name"
        if choices and name not in choices:
            return f"can have {', '.join(str(choice) for choice in choices)}, not {name!r}"
    return ""


_TYPE_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", str: "text"}


@dataclass(frozen=True, slots=True)
class TuningMode:
    """What a tuning mode sets in the children that tune, and in no other.

    `{database}` in a value stands for the job's private folder, into which the mode's shared database was restored.
    """

    stores: Mapping[str, str] = field(default_factory=dict)  # Environment that says where the databases are.
    search: Mapping[str, str] = field(default_factory=dict)  # Environment for a search for entries that they lack.
    arguments: Mapping[str, OptionValue] = field(default_factory=dict)  # Arguments of the compile that do the same.

    def reading(self, database: str, *, searching: bool = False) -> dict[str, str]:
        """Return the environment of a child that reads the databases in this folder, or also tunes into them."""
        variables = {**self.stores, **self.search} if searching else self.stores
        return {name: value.format(database=database) for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices of one kind (`gfx…`, `cpu`, `ref`) and their abilities."""

    pattern: str  # Matches the device part of a target (`fnmatch`).
    precisions: tuple[str, ...]
    tuning: Mapping[str, TuningMode] = field(default_factory=dict)
    """The modes except `off`; each has its own shared database, because a hit ends tuning for good."""
    min_samples: int = 8  # Distinct samples that verification runs at least.
    maker: Maker | None = None  # Whose GPUs they are; None: no GPU.
    quantization: Mapping[str, Option] = field(default_factory=dict)  # Quantization options that are others here.
    lowest: Mapping[str, int] = field(default_factory=dict)
    """Lowest compute capability, times 10, that has a precision; others need no more than the libraries do."""
    options: Mapping[str, Option] = field(default_factory=dict)  # Options that an extension adds with these devices.
    computes: tuple[str, ...] = ()  # Precisions that these compute, though the compiler's others do so in a wider type.
    module: str = ""
    """The module of an extension that does the work in children: of a compiler as `farm.runner.actions.CompilerModule`
    has it, of a device of ONNX Runtime's with its `RuntimeDevice`. Its package imports `farm.runner` alone of the farm.
    Empty: the farm's own."""
    optional: bool = False  # Whether a node that has such devices may lack what compiles for them.


@dataclass(frozen=True, slots=True)
class Debugging:
    """What a compiler can be made to say about its work, as environment variables; none of them changes a program."""

    levels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By log level. A compiler without variables for it takes the level from its request."""
    traces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # By what is traced.
    timings: Mapping[str, str] = field(default_factory=dict)  # For the time of each pass.

    def environment(self, debug: DebugWish) -> dict[str, str]:
        """Return the variables for a work order's `debug`; what the compiler does not have is left out."""
        chosen = [self.levels.get(debug.get("log_level", ""), {})]
        chosen += [self.traces.get(name, {}) for name in debug.get("trace", ())]
        chosen += [self.timings] if debug.get("timings") else []
        return {name: value for variables in chosen for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler as its users see it."""

    name: str
    recipe: int
    devices: tuple[DeviceKind, ...]
    formats: tuple[str, ...]
    extension: str  # Ending of a program's file, unless an option says otherwise.
    options: Mapping[str, Option]
    quantization: Mapping[str, Mapping[str, Option]]  # Options by precision; a pair has those of both halves.
    calibrated: frozenset[str]  # Precisions that need calibration data.
    toolchains: tuple[str, ...]  # How the ids of this compiler's toolchains may begin.
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Libraries outside the toolchain that rewrite the model, by precision; `*` is every precision."""
    tuning_binds: bool = False  # Whether the result of tuning depends on the CPU family.
    find_enforce: str = ""  # The variable that `tuning.miopen_find_enforce` sets; empty if there is none.
    env: Mapping[str, Variable] = field(default_factory=dict)
    """Environment variables that a manifest may set, by name or pattern; they are part of the cache key."""
    refused_env: Mapping[str, str] = field(default_factory=dict)  # Those that are refused whatever `env` says, and why.
    refused_options: Mapping[str, str] = field(default_factory=dict)
    """Names that the compiler itself has for what is written otherwise or never asked of it, and why."""
    features: Mapping[str, str] = field(default_factory=dict)  # The compiler's release since which it has a feature.
    packed: frozenset[str] = frozenset()
    """Precisions that the farm itself packs into the weights of ONNX models, before the compiler sees them."""
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Features that a precision needs; a pair needs those of both halves."""
    emulated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By precision the devices (patterns, `!` before those that are not) that compute it in a wider type."""
    debugging: Debugging = Debugging()
    pack_options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of a program that ONNX Runtime's provider for this compiler can run; empty if it has none."""

    def adding(self, kinds: Sequence[DeviceKind]) -> Compiler:
        """Return the compiler with further kinds of devices, and their options."""
        options = {name: option for kind in kinds for name, option in kind.options.items()}
        return replace(self, devices=(*self.devices, *kinds), options={**self.options, **options})

    def device(self, name: str) -> DeviceKind:
        """Return the kind that a device (`gfx942`, `cpu`) is of; for one that is not served one without precisions."""
        return next((kind for kind in self.devices if fnmatchcase(name, kind.pattern)), DeviceKind("", ()))

    def packable(self, device: str) -> bool:
        """Whether ONNX Runtime has a provider that takes this compiler's programs for a device."""
        return bool(self.pack_options) and self.device(device).maker is not None

    def options_of(self, device: str) -> dict[str, Option]:
        """Return the options that a device has."""
        return {name: option for name, option in self.options.items() if _listed(device, option.devices)}

    def needs_calibration(self, precision: str) -> bool:
        """Whether a precision (a pair too) needs calibration data."""
        return any(part in self.calibrated for part in precision.split("-"))

    def packs(self, precision: str) -> bool:
        """Whether the farm packs weights at a precision (a pair too); only ONNX models can be."""
        return any(part in self.packed for part in precision.split("-"))

    def quantization_options(self, precision: str, device: str = "") -> dict[str, Option]:
        """Return the quantization options that a precision (a pair too) has, on a device that may have others."""
        own = self.device(device).quantization
        return {
            name: own.get(name, option)
            for part in precision.split("-")
            for name, option in self.quantization.get(part, {}).items()
        }

    def too_old(self, device: str, arch: str, precision: str) -> str:
        """Return why a card of an `arch` (`sm_75:t4`) has no such precision; empty if it has."""
        lowest, found = self.device(device).lowest.get(precision, 0), re.match(r"sm_([0-9]+)", arch)
        if not found or int(found[1]) >= lowest:
            return ""
        return f"{precision} needs compute capability {lowest / 10}, and this card has {int(found[1]) / 10}"

    def resolved(
        self, precision: str, given: Mapping[str, OptionValue], device: str
    ) -> tuple[dict[str, OptionValue], dict[str, OptionValue]]:
        """Return the compile and quantization options of a spec, each from those `given` for all that it has.

        Defaults are filled in, but for `newer` options. Raises ValueError that names each wrong value.
        """
        quantizer = self.quantization_options(precision, device)
        return (
            _resolve(self.options_of(device), given, f"{self.name} option"),
            _resolve(quantizer, given, f"quantization option of {precision}"),
        )

    @property
    def binds(self) -> bool:
        """Whether some program of it is tied to the CPU family of the machine that makes it."""
        return self.tuning_binds or any(option.family_bound for option in self.options.values())

    def family_bound(self, options: Mapping[str, OptionValue], tuning: str) -> bool:
        """Whether options and tuning mode tie the program to the CPU family of the machine that makes it."""
        return (tuning != OFF and self.tuning_binds) or any(
            options.get(name) in option.family_bound for name, option in self.options.items()
        )

    def threads(self, options: Mapping[str, OptionValue], tuning: str) -> int:
        """Return the threads that a program is tuned for and measured with; 0 if they change nothing in it."""
        if tuning == OFF or "threads" not in self.options:
            return 0
        threads = options.get("threads", self.options["threads"].default)
        return threads if isinstance(threads, int) else 0

    def resolve_env(self, given: Mapping[str, object]) -> dict[str, str]:
        """Return the environment of a compile, each value in its one spelling; what says nothing is left out.

        Raises ValueError that names each variable that may not be set and each wrong value.
        """
        problems = {name: self.env_problem(name, value) for name, value in given.items()}
        if any(problems.values()):
            raise ValueError("; ".join(f"`{name}` {problem}" for name, problem in problems.items() if problem))
        spelt = {name: self._spelt(name, value) for name, value in given.items()}
        return {name: value for name, value in sorted(spelt.items()) if value}

    def variable(self, name: str) -> Variable | None:
        """Return what is known of an environment variable, be it refused or not; None if it is not this compiler's."""
        refused = ((pattern, Variable(refused=why)) for pattern, why in self.refused_env.items())
        if not re.fullmatch("[A-Z0-9_]+", name):  # A pattern's star takes any text.
            return None
        return next((found for pattern, found in (*refused, *self.env.items()) if fnmatchcase(name, pattern)), None)

    def env_problem(self, name: str, value: Any) -> str:
        """Return what is wrong with a variable and its value, or an empty string."""
        try:
            self._spelt(name, value)
        except ValueError as error:
            return str(error)
        return ""

    def _spelt(self, name: str, value: Any) -> str:
        if (found := self.variable(name)) is None:
            raise ValueError(f"is not a variable of {self.name} that may be set")
        return found.spelt(value)

    def is_file(self, name: str) -> bool:
        """Whether a variable's value is a file."""
        found = self.variable(name)
        return found is not None and found.kind == "file"

    def lacks(self, features: Iterable[str], precision: str, options: Mapping[str, OptionValue]) -> dict[str, str]:
        """Return each feature that is asked for and missing in a toolchain, and what asks for it."""
        wanted = {name: f"precision {precision}" for part in precision.split("-") for name in self.needs.get(part, ())}
        known = {**self.options, **self.quantization_options(precision)}
        for name, value in options.items():
            option = known[name]
            if option.feature and value != option.default:
                wanted.setdefault(option.feature, f"option `{name}`")
        return {name: what for name, what in wanted.items() if name not in features}

    def emulates(self, device: str, precision: str) -> tuple[str, ...]:
        """Return the parts of a precision that a device computes in a wider type: it rounds, and gains no speed."""
        own = self.device(device).computes
        parts = (part for part in precision.split("-") if part not in own)
        return tuple(part for part in parts if _listed(device, self.emulated.get(part, ())))

    def program_extension(self, options: Mapping[str, OptionValue]) -> str:
        """Return the ending of a program's file."""
        return ".json" if options.get("format") == "json" else self.extension

    def libraries_of(self, precision: str) -> tuple[str, ...]:
        """Return the names of the libraries outside the toolchain that rewrite a model at this precision."""
        parts = ["*", *precision.split("-")]
        return tuple(sorted({name for part in parts for name in self.libraries.get(part, ())}))


def filled(options: Mapping[str, Option], given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the options of a spec with every default filled in."""
    return {name: given.get(name, option.default) for name, option in options.items()}


def _resolve(options: Mapping[str, Option], given: Mapping[str, OptionValue], what: str) -> dict[str, OptionValue]:
    known = {name: value for name, value in given.items() if name in options}
    if problems := [f"{what} `{name}` {why}" for name, value in known.items() if (why := options[name].problem(value))]:
        raise ValueError("; ".join(problems))
    # The order of names in a list says nothing.
    values = {
        name: tuple(sorted(set(value))) if isinstance(value, list | tuple) else value
        for name, value in filled(options, known).items()
    }
    return {
        name: value for name, value in values.items() if not (options[name].newer and value == options[name].default)
    }


def _listed(device: str, patterns: Sequence[str]) -> bool:
    """Whether a device matches; the last pattern that matches counts."""
    return next(
        (not pattern.startswith("!") for pattern in reversed(patterns) if fnmatchcase(device, pattern.lstrip("!"))),
        False,
    )


def canonical_precision(text: str) -> str:
    """Return a precision as identifiers spell it, with the quantized part first: `fp16+int8` -> `int8-fp16`."""
    parts = re.split(r"[+-]", text.strip().lower())
    return "-".join(sorted(parts, key=lambda part: (part.endswith("16"), part)))


def default_tolerance(precision: str) -> float:
    """Return the default tolerance of rel_l2 for a precision; a pair has that of its coarser half."""
    return max(TOLERANCES[part] for part in precision.split("-"))


def default_equal_share(precision: str) -> float:
    """Return the share of equal values that integer and bool outputs need by default."""
    return 1.0 if precision == "fp32" else 0.99


_INT4_OPTIONS = {
    "block_size": Option(32, "values that share one scale", choices=(16, 32, 64, 128, 256)),
    "symmetric": Option(True, "scales without a zero point"),
}

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
            devices=("cpu",),
        ),
        "threads": Option(1, "how many threads a tuned program runs with at most", low=1, newer=True, devices=("cpu",)),
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
        "int4": _INT4_OPTIONS,
    },
    calibrated=frozenset({"int8"}),
    # The onnx version is part of the toolchain id.
    toolchains=("onnxruntime",),
    libraries={"bf16": ("ml_dtypes",), "int8": ("sympy",), "int4": ("onnx_ir",)},
    # Weights are kept in bf16 and widened when the program is loaded.
    emulated={"bf16": ("*",)},
)

_STORES = {
    "MIOPEN_USER_DB_PATH": "{database}",
    "MIOPEN_CUSTOM_CACHE_DIR": "{database}/kernels",
    "MIGRAPHX_PROBLEM_CACHE": "{database}/problem_cache.json",
}
_QUICK = {
    "MIOPEN_FIND_ENFORCE": "3",
    # With it MIGraphX (ROCm 7.0 and newer) writes its cache after every operation, else when a program is done.
    "MIGRAPHX_TRACE_BENCHMARKING": "1",
}
# Enforcement 3 skips what the system database holds, so its path leads to nothing but what was tuned here.
_EXHAUSTIVE = {**_QUICK, "MIOPEN_SYSTEM_DB_PATH": "{database}"}
_MIGRAPHX_TUNING = {
    "quick": TuningMode(_STORES, _QUICK),
    "exhaustive": TuningMode(_STORES, _EXHAUSTIVE, {"exhaustive_tune": True}),
    "full": TuningMode(_STORES, {**_EXHAUSTIVE, "MIGRAPHX_MLIR_TUNE_EXHAUSTIVE": "1"}, {"exhaustive_tune": True}),
}

_MIGRAPHX_PRECISIONS = (
    NATIVE, "fp32", "fp16", "bf16", "int8", "fp8", "int8-fp16", "int8-bf16", "fp8-fp16", "fp8-bf16",
)  # fmt: skip
_INT4_WEIGHTS = ("int4", "int4-fp16", "int4-bf16")

# TRACE_EVAL is left out: it prints while a program runs, which is when it is measured.
# MIGraphX counts levels from 0 (none) to 5, MIOpen from 1 (quiet) to 7.
_MIGRAPHX_DEBUGGING = Debugging(
    levels={
        level: {"MIGRAPHX_LOG_LEVEL": str(number), "MIOPEN_LOG_LEVEL": str(number + 2)}
        for number, level in enumerate(LOG_LEVELS, start=1)
    },
    traces={
        **{
            name: {f"MIGRAPHX_TRACE_{name.upper().replace('-', '_')}": "1"}
            for name in (
                "compile", "passes", "quantization", "mlir", "benchmarking", "finalize", "onnx-parser", "hiprtc",
            )
        },
        "matchers": {"MIGRAPHX_TIME_MATCHERS": "1"},
        "commands": {"MIGRAPHX_TRACE_CMD_EXECUTE": "1"},
        "miopen": {"MIOPEN_ENABLE_LOGGING": "1", "MIOPEN_ENABLE_LOGGING_CMD": "1"},
    },
    timings={"MIGRAPHX_TIME_PASSES": "1"},
)  # fmt: skip

MIGRAPHX = Compiler(
    name="migraphx",
    recipe=1,
    pack_options={"offload_copy": False, "format": "msgpack"},
    devices=(
        DeviceKind("gfx*", (*_MIGRAPHX_PRECISIONS, *_INT4_WEIGHTS), tuning=_MIGRAPHX_TUNING, maker="amd"),
        # The cpu target turns packed weights to float before it unpacks them, and stops.
        DeviceKind("cpu", _MIGRAPHX_PRECISIONS),
        # One inference of a small net takes 12 s on ref.
        DeviceKind("ref", (*_MIGRAPHX_PRECISIONS, *_INT4_WEIGHTS), min_samples=2),
    ),
    formats=("onnx", "tf"),
    extension=".mxr",
    options={
        "offload_copy": Option(True, "the program copies its inputs and outputs between host and GPU itself"),
        "fast_math": Option(True, "approximate functions; double and int64 become narrower inside"),
        "nhwc": Option(True, "TensorFlow: the model's 4-D inputs are NHWC (the program's own are NCHW)"),
        "format": Option(
            "msgpack",
            "of the program's file: msgpack (.mxr), or json (.json), which people can read and is larger",
            choices=("msgpack", "json"),
            newer=True,
        ),
        "max_loop_iterations": Option(
            10, "iterations that a Loop of unknown count may take", low=1, feature="max_loop_iterations"
        ),
        "limit_max_iterations": Option(
            65535, "largest count that a Loop may name itself", low=1, feature="limit_max_iterations", newer=True
        ),
        "use_debug_symbols": Option(
            False, "instructions carry the names of the model's nodes", feature="use_debug_symbols", newer=True
        ),
        "autocast_fp8": Option(
            False, "fp8 inputs and outputs of the model become float32", feature="autocast_fp8", newer=True
        ),
    },
    quantization={
        "fp16": {"fp16_operators": Option(("all",), "MIGraphX operators that fp16 converts", newer=True)},
        "bf16": {"bf16_operators": Option(("all",), "MIGraphX operators that bf16 converts", newer=True)},
        "int4": _INT4_OPTIONS,
    },
    calibrated=frozenset({"int8", "fp8"}),
    find_enforce="MIOPEN_FIND_ENFORCE",
    toolchains=("rocm", "migraphx"),
    env=MIGRAPHX_ENV,
    refused_env=MIGRAPHX_REFUSED_ENV,
    refused_options={
        "exhaustive_tune": "write `tuning: exhaustive`",
        "skip_unknown_operators": "MIGraphX compiles what it does not know to a program that computes garbage",
        "print_program_on_error": "it only prints",
        "is_nhwc": "write `nhwc`",
        "ins_names": "write `fp16_operators` or `bf16_operators`; int8 takes all convolutions and dots, or none",
        **dict.fromkeys(
            ("batch_size", "default_dim_value", "default_dyn_dim_value", "dim_params", "map_input_dims"),
            "sizes come from `dims`, `batches` and the `shape` of an input",
        ),
    },
    features={
        "autocast_fp8": "MIGraphX 2.10 (ROCm 6.2)",
        "limit_max_iterations": "MIGraphX 2.9 (ROCm 6.1)",
        "max_loop_iterations": "MIGraphX 2.6 (ROCm 5.6)",
        "quantize_bf16": "MIGraphX 2.12 (ROCm 6.4)",
        "quantize_fp16": "MIGraphX 2.6 (ROCm 5.6)",
        "quantize_fp8": "MIGraphX 2.12 (ROCm 6.4)",
        "quantize_int8": "MIGraphX 2.6 (ROCm 5.6)",
        "unpack_int4": "MIGraphX 2.11 (ROCm 6.3)",
        "use_debug_symbols": "MIGraphX 2.16",
    },
    packed=frozenset({"int4"}),
    needs={"int4": ("unpack_int4",)} | {name: (f"quantize_{name}",) for name in ("fp16", "bf16", "int8", "fp8")},
    # MIGraphX `src/targets/gpu/device_name.cpp`; the cpu target computes all in float32, ref in what was asked.
    emulated={
        "fp8": ("*", "!gfx94?", "!gfx95?", "!gfx12??", "!ref"),
        "bf16": ("gfx1030", "cpu"),
        "fp16": ("cpu",),
        "int8": ("cpu",),
    },
    debugging=_MIGRAPHX_DEBUGGING,
)


@cache
def compilers() -> Mapping[str, Compiler]:
    """Return the farm's own compilers and those of extensions, by name. Extensions are looked for at the first call."""
    known = {compiler.name: compiler for compiler in (ONNXRUNTIME, MIGRAPHX)}
    for entry, added in entry_points.load(entry_points.COMPILERS):
        if isinstance(added, Compiler) and not added.extension.endswith(SUFFIXES):  # Nobody could fetch its programs.
            raise UsageError(
                f"the compiler {added.name} of {entry.module} names programs *{added.extension}",
                hint=f"clients take files that end with {', '.join(SUFFIXES)}: let its `extension` end so",
            )
        for name, kinds in ({} if isinstance(added, Compiler) else added).items():
            known[name] = known[name].adding(kinds)
        known |= {added.name: added} if isinstance(added, Compiler) else {}
    return known


@cache
def child_modules() -> Mapping[str, list[str]]:
    """Return the module of each added device with its package's folder: what `farm.runner.actions` adds in children."""
    return {
        f"{compiler.name}/{kind.pattern}": with_folder(kind.module)
        for compiler in compilers().values()
        for kind in compiler.devices
        if kind.module
    }


def with_folder(module: str) -> list[str]:
    """Return a module's name, and the folder of its package."""
    spec = find_spec(module.rpartition(".")[0])
    return [module, next(iter(spec.submodule_search_locations or ()), "") if spec else ""]


TRACES: tuple[str, ...] = tuple(MIGRAPHX.debugging.traces)  # Everything that some compiler can trace.
