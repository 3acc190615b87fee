"""What a reader who follows a build gets, and what he does not get again."""

from __future__ import annotations

from typing import Any

import pytest

from farm.builds import reading
from farm.builds.reading import AT_ONCE, BuildChanges


class Played:
    """A build of which a test says what happens."""

    def __init__(self, *names: str) -> None:
        self.cells = {name: self.cell(name, "running") for name in names}
        self.items: list[dict[str, Any]] = []
        self.paused: frozenset[str] = frozenset()
        self.changes = BuildChanges(self, "main", "b-1", "1-0")  # type: ignore[arg-type]

    @staticmethod
    def cell(name: str, state: str, phase: str = "", progress: float | None = None) -> dict[str, Any]:
        return {"identifier": name, "state": state, "attempt": 1, "phase": phase, "progress": progress, "detail": ""}

    def running(self, namespace: str, build_id: str) -> list[str]:
        return [name for name, cell in self.cells.items() if cell["state"] == "running"]

    def some_cells(self, namespace: str, build_id: str, names: Any) -> list[dict[str, Any]]:
        return [self.cells[name] for name in names]

    def events(self, namespace: str, build_id: str, after: str, seconds: float) -> dict[str, Any]:
        items, self.items = self.items, []
        return {"items": items}

    def pauses(self, namespace, build_id: str) -> frozenset[str]:
        return self.paused

    def current_outlook(self, namespace: str, build_id: str) -> dict[str, Any]:
        return {"eta": None}

    def get(self) -> list[dict[str, Any]]:
        return list(self.changes.after(0.0))

    def names(self) -> list[str]:
        return [cell["identifier"] for change in self.get() for cell in change["cells"]]


def test_a_cell_is_sent_when_it_came_further_and_once_when_it_has_ended() -> None:
    build = Played("a", "b")
    assert build.names() == ["a", "b"], "he does not know how far they are"
    assert build.names() == []
    build.cells["a"] = build.cell("a", "running", "tuning", 0.5)
    assert build.names() == ["a"]
    assert build.names() == []
    build.cells["a"] = build.cell("a", "succeeded")
    build.items = [{"id": "2-0", "type": "cell", "identifier": "a"}]
    (change,) = build.get()
    assert (change["id"], [cell["state"] for cell in change["cells"]]) == ("2-0", ["succeeded"])
    assert build.get() == [], "what has ended does not come again"


def test_many_cells_come_in_parts_of_which_the_last_has_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "OUTLOOK_REST", 0)
    names = [f"c{number}" for number in range(AT_ONCE + 1)]
    build = Played(*names)
    build.get()
    build.cells = {name: build.cell(name, "succeeded") for name in names}
    build.items = [{"id": f"{place}-0", "type": "cell", "identifier": name} for place, name in enumerate(names)]
    changes = build.get()
    assert [len(change["cells"]) for change in changes] == [AT_ONCE, 1]
    assert [change["id"] for change in changes] == [f"{AT_ONCE - 1}-0", f"{AT_ONCE}-0"]
    assert all(change["outlook"] == {"eta": None} for change in changes)


def test_when_the_build_ends_is_estimated_with_each_change_unless_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Followed at each change, a build of a million cells would take a core for its estimates alone."""
    now = 1000.0
    monkeypatch.setattr(reading, "monotonic", lambda: now)
    build = Played("a")
    told = []

    def estimate(namespace: str, build_id: str) -> dict[str, Any]:
        nonlocal now
        now += 0.5
        return {"eta": None}

    build.current_outlook = estimate  # type: ignore[method-assign]
    build.get()
    for now in (1001.0, 1002.0, 1101.0, 1102.0, 1202.0, 1203.0):
        build.items = [{"id": f"{now}", "type": "cell", "identifier": "a"}]
        told += ["outlook" in change for change in build.get()]
    assert told == [True, False, False, True, False, True]
    build = Played("a")
    for now in (1001.0, 1001.1, 1001.2):
        build.items = [{"id": f"{now}", "type": "cell", "identifier": "a"}]
        told += ["outlook" in change for change in build.get()]
    assert told[6:] == [True] * 3, "these took no time"


def test_a_pause_sends_when_the_build_ends_by_now_and_a_reader_who_is_lost_reads_again() -> None:
    build = Played()
    assert build.get() == []
    build.paused = frozenset({"b-1"})
    assert build.get() == [{"type": "cells", "cells": [], "outlook": {"eta": None}}]
    assert build.get() == []
    build.items = [{"id": "9-0", "type": "reset"}]
    build.cells = {"z": build.cell("z", "running")}
    reset, further = build.get()
    assert reset == {"type": "reset", "id": "9-0"}
    assert further == {"type": "cells", "cells": [build.cells["z"]]}
    build.items = [{"id": "9-1", "type": "build", "state": "reported"}]
    assert build.get() == [{"type": "build", "id": "9-1", "state": "reported"}]
    build.items = [{"id": "9-2", "type": "build", "state": "ended"}]
    assert build.get() == []
