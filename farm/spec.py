"""The spec: everything that can change the output of one compile, and its cache key.

The key is a published contract: `docs/cache-key.md` describes it with test vectors.
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict

from farm.runner.documents import DataRecipe, DeviceDocument, InputSpec, OpenSize
from farm.runner.protocol import Digest, File, Size

SCHEMA = 1  # Number of the cache key's recipe: every change to the recipe gets a new number.
Json = Any  # A JSON value: None, bool, int, float, str, or lists and string-keyed dicts of them.
JsonSchema = dict[str, Any]  # A JSON Schema: what pydantic makes of a model, whose form the standard leaves open.


class FileReference(TypedDict):
    """A file and the blob that holds its bytes."""

    path: File
    digest: Digest
    size: Size


PlainSize = int | OpenSize  # The size of a dimension, as a spec has it.

OptionValue = bool | int | float | str | Sequence[str]


class KeyedModel(TypedDict):
    """The model of a spec; `outputs` are the nodes that a TensorFlow graph is cut at."""

    digest: str
    format: str
    outputs: NotRequired[Sequence[str]]


class KeyedCompiler(TypedDict):
    """The compiler of a spec: the number of our recipe for it, and the versions of libraries that rewrite the model."""

    name: str
    recipe: int
    libraries: Mapping[str, str]


class KeyedTuning(TypedDict):
    """The tuning of a spec; `budget` (seconds) is there if it cut the tuning short."""

    mode: str
    miopen_find_enforce: NotRequired[int]
    budget: NotRequired[float]


class KeyedVerification(TypedDict):
    """What a program is compared with: samples, and who computes the expected outputs."""

    samples: DataRecipe | None
    reference: str


class SpecDocument(TypedDict):
    """One fully resolved compile, every field present. Equal specs have equal cache keys and may share one artifact.

    All dimensions of `inputs` are resolved; `verification` is None if it is off. Names, labels, priority, limits,
    tolerances and gates are not part of a spec. `schema` is the number of the key's recipe (`SCHEMA`).
    """

    model: KeyedModel
    compiler: KeyedCompiler
    device: DeviceDocument
    toolchain: str
    precision: str
    inputs: Mapping[str, InputSpec]
    batch: PlainSize | None
    options: Mapping[str, OptionValue]
    tuning: KeyedTuning
    env: Mapping[str, str]
    calibration: DataRecipe | None
    quantization: Mapping[str, OptionValue]
    verification: KeyedVerification | None
    salt: str
    schema: int


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a program, as far as it changes the program.

    `arch` is the full name with its feature bits (`gfx942:sramecc+:xnack-`), `gfx942:any` if only the
    arch is keyed, or `cpu`. `cpu_family` is set if a CPU result only runs on the same CPU family.
    """

    arch: str
    compute_units: int | None = None
    xcc: int | None = None
    cpu_family: str | None = None

    def as_dict(self) -> DeviceDocument:
        """Return the device as plain JSON."""
        return cast(DeviceDocument, asdict(self))


def canonical_json(value: Json) -> str:
    """Return the canonical JSON of a value, which is hashed.

    Keys sorted by code point, no white space, text as UTF-8 without escapes beyond what JSON demands, numbers
    that are not integers as their shortest decimal in a string (`0.5` -> `"0.5"`).

    Raises ValueError for numbers that are not finite.
    """
    return json.dumps(_decimals_as_text(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _decimals_as_text(value: Json) -> Json:
    match value:
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} has no place in a cache key")
            return repr(value)
        case Mapping():
            return {key: _decimals_as_text(item) for key, item in value.items()}
        case list() | tuple():
            return [_decimals_as_text(item) for item in value]
        case _:
            return value


def cut_short(document: SpecDocument, budget: float) -> SpecDocument:
    """Return the spec (as a document) for a tuning that its budget, in seconds, cut short.

    A finished tuning has no budget in its key, so a larger budget is a miss that continues from the database.
    """
    return {**document, "tuning": {**document["tuning"], "budget": whole_seconds(budget)}}


def whole_seconds(seconds: float) -> float:
    """Return a number of seconds as an integer if it is one."""
    return int(seconds) if seconds == int(seconds) else seconds


def digest_of(value: Json) -> str:
    """Return the SHA-256 (64 hex digits) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def cache_key(spec: SpecDocument) -> str:
    """Return the spec's cache key: the SHA-256 (64 hex digits) of its canonical JSON."""
    return key_of_fields(canonical_fields(spec))


def canonical_fields(document: Mapping[str, object]) -> dict[str, str]:
    """Return the canonical JSON of each field of a spec, with its name: fields that cells share are written once."""
    return {name: f'"{name}":{canonical_json(value)}' for name, value in document.items()}


def key_of_fields(fields: Mapping[str, str]) -> str:
    """Return the cache key of the spec that has these `canonical_fields`."""
    return hashlib.sha256(f"{{{','.join(map(fields.__getitem__, sorted(fields)))}}}".encode()).hexdigest()


def model_digest(files: Mapping[str, str]) -> str:
    """Return the digest of a model from its files' `{relative path: SHA-256}`.

    A model of one file has that file's SHA-256. A model with external data has the SHA-256 of the canonical
    JSON of the sorted list of `[relative path, SHA-256]`.
    """
    if len(files) == 1:
        return next(iter(files.values()))
    return digest_of(sorted([path, digest] for path, digest in files.items()))


LONGEST_NAME = 128  # Characters of a program's file name: what clients take, and every file system.

SUFFIXES = (".json", ".mxr", ".npz", ".onnx", ".txt", ".zip")
"""How names of artifacts' files end: an untrusted farm must not name a `Makefile` or a `conftest.py`."""


def program_name(identifier: str, extension: str) -> str:
    """Return the name of a cell's program file: its identifier, of a long one the beginning and a digest of it all.

    Cells with one cache key share a program; each names its file.
    """
    name = identifier.replace("/", "--")
    room = LONGEST_NAME - len(extension)
    return (name if len(name) <= room else f"{name[: room - 13]}-{digest_of(identifier)[:12]}") + extension


def program_extension(path: str, identifier: str) -> str:
    """Return the extension of a program's file that has the name of a cell: a compiler's may have several dots."""
    for stem in (identifier.replace("/", "--"), digest_of(identifier)[:12]):
        if stem and stem in path:
            return path.rpartition(stem)[2]
    return PurePosixPath(path).suffix


_NOTHING: tuple[Any, ...] = (None, "", {})


def comparable(spec: SpecDocument) -> str:
    """Name what durations depend on, apart from the model: target, precision and tuning mode of a spec."""
    device = re.sub(r"[^a-z0-9]+", "-", str(spec["device"]["arch"]).lower())
    return f"{spec['compiler']['name']}-{device}.{spec['precision']}.{spec['tuning']['mode']}"


def changes(before: SpecDocument, after: SpecDocument) -> list[str]:
    """List the parts of the cache key that differ: `options.level: standard -> tuned`."""
    found: list[str] = []
    _compare("", before, after, found)
    return found or ["compiled again: the artifact is gone"]


def _compare(path: str, before: Any, after: Any, found: list[str]) -> None:
    if isinstance(before, Mapping) and isinstance(after, Mapping) and (before.keys() & after.keys() or not path):
        for name in sorted({*before, *after}):
            _compare(f"{path}.{name}" if path else name, before.get(name), after.get(name), found)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if list(before) != list(after):
            found.append(f"{path}: {list(before)} -> {list(after)}")
    elif before != after:
        found.append(f"{path}: {_short(before)} -> {_short(after)}")


def _short(value: Any) -> str:
    """One value for people: digests shortened, a missing value as `none`, a document by its first words."""
    match value:
        case _ if value in _NOTHING:
            return "none"
        case Mapping():
            return ", ".join(f"{name} {_short(item)}" for name, item in value.items() if item not in _NOTHING)
        case _:
            text = str(value)
            return f"{text[:12]}…" if len(text) == 64 else text
