"""Fixtures of the chaos suite: farms that may be broken, and clocks that are wrong."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.network import Network
from tests.chaos.rig import Rig


class Rigs:
    """Makes farms with settings of the test's choice; `s3` are those of the session's object storage."""

    def __init__(self, folder: Path, s3: Mapping[str, str]) -> None:
        self.s3 = s3
        self.made: list[Rig] = []
        self.parts = ExitStack()
        """What ends after the farms."""
        self._folder = folder

    def __call__(self, **settings: Any) -> Rig:
        folder = self._folder / f"farm{len(self.made)}"
        folder.mkdir()
        self.made.append(Rig(folder, **{**self.s3, **settings}))
        return self.made[-1]


@pytest.fixture
def rig(tmp_path: Path, s3_settings: dict[str, str]) -> Iterator[Rigs]:
    """Makes farms that may be broken; they end with the test."""
    rigs = Rigs(tmp_path, s3_settings)
    with ExitStack() as stack:
        stack.push(rigs.parts)
        yield rigs
        for one in rigs.made:
            stack.enter_context(one)


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Makes hosts that have addresses of their own; they go with the test."""
    with ExitStack() as stack:

        def make(*names: str) -> Network:
            try:
                return stack.enter_context(Network(*names))
            except OSError as error:
                pytest.skip(f"this process may not make hosts: {error}")

        yield make


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) { return atol(getenv("CHAOS_CLOCK")); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += shift();
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
"""


@pytest.fixture
def shifted(tmp_path: Path) -> Callable[[int], dict[str, str]]:
    """Returns the environment of a process whose clock is so many seconds ahead (or behind)."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("a C compiler (cc) is missing: it makes the library that shifts the clock")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return lambda seconds: {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(seconds)}
