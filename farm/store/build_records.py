"""Builds, their cells and their events."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

from farm.errors import Conflict, NotFound
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import BuildEvent, BuildRow, CellRow, EventBatch, NewCell, PlannedBuild, VerdictDocument
from farm.jobs.state import State, job_key
from farm.store.link import Records
from farm.units import in_seconds, lots

LOT = 500  # Cells per script call, so that no call blocks the server for long.
AT_ONCE = 8  # Lots of cells per pipeline.
FOR_EVER = 1e11  # Unix seconds for "never": JSON has no infinity.

CANCELLED = "the build was cancelled"
STOPPED = "another cell of the build failed, and it is fail-fast"

_LIVE = ("worker", "number", "started_at", "phase", "progress", "detail", "paused", "spent")

BuildRows = list[BuildRow]
CellRows = list[CellRow]
Names = list[str]


class BuildRecords(Records):
    """Builds, from their first lot of cells until their reports are written and they expire."""

    def create(self, build: PlannedBuild, cells: Iterable[NewCell]) -> int:
        """Add a build and its cells; return how many of its cells the store has. Repeating changes nothing.

        Raises Conflict if another namespace has a build of that id.
        """
        answer = self._link.run(
            "create_build",
            build=build["id"],
            namespace=build["namespace"],
            cells=build["cells"],
            max_parallel=build.get("max_parallel") or 0,
            fail_fast=int(bool(build.get("fail_fast"))),
            document=json.dumps(build),
        )
        if answer < 0:
            raise Conflict(f"the id {build['id']} is taken", hint="submit again with a new build id")
        accepted = 0
        rows = itertools.starmap(_cell_row, enumerate(cells))
        for some in lots(lots(rows, LOT), AT_ONCE):
            calls = [{"build": build["id"], "cells": json.dumps(lot)} for lot in some]
            accepted = self._link.run_many("add_cells", calls)[-1]
        return accepted

    def get(self, build_id: str) -> BuildRow | None:
        """Return a build; the submitter's own `created_at` wins over that of the store."""
        return _build(self._link.ask("HGETALL", ("build", build_id)))

    def ids(self, namespace: str) -> Names:
        """Return the ids of the builds of a namespace, the one that the store got last first."""
        return list(self._link.ask("ZREVRANGE", ("builds", namespace), 0, -1))

    def list(self, namespace: str, only: Sequence[str] | None = None) -> BuildRows:
        """Return the builds of a namespace, or those with these ids, newest first by submission.

        That order stays after the store was restored.
        """
        ids = self.ids(namespace) if only is None else only
        rows = self._link.ask_many([["HGETALL", ("build", build_id)] for build_id in ids])
        builds = [build for row in rows if (build := _build(row))]
        return sorted(builds, key=itemgetter("created_at"), reverse=True)

    def unreported(self) -> BuildRows:
        """Return the builds of all namespaces that are not reported."""
        namespaces = self._link.ask("SMEMBERS", ("namespaces",))
        return [build for name in namespaces for build in self.list(name) if build["state"] != "reported"]

    def live_cells(self, namespace: str) -> dict[str, int]:
        """Return the number of unfinished cells in a namespace's builds, by submitter."""
        live: Counter[str] = Counter()
        for build in self.list(namespace):
            counts = build["counts"]
            live[build.get("created_by") or ""] += counts.get("queued", 0) + counts.get("running", 0)
        return dict(live)

    def states(self, build_id: str) -> dict[str, str]:
        """Return the states of a build's cells, by their identifiers."""
        return dict(self._link.ask("HGETALL", ("build", build_id, "states")))

    def jobs(self, build_id: str) -> dict[str, str]:
        """Return the jobs of a build's cells, by their identifiers; what was there when it was planned has none."""
        return dict(self._link.ask("HGETALL", ("build", build_id, "jobs")))

    def cells(self, build_id: str, only: Sequence[str] | None = None) -> CellRows:
        """Return a build's cells in the order of submission; with `only`, those with these identifiers."""
        parts = ("cells", "states", "jobs", "ends")
        command = ["HGETALL"] if only is None else ["HMGET"]
        time, *found = self._link.ask_many(
            [["TIME"], *([*command, ("build", build_id, part), *(only or ())] for part in parts)], together=True
        )
        if only is not None:
            found = [
                {name: value for name, value in zip(only, values, strict=True) if value is not None} for values in found
            ]
        static, states, jobs, ends = found
        now = int(time[0]) + int(time[1]) / 1e6
        live = [name for name, state in states.items() if state in {"queued", "running"}]
        found = self._link.ask_many([["HMGET", ("job", jobs[name]), *_LIVE] for name in live])
        running = {name: dict(zip(_LIVE, values, strict=True)) for name, values in zip(live, found, strict=True)}
        documents = {name: json.loads(text) for name, text in static.items()}
        return [
            _cell(documents[name], states[name], jobs.get(name), ends.get(name), running.get(name, {}), now)
            for name in sorted(documents, key=lambda name: documents[name]["position"])
        ]

    def cancel(self, build_id: str, reason: str = CANCELLED) -> int:
        """Cancel every cell that has not ended; return their number. Raises NotFound."""
        total = 0
        while ended := self._link.run("cancel_cells", build=build_id, limit=LOT, reason=reason):
            if ended < 0:
                raise NotFound(f"no build {build_id}")
            total += ended
        return total

    def cancel_queued(self, build_id: str, reason: str) -> int:
        """Cancel the cells of a build that wait; those that run go on. Return their number."""
        queued = [name for name, state in self.states(build_id).items() if state == "queued"]
        calls = [{"build": build_id, "identifiers": json.dumps(lot), "reason": reason} for lot in lots(queued, LOT)]
        return sum(self._link.run_many("cancel_queued", calls))

    def join_group(
        self, build_id: str, namespace: str, group: str, *, at: float, cancels: bool
    ) -> tuple[str, Sequence[str]]:
        """Let a build join its concurrency group: `at` is when it was submitted, in Unix seconds.

        Returns the group's newest build that takes the place of older ones, and the open builds that are older.
        """
        newest, *older = self._link.run(
            "join_group", build=build_id, namespace=namespace, group=group, at=repr(at), cancels=int(cancels)
        )
        return newest, older

    def pause(self, build_id: str, *, paused: bool) -> bool:
        """Hand out no more of a build's jobs, or hand them out again; False if it has ended. Raises NotFound."""
        answer = self._link.run("pause_build", build=build_id, paused=int(paused))
        if answer < 0:
            raise NotFound(f"no build {build_id}")
        return bool(answer)

    def mark_reported(self, build_id: str, verdict: VerdictDocument | None) -> None:
        """Record the verdict of a build without live cells; from then on its records expire."""
        self._link.run("mark_reported", build=build_id, verdict=json.dumps(verdict))

    def unpacked(self, seconds: float) -> Iterator[tuple[str, str]]:
        """Yield namespace and id of the reported builds that ended so many seconds ago and are not packed."""
        before = 1000 * (self._link.now() - seconds)
        for namespace in self._link.ask("SMEMBERS", ("namespaces",)):
            ids = self.ids(namespace)
            rows = self._link.ask_many([["HMGET", ("build", one), "state", "packed", "ended_at"] for one in ids])
            for one, (state, packed, ended_at) in zip(ids, rows, strict=True):
                if state == "reported" and not packed and float(ended_at or 0) < before:
                    yield namespace, one

    def pack(self, build_id: str) -> None:
        """Drop the cells and events of a reported build: its report has them. Repeating changes nothing."""
        self._link.run("pack_build", build=build_id)

    def ended_unreported(self) -> Names:
        """Return the builds that ended and wait for their reports."""
        return list(self._link.ask("SMEMBERS", ("unreported",)))

    def to_stop(self) -> Names:
        """Return the fail-fast builds with a failed cell and live cells."""
        return list(self._link.ask("SMEMBERS", ("stopping",)))

    def incomplete(self, seconds: float) -> Names:
        """Return the builds whose cells are still incomplete after this many seconds."""
        return list(self._link.ask("ZRANGEBYSCORE", ("incomplete",), "-inf", 1000 * (self._link.now() - seconds)))

    def forget_expired(self) -> int:
        """Drop the names of builds whose records expired; return their number."""
        dropped = 0
        for namespace in self._link.ask("SMEMBERS", ("namespaces",)):
            ids = self._link.ask("ZRANGE", ("builds", namespace), 0, -1)
            there = self._link.ask_many([["EXISTS", ("build", build_id)] for build_id in ids])
            gone = [build_id for build_id, exists in zip(ids, there, strict=True) if not exists]
            for lot in lots(gone, LOT):
                dropped += self._link.ask("ZREM", ("builds", namespace), *lot)
        return dropped


def _cell_row(position: int, cell: NewCell) -> list[str]:
    """One cell for `add_cells.lua`: all text, because numbers would lose digits."""
    order, facts, expected, limits = cell["order"], cell["facts"], cell.get("expected"), cell["limits"]
    is_hit = facts is not None and not (order and order.get("hit"))
    if expected:
        expected = {**expected, "before": min(expected["before"], FOR_EVER) * 1000}
    static = {"identifier": cell["identifier"], "position": position, "facts": facts, "expected": expected}
    return [
        cell["identifier"],
        cell["key"],
        cell["namespace"],
        cell["pool"],
        str(max(-1000, min(1000, int(cell["priority"])))),
        repr(float(limits["time"])),
        str(int(limits["memory"])),
        str(cell["expected_seconds"] or 0),
        "succeeded" if is_hit else "",
        json.dumps(static),
        json.dumps(order),
        f"j-{secrets.token_hex(8)}",
        job_key(order, cell["key"]),
    ]


def _build(row: Mapping[str, str]) -> BuildRow | None:
    if not row.get("document"):
        return None
    planned: PlannedBuild = json.loads(row["document"])
    planned.setdefault("created_at", float(row["created_at"]) / 1000)
    return {
        **planned,
        "state": row["state"],
        "ended_at": in_seconds(row.get("ended_at")),
        "accepted": int(row["accepted"]),
        "paused": row.get("paused") == "1",
        "counts": {state: int(row.get(f"n:{state}", 0)) for state in (*map(str, State), "expected")},
        "verdict": json.loads(row["verdict"]) if "verdict" in row else None,
    }


def _cell(
    static: Mapping[str, Any], state: str, job: str | None, end: str | None, live: Mapping[str, str | None], now: float
) -> CellRow:
    ended = json.loads(end) if end else {}
    started_at, ended_at = in_seconds(ended.get("started_at") or live.get("started_at")), in_seconds(ended.get("at"))
    outcome = ended.get("outcome") or {}
    taken = max(0.0, (ended_at or now) - started_at) if started_at else 0.0
    paused = in_seconds(ended.get("paused") or live.get("paused")) or 0.0
    spent = float(ended.get("spent") or live.get("spent") or 0) / 1000
    return {
        "identifier": static["identifier"],
        "state": state,
        "job": job,
        "attempt": ended.get("attempt") or int(live.get("number") or 0),
        "hit": (job is None and state == "succeeded") or bool(outcome.get("hit")),
        "kind": outcome.get("kind"),
        "message": outcome.get("message") or "",
        "detail": outcome.get("detail") or live.get("detail") or "",
        "phase": live.get("phase"),
        "progress": float(text) if (text := live.get("progress")) else None,
        "worker": ended.get("worker") or live.get("worker"),
        "elapsed": round(max(0.0, taken - paused), 3) if started_at else None,
        "spent": round(spent + taken, 3) if state == "running" else spent,
        "facts": _facts(static["facts"], state, outcome),
        "log": outcome.get("log") or None,
    }


def _facts(of_hit: ArtifactFacts | None, state: str, outcome: Mapping[str, Any]) -> ArtifactFacts | None:
    """Return the facts of a cell's program; those of a hit that is to be measured count when that has ended."""
    if made := outcome.get("facts"):
        return cast(ArtifactFacts, made)
    if not of_hit or state != "succeeded":
        return None
    why = outcome.get("unmeasured")
    return {**of_hit, "unmeasured": why} if why else of_hit


EVENTS_AT_ONCE = 500  # Most events of one answer.
_STREAM_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")  # Milliseconds and a count, each of 64 bits.
LONGEST_BLOCK = 2000  # Most milliseconds that one command waits: less than the socket's timeout.


class EventStreams(Records):
    """The events of all builds, one stream each. An id is `<epoch>.<stream id>`."""

    def read(self, build_id: str, after: str | None = None, block_ms: int | None = None) -> EventBatch:
        """Return up to 500 events after an id (None: from the beginning), waiting up to `block_ms` for the first.

        An unknown id counts as an id of another epoch.
        """
        stream = ("build", build_id, "events")
        position = _position(after, (after or "").partition(".")[0])
        found = ["XRANGE", stream, f"({position}" if position else "+", "+", "COUNT", EVENTS_AT_ONCE]
        asked: list[list[Any]] = [["HGET", ("epoch",), "epoch"], ["XINFO STREAM", stream], found]
        epoch, edges, entries = self._link.ask_many(asked, tolerant=True)
        epoch = epoch or self._link.epoch()
        first, last, trimmed = _edges(edges)
        position = _position(after, epoch)
        if position is None or (trimmed and _order(position) < _order(first)):
            item = BuildEvent(id=f"{epoch}.{last}", at=_time_of(last) or time.time(), type="reset", build=build_id)
            return {"items": [item], "reset": True}
        if isinstance(entries, Exception):
            entries = self._link.ask(*found)
        if not entries and block_ms:
            entries = self._wait(stream, position, block_ms)
        return {"items": [_item(build_id, epoch, *entry) for entry in entries], "reset": False}

    def _wait(self, stream: tuple[str, ...], position: str, block_ms: int) -> list[Any]:
        deadline = time.monotonic() + block_ms / 1000
        while (left := round((deadline - time.monotonic()) * 1000)) > 0:
            block = min(left, LONGEST_BLOCK)
            answer = self._link.ask("XREAD", "COUNT", EVENTS_AT_ONCE, "BLOCK", block, "STREAMS", stream, position)
            if answer:
                return list(answer[0][1])
        return []


def _position(after: str | None, epoch: str) -> str | None:
    """Return the stream id for a reader's id, or None if it is not of this epoch."""
    if not after:
        return "0-0"
    life, _, position = after.partition(".")
    ours = life == epoch and _STREAM_ID.fullmatch(position) and max(_order(position)) < 1 << 64
    return position if ours else None


def _edges(info: Any) -> tuple[str, str, bool]:
    """First and last id of a stream, and whether entries before the first were trimmed."""
    if not isinstance(info, dict) or not info.get("first-entry"):
        return "0-0", "0-0", False
    return info["first-entry"][0], info["last-generated-id"], info["entries-added"] > info["length"]


def _order(position: str) -> tuple[int, ...]:
    return tuple(int(part) for part in position.split("-"))


def _time_of(position: str) -> float:
    return int(position.partition("-")[0]) / 1000


def _item(build_id: str, epoch: str, position: str, fields: dict[str, str]) -> BuildEvent:
    numbers = {name: int(fields[name]) for name in ("attempt", "cells", "accepted") if fields.get(name)}
    item = {"id": f"{epoch}.{position}", "at": _time_of(position), "build": build_id, **fields, **numbers}
    return cast(BuildEvent, item)
