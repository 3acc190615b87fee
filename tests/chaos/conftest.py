"""Fixtures of the chaos suite: the counts, the measured figures, the report; a farm that may be broken.

Without `--chaos` the tests run as a slice, a tenth or less of the counts in `counts.toml`; `--chaos 1` is all of them,
`--chaos 0.2` a fifth. With `--chaos-report FOLDER` the figures are written there.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.report import Fault, load_faults, write_report
from tests.chaos.rig import Rig

FAULTS = pytest.StashKey[list[Fault]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", type=float, default=0.0, metavar="SHARE", help="share of the full counts; 0: a slice")
    parser.addoption("--chaos-report", type=Path, metavar="FOLDER", help="where to write what was measured")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name): a fault of tests/chaos/counts.toml")
    config.stash[FAULTS] = []


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """The fault that a test is marked with: its counts, and where its figures go."""
    mark = request.node.get_closest_marker("fault")
    fault = load_faults(request.config.getoption("chaos", 0.0))[mark.args[0]]
    if not fault.counts:
        pytest.skip("not in the slice: `make chaos` runs it")
    request.config.stash[FAULTS].append(fault)
    with fault.timed():
        yield fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if "fault" in getattr(item, "funcargs", {}) and (report.failed or report.when == "call"):
        item.funcargs["fault"].ended(passed=report.passed, why=str(report.longrepr or "").strip().splitlines()[-1:])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder, faults = session.config.getoption("chaos_report", None), session.config.stash[FAULTS]
    if folder and faults:
        write_report(folder, faults, share=session.config.getoption("chaos"))


class Rigs:
    """Makes farms with settings of the test's choice; `s3` are those of the session's object storage."""

    def __init__(self, folder: Path, s3: Mapping[str, str]) -> None:
        self.s3 = s3
        self.made: list[Rig] = []
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
        yield rigs
        for one in rigs.made:
            stack.enter_context(one)


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
