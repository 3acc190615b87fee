"""Following a build: a live display on a terminal, or one plain line for every change of state."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from farm.cli import output, render
from farm.errors import FarmError
from farm.inert import one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from farm.client.client import FarmClient
    from farm.jobs.estimate import OutlookDocument
    from farm.results.report import BuildView, JudgedCell

LIVELY_PERIOD = 1.0
"""Seconds between two reads of a build for a display that shows elapsed time."""

CELLS_A_SECOND = 500
"""Cells that one read may cost, so that large builds are read less often."""


class Display(Protocol):
    """Shows the cells of a build repeatedly."""

    def show(self, cells: Sequence[JudgedCell], outlook: OutlookDocument | None = None) -> None:
        """Show the cells as they are now, and when the others may be done."""


class Lines:
    """One plain line on standard error for every change of a cell's state; no ANSI, nothing redrawn."""

    period: float | None = None

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}

    def show(self, cells: Sequence[JudgedCell], outlook: OutlookDocument | None = None) -> None:
        """Print what changed since the last call, except cells that only wait."""
        for cell in cells:
            now = (str(cell["state"]), int(cell.get("attempt") or 0))
            before = self._seen.get(cell["identifier"], ("queued", now[1]))
            self._seen[cell["identifier"]] = now
            if now != before:
                output.note(render.change(cell))


class Screen:
    """The live display: one line for every running cell, the cells that ended last, and the counts."""

    def __init__(self) -> None:
        self._cells: Sequence[JudgedCell] = ()
        self._outlook: OutlookDocument | None = None

    def show(self, cells: Sequence[JudgedCell], outlook: OutlookDocument | None = None) -> None:
        """Remember the cells; the display draws them by itself."""
        self._cells, self._outlook = cells, outlook

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many cells as fit on the terminal: running first, then failed, queued, done."""
        from rich.table import Table
        from rich.text import Text

        room = max(3, (options.height or console.height) - 3)
        order = ("running", "failed", "queued", "cancelled", "succeeded")
        cells = sorted(self._cells, key=lambda cell: order.index(cell["state"]))
        grid = Table.grid(padding=(0, 2))
        for column in range(5):
            grid.add_column(no_wrap=True, overflow="ellipsis", ratio=3 if column == 0 else None)
        for cell in cells[:room]:
            identifier, state, *rest = render.activity(cell)
            texts = [Text(one_line(text)) for text in rest]
            grid.add_row(Text(one_line(identifier)), Text(state, style=render.STYLES.get(state, "")), *texts)
        yield grid
        hidden = f" ({len(cells) - room} not shown)" if len(cells) > room else ""
        yield Text("; ".join([render.counts(cells) + hidden, *render.outlook(self._outlook)]))


@contextmanager
def display() -> Iterator[tuple[Display, float | None]]:
    """Yield the display for this terminal, and the seconds between its updates (None: on events)."""
    if not output.lively():
        yield Lines(), None
        return
    from rich.console import Console
    from rich.live import Live

    screen = Screen()
    with Live(screen, console=Console(stderr=True), refresh_per_second=4, transient=True):
        yield screen, LIVELY_PERIOD


def follow(client: FarmClient, build_id: str) -> tuple[BuildView, list[JudgedCell]]:
    """Show a build until its report is written; return the build and its cells.

    Events say when to read, and only reads are shown, so nothing is missed or repeated if the connection breaks.
    Raises FarmFault if the farm stays unreachable, KeyboardInterrupt on Ctrl-C.
    """
    news: queue.SimpleQueue[FarmError | str] = queue.SimpleQueue()
    # A daemon: it may be in a read when Ctrl-C comes, and nobody waits for it then.
    threading.Thread(target=_listen, args=(client, build_id, news), name="events", daemon=True).start()
    report = client.report(build_id)
    with display() as (screen, period):
        screen.show(report["cells"], report["build"].get("outlook"))
        looked = time.monotonic()
        message: FarmError | str = ""
        while message != "end":
            message = _next(news, period)
            pause = max(0.2, len(report["cells"]) / CELLS_A_SECOND) - (time.monotonic() - looked)
            if message != "end" and pause > 0:
                time.sleep(pause)
            while message != "end" and not news.empty():
                message = news.get()
            if isinstance(message, FarmError):
                raise message
            report = client.report(build_id)
            screen.show(report["cells"], report["build"].get("outlook"))
            looked = time.monotonic()
        return report["build"], report["cells"]


def _listen(client: FarmClient, build_id: str, news: queue.SimpleQueue[FarmError | str]) -> None:
    try:
        for event in client.watch(build_id):
            news.put(str(event["type"]))
        news.put("end")
    except FarmError as error:
        news.put(error)
    except RuntimeError:
        # The client was closed: nobody follows the build any more.
        news.put("end")


def _next(news: queue.SimpleQueue[FarmError | str], period: float | None) -> FarmError | str:
    try:
        return news.get(timeout=period)
    except queue.Empty:
        return ""
