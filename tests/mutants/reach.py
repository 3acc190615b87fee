"""A pytest plug-in that writes which test runs which line of the rooms, and which script of the store.

    REACH=FOLDER python -m pytest -p tests.mutants.reach …

Python processes that a test starts count as the test, unless they get an environment of their own or are killed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.places import ROOMS, ROOT

FOLDER = Path(os.environ["REACH"])
INCLUDED = [f"{ROOT}/{room}/*" for room in ROOMS]
MODULES = tuple(room.replace("/", ".") for room in ROOMS)
CACHED = type(cache(len))
PHASE = re.compile(r" \((?:setup|call|teardown)\)$")

LINES = coverage.Coverage(data_file=None, config_file=False, include=INCLUDED)
LINES.start()

running = ""
scripts: dict[str, set[str]] = defaultdict(set)
seconds: dict[str, float] = defaultdict(float)
not_passed: set[str] = set()


def pytest_configure() -> None:
    """See the names of the scripts that tests run."""
    from farm.store.link import Link

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(link: Link, script: str, *values: Any, **arguments: Any) -> Any:
            scripts[running].add(script)
            return call(link, script, *values, **arguments)

        return run

    for name in ("run", "run_many"):
        setattr(Link, name, watched(getattr(Link, name)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let Python processes that tests start write which lines they run, for the test that started them."""
    if _runs_tests(session):
        config = FOLDER / f"{os.getpid()}.ini"
        config.write_text(
            f"[run]\nparallel = true\ndata_file = {FOLDER}/child-{os.getpid()}\n"
            "context = ${PYTEST_CURRENT_TEST-}\ninclude = " + ",".join(INCLUDED) + "\n"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global running  # noqa: PLW0603
    running = item.nodeid
    _empty_caches()
    LINES.switch_context(running)
    try:
        return (yield)
    finally:
        running = ""
        LINES.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] += report.duration
    if not report.passed:
        not_passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    LINES.stop()
    if not _runs_tests(session):
        return
    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for data in (LINES.get_data(), *_of_children()):
        for name in data.measured_files():
            for line, tests in data.contexts_by_lineno(name).items():
                for test in tests:
                    lines[PHASE.sub("", test)][str(Path(name).relative_to(ROOT))].add(line)
    written = {
        test: {
            "seconds": round(spent, 3),
            "lines": {name: sorted(found) for name, found in lines[test].items()},
            "scripts": sorted(scripts[test]),
        }
        for test, spent in seconds.items()
        if test not in not_passed
    }
    (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(written))


def _empty_caches() -> None:
    """Empty the caches of the rooms: else what fills one would count as run by the first test alone."""
    for name, module in list(sys.modules.items()):
        if name.startswith(MODULES):
            for value in list(vars(module).values()):
                if isinstance(value, CACHED):
                    value.cache_clear()


def _runs_tests(session: pytest.Session) -> bool:
    """Whether this process runs tests itself: xdist's controller does not."""
    return not getattr(session.config.option, "numprocesses", None) or hasattr(session.config, "workerinput")


def _of_children() -> Iterator[coverage.CoverageData]:
    for path in FOLDER.glob(f"child-{os.getpid()}.*"):
        data = coverage.CoverageData(str(path))
        try:
            data.read()
        except coverage.CoverageException:  # It was killed while it wrote.
            continue
        yield data
