"""A snapshot as text: how it is stored and travels.

Lines of tab-separated fields (no key or value has a tab or a newline), so that a head of 50 MB is read in a
moment, and by people with `gzip -dc`:

    {"schema": 1, "sources": [[when, worker, job, toolchain, seconds], …], "sessions": […], "days": {…}, "folded": ""}
    @@ TAB <store> TAB <file>                      the records of one table follow
    <number of its source> TAB <key> TAB <value>
    @@ TAB end                                     without it, the text was cut

Tables, and keys in them, are sorted, so that equal snapshots are equal bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import astuple, dataclass
from typing import Any

from farm.errors import UsageError
from farm.tuning.formats import check_place, check_record
from farm.tuning.records import (
    Log,
    Measured,
    Place,
    RecordSource,
    RecordStore,
    Session,
    Snapshot,
    TuningDay,
    TuningWork,
)

SCHEMA = 1

_MARK, _END = "\n@@\t", "end"


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What of a snapshot's text is read at most: bytes in all, of its header and of each line after it, and lines.

    A line takes a few hundred bytes of memory, however short it is, and its JSON twenty times its length.
    """

    size: int = 2 << 30
    header: int = 1 << 30
    line: int = 1 << 30
    lines: int = 1 << 30


OURS = TextLimits()
"""Of what the farm wrote itself."""

BROUGHT = TextLimits(size=64 << 20, header=4 << 20, line=1 << 20, lines=500_000)
"""Of what a user brings: little enough for a server, however well it was packed."""


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as gzipped text; equal snapshots give equal bytes."""
    return gzip.compress(write(snapshot).encode(), compresslevel=1, mtime=0)


def unpack(data: bytes, limits: TextLimits = OURS) -> Snapshot:
    """Read back what `pack` wrote. Raises UsageError for anything else, and for more than the limits."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, limits.size)
    except zlib.error as error:
        raise UsageError(f"not a snapshot of a tuning database: {error}") from None
    if not unpacker.eof:
        if len(text) < limits.size:
            raise UsageError("not a snapshot of a tuning database: it is cut")
        raise UsageError(
            f"a snapshot of a tuning database with more than {limits.size >> 20} MiB of text", hint=_SMALLER
        )
    # Before anything is made of it.
    if text.count(b"\n") > limits.lines:
        raise UsageError(f"a snapshot of a tuning database with more than {limits.lines} records", hint=_SMALLER)
    header = text.find(b"\n") if b"\n" in text else len(text)
    if header > limits.header or re.compile(rb"[^\n]{%d}" % (limits.line + 1)).search(text, header):
        raise UsageError("a snapshot of a tuning database with a line that is too long", hint=_SMALLER)
    return read(text)


_SMALLER = "bring a part of it at a time"


def write(snapshot: Snapshot) -> str:
    """Return a snapshot as text."""
    # Many records share one object: looking at its identity spares hashing it for each of them.
    objects = {id(entry[1]): entry[1] for table in snapshot.tables.values() for entry in table.values()}
    sources = sorted(set(objects.values()))
    by_source = {source: str(number) for number, source in enumerate(sources)}
    numbers = {identity: by_source[source] for identity, source in objects.items()}
    log = snapshot.log
    header = {
        "schema": SCHEMA,
        "sources": [list(astuple(source)) for source in sources],
        "sessions": [log.sessions[name].as_dict() for name in sorted(log.sessions)],
        "days": {name: [day.sessions, list(astuple(day.work))] for name, day in sorted(log.days.items())},
        "folded": log.folded,
    }
    parts = [json.dumps(header, sort_keys=True)]
    for (store, file), table in sorted(snapshot.tables.items()):
        lines = [f"{numbers[id(source)]}\t{key}\t{value}" for key, (value, source) in sorted(table.items())]
        parts.append("\n".join([f"{store}\t{file}", *lines]))
    return _MARK.join([*parts, _END])


def read(data: bytes) -> Snapshot:
    """Read back what `write` wrote. Raises UsageError for anything else."""
    try:
        header, *parts, end = data.decode().split(_MARK)
        if end != _END:
            raise ValueError("it is cut")
        document = json.loads(header)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, this farm reads {SCHEMA}")
        sources = {str(number): RecordSource(*fields) for number, fields in enumerate(document["sources"])}
        return Snapshot(dict(_table(part, sources) for part in parts), _log(document))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UsageError(f"not a snapshot of a tuning database: {cause_of(error)}") from None


def cause_of(error: Exception) -> str:
    """Return what an error says; one that names only a field says more with its type."""
    return str(error) if isinstance(error, ValueError) else repr(error)


def check(snapshot: Snapshot) -> None:
    """Refuse a snapshot from outside that would not be written back as what it says. Raises UsageError."""
    for place, table in snapshot.tables.items():
        wrong = check_place(place) or next(
            filter(None, (check_record(place[0], key, value) for key, (value, _) in table.items())), ""
        )
        if wrong:
            raise UsageError(f"not a snapshot of a tuning database: {wrong}")


def _table(part: str, sources: dict[str, RecordSource]) -> tuple[Place, dict[str, Measured]]:
    store, file = part.partition("\n")[0].split("\t")
    # All lines at once: a loop over them takes three times as long.
    fields = part.replace("\n", "\t").split("\t")[2:]
    if len(fields) != 3 * part.count("\n"):
        raise ValueError("a line has not three fields")
    values = zip(fields[2::3], map(sources.__getitem__, fields[0::3]), strict=True)
    return (RecordStore(store), file), dict(zip(fields[1::3], values, strict=True))


def _log(document: dict[str, Any]) -> Log:
    sessions = map(Session.from_dict, document["sessions"])
    days = {name: TuningDay(count, TuningWork(*work)) for name, (count, work) in document["days"].items()}
    return Log({session.id: session for session in sessions}, days, document["folded"])
