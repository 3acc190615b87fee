"""What a user offers for a tuning database, as the server reads it: line by line, each checked before the next.

The form is that of `text.py`, but an import has less: no sources and no log, since it is a source of its own.
What is read is bounded, so this needs no process of its own: bytes of text, records, files, the length of a line, and
the lists and objects in it. All of it is ASCII that can be printed.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

from farm.errors import UsageError
from farm.tuning import text
from farm.tuning.formats import check_place, check_record
from farm.tuning.records import Measured, Place, RecordSource, RecordStore, Snapshot

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
    for number, line in _lines(text.unzip(packed, MOST_BYTES)):
        try:
            if number == 1:
                text.check_schema(json.loads(line))
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
            raise _refusal(f"line {number}: {text.cause_of(error)}") from None
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
