"""The two documents of known failures, at their bounds."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.builds import known_failures
from farm.builds.known_failures import KnownFailures, today
from farm.errors import NotFound, UsageError


@pytest.fixture
def artifacts(farm: Farm) -> S3Store:
    return farm.artifacts


def entry(cell: str, days: int, **more: Any) -> Any:
    until = str(today() + timedelta(days=days))
    return {"cell": cell, "kind": "accuracy", "reason": "r", "until": until, "link": "l", "by": "me", "at": 1.0, **more}


def test_a_failure_is_acknowledged_from_today_to_ninety_days_ahead(
    artifacts: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownFailures(artifacts)
    for cell, days in (("c", 90), ("b", 0), ("a", 90)):
        assert known.acknowledge("main", entry(cell, days)) == entry(cell, days)
    for days in (-1, 91):
        with pytest.raises(UsageError, match="is not within 90 days from today"):
            known.acknowledge("main", entry("d", days))
    assert [each["cell"] for each in known.acknowledged("main")] == ["b", "a", "c"], "what ends first is first"
    known.acknowledge("main", entry("a", 1))
    assert [each["cell"] for each in known.acknowledged("main")] == ["b", "a", "c"]
    assert len(known.acknowledged("main")) == 3, "in place of the one before"
    cells: list[Any] = [{"identifier": name, "expected": None} for name in ("a", "b", "x")]
    cells.append({"identifier": "c", "expected": {"kind": "crash"}})
    known.attach("main", cells)
    said = {name: value for name, value in entry("b", 0).items() if name not in {"cell", "at"}}
    assert [cell["expected"] for cell in cells] == [
        {**said, "until": entry("a", 1)["until"]}, said, None, {"kind": "crash"},
    ]  # fmt: skip
    monkeypatch.setattr(known_failures, "MOST", 3)
    with pytest.raises(UsageError, match="3 failures are acknowledged already"):
        known.acknowledge("main", entry("d", 1))
    known.acknowledge("main", entry("c", 2))
    known.forget("main", "c")
    known.acknowledge("main", entry("d", 3))
    with pytest.raises(NotFound, match="nothing is acknowledged of c"):
        known.forget("main", "c")


def test_an_entry_is_forgotten_a_month_after_its_last_day(artifacts: S3Store) -> None:
    known = KnownFailures(artifacts)
    old = [entry("kept", -30), entry("forgotten", -31)]
    artifacts.put_object("ns/main/acknowledged.json", json.dumps({"entries": old}).encode())
    assert [each["cell"] for each in known.acknowledged("main")] == ["forgotten", "kept"]
    cells: list[Any] = [{"identifier": "kept", "expected": None}]
    known.attach("main", cells)
    assert cells[0]["expected"] is None, "it is over"
    known.acknowledge("main", entry("new", 1))
    assert [each["cell"] for each in known.acknowledged("main")] == ["kept", "new"]


def test_the_oldest_refusals_are_forgotten_when_they_are_too_many(
    artifacts: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {
        f"k{number}": {"cell": "c", "kind": "regression", "build": "b-1", "rules": {}, "at": f"2026-01-0{number}"}
        for number in (3, 1, 2)
    }
    artifacts.put_object("ns/main/refused.json", json.dumps({"programs": there}).encode())
    monkeypatch.setattr(known_failures, "MOST_REFUSED", 2)
    refused = KnownFailures(artifacts)
    refused.taken("main", ["k9"])
    assert refused.hold("main", "b-2", []) == there.keys(), "nothing was chosen, so nothing is written"
    refused.taken("main", ["k3", "k9"])
    assert refused.hold("main", "b-2", []) == {"k1", "k2"}
    refused.taken("main", ["k1"])
    assert refused.hold("main", "b-2", []) == {"k2"}
