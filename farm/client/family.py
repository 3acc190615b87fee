"""A family: one model, target and precision at several shapes, with an index that says which file serves what. Pure.

The index is published as JSON Schema (`schema()`); readers ignore fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from farm.artifacts.sidecar import of_cell
from farm.client.fetching import SIDECAR_SUFFIX
from farm.models.shapes import BATCH
from farm.runner.bounds import Amount, Bound, Digest
from farm.runner.documents import TensorInfo
from farm.spec import JsonSchema, PlainSize
from farm.wire.program import MeasuredPoint, Sidecar

if TYPE_CHECKING:
    from farm.artifacts.refs import SnapshotCell


class BatchRange(TypedDict):
    """The batches that a program takes."""

    min: Annotated[int, Bound(least=1)]
    max: Annotated[int, Bound(least=1)]


class Member(TypedDict):
    """A program of the family; `program` and `sidecar` are paths relative to the index.

    `sizes` are those of the named dimensions, `{"min", "max", "optimals"}` of a range, which was measured at several
    `points`. `latency` is the median in seconds, `throughput` samples a second, null where nothing was measured.
    """

    shape: str
    sizes: Mapping[str, PlainSize]
    batch: BatchRange
    program: str
    sidecar: str
    key: Digest
    inputs: Sequence[TensorInfo]
    latency: Amount | None
    throughput: float | None
    points: Sequence[MeasuredPoint]
    shared: bool


class Family(TypedDict):
    """`family.json`: the members by the largest batch that they take, all of one toolchain and device."""

    schema: Literal[1]
    ref: str
    model: str
    target: str
    precision: str
    device: str
    toolchain: str
    members: Annotated[Sequence[Member], Bound(shortest=1)]


FamilyMember = tuple["SnapshotCell", Sidecar]
"""A cell of a ref, and its sidecar."""


def schema() -> JsonSchema:
    """Return the index's JSON Schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **TypeAdapter(Family).json_schema(),
        "title": "Family index of the MIGraphX compile farm",
    }


def family_index(ref: str, members: Iterable[FamilyMember]) -> Family:
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


def _member(cell: SnapshotCell, sidecar: Sidecar) -> Member:
    measured, own = sidecar["measurements"], of_cell(sidecar, cell["identifier"])
    program = f"{cell['shape']}/{own['blobs']['program']['path']}"
    return {
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        "batch": _batch(cell),
        "program": program,
        "sidecar": f"{program}{SIDECAR_SUFFIX}",
        "key": cell["key"],
        "inputs": [
            {"name": port["name"], "dtype": port["dtype"], "shape": port["shape"]} for port in sidecar["inputs"]
        ],
        "latency": measured["latency"]["median"] if measured["latency"] else None,
        "throughput": measured["throughput"],
        "points": measured["points"],
        "shared": measured["shared"],
    }


def _batch(cell: SnapshotCell) -> BatchRange:
    """Return the batches that a cell's program takes; 1 if its model names no batch."""
    size = cell["sizes"].get(BATCH, 1)
    return {"min": size, "max": size} if isinstance(size, int) else {"min": size["min"], "max": size["max"]}
