"""The process in which readers of foreign bytes are tried: one fork for each reader, so that none harms another.

As a program it takes the arguments of `tests.fuzz.run.try_readers` as JSON, and prints a line of JSON for each reader.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis

from tests.fuzz.mutations import mutated
from tests.fuzz.reader import Reader

MEMORY, TIMES = 64 << 20, 4
"""Bytes, and times the input, by which a process may grow while it reads one."""
GUARD = 2 << 30
"""Bytes after which the system refuses more: the machine is not to suffer."""
LONGEST_LINE = 2000
"""Characters of a line of an error."""


class Broken(AssertionError):
    """A reader broke a promise; the text says which."""


def grown() -> int:
    """Return the most bytes that were resident since `clear_refs`, less those that are now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(status["VmHWM"].split()[0]) - int(status["VmRSS"].split()[0])) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def attempt(reader: Reader, data: bytes, folder: Path, limit: float, *, measured: bool = True) -> None:
    """Have a reader read an input, for `limit` seconds of CPU at most. Raises Broken."""
    path = folder / reader.file
    path.write_bytes(data)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        reader.read(path)
    except reader.errors as error:
        longest = max(map(len, str(error).splitlines()), default=0)
        if not 0 < longest <= LONGEST_LINE:
            raise Broken(f"a message of {longest} characters: {str(error)[:200]!r}") from None
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = next((each for each in reversed(where) if "/farm/" in each.filename), where[-1])
        raise Broken(f"{type(error).__name__}: {str(error)[:200]} ({Path(ours.filename).name}:{ours.lineno})") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    more = resident() + grown() - before
    if measured and more > MEMORY + TIMES * len(data):
        raise Broken(f"{more >> 20} MiB of memory for {len(data)} bytes")


def try_reader(reader: Reader, order: dict[str, Any], folder: Path) -> int:
    """Read the corpus, then what is made of it; return how many inputs there were. Raises Broken."""
    corpus = reader.corpus(folder)
    place = Path(order["found"]) / reader.name
    count = 0

    def check(data: bytes) -> None:
        nonlocal count
        count += 1
        place.write_bytes(data)
        attempt(reader, data, folder, order["limit"])

    place.write_bytes(corpus[0])
    attempt(
        reader, corpus[0], folder, order["limit"], measured=False
    )  # What is imported at first use is not a cost of an input.
    for data in corpus:
        check(data)
    settings = hypothesis.settings(
        max_examples=order["examples"],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    end = time.monotonic() + order["seconds"]
    rounds = 0
    while not rounds or time.monotonic() < end:
        test: Callable[[], None] = hypothesis.given(mutated(corpus))(check)
        hypothesis.seed(order["seed"] + rounds)(settings(test))()
        rounds += 1
    place.unlink()
    return count


def in_fork(reader: Reader, order: dict[str, Any]) -> dict[str, Any]:
    """Try a reader in a process of its own; return what came of it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        result: dict[str, Any] = {}
        try:
            warnings.simplefilter("ignore")
            faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
            resource.setrlimit(resource.RLIMIT_DATA, (GUARD, GUARD))
            with tempfile.TemporaryDirectory() as folder:
                result["inputs"] = try_reader(reader, order, Path(folder))
        except Broken as error:
            result["broken"] = str(error)
        except BaseException:
            result["broken"] = traceback.format_exc()[-1500:]
        with suppress(OSError):
            os.write(write, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    ended = os.waitstatus_to_exitcode(status)
    words = f"more than {order['limit']} s of CPU" if ended == -signal.SIGPROF else f"the process ended with {ended}"
    return {"reader": reader.name, **(json.loads(text) if text else {"broken": words})}


def main(order: dict[str, Any]) -> None:
    # What Hypothesis does once in a process is done before the forks: above all it reads our sources for constants.
    hypothesis.settings(max_examples=1, database=None)(hypothesis.given(mutated([b"x"]))(lambda data: None))()
    gc.freeze()  # Else each fork copies what the collector touches.
    for reader in importlib.import_module(order["table"]).READERS:
        if not order["only"] or reader.name in order["only"]:
            print(json.dumps(in_fork(reader, order)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
