"""What a user offers for a tuning database: hostile text costs the server little, and is refused with its line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from farm.errors import UsageError
from farm.tuning import exchange
from farm.tuning.exchange import read_offered
from farm.tuning.formats import canonical
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot

HEADER = b'{"schema": 1, "sources": [["2026-01-01"]], "sessions": [], "days": {}, "folded": ""}'
PERF = "gfx942130.HIP.3_5_1_4dddc24.udb.txt"
TIMES = b"@@\tperf_db\t" + PERF.encode()
CACHE = b"@@\tproblem_cache\t"
PROBLEM = b'0\t{"name":"gemm","problem":1}\t'
END = b"@@\tend"
SOURCE = RecordSource("2026-01-02T00:00:00+00:00", "import by me")
CHILD = """
import resource, sys
from farm.errors import UsageError
from farm.tuning.exchange import read_offered
from farm.tuning.records import RecordSource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_offered(sys.stdin.buffer.read(), RecordSource(""))
except UsageError as error:
    print(error.message, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def lines(*given: bytes) -> bytes:
    return b"\n".join([HEADER, *given])


def read(data: bytes) -> Snapshot:
    return read_offered(gzip.compress(data, compresslevel=1), SOURCE)


def test_records_of_all_stores_come_back_with_the_source_of_the_import() -> None:
    records = [
        Record(RecordStore.PERF_DB, PERF, "1x1=Solver", "1,2", RecordSource("2025")),
        Record(RecordStore.FIND_DB, PERF.replace("udb", "ufdb"), "1x1", "A:0.1,0,x;B:1,0,y", RecordSource("2025", "w")),
        Record(RecordStore.PROBLEM_CACHE, "", canonical({"name": "a", "problem": [1, "\t\0é"]}), '"v"', SOURCE),
        Record(RecordStore.SLICES, "", "0" * 64, '{"operations":1,"seconds":2.5}', SOURCE),
        Record(RecordStore.TIMING_CACHE, "TensorrtExecutionProvider_cache_sm90.timing", "cache", "AAAA", SOURCE),
    ]
    found = read_offered(exchange.pack(Snapshot.of(records)), SOURCE)
    assert {(each.store, each.file, each.key, each.value) for each in found} == {
        (each.store, each.file, each.key, each.value) for each in records
    }
    assert {each.source for each in found} == {SOURCE}


LARGE = {
    "one long value": lambda: lines(TIMES, b"0\tk=s\t" + b"v" * (400 << 20)),
    "a line of 50 MiB": lambda: lines(TIMES, b"0\tk=s\t" + b"v" * (50 << 20), END),
    "empty records": lambda: lines(TIMES, b"0\tk=s\tv\n" * (5 << 20)),
    "different records": lambda: lines(TIMES, *(b"0\tk%d=s\tv" % number for number in range(3_000_000))),
    "a header of lists": lambda: b'{"schema": 1, "sources": [' + b"[]," * (30 << 20),
    "values of lists": lambda: lines(CACHE, *[PROBLEM + b"[" + b"[]," * 300_000 + b"[]]"] * 60, END),
    "many files": lambda: lines(*(b"@@\tperf_db\tgfx942130.HIP.%d.udb.txt" % n for n in range(1_000_000)), END),
}
"""Made when they are tested."""


@pytest.mark.parametrize("name", LARGE)
def test_a_small_import_takes_little_memory(name: str) -> None:
    """Less than a megabyte of gzip may unpack to gigabytes."""
    packed = gzip.compress(LARGE[name](), compresslevel=1)
    done = subprocess.run([sys.executable, "-c", CHILD], input=packed, capture_output=True, check=True)
    assert int(done.stdout) * 1024 < 300 << 20
    assert b"more than" in done.stderr, done.stderr


HOSTILE = {
    "no gzip": (b"no snapshot", "incorrect header check"),
    "a sqlite file": (gzip.compress(b"SQLite format 3\0" + b"\0" * 4096), "line 1: it is not of printable ASCII"),
    "an archive": (b"PK\3\4" + b"\0" * 100, "not a snapshot"),
    "cut": (gzip.compress(lines(TIMES, b"0\tk=s\tv", END))[:-4], "it is cut"),
    "an archive in it": (gzip.compress(gzip.compress(lines(END))), "line 1: it is not of printable ASCII"),
    "nothing": (gzip.compress(b""), "it is cut"),
    "no end": (gzip.compress(lines(TIMES, b"0\tk=s\tv")), "it is cut"),
    "no header": (gzip.compress(b"\n".join([TIMES, b"0\tk=s\tv", END])), "line 1: Expecting value"),
    "a header that is a list": (gzip.compress(b"[]\n" + END), "line 1: "),
    "a newer form": (gzip.compress(b'{"schema": 2}\n' + END), "line 1: its schema is 2, this farm reads 1"),
    "a deep header": (gzip.compress(b'{"a":' * 100_000), "line 1: it is nested too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_snapshot_is_refused(name: str) -> None:
    packed, said = HOSTILE[name]
    with pytest.raises(UsageError, match=said):
        read_offered(packed, SOURCE)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((b"0\tk=s\tv",), "line 2: it has not the fields of a record"),
        ((TIMES, b"0\tk=s\tv", b"0\tk=s"), "line 4: it has not the fields of a record"),
        ((TIMES, b"0\tk=s\tv\tw"), "line 3: it has not the fields of a record"),
        ((TIMES, b"", b"0\tk=s\tv"), "line 3: it has not the fields of a record"),
        ((TIMES, b"0\tk=s\tv\0"), "line 3: it is not of printable ASCII"),
        ((TIMES, b"0\tk=s\t\xff\xfe"), "line 3: it is not of printable ASCII"),
        ((TIMES, "0\tk=s\té".encode()), "line 3: it is not of printable ASCII"),
        ((TIMES, b"0\tk=s\tv\r"), "line 3: it is not of printable ASCII"),
        ((TIMES, b"0\tk\tv"), "line 3: no record of a perf_db"),
        ((b"@@\tperf_db\t../../x.udb.txt",), "line 2: .*does not name a perf_db"),
        ((b"@@\tperf_db\tgfx942.HIP." + b"1" * 2000 + b".udb.txt",), "line 2: the name of its file is too long"),
        ((b"@@\twhatever\t",), "line 2: 'whatever' is not a valid RecordStore"),
        ((CACHE + b'{"gfx_name":"gfx942"}',), "line 2: .*is not a device"),
        ((CACHE, PROBLEM + b"1e999"), "line 3: no entry of a problem cache"),
        ((CACHE, PROBLEM + b"NaN"), "line 3: no entry of a problem cache"),
        ((CACHE, PROBLEM + b"1" * 5000), "line 3: no entry of a problem cache"),
        ((CACHE, PROBLEM + b"null"), "line 3: no entry of a problem cache"),
        ((CACHE, PROBLEM + b"[" * 501 + b"]" * 501), "line 3: it has more than 500 lists and objects"),
        ((CACHE, PROBLEM + b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "line 3: it has more than 500 lists"),
        ((b"@@\tslices\t", b"0\t" + b"0" * 64 + b'\t{"operations":1e300,"seconds":1}'), "line 3: no record of slices"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(bad: tuple[bytes, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(lines(*bad, END))


def test_what_is_nested_as_deep_as_is_taken_can_be_read_everywhere() -> None:
    (record,) = read(lines(CACHE, PROBLEM + b"[" * 499 + b"]" * 499, END))
    assert json.dumps(json.loads(record.value)) == record.value
