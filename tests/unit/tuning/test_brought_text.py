"""A snapshot that a user brings: what it unpacks to is bounded before anything is made of it."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest

from farm.errors import UsageError
from farm.tuning import text

HEADER = b'{"schema": 1, "sources": [["2026-01-01"]], "sessions": [], "days": {}, "folded": ""}'
CHILD = """
import gzip, resource, sys
from farm.errors import UsageError
from farm.tuning import text
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    text.check(text.unpack(sys.stdin.buffer.read(), text.BROUGHT))
except UsageError as error:
    print(error.message, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def records(lines: bytes) -> bytes:
    return HEADER + b"\n@@\tperf_db\tgfx942130.HIP.3_5_1_4dddc24.udb.txt\n" + lines + b"\n@@\tend"


HOSTILE = {
    "one long value": lambda: records(b"0\tk\t" + b"v" * (400 << 20)),
    "empty records": lambda: records(b"0\tk\tv\n" * (20 << 20)),
    "a header of lists": lambda: b'{"schema": 1, "sources": [' + b"[]," * (30 << 20),
    "a value of lists": lambda: records(b"0\tk\t" + b"[]," * (15 << 20)),
}
"""Made when they are tested: together they take 0.7 GB."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_import_takes_little_memory(name: str) -> None:
    """Less than a megabyte of gzip took gigabytes."""
    packed = gzip.compress(HOSTILE[name](), compresslevel=1)
    done = subprocess.run([sys.executable, "-c", CHILD], input=packed, capture_output=True, check=True)
    assert int(done.stdout) * 1024 < 300 << 20
    assert b"a snapshot of a tuning database with" in done.stderr


def test_what_is_cut_is_said_to_be_cut() -> None:
    with pytest.raises(UsageError, match="it is cut"):
        text.unpack(gzip.compress(records(b"0\tk\tv"))[:-4], text.BROUGHT)
