"""A family: one model, target and precision at several shapes, with an index that says which file serves what. Pure.

The index is published as JSON Schema (`schema()`); readers ignore fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from farm.artifacts.sidecar import Digest, Seconds, Sidecar, SidecarDocument
from farm.client.fetching import SIDECAR_SUFFIX
from farm.models.shapes import BATCH
from farm.spec import JsonSchema, PlainSize
from farm.wire.program import MeasuredPoint

if TYPE_CHECKING:
    from farm.artifacts.refs import SnapshotCell


class _FamilyPart(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Batches(_FamilyPart):
    """The batches that a program takes."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)


class MemberInput(_FamilyPart):
    """An input, as the sidecar of the program has it."""

    name: str
    dtype: str
    shape: list[int | str]


class Member(_FamilyPart):
    """A program of the family; `program` and `sidecar` are paths relative to the index.

    `sizes` are those of the named dimensions, `{"min", "max", "optimals"}` of a range, which was measured at several
    `points`. `latency` is the median in seconds, `throughput` samples a second, null where nothing was measured.
    """

    shape: str
    sizes: dict[str, int | dict[str, Any]]
    batch: Batches
    program: str
    sidecar: str
    key: Digest
    inputs: list[MemberInput]
    latency: Seconds | None
    throughput: float | None
    points: list[MeasuredPoint]
    shared: bool


class Family(_FamilyPart):
    """`family.json`: the members by the largest batch that they take, all of one toolchain and device."""

    schema_: Literal[1] = Field(alias="schema")
    ref: str
    model: str
    target: str
    precision: str
    device: str
    toolchain: str
    members: list[Member] = Field(min_length=1)


class BatchRange(TypedDict):
    """`Batches` as plain JSON."""

    min: int
    max: int


class MemberPort(TypedDict):
    """An input of a member."""

    name: str
    dtype: str
    shape: Sequence[int | str]


class MemberDocument(TypedDict):
    """A `Member` as plain JSON."""

    shape: str
    sizes: Mapping[str, PlainSize]
    batch: BatchRange
    program: str
    sidecar: str
    key: str
    inputs: list[MemberPort]
    latency: float | None
    throughput: float | None
    points: list[MeasuredPoint]
    shared: bool


class FamilyIndex(TypedDict):
    """A `Family` as plain JSON."""

    schema: int
    ref: str
    model: str
    target: str
    precision: str
    device: str
    toolchain: str
    members: list[MemberDocument]


FamilyMember = tuple["SnapshotCell", SidecarDocument]
"""A cell of a ref, and its sidecar."""


def schema() -> JsonSchema:
    """Return the index's JSON Schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Family.model_json_schema(by_alias=True),
        "title": "Family index of the MIGraphX compile farm",
    }


def family_index(ref: str, members: Iterable[FamilyMember]) -> FamilyIndex:
    """Return the index of a family whose members are (a ref's cell, its sidecar), all of one toolchain and device.

    The members are in the order in which a serving program asks them: by the largest batch that they take.
    """
    pairs = sorted(members, key=lambda pair: (_batch(pair[0])["max"], pair[0]["shape"]))
    cell = pairs[0][0]
    return {
        "schema": 1,
        "ref": ref,
        "model": cell["model"],
        "target": cell["target"],
        "precision": cell["precision"],
        "device": cell["device"],
        "toolchain": cell["toolchain"],
        "members": [_member(cell, sidecar) for cell, sidecar in pairs],
    }


def _member(cell: SnapshotCell, document: SidecarDocument) -> MemberDocument:
    sidecar = Sidecar.model_validate(document)
    measured = sidecar.measurements
    program = f"{cell['shape']}/{sidecar.of_cell(cell['identifier']).blobs.program.path}"
    return {
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        "batch": _batch(cell),
        "program": program,
        "sidecar": f"{program}{SIDECAR_SUFFIX}",
        "key": cell["key"],
        "inputs": [{"name": port["name"], "dtype": port["dtype"], "shape": port["shape"]} for port in sidecar.inputs],
        "latency": measured.latency["median"] if measured.latency else None,
        "throughput": measured.throughput,
        "points": measured.points,
        "shared": measured.shared,
    }


def _batch(cell: SnapshotCell) -> BatchRange:
    """Return the batches that a cell's program takes; 1 if its model names no batch."""
    size = cell["sizes"].get(BATCH, 1)
    return {"min": size, "max": size} if isinstance(size, int) else {"min": size["min"], "max": size["max"]}
