"""Output of commands: results on standard output, the rest on standard error; with --json, one document."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, Union

import typer

from farm.cli import render
from farm.errors import ExitCode, FarmError, ManifestError, UsageError
from farm.inert import inert, inert_json, one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from farm.client.client import FarmClient
    from farm.jobs.estimate import OutlookDocument
    from farm.results.report import BuildChange, JudgedCell, Report
    from farm.settings import Settings


PROGRESS_EVERY = 2.0  # Seconds between two lines about an upload or a download.
AS_JSON = ContextVar("as_json", default=False)  # Whether the command line has `--json` (`farm.cli.commands`).


def commands(about: str | None) -> typer.Typer:
    """Return a group of commands, such as `farm token`; `about` is its help."""
    return typer.Typer(help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def say(text: str = "", *, command: bool = False) -> None:
    """Print a result for people on standard output; `command` marks our own command to a CI server."""
    typer.echo(_wrapped(inert(text, colours=True, command=command), sys.stdout), color=colourful())


def say_all(lines: Iterable[str]) -> None:
    """Print lines of a result on standard output."""
    for line in lines:
        say(line)


def note(text: str = "", *, command: bool = False) -> None:
    """Print a remark on standard error; `command` as in `say`. A full disk of remarks ends no command."""
    try:
        typer.echo(_wrapped(inert(text, colours=True, command=command), sys.stderr), err=True, color=colourful())
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def countdown(text: str, seconds: int) -> None:
    """Wait, and say until when something can be done; on a terminal second by second."""
    if not lively():
        note(f"{text}, within {seconds} s")
        time.sleep(seconds)
        return
    for left in range(seconds, 0, -1):
        typer.echo(f"\r{text}: {left} s ", err=True, nl=False)
        time.sleep(1)
    typer.echo(err=True)


def progress(doing: str) -> Callable[[int, int], None]:
    """Return what takes the bytes that are done and all that are to do, and says them once in a while."""
    due = 0.0

    def told(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        due = due or now + PROGRESS_EVERY
        if now >= due:
            due = now + PROGRESS_EVERY
            note(f"{doing}: {render.size(done)} of {render.size(total)}")

    return told


def as_json() -> bool:
    """Whether a document is asked for: standard output then has nothing else."""
    return AS_JSON.get()


def result(document: Any, said: str | Iterable[str]) -> None:
    """Print what came of a command: with --json the document, else what is said about it, a line each."""
    if as_json():
        emit(document)
    else:
        say_all([said] if isinstance(said, str) else said)


def table(rows: Sequence[Sequence[str]], nothing: str, document: Any) -> None:
    """Print a list that fits the terminal; the first row is its header. With --json, print the document instead.

    Without any other row, says on standard error that there is `nothing`, and how that changes.
    """
    if len(rows) < 2 and not as_json():
        note(nothing)
    else:
        result(document, render.align(rows, columns=width()))


def facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return what is known of something, a line each of what and how it is; what has no text is left out."""
    return render.align([(one_line(what, 40), one_line(text)) for what, text in rows if text], "  ")


def width(stream: TextIO | None = None) -> int:
    """Return how many characters a line of a terminal has; 0 if the stream (standard output) is not a terminal."""
    stream = stream or sys.stdout
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def _wrapped(text: str, stream: TextIO) -> str:
    """Return text whose long lines end between words; the rest of a line is indented like it."""
    columns = width(stream)
    if not columns or all(len(line) <= columns for line in text.splitlines()):
        return text
    return "\n".join(render.wrap(line, columns) for line in text.splitlines())


@contextmanager
def if_interrupted(said: str) -> Iterator[None]:
    """On Ctrl-C in the block, say what exists, and go on to the end of the command."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        note(f"stopped: {said}")
        raise KeyboardInterrupt(*interrupt.args, said) from None


def emit(document: Any) -> None:
    """Print a result for programs on standard output."""
    from pydantic_core import PydanticSerializationError, to_json

    try:
        text = to_json(document, indent=2).decode()
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (PydanticSerializationError, UnicodeEncodeError):
        # Not each terminal has each character, and halves of characters stand for the bytes of a file's name.
        text = json.dumps(document, indent=2)
    typer.echo(inert_json(text))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OS error about a file that the user named into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint="choose another place") from None


def check_folder(file: Path) -> None:
    """Refuse a file that cannot be written before hours of work, not after."""
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder", hint="name a file in it")
    if not file.parent.is_dir():
        hint = "make the folder, or choose another"
        raise UsageError(f"cannot write {file}: there is no folder {file.parent}", hint=hint)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"cannot write {file}: permission denied", hint="choose another place")


def quiet_logs(settings: Settings) -> None:
    """Print this process's own log lines on standard error, warnings and errors only: a command is not a service."""
    from farm.logging import configure

    level = settings.log_level if settings.log_level in ("debug", "error") else "warning"
    configure(settings.model_copy(update={"log_level": level}))


def colourful() -> bool | None:
    """Whether colours may be used: False if NO_COLOR is set, else None: only on a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def lively() -> bool:
    """Whether a display that redraws itself may be used: on a terminal, outside CI, unless FARM_NO_PROGRESS is set."""
    quiet = any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "FARM_NO_PROGRESS"))
    return sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"


def complain(error: FarmError) -> ExitCode:
    """Print an error on standard error, with --json also as a document on standard output; return its exit code."""
    word = typer.style("error:", fg="red", bold=True)
    if isinstance(error, ManifestError):
        for problem in error.problems:
            note(f"{word} {inert(str(problem))}")
        if len(error.problems) > 1:
            note(f"{len(error.problems)} errors; nothing was changed")
    else:
        note(f"{word} {inert(error.message)}")
        for line in inert(error.hint).splitlines():
            note(f"  {line}")
    if as_json():
        emit({"error": document(error)})
    return error.exit_code


def document(error: FarmError) -> dict[str, Any]:
    """Return an error as `--json` prints it."""
    found: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": int(error.exit_code),
    }
    if isinstance(error, ManifestError):
        found["problems"] = [asdict(problem) for problem in error.problems]
    return found


# --- following a build: a live display on a terminal, or one plain line for every change of state ---------------------

LIVELY_PERIOD = 1.0  # Seconds between two updates of a display that shows elapsed time.

FIRST_NEWS = 2.0
"""Seconds after which the build is read without news: its farm may be behind a proxy that lets no events through."""

WORKER = 14  # Columns that are left for the name of a worker.
READABLE = 6  # Characters of a part of a cell's name that still tell it from others.
WIDE = 70  # Columns of a terminal from which on the live display names workers.
CELLS_A_SECOND = 500  # Cells that one read of a whole build may cost, so that large builds are read less often.
News = Union["FarmError", "BuildChange", None]  # A change, an error, or None: the build's report is written.


class Lines:
    """One plain line on standard error for every change of a cell's state; no ANSI, nothing redrawn."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}

    def show(self, cells: Sequence[JudgedCell], outlook: OutlookDocument | None = None) -> None:
        """Print what changed since the last call, except cells that only wait."""
        for cell in cells:
            now = (str(cell["state"]), int(cell.get("attempt") or 0))
            before = self._seen.get(cell["identifier"], ("queued", now[1]))
            self._seen[cell["identifier"]] = now
            if now != before:
                note(render.change(cell))


class Screen:
    """The live display: one line for every cell that runs or ended, a bar, and the counts."""

    def __init__(self) -> None:
        self._cells: Sequence[JudgedCell] = ()
        self._outlook: OutlookDocument | None = None

    def show(self, cells: Sequence[JudgedCell], outlook: OutlookDocument | None = None) -> None:
        """Remember the cells; the display draws them by itself."""
        self._cells, self._outlook = cells, outlook

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many cells as fit on the terminal: running first, then failed, cancelled, done."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        room = max(3, (options.height or console.height) - 4)
        order = ("running", "failed", "cancelled", "succeeded")
        begun = [cell for cell in self._cells if cell["state"] in order]
        cells = sorted(begun, key=lambda cell: (order.index(cell["state"]), cell["as_expected"]))
        grid = Table.grid(padding=(0, 2, 0, 0))
        # Where there is little room the name is cut, never the state, the phase or the time; the worker is left out.
        wide = options.max_width >= WIDE
        rows = [render.activity(cell)[: 5 if wide else 4] for cell in cells[:room]]
        needed = [max((len(row[column]) for row in rows), default=0) for column in range(5 if wide else 4)]
        others = sum(needed[1:4]) + 2 * len(needed)
        name = max(8, min(needed[0], options.max_width - others - (min(WORKER, needed[4]) if wide else 0)))
        worker = max(1, options.max_width - others - name)
        for width in (name, *needed[1:4], *([worker] if wide else [])):
            grid.add_column(no_wrap=True, overflow="ellipsis", width=max(1, width))
        same = [len(set(column)) == 1 for column in zip(*(row[0].split("/") for row in rows), strict=False)]
        for identifier, state, *rest in rows:
            texts = [Text(one_line(text)) for text in rest]
            grid.add_row(Text(_cut(one_line(identifier), name, same)), Text(state, style=render.style(state)), *texts)
        yield grid
        hidden = f" ({len(cells) - room} not shown)" if len(cells) > room else ""
        ended = sum(cell["state"] != "running" for cell in cells)
        outlook = render.outlook(self._outlook) if ended < len(self._cells) else []
        width = min(60, options.max_width)
        yield ProgressBar(total=len(self._cells) or 1, completed=ended, width=width, complete_style="cyan")
        yield Text("\n" + "; ".join([render.counts(self._cells) + hidden, *outlook]))


def _cut(name: str, room: int, same: Sequence[bool] = ()) -> str:
    """Return a cell's name that fits: the middle of its longest parts is left out, for cells differ in each part.

    If hardly anything would be left of them, those that are the `same` in all cells go.
    """
    parts = name.split("/")
    longest = max(map(len, parts))
    while longest > 3 and sum(min(len(part), longest) for part in parts) + len(parts) - 1 > room:
        longest -= 1
    if longest < READABLE and any(same) and not all(same) and len(same) == len(parts):
        return _cut("/".join("…" if shared else part for part, shared in zip(parts, same, strict=True)), room)
    start, end = longest // 2, longest // 2 + 1 - longest
    return "/".join(part if len(part) <= longest else f"{part[:start]}…{part[end:]}" for part in parts)


@contextmanager
def display() -> Iterator[tuple[Lines | Screen, float | None]]:
    """Yield the display for this terminal, and the seconds between its updates (None: on events)."""
    if not lively():
        yield Lines(), None
        return
    from rich.console import Console
    from rich.live import Live

    screen = Screen()
    # On a screen of its own: a terminal that is resized would leave lines of the old width on the ordinary one.
    with Live(screen, console=Console(stderr=True), refresh_per_second=4, screen=True):
        yield screen, LIVELY_PERIOD


class Followed:
    """A build as it is known here: its report, with the changes since then and the time that goes by."""

    def __init__(self, report: Report) -> None:
        self._read_at = time.monotonic()
        self._cells = {cell["identifier"]: cell for cell in report["cells"]}
        self._known_at = dict.fromkeys(self._cells, self._read_at)
        self.outlook = report["build"].get("outlook")

    @property
    def pause(self) -> float:
        """Seconds until the whole build may be read again."""
        return max(0.2, len(self._cells) / CELLS_A_SECOND) - (time.monotonic() - self._read_at)

    def change(self, change: BuildChange) -> None:
        """Take over the cells that changed."""
        for cell in change.get("cells", ()):
            self._cells[cell["identifier"]] = cell
            self._known_at[cell["identifier"]] = time.monotonic()
        self.outlook = change.get("outlook", self.outlook)

    def cells(self) -> list[JudgedCell]:
        """Return the cells; the running ones have been running on since they were sent."""
        now = time.monotonic()
        return [
            {**cell, "elapsed": cell["elapsed"] + now - self._known_at[identifier]}
            if cell["state"] == "running" and cell["elapsed"] is not None
            else cell
            for identifier, cell in self._cells.items()
        ]


def follow(client: FarmClient, build_id: str) -> Report:
    """Show a build until its report is written, and return it.

    Reads the whole build at the beginning, at the end, and if events were missed; in between, only what changes.
    Raises FarmFault if the farm stays unreachable, KeyboardInterrupt on Ctrl-C.
    """
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    # A daemon: it may be in a read when Ctrl-C comes, and nobody waits for it then.
    threading.Thread(target=_listen, args=(client, build_id, news), name="events", daemon=True).start()
    followed: Followed | None = None
    with display() as (screen, period):
        while True:
            messages = _next(news, period if followed else FIRST_NEWS)
            if followed is None or any(message is None or message["type"] != "cells" for message in messages):
                if followed and None not in messages and followed.pause > 0:
                    time.sleep(followed.pause)
                messages += _next(news, 0)
                report = client.report(build_id)
                followed = Followed(report)
            else:
                for message in messages:
                    if message:
                        followed.change(message)
            screen.show(followed.cells(), followed.outlook)
            if None in messages:
                return report


def _listen(client: FarmClient, build_id: str, news: queue.SimpleQueue[News]) -> None:
    try:
        for change in client.changes(build_id):
            news.put(change)
        news.put(None)
    except FarmError as error:
        news.put(error)
    except RuntimeError:
        # The client was closed: nobody follows the build any more.
        news.put(None)


def _next(news: queue.SimpleQueue[News], period: float | None) -> list[BuildChange | None]:
    """Return the news so far, after waiting up to `period` seconds for the first (None: for ever)."""
    found: list[BuildChange | None] = []
    with suppress(queue.Empty):
        while True:
            message = news.get(timeout=0 if found else period)
            if isinstance(message, FarmError):
                raise message
            found.append(message)
    return found
