"""A pytest plug-in that writes which test runs which line of the rooms, and which script of the store.

    REACH=FOLDER python -m pytest -p tests.mutants.reach …

Child processes are not looked into: what only they run counts as run by no test.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.places import ROOMS, ROOT

FOLDER = Path(os.environ["REACH"])
LINES = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT}/{room}/*" for room in ROOMS])
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global running  # noqa: PLW0603
    running = item.nodeid
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
    if getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # xdist's controller, which ran none itself
    data = LINES.get_data()
    files = {str(Path(name).relative_to(ROOT)): data.contexts_by_lineno(name) for name in data.measured_files()}
    lines: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for name, tests in files.items():
        for line, found in tests.items():
            for test in found:
                lines[test].setdefault(name, []).append(line)
    written = {
        test: {"seconds": round(spent, 3), "lines": lines[test], "scripts": sorted(scripts[test])}
        for test, spent in seconds.items()
        if test not in not_passed
    }
    (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(written))
