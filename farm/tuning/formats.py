"""The files in which MIGraphX and MIOpen keep what tuning learnt: readers and writers.

Readers take what a process that was killed, or is still writing, leaves: they keep every whole record and count
what they drop. Formats, from the sources of these libraries:

- problem cache, JSON (MIGraphX `src/targets/gpu/problem_cache.cpp`, ROCm 6.3 to 7.2):
  `[[{"name": op, "problem": X}, solution], …]`; `null` marks a problem that was seen and never decided;
- problem cache, keyed by device (`json_problem_cache.cpp`, after 7.2): `[[device_key, [[key, solution], …]], …]`
  with `device_key = {"cu_count", "device_name", "gfx_name", "wavefront_size"}`;
- problem cache, SQLite (`sqlite_problem_cache.cpp`): a table `solutions(device_key, problem_key, solution)`, each
  column the same as JSON text;
- find-db and perf-db, text (MIOpen `src/db_record.cpp`, `src/db.cpp`): a line `KEY=ID:VALUES;ID:VALUES` for each
  problem; the first counts;
- timing cache (TensorRT): bytes that it alone can read, in a file that ONNX Runtime names by the compute capability;
- the farm's own (`OBJECTS`), a JSON object.
"""

from __future__ import annotations

import base64
import errno
import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.files import is_plain, read_plain, write_new
from farm.tuning.records import Place, Record, RecordSource, RecordStore, Snapshot, Table

PROBLEM_CACHE = "problem_cache.json"  # The cache's name in a folder of ours: `MIGRAPHX_PROBLEM_CACHE` points there.

OBJECTS = {RecordStore.ONNXRUNTIME: "onnxruntime.json", RecordStore.SLICES: "slices.json"}
"""Stores of our own, and their files in a folder: one JSON object each, `{key: value}`."""

_OURS = {PROBLEM_CACHE, *OBJECTS.values()}

SQLITE_SUFFIXES = (".db", ".sqlite")  # By these MIGraphX knows a problem cache that is a SQLite database.
FILE_LIMIT = 1 << 30  # Bytes of a file that a user named that are read at most.
CHILD_LIMIT = 256 << 20  # Bytes of all files in a folder in which a child writes that are read at most.
CHILD_RECORDS = 1_000_000  # Lines, and solutions in them, of all these files.

CHILD_VALUES = 8_000_000  # JSON values in all these files: an empty one takes three bytes there, a hundred in memory.

_MIOPEN_NAME = re.compile(
    r"(?:batchnorm_)?(?P<base>\w[\w.+-]*?)(?:\.(?P<version>(?:HIP|OpenCL)\.[\w-]+))?(?:\.\w+)?\.(?P<kind>ufdb|udb)\.txt",
    re.ASCII,
)
_TIMINGS_NAME = re.compile(r"TensorrtExecutionProvider_cache_sm[0-9]{2,3}\.timing", re.ASCII)
_KINDS = {"ufdb": RecordStore.FIND_DB, "udb": RecordStore.PERF_DB}
_DEVICE_KEYS = {"device_name", "gfx_name", "cu_count", "wavefront_size"}
_LINE = re.compile(r"(?P<key>[!-<>-~]+)=(?P<contents>[ -~]+)")
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_SQLITE_STEPS = 200_000_000
"""Steps of SQLite's machine after which a file is taken for hostile: reading a million rows takes some ten million."""

_SQLITE_VALUE = 16 << 20  # Bytes of one value in it.

_MOST_DAMAGES = 100
"""Places in a file from which nothing can be read, each of which costs as much as the whole file, if it is hostile."""

_LARGEST_NUMBER = 1e18  # No operations or seconds of a slice are as many; sums of them stay numbers.


@dataclass(slots=True)
class Dropped:
    """What was left out of what was read: solutions that were never decided, and what is broken."""

    nulls: int = 0
    broken: int = 0
    files: dict[str, str] = field(default_factory=dict)  # Whole files, with the reason.
    parts: dict[str, str] = field(default_factory=dict)
    """Files that are damaged, with the place of the first damage; what is whole in them was read."""
    of_child: bool = False
    """Whether it is a child's, so that the size of all its files is bounded before they are parsed."""
    size: int = 0
    records: int = 0
    values: int = 0  # What was read of a child's files so far.

    def broke(self, name: str, where: str) -> None:
        """Count a damage in a file; keep the place of the first."""
        self.broken += 1
        self.parts.setdefault(name, where)


@dataclass(frozen=True, slots=True)
class Read:
    """Records that were read from real files, and what was left out."""

    snapshot: Snapshot
    dropped: Dropped
    origins: Mapping[Place, Sequence[Path]] = field(default_factory=dict)  # The files that each table came from.


@dataclass(frozen=True, slots=True)
class MIOpenName:
    """What the name of a MIOpen database says: `gfx942130.HIP.3_5_1_4dddc24.ufdb.txt`."""

    store: RecordStore
    base: str  # Device and number of compute units, in MIOpen's own spelling, without the `batchnorm_` before some.
    version: str  # `HIP.3_5_1_4dddc24`; MIOpen ignores the files of every other version.


def miopen_name(name: str) -> MIOpenName | None:
    """Return what a file's name says; None if it is not the name of a user find-db or perf-db in text form."""
    match = _MIOPEN_NAME.fullmatch(name)
    return MIOpenName(_KINDS[match["kind"]], match["base"], match["version"] or "") if match else None


def is_timing_cache(name: str) -> bool:
    """Whether a file's name is the one that ONNX Runtime gives a timing cache of TensorRT's."""
    return _TIMINGS_NAME.fullmatch(name) is not None


# --- folders ----------------------------------------------------------------------------------------------------


def read_folder(folder: Path, source: RecordSource) -> Read:
    """Read the databases in a private folder, in which a hostile compiler may be writing: those that it was given, and
    MIOpen's, by their names, as far as they are of a sane size.

    A folder that is not there holds nothing. Files that are neither are not ours to read.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    known = [path for path in paths if path.name in _OURS or miopen_name(path.name) or is_timing_cache(path.name)]
    return _read(known, source, of_child=True)


def read_files(paths: Iterable[Path], source: RecordSource) -> Read:
    """Read folders and files that a user named. Raises UsageError for what is not a tuning database."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}")
        if not path.is_dir() and _reader(path) is None:
            why = f": {_LEFT_ALONE[path.suffix]}" if path.suffix in _LEFT_ALONE else ""
            hint = "a problem cache ends in .json, .db or .sqlite, MIOpen's user databases in .ufdb.txt or .udb.txt"
            raise UsageError(f"{path} is not a tuning database{why}", hint=hint)
        files += sorted(path.iterdir()) if path.is_dir() else [path]
    return _read(files, source)


_LEFT_ALONE = {
    ".ukdb": "kernel binaries are not tuning; `farm fetch --with-kernels` brings those of a program",
    ".udb": "MIOpen's SQLite form is not read, only text (.udb.txt), which it writes unless it was built otherwise",
}
"""Files of MIOpen's in the folders of its databases, by ending, and why they are not read."""


def _read(paths: Iterable[Path], source: RecordSource, *, of_child: bool = False) -> Read:
    records: list[Record] = []
    origins: dict[Place, list[Path]] = {}
    dropped = Dropped(of_child=of_child)
    for path in paths:
        reader = _reader(path)
        if path.suffix in _LEFT_ALONE:
            dropped.files[path.name] = _LEFT_ALONE[path.suffix]
        if reader is None or path.is_dir():
            continue
        try:
            found = reader(path, source, dropped)
        except FileNotFoundError:
            continue  # MIOpen replaces a file by deleting it first.
        for place in {(record.store, record.file) for record in found}:
            origins.setdefault(place, []).append(path)
        records += found
    return Read(Snapshot.of(records), dropped, origins)


def write_folder(snapshot: Snapshot, folder: Path, *, problem_cache: str = PROBLEM_CACHE) -> None:
    """Write a snapshot as the files that MIGraphX and MIOpen read. What has no record gets no file: MIGraphX fails on
    an empty problem cache and makes one if there is none.

    `problem_cache` is its name; by its ending MIGraphX knows JSON from SQLite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    caches = {
        file: table for (store, file), table in snapshot.tables.items() if store is RecordStore.PROBLEM_CACHE and table
    }
    # A toolchain that names devices cannot read the older form, and one that does not has no device anywhere.
    keyed = {device: table for device, table in caches.items() if device}
    path = folder / problem_cache
    if caches and path.suffix in SQLITE_SUFFIXES:
        _write_sqlite(keyed, path)
    elif keyed:
        entries = (f"[{device},{_entries_json(table)}]" for device, table in keyed.items())
        write_new(path, "[" + ",\n".join(entries) + "]\n")
    elif caches:
        write_new(path, _entries_json(caches[""]))
    for (store, file), table in snapshot.tables.items():
        if store in OBJECTS:
            lines = (f"{json.dumps(key)}:{value}" for key, (value, _) in table.items())
            write_new(folder / OBJECTS[store], "{" + ",\n".join(lines) + "}\n")
        elif store is RecordStore.TIMING_CACHE:
            for value, _ in table.values():
                write_new(folder / file, base64.b64decode(value))
        elif store is not RecordStore.PROBLEM_CACHE and table:
            write_new(folder / file, _miopen_text(store, table))


def _reader(path: Path) -> Callable[[Path, RecordSource, Dropped], list[Record]] | None:
    if miopen_name(path.name):
        return _read_miopen
    if path.name in OBJECTS.values():
        return _read_object
    if is_timing_cache(path.name):
        return _read_timings
    if path.suffix == ".json":
        return _read_json
    return _read_sqlite if path.suffix in SQLITE_SUFFIXES else None


# --- problem cache ----------------------------------------------------------------------------------------------


def canonical(value: Any) -> str:
    """Return a record's one spelling of a JSON value: sorted keys, no white space, ASCII; numbers keep their type."""
    return _encode(value)


def _read_json(path: Path, source: RecordSource, dropped: Dropped) -> list[Record]:
    data = _bytes(path, dropped)
    if data is None or not data.strip():
        return []
    try:
        found = list(_entries(json.loads(data)))
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
        # Cut or damaged: what is whole in it can still be used.
        found = list(_salvaged(data.decode("utf-8", errors="replace")))
        at = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "its form"
        dropped.broke(path.name, at)
        if not found:
            dropped.files[path.name] = f"nothing in it is a whole entry of a problem cache; damaged: {at}"
    return _records(found, source, dropped, path.name)


def _records(
    entries: Iterable[tuple[str, Any, Any]], source: RecordSource, dropped: Dropped, name: str
) -> list[Record]:
    records = []
    for number, (device, key, solution) in enumerate(entries, 1):
        if solution is None:
            dropped.nulls += 1
            continue
        try:
            if key.keys() != {"name", "problem"}:
                raise ValueError(key)
            records.append(Record(RecordStore.PROBLEM_CACHE, device, canonical(key), canonical(solution), source))
        except (ValueError, AttributeError, RecursionError):
            dropped.broke(name, f"entry {number}")
    return records


def _entries(document: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield device, key and solution of a whole problem cache. Raises for any other document."""
    if not isinstance(document, list):
        raise TypeError(document)
    for first, second in document:
        if first.keys() == _DEVICE_KEYS:
            device = canonical(first)
            for key, solution in second:
                yield device, key, solution
        elif "name" in first:
            yield "", first, second
        else:
            raise KeyError(first)


def _salvaged(text: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is whole in a problem cache that is not, up to the place where it is damaged too often."""
    decoder, device, position, damages = json.JSONDecoder(), "", 0, 0
    start = re.compile(r"\[\s*(?=\{)")
    between, end = re.compile(r"\s*,\s*"), re.compile(r"\s*\]")
    while damages < _MOST_DAMAGES and (match := start.search(text, position)):
        position = match.end()
        try:
            first, position = decoder.raw_decode(text, position)
            if first.keys() == _DEVICE_KEYS:
                device = canonical(first)
            elif first.keys() == {"name", "problem"}:
                comma = between.match(text, position)
                solution, after = decoder.raw_decode(text, comma.end() if comma else position)
                closed = end.match(text, after)
                if closed:  # Else a number may have lost its last digits.
                    yield device, first, solution
                    position = closed.end()
        except (ValueError, RecursionError):
            damages += 1


def _read_sqlite(path: Path, source: RecordSource, dropped: Dropped) -> list[Record]:
    if not is_plain(path.lstat()):
        dropped.files[path.name] = "it is not a plain file"
        return []
    found: list[tuple[str, Any, Any]] = []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            # The file may come from anybody: its schema runs nothing, and no query goes on for ever.
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA cell_size_check = ON")
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _SQLITE_VALUE)
            database.set_progress_handler(lambda: 1, _SQLITE_STEPS)
            kind = database.execute("SELECT type FROM sqlite_master WHERE name = 'solutions'").fetchone()
            if kind != ("table",):
                dropped.files[path.name] = "it has no table `solutions`"
                return []
            database.text_factory = bytes
            for row in database.execute("SELECT device_key, problem_key, solution FROM solutions"):
                try:
                    device, key, solution = map(json.loads, row)
                    if device.keys() != _DEVICE_KEYS:
                        raise ValueError(device)
                    found.append((canonical(device), key, solution))
                except (ValueError, TypeError, AttributeError, RecursionError):
                    dropped.broke(path.name, f"row {len(found) + 1}")
    except sqlite3.Error as error:
        dropped.broke(path.name, str(error))
    return _records(found, source, dropped, path.name)


def _entries_json(table: Table) -> str:
    return "[\n" + ",\n".join([f"[{key},{entry[0]}]" for key, entry in table.items()]) + "\n]\n"


def _write_sqlite(tables: Mapping[str, Table], path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE solutions (device_key TEXT NOT NULL, problem_key TEXT NOT NULL, solution TEXT NOT NULL,"
            " PRIMARY KEY (device_key, problem_key)) WITHOUT ROWID"
        )
        for device, table in tables.items():
            rows = ((device, key, entry[0]) for key, entry in table.items())
            database.executemany("INSERT INTO solutions VALUES (?, ?, ?)", rows)


# --- the farm's own ---------------------------------------------------------------------------------------------


def _read_object(path: Path, source: RecordSource, dropped: Dropped) -> list[Record]:
    store = next(store for store, name in OBJECTS.items() if name == path.name)
    data = _bytes(path, dropped)
    try:
        values = json.loads(data or b"{}")
        found = [(key, value) for key, value in values.items() if _is_object(store, key, value)]
        if len(found) < len(values):
            dropped.broke(path.name, f"{len(values) - len(found)} of its records")
        return [Record(store, "", key, canonical(value), source) for key, value in found]
    except (ValueError, AttributeError, RecursionError):
        dropped.broke(path.name, "its form")
        return []


def _is_object(store: RecordStore, key: str, value: Any) -> bool:
    """Whether a record of our own is one: numbers by name, of a slice. A hostile child may have written it."""
    return (
        re.fullmatch(r"[0-9a-f]{64}", key) is not None
        and isinstance(value, dict)
        and all(type(number) in (int, float) and 0 <= number < _LARGEST_NUMBER for number in value.values())
        and (store is not RecordStore.SLICES or value.keys() == {"operations", "seconds"})
    )


# --- TensorRT ---------------------------------------------------------------------------------------------------


def _read_timings(path: Path, source: RecordSource, dropped: Dropped) -> list[Record]:
    data = _bytes(path, dropped)
    value = base64.b64encode(data or b"").decode()
    return [Record(RecordStore.TIMING_CACHE, path.name, "cache", value, source)] if value else []


# --- MIOpen -----------------------------------------------------------------------------------------------------


def _read_miopen(path: Path, source: RecordSource, dropped: Dropped) -> list[Record]:
    named = miopen_name(path.name)
    data = _bytes(path, dropped)
    if data is None or named is None:
        return []
    records: list[Record] = []
    seen: set[str] = set()
    lines = data.decode("ascii", errors="replace").split("\n")
    # A line ends in a newline; without one it may have lost its end.
    end = lines.pop()
    for number, line in enumerate(lines, 1):
        parsed = _parse_line(line)
        if parsed is None:
            if line.strip():
                dropped.broke(path.name, f"line {number}")
        elif parsed[0] not in seen:
            key, items = parsed
            seen.add(key)
            if named.store is RecordStore.FIND_DB:
                value = ";".join(f"{solver}:{values}" for solver, values in items.items())
                records.append(Record(named.store, path.name, key, value, source))
            else:
                records += [
                    Record(named.store, path.name, f"{key}={solver}", values, source)
                    for solver, values in items.items()
                ]
    if end.strip("\r\n "):
        dropped.broke(path.name, f"line {len(lines) + 1} has no end")
    return records


def _parse_line(line: str) -> tuple[str, dict[str, str]] | None:
    match = _LINE.fullmatch(line.rstrip("\r"))
    if not match:
        return None
    items: dict[str, str] = {}
    for item in match["contents"].split(";"):
        solver, colon, values = item.partition(":")
        if colon and solver:
            items.setdefault(solver, values)
    return (match["key"], items) if items else None


def _miopen_text(store: RecordStore, table: Table) -> str:
    if store is RecordStore.FIND_DB:
        return "".join([f"{key}={entry[0]}\n" for key, entry in table.items()])
    problems: dict[str, list[str]] = {}
    for key, entry in table.items():
        problem, _, solver = key.partition("=")
        problems.setdefault(problem, []).append(f"{solver}:{entry[0]}")
    return "".join([f"{problem}={';'.join(items)}\n" for problem, items in problems.items()])


def _bytes(path: Path, dropped: Dropped) -> bytes | None:
    limit = CHILD_LIMIT - dropped.size if dropped.of_child else FILE_LIMIT
    try:
        data = read_plain(path, limit)
    except OSError as error:
        if error.errno == errno.EFBIG:
            dropped.files[path.name] = f"it has more than {limit / 2**20:.3g} MiB"
        elif error.errno != errno.ENOENT:  # MIOpen replaces a file by deleting it first.
            dropped.files[path.name] = f"it is not a plain file: {error}"
        return None
    if dropped.of_child and _is_crowded(data, dropped):
        dropped.files[path.name] = "it has more records than a compiler writes"
        return None
    return data


def _is_crowded(data: bytes, before: Dropped) -> bool:
    """Whether parsing it too would take more memory than the sizes of a child's files let expect; else it counts."""
    records = before.records + max(data.count(mark) for mark in (b"\n", b";"))
    values = before.values + sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if records > CHILD_RECORDS or values > CHILD_VALUES:
        return True
    before.size, before.records, before.values = before.size + len(data), records, values
    return False


def check_place(place: Place) -> str:
    """Return what is wrong with the place of a foreign table; empty if nothing is."""
    store, file = place
    if store in OBJECTS:
        return "" if not file else f"{store} has one table, not one for {file!r}"
    if store is RecordStore.TIMING_CACHE:
        return "" if is_timing_cache(file) else f"{file!r} does not name a timing cache of TensorRT's"
    if store is not RecordStore.PROBLEM_CACHE:
        named = miopen_name(file)
        return "" if named and named.store is store else f"{file!r} does not name a {store} of MIOpen"
    device = _parsed(file) if file else None
    if not file or (isinstance(device, dict) and device.keys() == _DEVICE_KEYS):
        return ""
    return f"{file!r} is not a device of MIGraphX's problem cache"


def check_record(store: RecordStore, key: str, value: str) -> str:
    """Return what is wrong with a foreign record; empty if nothing is."""
    if store is RecordStore.PROBLEM_CACHE:
        parts = _parsed(key), _parsed(value)
        whole = isinstance(parts[0], dict) and parts[0].keys() == {"name", "problem"} and parts[1] is not None
        return "" if whole else f"no entry of a problem cache: {key[:80]}"
    if store in OBJECTS:
        return "" if _is_object(store, key, _parsed(value)) else f"no record of {store}: {key[:80]}"
    if store is RecordStore.TIMING_CACHE:
        whole = key == "cache" and re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", value) is not None and len(value) % 4 == 0
        return "" if whole else f"no timing cache: {key[:80]}"
    line = f"{key}={value}" if store is RecordStore.FIND_DB else f"{key}:{value}"
    return "" if _parse_line(line) else f"no record of a {store}: {line[:80]}"


def _parsed(text: str) -> Any:
    """Return a JSON value that is in its canonical spelling, else None."""
    try:
        value = json.loads(text)
        return value if canonical(value) == text else None
    except (ValueError, RecursionError):
        return None
