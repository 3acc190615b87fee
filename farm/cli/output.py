"""Output of commands: results on standard output, the rest on standard error; with --json, one document."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TextIO

import typer
from typing_extensions import TypedDict

from farm.errors import FarmError, ManifestError, ProblemDocument, UsageError
from farm.inert import inert, inert_json

if TYPE_CHECKING:
    from farm.settings import Settings

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]


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


def result(document: Any, said: str | Iterable[str], *, as_json: bool) -> None:
    """Print what came of a command: with --json the document, else what is said about it, a line each."""
    if as_json:
        emit(document)
    else:
        say_all([said] if isinstance(said, str) else said)


def table(rows: Sequence[Sequence[str]], nothing: str, document: Any, *, as_json: bool) -> None:
    """Print a list that fits the terminal; the first row is its header. With --json, print the document instead.

    Without any other row, says on standard error that there is `nothing`, and how that changes.
    """
    from farm.cli.render import align

    if len(rows) < 2 and not as_json:
        note(nothing)
    else:
        result(document, align(rows, columns=width()), as_json=as_json)


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
    from farm.cli.render import wrap

    return "\n".join(wrap(line, columns) for line in text.splitlines())


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
    every = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    typer.echo(inert_json(json.dumps(document, indent=2, ensure_ascii=not every)))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OS error about a file that the user named into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint="choose another place") from None


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


def complain(error: FarmError, *, as_json: bool) -> None:
    """Print an error: for people on standard error, and with --json as a document on standard output."""
    if isinstance(error, ManifestError):
        for problem in error.problems:
            note(f"{_error()} {inert(str(problem))}")
        if len(error.problems) > 1:
            note(f"{len(error.problems)} errors; nothing was changed")
    else:
        note(f"{_error()} {inert(error.message)}")
        for line in inert(error.hint).splitlines():
            note(f"  {line}")
    if as_json:
        emit({"error": document(error)})


class ErrorDocument(TypedDict):
    """An error as `--json` prints it."""

    kind: str
    message: str
    hint: str
    exit_code: int
    problems: NotRequired[list[ProblemDocument]]


def document(error: FarmError) -> ErrorDocument:
    """Return an error as JSON."""
    found: ErrorDocument = {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": int(error.exit_code),
    }
    if isinstance(error, ManifestError):
        found["problems"] = [problem.as_dict() for problem in error.problems]
    return found


def _error() -> str:
    return typer.style("error:", fg="red", bold=True)
