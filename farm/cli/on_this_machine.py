"""Shared code of commands that compile and measure on this machine, without a farm."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farm.cli import output, render
from farm.errors import CompileFailed, FarmFault
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.compiling.pipeline import OnPhase
    from farm.jobs.state import Phase
    from farm.results.speed import ComparisonDocument, MeasuredDocument
    from farm.settings import Settings


@contextmanager
def here() -> Iterator[tuple[Settings, Path, OnPhase]]:
    """Yield settings for one compile at a time on all cores, a temporary folder, and a callback for phases.

    A failed step becomes an error with its exit code; SIGTERM counts as Ctrl-C.
    """
    from farm.compiling.pipeline import StepEnded
    from farm.jobs.state import Fault
    from farm.settings import load_settings

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = load_settings(cpu_slots=1)
    output.quiet_logs(settings)
    with output.if_interrupted("no file was written"), tempfile.TemporaryDirectory(prefix="farm-") as work:
        try:
            yield settings, Path(work), _teller()
        except StepEnded as ended:
            if ended.failure is None:
                raise KeyboardInterrupt from None
            kind, message, detail, _ = ended.failure
            for line in detail.splitlines():
                output.note(f"  | {one_line(line)}")
            error = FarmFault if kind.policy.fault is Fault.FARM else CompileFailed
            raise error(f"{kind}: {one_line(message)}", hint=kind.policy.advice) from None


def _teller() -> OnPhase:
    said: set[str] = set()

    def say_phase(phase: Phase, _progress: float | None, detail: str) -> None:
        words = f"{phase}{f': {detail}' if detail and not detail.startswith('run ') else ''}"
        if words not in said and f"{phase}: {detail}" not in said:
            said.add(words)
            output.note(f"  {words}")

    return say_phase


def latency(measured: MeasuredDocument) -> str:
    """Return a program's latency for people: median and tail."""
    found = measured["latency"]
    spread = f"p90 {render.duration(found['p90'])}, p99 {render.duration(found['p99'])}"
    return f"{render.duration(found['p50'])}, {spread}"


def compared(comparison: ComparisonDocument) -> str:
    """Return a program's speed as a multiple of another's, for people."""
    figures = (comparison["ratio"], *comparison["interval"])
    ratio, low, high = (f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" for value in figures)
    return f"{ratio}x the speed of the other [{low}, {high}]: {comparison['verdict']}"
