"""A snapshot as text: how it is stored and travels.

Lines of tab-separated fields, so that a head of 50 MB is read in a moment, and by people with `gzip -dc`:

    {"schema": 1, "sources": [[when, worker, job, toolchain, seconds], …], "sessions": […], "days": {…}, "folded": ""}
    @<store> TAB <file>                            the records of one table follow
    <number of its source> TAB <key> TAB <value>

Tables, and keys in them, are sorted, so that equal snapshots are equal bytes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import astuple
from typing import Any

from farm.errors import UsageError
from farm.tuning.files import check_place, check_record
from farm.tuning.records import Day, Entry, Log, Place, Session, Snapshot, Source, Store, Work

SCHEMA = 1

TEXT_LIMIT = 2 << 30
"""Bytes of unpacked text that are read at most."""


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as gzipped text; equal snapshots give equal bytes."""
    return gzip.compress(write(snapshot).encode(), compresslevel=1, mtime=0)


def unpack(data: bytes) -> Snapshot:
    """Read back what `pack` wrote. Raises UsageError for anything else."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, TEXT_LIMIT)
    except zlib.error as error:
        raise UsageError(f"not a snapshot of a tuning database: {error}") from None
    if not unpacker.eof:
        raise UsageError("not a snapshot of a tuning database: it is cut, or too large")
    return read(text)


def write(snapshot: Snapshot) -> str:
    """Return a snapshot as text."""
    sources = sorted({entry[1] for table in snapshot.tables.values() for entry in table.values()})
    numbers = {source: str(number) for number, source in enumerate(sources)}
    log = snapshot.log
    header = {
        "schema": SCHEMA,
        "sources": [list(astuple(source)) for source in sources],
        "sessions": [log.sessions[name].as_dict() for name in sorted(log.sessions)],
        "days": {name: [day.sessions, list(astuple(day.work))] for name, day in sorted(log.days.items())},
        "folded": log.folded,
    }
    lines = [json.dumps(header, sort_keys=True)]
    for (store, file), table in sorted(snapshot.tables.items()):
        lines.append(f"@{store}\t{file}")
        lines += [f"{numbers[source]}\t{key}\t{value}" for key, (value, source) in sorted(table.items())]
    lines.append("")
    return "\n".join(lines)


def read(data: bytes) -> Snapshot:
    """Read back what `write` wrote. Raises UsageError for anything else."""
    try:
        header, *lines = data.decode().split("\n")
        if lines.pop():
            raise ValueError("it is cut")
        document = json.loads(header)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, this farm reads {SCHEMA}")
        return Snapshot(_tables(lines, [Source(*fields) for fields in document["sources"]]), _log(document))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UsageError(f"not a snapshot of a tuning database: {error}") from None


def check(snapshot: Snapshot) -> None:
    """Refuse a snapshot from outside that would not be written back as what it says. Raises UsageError."""
    for place, table in snapshot.tables.items():
        wrong = check_place(place) or next(
            filter(None, (check_record(place[0], key, value) for key, (value, _) in table.items())), ""
        )
        if wrong:
            raise UsageError(f"not a snapshot of a tuning database: {wrong}")


def _tables(lines: list[str], sources: list[Source]) -> dict[Place, dict[str, Entry]]:
    by_number = {str(number): source for number, source in enumerate(sources)}
    tables: dict[Place, dict[str, Entry]] = {}
    table: dict[str, Entry] = {}
    for line in lines:
        number, key, *rest = line.split("\t")
        if rest:
            (value,) = rest
            table[key] = value, by_number[number]
        else:
            table = tables.setdefault((Store(number.removeprefix("@")), key), {})
    return tables


def _log(document: dict[str, Any]) -> Log:
    sessions = map(Session.from_dict, document["sessions"])
    days = {name: Day(count, Work(*work)) for name, (count, work) in document["days"].items()}
    return Log({session.id: session for session in sessions}, days, document["folded"])
