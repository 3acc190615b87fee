"""Requests and messages between worker and child.

Messages, one JSON object a line, on the file descriptor MESSAGES_FD
    {"phase": "compiling", "progress": 0.5 or null, "detail": "text"}
    {"result": {…}}
    {"error": {"kind": failure kind or "", "message": sentence, "detail": text}}
    {"alone": true}                         it waits for `GO`, and then measures; false: it has measured
and from its guard and its launcher, on GUARD_FD
    {"usage": {"cpu": seconds, "memory": bytes}}            of the child and its descendants, once a second
    {"paused": true}                        after `PAUSE`, when all of the child's processes stand still
    {"ended": {"exit": code or null, "signal": number or null, "memory": peak in bytes, "stuck": [pids],
               "killed": "memory", "disk", "files", "processes", "awake", "guard" or ""}}
                                            when nothing of the child is left but what cannot be killed

The worker sends the guard `PAUSE`, `CONTINUE` and `GO`, of one byte, on its standard input.

A request is a JSON object, as is an answer: `documents.py` has the fields of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .documents import Request

_PLACE = re.compile(
    r"\S+\.[ch]pp:\d+: .*?: "  # MIGraphX
    r"|\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:"
    r"|/onnxruntime_src/\S+:\d+ [^()]*(?:\([^()]*\)[^() ]*)+ (?:\[with [^\]]*\] )?"
)
"""Places in a compiler's source: the detail of an error keeps them, its sentence does not."""

PAUSE, CONTINUE, GO = b"p", b"c", b"g"  # Let the child stand still, let it continue, and let it measure.


class RequestFailed(Exception):
    """The child cannot do what was asked. `kind` is a failure kind of the farm, or empty: the worker decides
    from the message."""

    def __init__(self, kind: str, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class CannotRun(RequestFailed):
    """A program cannot be given its inputs from here, which says nothing against it."""


@contextmanager
def blamed_on_compiler(what: str, kind: str = "") -> Iterator[None]:
    """Turn every error of a compiler into a RequestFailed that begins with `what` was being done."""
    try:
        yield
    except (RequestFailed, MemoryError):
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        said = first_line(_PLACE.sub("", text))
        raise RequestFailed(kind, f"{what}: {said}", f"{type(error).__name__}: {text}") from error


def keep_text(request: Request, when: Literal["before", "after"], text: Callable[[], str]) -> None:
    """Write a program's text `before` or `after` compilation if the request asks for it."""
    debug = request.get("debug")
    path = debug.get(when) if debug else ""
    if path:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text())


def first_line(text: str) -> str:
    """Return the first line of a text, cut to a length that fits a table."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 400 else line[:397] + "..."


def reason_of(error: Exception) -> str:
    """Return what a library says of bytes that it cannot read, as one line; its error's name if it says nothing."""
    return first_line(str(error)) or type(error).__name__


def is_deep(value: object, most: int) -> bool:
    """Whether lists and objects are nested in more than so many levels: who walks through them would go as deep."""
    level: list[Any] = [[value]]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
