"""Requests and messages between worker and child, and the bounds of the fields of documents.

Messages, one JSON object a line, on the file descriptor MESSAGES_FD
    {"phase": "compiling", "progress": 0.5 or null, "detail": "text"}
    {"result": {…}}
    {"error": {…}}                          a `ChildError`
    {"alone": true}                         it waits for `GO`, and then measures; false: it has measured
and from its guard and its launcher, on GUARD_FD
    {"usage": {"cpu": seconds, "memory": bytes}}            of the child and its descendants, once a second
    {"paused": true}                        after `PAUSE`, when all of the child's processes stand still
    {"ended": {…}}                          a `GuardEnd`, when nothing of the child is left but what cannot be killed

The worker sends the guard `PAUSE`, `CONTINUE` and `GO`, of one byte, on its standard input.

A request is a JSON object, as is an answer: `documents.py` has the fields of both. What the type of a field alone does
not say about it, a `Bound` does: to the farm's reader that needs only the standard library, as children and
`farm reproduce` do (`farm.compiling.asking`), and to pydantic wherever the same types are part of a stored or a sent
document.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

if TYPE_CHECKING:
    from .documents import Request

_PLACE = (
    r"\S+\.[ch]pp:\d+: .*?: "  # MIGraphX
    r"|\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:"
    r"|/onnxruntime_src/\S+:\d+ [^()]*(?:\([^()]*\)[^() ]*)+ (?:\[with [^\]]*\] )?"
)
"""Places in a compiler's source: the detail of an error keeps them, its sentence does not."""

NO_ROOM = 64 << 20  # Free bytes of a disk that is called full: other children leave some as they fail, too.
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
        if shutil.disk_usage(".").free < NO_ROOM:  # Few compilers say that this is why.
            raise OSError(errno.ENOSPC, "No space left on device", text) from error
        said = first_line(re.sub(_PLACE, "", text))
        raise RequestFailed(kind, f"{what}: {said}", f"{type(error).__name__}: {text}") from error


def keep_text(request: Request, when: Literal["before", "after"], text: Callable[[], str]) -> None:
    """Write a program's text `before` or `after` compilation if the request asks for it."""
    if (request.get("debug") or {}).get("print"):
        text_of(Path(request["program"]), when).write_text(text(), encoding="utf-8")


def text_of(program: Path, when: str) -> Path:
    """Return where the text of a program `before` or `after` compilation is."""
    return program.with_name(f"program-{when}.txt")


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


@dataclass(frozen=True)
class Bound:
    """The least and the greatest number, lengths, the form of a text; to pydantic a group of its own annotations."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    shortest: int = 0
    longest: int | None = None
    pattern: str = ""
    inside: bool = False  # The text is a relative path that stays in its folder.

    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    def __iter__(self) -> Iterator[object]:
        """Yield the same as annotations of pydantic."""
        from pydantic import AfterValidator, Field

        if self.pattern:
            yield Field(pattern=f"^(?:{self.pattern})$" if "|" in self.pattern else f"^{self.pattern}$")
        yield Field(
            ge=self.least, gt=self.above, le=self.most, min_length=self.shortest or None, max_length=self.longest
        )
        if self.inside:
            yield AfterValidator(relative)


class Default:
    """The value of a field that a document leaves out, for whoever reads it through pydantic."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> object:
        """Return pydantic's schema of the field."""
        from pydantic_core import core_schema

        return core_schema.with_default_schema(handler(source), default=self.value, validate_default=True)


class Unchecked:
    """An object that pydantic takes as it is: releases before wrote other fields, and whoever reads it knows which."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> object:
        """Return pydantic's schema of the field."""
        from pydantic_core import core_schema

        return core_schema.dict_schema(core_schema.str_schema())


def relative(path: str) -> str:
    """Return a path that stays in its folder, as it is. Raises ValueError for any other."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path or "\\" in path or not parts.parts:
        raise ValueError("must be a relative path inside the model's folder")
    return path


Amount = Annotated[float, Bound(least=0)]  # Seconds, errors, shares.
Count = Annotated[int, Bound(least=0)]
Name = Annotated[str, Bound(longest=1024)]  # Of an input, an output or a node.
Word = Annotated[str, Bound(longest=256)]  # A dtype, an operator, a version.
Given = Annotated[str, Bound(longest=1000, pattern="[A-Za-z0-9][A-Za-z0-9._/:+-]*")]
"""What only the farm names: cells, toolchains, architectures. It becomes part of scripts, paths and pages."""
Label = Annotated[str, Bound(longest=256, pattern="[A-Za-z0-9._+-]*")]
"""What becomes part of a key: a toolchain, a target, a version of a library."""
File = Annotated[str, Bound(longest=1024, inside=True)]  # In or below the model's folder.
Digest = Annotated[str, Bound(pattern="[0-9a-f]{64}")]  # SHA-256.
Size = Annotated[int, Bound(least=0, most=2**42)]
"""Bytes. 4 TiB at most: a thousand parts, of which S3 takes 5 GiB each."""
