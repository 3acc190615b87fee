"""A snapshot as text: how it is stored and travels.

Lines of tab-separated fields (no key or value has a tab or a newline), so that a head of 50 MB is read in a
moment, and by people with `gzip -dc`:

    {"schema": 1, "sources": [[when, worker, job, toolchain, seconds], …], "sessions": […], "days": {…}, "folded": ""}
    @@ TAB <store> TAB <file>                      the records of one table follow
    <number of its source> TAB <key> TAB <value>
    @@ TAB end                                     without it, the text was cut

Tables, and keys in them, are sorted, so that equal snapshots are equal bytes.

What a user offers to import has the same form, without sources and a log, since it is a source of its own. The server
reads it line by line, each checked before the next, and needs no process of its own for that: bytes of text, records,
files, the length of a line, and the lists and objects in it are bounded. All of it is ASCII that can be printed.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, replace
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
    TuningWork,
)

SCHEMA = 1

_MARK, _END = "\n@@\t", "end"


LARGEST = 2 << 30
"""Bytes of the text of what the farm wrote itself, at most."""


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as gzipped text; equal snapshots give equal bytes."""
    return gzip.compress(write(snapshot).encode(), compresslevel=1, mtime=0)


def unpack(data: bytes) -> Snapshot:
    """Read back what `pack` wrote. Raises UsageError for anything else."""
    return read(unzip(data, LARGEST))


def unzip(data: bytes, most: int) -> bytes:
    """Return the text of a packed snapshot. Raises UsageError if it has more than so many bytes, or is cut."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, most)
    except zlib.error as error:
        raise UsageError(f"not a snapshot of a tuning database: {error}") from None
    if not unpacker.eof and len(text) < most:
        raise UsageError("not a snapshot of a tuning database: it is cut")
    if not unpacker.eof:
        raise UsageError(f"a snapshot of a tuning database with more than {most >> 20} MiB of text")
    return text


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
        "sessions": [asdict(log.sessions[name]) for name in sorted(log.sessions)],
        "days": {name: [work.sessions, astuple(work)[:-1]] for name, work in sorted(log.days.items())},
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
        check_schema(document)
        sources = {str(number): RecordSource(*fields) for number, fields in enumerate(document["sources"])}
        return Snapshot(dict(_table(part, sources) for part in parts), _log(document))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UsageError(f"not a snapshot of a tuning database: {cause_of(error)}") from None


def check_schema(header: Mapping[str, Any]) -> None:
    """Refuse the header of another form than this farm's. Raises ValueError, KeyError, TypeError."""
    if header["schema"] != SCHEMA:
        raise ValueError(f"its schema is {header['schema']}, this farm reads {SCHEMA}")


def cause_of(error: Exception) -> str:
    """Return what an error says; one that names only a field says more with its type."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = str(error) if isinstance(error, ValueError) else repr(error)
    return said[:300]


def _table(part: str, sources: dict[str, RecordSource]) -> tuple[Place, dict[str, Measured]]:
    name, file = part.partition("\n")[0].split("\t")
    store = RecordStore(name)
    # Every worker writes deltas, and a farm may be hostile: whoever reads them makes files of these names.
    if store is not RecordStore.PROBLEM_CACHE and (wrong := check_place((store, file))):
        raise ValueError(wrong)
    # All lines at once: a loop over them takes three times as long.
    fields = part.replace("\n", "\t").split("\t")[2:]
    if len(fields) != 3 * part.count("\n"):
        raise ValueError("a line has not three fields")
    values = zip(fields[2::3], map(sources.__getitem__, fields[0::3]), strict=True)
    return (store, file), dict(zip(fields[1::3], values, strict=True))


def _log(document: dict[str, Any]) -> Log:
    sessions = {
        each["id"]: Session(each["id"], each["until"], TuningWork(**each["work"])) for each in document["sessions"]
    }
    days = {name: replace(TuningWork(*sums), sessions=count) for name, (count, sums) in document["days"].items()}
    return Log(sessions, days, document["folded"])


MOST_BYTES = 64 << 20
"""Of unpacked text."""

MOST_RECORDS = 500_000

MOST_FILES = 1000
"""Tables; the answer names those that are refused."""

LONGEST_LINE = 1 << 20
"""Bytes."""

LONGEST_NAME = 1000
"""Bytes of the name of a file or a device."""

MOST_BRACKETS = 500
"""Lists and objects in a record, so nothing is nested deeper. Compilers write some ten."""

_PRINTABLE = re.compile(rb"[\t -~]*\n?")


def read_offered(packed: bytes, source: RecordSource) -> Snapshot:
    """Return the records of a packed snapshot, measured by `source`. Raises UsageError with the line that is wrong."""
    tables: dict[Place, dict[str, Measured]] = {}
    place: Place | None = None
    records = 0
    for number, line in _lines(unzip(packed, MOST_BYTES)):
        try:
            if number == 1:
                check_schema(json.loads(line))
                continue
            match line.split("\t"):
                case ["@@", "end"]:
                    return Snapshot(tables)
                case ["@@", store, file]:
                    place = _place(store, file)
                    tables.setdefault(place, {})
                    if len(tables) > MOST_FILES:
                        raise ValueError(f"there are more than {MOST_FILES} files")
                case [_, key, value] if place:
                    records += 1
                    if records > MOST_RECORDS:
                        raise ValueError(f"there are more than {MOST_RECORDS} records")
                    if line.count("[") + line.count("{") > MOST_BRACKETS:
                        raise ValueError(f"it has more than {MOST_BRACKETS} lists and objects")
                    if wrong := check_record(place[0], key, value):
                        raise ValueError(wrong)
                    tables[place][key] = value, source
                case _:
                    raise ValueError("it has not the fields of a record")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _refusal(f"line {number}: {cause_of(error)}") from None
    raise _refusal("it is cut")


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers. Raises UsageError for one that is too long, or not of text alone."""
    file = io.BytesIO(data)
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        if len(line) == LONGEST_LINE:
            raise _refusal(f"line {number}: it has more than {LONGEST_LINE >> 20} MiB")
        if not _PRINTABLE.fullmatch(line):
            raise _refusal(f"line {number}: it is not of printable ASCII alone")
        yield number, line.decode("ascii").removesuffix("\n")


def _place(store: str, file: str) -> Place:
    if len(file) > LONGEST_NAME:
        raise ValueError("the name of its file is too long")
    place = RecordStore(store), file
    if wrong := check_place(place):
        raise ValueError(wrong)
    return place


def _refusal(why: str) -> UsageError:
    return UsageError(f"the import is not a snapshot of a tuning database: {why}", hint="bring a part of it at a time")
