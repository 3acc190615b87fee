"""How tuning travels: a snapshot as text, and what of a user's own databases fits one of the farm. Pure.

Lines of tab-separated fields (no key or value has a tab or a newline), so that a head of 50 MB is read in a moment, and
by people with `gzip -dc`:

    {"schema": 1, "sources": [[when, worker, job, toolchain, seconds], …], "sessions": […], "days": {…}, "folded": ""}
    @@ TAB <store> TAB <file>                      the records of one table follow
    <number of its source> TAB <key> TAB <value>
    @@ TAB end                                     without it, the text was cut

Tables, and keys in them, are sorted, so that equal snapshots are equal bytes.

What a user offers to import has the same form, without sources and a log, since it is a source of its own. The server
reads it line by line, each checked before the next, and needs no process of its own for that: bytes of text, records,
files, the length of a line, and the lists and objects in it are bounded. All of it is ASCII that can be printed. What
does not fit is refused, file by file, with the reason.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from farm.errors import UsageError
from farm.spec import Device
from farm.targets.pools import bare, same_arch
from farm.tuning.formats import OBJECTS, check_place, check_record, miopen_name
from farm.tuning.records import Log, Measured, Place, RecordSource, RecordStore, Session, Snapshot, Table, TuningWork

SCHEMA = 1

_MARK, _END = "\n@@\t", "end"

LARGEST = 2 << 30  # Bytes of the text of what the farm wrote itself, at most.


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


def check_schema(header: Mapping[str, object]) -> None:
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
    # Every worker writes deltas, and a farm may be hostile: whoever reads them makes files of these names.
    place = _place(name, file)
    # All lines at once: a loop over them takes three times as long.
    fields = part.replace("\n", "\t").split("\t")[2:]
    if len(fields) != 3 * part.count("\n"):
        raise ValueError("a line has not three fields")
    values = zip(fields[2::3], map(sources.__getitem__, fields[0::3]), strict=True)
    return place, dict(zip(fields[1::3], values, strict=True))


def _log(document: dict[str, Any]) -> Log:
    sessions = {
        each["id"]: Session(each["id"], each["until"], TuningWork(**each["work"])) for each in document["sessions"]
    }
    days = {name: replace(TuningWork(*sums), sessions=count) for name, (count, sums) in document["days"].items()}
    return Log(sessions, days, document["folded"])


MOST_BYTES = 64 << 20  # Of unpacked text.
MOST_RECORDS = 500_000
MOST_FILES = 1000  # Tables; the answer names those that are refused.
LONGEST_LINE = 1 << 20  # Bytes.
LONGEST_NAME = 1000  # Bytes of the name of a file or a device.
MOST_BRACKETS = 500  # Lists and objects in a record, so nothing is nested deeper. Compilers write some ten.

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


MLIR = "gpu::mlir_op"  # Its problem names its device: arch, compute units, chiplets, problem, separated by tabs.


@dataclass(frozen=True, slots=True)
class Fitting:
    """What may be imported, and the files that may not, with the reason."""

    snapshot: Snapshot
    refused: Mapping[str, str]


def fitting(offered: Snapshot, known: Snapshot, device: Device, toolchain: str, miopen: str = "") -> Fitting:
    """Choose what this kind of device measured, and this toolchain reads.

    Which version of MIOpen that has, its own jobs have shown; else `miopen` says (`HIP.3_5_1_4dddc24`, from the files'
    names), or what was imported before, or the files, which must be of one then. The form of its problem cache is known
    from MIGraphX's version, else from its own jobs alone: on a file of the wrong form they would all fail. Raises
    UsageError if the files are of several versions and nothing says which.
    """
    arch = bare(device.arch)
    of_jobs = [place for place, table in known.tables.items() if any(source.job for _, source in table.values())]
    ours = [place for place in offered.tables if not _other_miopen_device(place, device)]
    versions = _versions(of_jobs, arch) or _chosen(_versions(ours, arch), _versions(known.tables, arch), miopen)
    form = _form_of(toolchain)
    forms = {form} if form else {_form(file) for store, file in of_jobs if store is RecordStore.PROBLEM_CACHE}
    taken: dict[Place, Table] = {}
    refused = {}
    for (store, file), table in offered.tables.items():
        if store is RecordStore.PROBLEM_CACHE:
            why = _other_device(file, table, device) or _other_form(file, forms)
        elif store in OBJECTS:
            why = "it is the farm's own, and is not imported"
        else:
            why = _other_miopen_device((store, file), device) or _other_miopen(file, versions)
        if why:
            refused[label((store, file))] = why
        else:
            taken[store, file] = table
    return Fitting(Snapshot(taken), refused)


def label(place: Place) -> str:
    """Return what people call a table: MIOpen's by its file, others by store and device."""
    store, file = place
    return file if miopen_name(file) else f"{store} {file}".strip()


# --- the problem cache's form ---------------------------------------------------------------------------------------

_PLAIN, _KEYED = "in the form of ROCm 7.2 and older", "keyed by device"


def _form_of(toolchain: str) -> str | None:
    """Return the form that a toolchain reads; None if its version does not say.

    MIGraphX 2.15 (ROCm 7.2) names no device. 2.16 is the number of development before and after the change.
    """
    said = re.search(r"migraphx(\d+)\.(\d+)", toolchain)
    version = (int(said[1]), int(said[2])) if said else (2, 16)
    return None if version == (2, 16) else _PLAIN if version < (2, 16) else _KEYED


def _form(file: str) -> str:
    return _KEYED if file else _PLAIN


def _other_form(file: str, forms: set[str]) -> str:
    mine = _form(file)
    if not forms:
        return (
            f"it is {mine}, and whether this pool's toolchain reads that its version does not say (MIGraphX 2.16 was "
            "that of development before and after the change): let a job tune there first, which shows it"
        )
    return "" if mine in forms else f"it is {mine}, and this pool's toolchain reads what is {', '.join(sorted(forms))}"


# --- MIOpen's version and device ------------------------------------------------------------------------------------

_UNITS = re.compile(r"(?:_(?:no)?sramecc)?(?:_(?:no)?xnack)?(?:_(?P<decimal>\d+)|(?P<hexadecimal>[0-9a-f]+))")
"""What follows the architecture in a name: features, and compute units, up to 64 in decimals, more in hexadecimals."""


def _chosen(offered: set[str], imported: set[str], miopen: str) -> set[str]:
    listed = ", ".join(sorted(offered))
    if miopen:
        if offered and miopen not in offered:
            hint = f"nothing was imported; --miopen takes one of {listed}"
            raise UsageError(f"no file is of MIOpen {miopen}", hint=hint)
        return {miopen}
    if not imported and len(offered) > 1:
        raise UsageError(
            f"the files are of several versions of MIOpen: choose one with --miopen, of {listed}",
            hint="nothing was imported; a job that tunes in this pool shows which it has",
        )
    return imported or offered


def _versions(places: Iterable[Place], arch: str) -> set[str]:
    names = (miopen_name(file) for _, file in places)
    return {named.version for named in names if named and named.version and named.base.startswith(arch)}


def _other_miopen(file: str, versions: set[str]) -> str:
    named = miopen_name(file)
    version = named.version if named else ""
    if not version:
        return "its name has no version of MIOpen"
    return "" if version in versions else f"it is of MIOpen {version}, not of {', '.join(sorted(versions))}"


def _other_miopen_device(place: Place, device: Device) -> str:
    """Say that a file of MIOpen's is of another device, by its name; what that does not tell is let through."""
    named, arch = miopen_name(place[1]), bare(device.arch)
    if named is None:
        return ""
    if not named.base.startswith(arch):
        return f"it is not of {arch}"
    said = _UNITS.fullmatch(named.base.removeprefix(arch))
    if said is None or device.compute_units is None:
        return ""
    units = int(said["decimal"]) if said["decimal"] else int(said["hexadecimal"], 16)
    if units in _counts(device):
        return ""
    return f"it is of {arch} with {units} compute units, not {device.compute_units}"


# --- the problem cache's device -------------------------------------------------------------------------------------


def _other_device(key: str, table: Table, device: Device) -> str:
    found = set()
    if key:
        named = json.loads(key)
        found.add((str(named["gfx_name"]), str(named["cu_count"])))
    for problem in table:
        entry = json.loads(problem)
        if entry["name"] == MLIR and isinstance(entry["problem"], str):
            arch, units, *_ = [*entry["problem"].split("\t"), ""]
            if units.isdecimal():
                found.add((arch, units))
    for arch, units in sorted(found):
        if not same_arch(arch, device.arch) or (device.compute_units and units not in map(str, _counts(device))):
            return f"it is of {arch[:80]} with {units[:80]} compute units"
    return ""


def _counts(device: Device) -> set[int]:
    """Return what libraries may name as a device's compute units: HIP counts RDNA's by twos (work group processors)."""
    units = device.compute_units or 0
    return {units, units // 2} if device.arch.startswith("gfx1") else {units}
