"""A family: one model, target and precision at several shapes, with an index that says which file serves what. Pure.

The index is published as JSON Schema (`schema()`); readers ignore fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.artifacts.sidecar import Digest, MeasuredPoint, Seconds
from farm.models.shapes import BATCH

Document = dict[str, Any]

INDEX = "family.json"
"""File name of the index. `docs/object-storage.md` describes its fields."""


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


def schema() -> dict[str, Any]:
    """Return the index's JSON Schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Family.model_json_schema(by_alias=True),
        "title": "Family index of the MIGraphX compile farm",
    }


def family_index(ref: str, members: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Document:
    """Return the index of a family whose members are (a ref's cell, its sidecar), all of one toolchain and device.

    The members are in the order in which a serving program asks them: by the largest batch that they take.
    """
    pairs = sorted(members, key=lambda pair: (_batch(pair[0])["max"], pair[0]["shape"]))
    cell = pairs[0][0]
    return {
        "schema": 1,
        "ref": ref,
        **{name: cell[name] for name in ("model", "target", "precision", "device", "toolchain")},
        "members": [_member(cell, sidecar) for cell, sidecar in pairs],
    }


def _member(cell: Mapping[str, Any], sidecar: Mapping[str, Any]) -> Document:
    measured = sidecar.get("measurements") or {}
    folder, program = cell["shape"], sidecar["blobs"]["program"]
    return {
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        "batch": _batch(cell),
        "program": f"{folder}/{program['path']}",
        "sidecar": f"{folder}/artifact.json",
        "key": cell["key"],
        "inputs": [{name: port[name] for name in ("name", "dtype", "shape")} for port in sidecar.get("inputs", [])],
        "latency": (measured.get("latency") or {}).get("median"),
        "throughput": measured.get("throughput"),
        "points": measured.get("points", []),
        "shared": bool(measured.get("shared")),
    }


def _batch(cell: Mapping[str, Any]) -> Document:
    """Return the batches that a cell's program takes, `{"min", "max"}`; 1 where its model names no batch."""
    size = cell["sizes"].get(BATCH, 1)
    return {name: size[name] for name in ("min", "max")} if isinstance(size, Mapping) else {"min": size, "max": size}
