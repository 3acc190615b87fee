"""What a user brings for a tuning database is read in a sealed child with limits, not in the server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from farm.errors import UsageError
from farm.spec import Device
from farm.tuning import brought, text
from farm.tuning.brought import Brought, read_brought
from farm.tuning.formats import canonical
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot

PERF, OTHER = "gfx942130.HIP.3_5_1_4dddc24.udb.txt", "gfx90a68.HIP.3_5_1_4dddc24.udb.txt"
DEVICE = Device("gfx942:sramecc+:xnack-", 304)
SOURCE = RecordSource("2026-01-02T00:00:00+00:00", "import by me", "", "rocm7.2-migraphx2.15-ab")
BEFORE = RecordSource("2026-01-01T00:00:00+00:00", "w", "j", SOURCE.toolchain)


def record(store: RecordStore, file: str, key: str, value: str) -> Record:
    return Record(store, file, key, value, BEFORE)


def perf(file: str, count: int) -> list[Record]:
    return [record(RecordStore.PERF_DB, file, f"1x{number}=Solver", "1,2") for number in range(count)]


def read(packed: bytes, known: Snapshot | None = None) -> Brought:
    return read_brought(packed, known or Snapshot(), DEVICE, SOURCE.toolchain, "", SOURCE)


def test_what_fits_comes_back_and_the_rest_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = text.pack(Snapshot.of([*perf(PERF, 3), *perf(OTHER, 1)]))
    known = Snapshot.of(perf(PERF, 1))

    def here(*_: object) -> None:
        raise AssertionError("it is read in this process")

    with monkeypatch.context() as only:
        only.setattr(text, "unpack", here)
        only.setattr(text, "check", here)
        found = read(packed, known)
    assert (found.records["perf_db"], found.added) == (3, 2)
    assert found.refused == {OTHER: "it is not of gfx942"}
    assert {one.source for one in text.unpack(found.delta)} == {SOURCE}
    assert read(text.pack(Snapshot.of(perf(OTHER, 1)))).delta == b""


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (b"no snapshot", "not a snapshot"),
        (text.pack(Snapshot.of(perf(PERF, 1)))[:-5], "it is cut"),
        (text.pack(Snapshot.of([record(RecordStore.PROBLEM_CACHE, "", "{}", "{}")])), "no entry of a problem cache"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(packed: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(packed)


def test_it_takes_only_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"name": "gpu::mlir_op", "problem": list(range(100_000))}
    value: Any = record(RecordStore.PROBLEM_CACHE, "", canonical(problem), json.dumps("x"))
    values = [value, *(replace(value, key=canonical({**problem, "name": f"{n}"})) for n in range(80))]
    packed = text.pack(Snapshot.of(values))
    monkeypatch.setattr(brought, "LIMITS", replace(brought.LIMITS, memory=48 << 20))
    monkeypatch.setattr(brought, "KNOWN_MEMORY", 0)
    with pytest.raises(UsageError, match=r"cannot be read: .*memory") as refused:
        read(packed)
    assert "a part of it" in refused.value.hint
