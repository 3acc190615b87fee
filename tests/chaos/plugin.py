"""The faults of `counts.toml` in pytest: their counts, the measured figures, the report.

Without `--chaos` the tests that are marked with a fault run as a slice, a tenth or less of the counts; `--chaos 1` is
all of them, `--chaos 0.2` a fifth. With `--chaos-report FOLDER` the figures are written there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.report import Fault, load_faults, write_report

FAULTS = pytest.StashKey[list[Fault]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", type=float, default=0.0, metavar="SHARE", help="share of the full counts; 0: a slice")
    parser.addoption("--chaos-report", type=Path, metavar="FOLDER", help="where to write what was measured")
    parser.addoption("--chaos-seed", type=int, default=0, metavar="N", help="seed of the random walk; 0: a new one")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name): a fault of tests/chaos/counts.toml")
    config.stash[FAULTS] = []


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """The fault that a test is marked with: its counts, and where its figures go."""
    mark = request.node.get_closest_marker("fault")
    fault = load_faults(request.config.getoption("chaos"))[mark.args[0]]
    if not fault.counts:
        pytest.skip("not in the slice: `make chaos` runs it")
    request.config.stash[FAULTS].append(fault)
    with fault.timed():
        yield fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if "fault" in getattr(item, "funcargs", {}) and (report.failed or report.when == "call"):
        why = call.excinfo.exconly().partition("\n")[0][:300] if report.failed and call.excinfo else ""
        item.funcargs["fault"].ended(passed=report.passed, why=why)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Write the report after each test: a run that is ended early has the figures so far."""
    done = yield
    folder, faults = item.config.getoption("chaos_report"), item.config.stash[FAULTS]
    if folder and faults:
        write_report(folder, faults, share=item.config.getoption("chaos"))
    return done
