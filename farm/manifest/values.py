"""How the values of a manifest are read: each odd spelling with its rule, its message, and its JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import core_schema

from farm.errors import shown, suggestion
from farm.jobs.state import FailureKind
from farm.models.shapes import Extent, Span
from farm.spec import JsonSchema
from farm.targets.compilers import TRACES, canonical_precision, compilers
from farm.units import DURATION, SHARE, SIZE, parse_duration, parse_share, parse_size

MAX_SELECTORS = 256
"""Entries of `exclude`, `include`, `overrides` and `expected` each."""
MAX_DIMENSION = 2**31 - 1
MAX_OPTIMALS = 16
"""Sizes of a dynamic dimension that are verified and measured, in addition to the smallest and the largest."""

SCHEMA_ID = "https://migraphx-farm.dev/manifest.schema.json"

# If a part of a text may have any character, `max_length` bounds it: pydantic compiles `[^/]{0,200}` to 200 copies of a
# class of all of Unicode, at each start of a command that takes a manifest.
NAME = r"^[a-z0-9][a-z0-9._-]{0,99}$"
_DIM_NAME = r"^[A-Za-z_][A-Za-z0-9_.]{0,63}$"
_LABEL_KEY = r"^[a-z0-9][a-z0-9._/-]{0,62}$"
_SUM = r"^ *[A-Za-z_][A-Za-z0-9_.]{0,63}( *\+ *([A-Za-z_][A-Za-z0-9_.]{0,63}|[0-9]{1,9})){0,7} *$"
_URL = r"^https://[^\s]+$"
BUCKET_URL = r"^s3://[a-z0-9][a-z0-9.-]{1,62}/[^\s]+$"
PACKAGE = r"^[A-Za-z_][A-Za-z0-9_]*(/[^/\\]+)+$"
SHA256 = r"^[0-9a-f]{64}$"
HUB_MODEL = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
COMMIT = r"^[0-9a-f]{40}$"
HUB_FILE = r"^[A-Za-z0-9_][^/\\]*(/[A-Za-z0-9_][^/\\]*)*$"
FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
_OUTPUT_NODE = r"^[A-Za-z0-9.][A-Za-z0-9_.\\/>-]{0,200}(:0)?$"
_CRON = r"^[0-9A-Za-z*,/#-]{1,100}( [0-9A-Za-z*,/#-]{1,100}){4}$"
_TIMEZONE = r"^[A-Za-z][A-Za-z0-9_+-]{0,30}(/[A-Za-z0-9_+-]{1,30}){0,2}$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"

PRECISIONS: tuple[str, ...] = tuple(
    dict.fromkeys(
        precision for compiler in compilers().values() for kind in compiler.devices for precision in kind.precisions
    )
)
"""Every precision that some compiler has on some device, spelt as in identifiers."""
SPELLINGS = tuple(dict.fromkeys(text for name in PRECISIONS for text in (name, name.replace("-", "+"))))


class Unknown(ValueError):
    """An unknown word; `hint` says which was meant, or which there are."""

    def __init__(self, message: str, word: str, known: Iterable[str]) -> None:
        super().__init__(message)
        self.hint = suggestion(ELSEWHERE.get(word, word), known)


ELSEWHERE = {
    "bfloat16": "bf16", "double": "fp32", "float": "fp32", "float16": "fp16", "float32": "fp32", "half": "fp16",
    "single": "fp32",
}  # fmt: skip
"""What other tools call a precision, and its name here."""


# --- how odd values are read --------------------------------------------------------------------------------------


def read_by(function: Callable[[Any], Any], schema: JsonSchema) -> Any:
    """Return annotations for a value that `function` reads (ValueError says what is wrong) and `schema` describes."""
    return PlainValidator(function), WithJsonSchema(schema)


@dataclass(frozen=True, eq=False)
class Short:
    """Annotation: a value that may be written short. Parser and schema know both spellings, and refuse `null`."""

    convert: Callable[[Any], Any]
    schema: JsonSchema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        long = handler(schema)
        kept = [entry for entry in long.get("anyOf", [long]) if entry != {"type": "null"}]
        return {"anyOf": [self.schema, *kept]}


def _version(value: Any) -> int:
    if value is True or value != 1:
        raise ValueError(f"{shown(value)} is not a version of the format that is known here: write 1")
    return 1


def _address(text: str) -> str:
    parts = urlsplit(text)  # Its own errors say what is wrong with a port or with brackets.
    if not parts.hostname or parts.port == 0:
        raise ValueError(f"{shown(text)} names no {'port' if parts.hostname else 'host'}")
    return text


def _precision(value: Any) -> str:
    if value not in SPELLINGS:
        raise Unknown(f"unknown precision {shown(value)}", str(value), SPELLINGS)
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


def _is_number_of(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION


def _no_sizes(values: Sequence[Any]) -> str:
    said = "is not a size" if len(values) == 1 else "are not sizes"
    return f"{_named(values)} {said}: write whole numbers from 0 to {MAX_DIMENSION}"


def _named(values: Sequence[Any]) -> str:
    return ", ".join(map(shown, values[:5])) + (", …" if len(values) > 5 else "")


def _number_of(value: Any) -> int:
    if not _is_number_of(value):
        raise ValueError(_no_sizes([value]))
    return int(value)


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
    given = value if isinstance(value, list | tuple) else [value]
    wrong = [size for size in given if not isinstance(size, dict) and not _is_number_of(size)]
    if wrong:
        raise ValueError(_no_sizes(wrong))
    sizes = [_size(size) for size in given]
    if not sizes or len(sizes) > 1000:
        raise ValueError("must have between 1 and 1000 sizes")
    if len(set(sizes)) < len(sizes):
        raise ValueError("the same size occurs twice")
    return tuple(sizes)


def _batch_sizes(value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, list | tuple) else [value]
    wrong = [size for size in given if not _is_number_of(size) or not size]
    if not isinstance(value, list | tuple) or wrong:
        raise ValueError(f"must be a list of whole numbers from 1 on, such as [1, 8], not {_named(wrong or [value])}")
    return tuple(size for size in _sizes(value) if isinstance(size, int))


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


def _limit(value: Any) -> float | None:
    return None if value == "off" else parse_share(value)


def _least(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"must be greater than zero, not {value}")
    return float(value)


def _trace(value: Any) -> str:
    if value not in TRACES:
        raise Unknown(f"no compiler traces {shown(value)}", str(value), TRACES)
    return str(value)


def _kind(value: Any) -> str:
    if value not in list(FailureKind):
        raise Unknown(f"unknown kind {shown(value)}", str(value), FailureKind)
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


def data_use(value: Any) -> Any:
    """Read a use of data: `imagenet` is short for `{dataset: imagenet}`."""
    if value is None:
        raise ValueError("has no value: write the name of a dataset, or {path: FILE}")
    return {"dataset": value} if isinstance(value, str) else value


def sweep_use(value: Any) -> Any:
    """Read a sweep: a list is short for `{batches: [...]}`."""
    if value is None:
        raise ValueError("has no value: write batches to try, such as [1, 8, 32]")
    return {"batches": value} if isinstance(value, list) else value


def concurrency_use(value: Any) -> Any:
    """Read a concurrency: a name is short for `{group: NAME}`."""
    if value is None:
        raise ValueError("has no value: write the name of a group")
    return {"group": value} if isinstance(value, str) else value


def tuning_use(value: Any) -> Any:
    """Read a tuning: `quick` is short for `{mode: quick}`. If `mode` is given, it also resets `background`."""
    if isinstance(value, str):
        value = {"mode": value}
    return {"background": "off", **value} if isinstance(value, dict) and "mode" in value else value


def off_or(value: Any) -> Any:
    """Read an entry that may be `off`."""
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
BATCHES_SCHEMA = {
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

Version = Annotated[int, *read_by(_version, {"const": 1})]
Name = Annotated[str, Field(pattern=NAME)]
OutputNode = Annotated[str, Field(pattern=_OUTPUT_NODE)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Reason = Annotated[str, Field(max_length=1000)]
Duration = Annotated[float | None, *read_by(parse_duration, {"type": "string", "pattern": DURATION})]
Size = Annotated[int | None, *read_by(parse_size, {"type": "string", "pattern": SIZE})]
Limit = Annotated[float | None, *read_by(_limit, {"anyOf": [{"type": "string", "pattern": SHARE}, {"const": "off"}]})]
Rate = Annotated[float | None, *read_by(_least, _POSITIVE_SCHEMA)]
Address = Annotated[str, Field(pattern=_URL), AfterValidator(_address)]
Link = Annotated[str, Field(pattern=r"^https?://[^\s<>\"']+$", max_length=508)]
RefTag = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Precision = Annotated[str, *read_by(_precision, {"enum": list(SPELLINGS)})]
TargetText = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,99}$")]
Dimension = Annotated[int | str, *read_by(_dimension, {"anyOf": [_NUMBER_SCHEMA, {"type": "string", "pattern": _SUM}]})]
Sizes = Annotated[
    tuple[Extent, ...],
    *read_by(
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
    *read_by(
        _batch_sizes,
        BATCHES_SCHEMA,
    ),
]
Patterns = Annotated[
    tuple[str, ...],
    *read_by(_patterns, {"anyOf": [_PATTERN_SCHEMA, {"type": "array", "items": _PATTERN_SCHEMA, "minItems": 1}]}),
]
Number = Annotated[float | int | None, *read_by(_number, {"type": "number"})]
InputRange = Annotated[
    tuple[float | int, float | int] | None,
    *read_by(_range, {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]
Date = Annotated[str, *read_by(_day, {"type": "string", "format": "date", "pattern": _DATE})]
Tolerances = Annotated[
    dict[str, dict[str, float]],
    *read_by(
        _tolerance,
        {
            "anyOf": [
                _POSITIVE_SCHEMA,
                {
                    "type": "object",
                    "propertyNames": {"enum": ["*", *SPELLINGS]},
                    "additionalProperties": _TOLERANCES_SCHEMA,
                },
            ]
        },
    ),
]
ExpectedKind = Annotated[str, *read_by(_kind, {"enum": [kind.value for kind in FailureKind]})]
Count = Annotated[int | None, *read_by(_count, {"type": "integer", "minimum": 1, "maximum": 100_000})]
_NAMES_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Options = dict[
    Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
    Annotated[
        bool | int | str | tuple[str, ...],
        *read_by(_option_value, {"anyOf": [{"type": ["boolean", "integer", "string"]}, _NAMES_SCHEMA]}),
    ],
]
DimName = Annotated[str, Field(pattern=_DIM_NAME)]
Toolchain = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,99}$")]
Dims = dict[DimName, Sizes]
Shapes = Annotated[
    dict[Name, Annotated[dict[DimName, Annotated[Extent, *read_by(_size, _SIZE_SCHEMA)]], Field(min_length=1)]],
    Field(max_length=1000),
]
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL_KEY)], Annotated[str, Field(max_length=256)]], Field(max_length=64)
]
Trace = Annotated[str, *read_by(_trace, {"enum": list(TRACES)})]
Cron = Annotated[str, Field(pattern=_CRON)]
Timezone = Annotated[str, Field(pattern=_TIMEZONE)]
BucketObject = Annotated[str, Field(pattern=BUCKET_URL)]
LabelKey = Annotated[str, Field(pattern=_LABEL_KEY)]
Salt = Annotated[str, Field(max_length=100)]
Priority = Annotated[int, Field(ge=-100, le=100)]
