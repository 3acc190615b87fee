"""The errors of the farm: one tree, each branch with its exit code and HTTP status.

    FarmError
    ├── CompileFailed       1   422   a compiler could not do it: another model or precision may help
    ├── GateFailed          3   422   it compiled, but is not good enough: accuracy or budget
    ├── UsageError          2   400   the request is wrong: the caller changes it
    │   ├── ManifestError   2   422   … with the places in the manifest
    │   └── InputsMissing   2   400   … it names inputs that have to be uploaded first
    ├── Conflict            2   409   it exists already, or has changed meanwhile
    ├── NotFound            4   404   nothing matched
    │   └── NotPlanned      4   404   … among the submissions that this server keeps: send the whole one
    ├── NotAllowed          5   403   this token may not do that
    │   └── QuotaExceeded   5   429   … until some of its cells have ended
    ├── StillRunning        8   504   it was not done in time, and goes on
    ├── ArtifactGone       39   410   it existed; its bytes are gone or damaged
    │   └── Untrusted      39   410   … or not signed by a signer that this reader trusts
    └── FarmFault           6   503   the farm's fault: trying again helps
        ├── StoreUnavailable          Redis cannot be reached, or refuses
        └── StorageUnavailable        object storage cannot be reached, or refuses
            └── StorageAway           … in a way that passes by itself

A message says what happened; `hint` says what to do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NotRequired, Self

from typing_extensions import TypedDict


class ExitCode(IntEnum):
    """The exit codes of `farm`, each with what it means; `farm help exit-codes` prints this table."""

    meaning: str

    OK = 0, "all cells succeeded"
    CELL_FAILED = 1, "some cell failed"
    USAGE = 2, "wrong usage, or an error in the manifest; nothing was changed"
    GATE_FAILED = 3, "only gates failed: accuracy, unverifiable, fallback, regression, budget or undecided"
    NOTHING_MATCHED = 4, "nothing matched"
    NOT_ALLOWED = 5, "this token may not do that"
    FARM_FAULT = 6, "some cell ended by the farm's fault; trying again helps"
    INTERRUPTED = 8, "interrupted (Ctrl-C); the build goes on"
    ARTIFACT_GONE = 39, "the artifact existed, and is gone or damaged"

    def __new__(cls, code: int, meaning: str) -> Self:
        """Make a code: the value is the number alone."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member


class FarmError(Exception):
    """Root of all errors that the farm raises on purpose."""

    exit_code = ExitCode.FARM_FAULT
    http_status = 500

    def __init_subclass__(cls, *, exit_code: ExitCode | None = None, http_status: int | None = None) -> None:
        """Give a branch its own exit code and HTTP status; without them it has those of the error above it."""
        cls.exit_code, cls.http_status = exit_code or cls.exit_code, http_status or cls.http_status

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class CompileFailed(FarmError, exit_code=ExitCode.CELL_FAILED, http_status=422):
    """A compiler cannot do what was asked with this model."""


class GateFailed(FarmError, exit_code=ExitCode.GATE_FAILED, http_status=422):
    """A program was made, but is not accurate or small enough."""


class UsageError(FarmError, exit_code=ExitCode.USAGE, http_status=400):
    """The request is wrong; changing it helps, trying again does not."""


class ProblemDetails(TypedDict):
    """An error as the API answers it (RFC 9457); all from `hint` on is ours."""

    type: str
    title: str
    status: int
    detail: str
    hint: NotRequired[str]
    problems: NotRequired[list[dict[str, str | int]]]
    missing_blobs: NotRequired[Sequence[str]]
    kept: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a manifest, with its place (line and column count from 1)."""

    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""
    snippet: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: " if self.file else ""
        text = f"{place}{self.message}"
        if self.snippet:
            text += f"\n    {self.snippet}\n    {' ' * (self.column - 1)}^"
        if self.hint:
            text += f"\n    {self.hint}"
        return text


class ManifestError(UsageError, http_status=422):
    """A manifest (or a model or data set that it names) cannot be used; carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InputsMissing(UsageError):
    """A build's inputs are not in object storage yet; `blobs` are the digests of the missing ones.

    The server has kept the submission under the name `kept` (`POST /v1/builds/{build_id}`).
    """

    def __init__(self, message: str, blobs: Sequence[str], *, kept: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.blobs = list(blobs)
        self.kept = kept


class Conflict(FarmError, exit_code=ExitCode.USAGE, http_status=409):
    """The thing exists already with other content, or has changed meanwhile."""


class NotFound(FarmError, exit_code=ExitCode.NOTHING_MATCHED, http_status=404):
    """Nothing matched."""


class NotPlanned(NotFound):
    """This server keeps no such submission: another one planned it, or it was too long ago."""


class NotAllowed(FarmError, exit_code=ExitCode.NOT_ALLOWED, http_status=403):
    """This token may not do that."""


class QuotaExceeded(NotAllowed, http_status=429):
    """This namespace or token has too many unfinished cells; it helps to wait, or to ask the operator."""


class StillRunning(FarmError, exit_code=ExitCode.INTERRUPTED, http_status=504):
    """What was waited for was not done in time, and goes on."""


class ArtifactGone(FarmError, exit_code=ExitCode.ARTIFACT_GONE, http_status=410):
    """The artifact existed; its bytes are gone or fail their digest."""


class Untrusted(ArtifactGone):
    """The signature, or its signer, is not what this reader trusts."""


class FarmFault(FarmError, exit_code=ExitCode.FARM_FAULT, http_status=503):
    """The farm's fault, or that of a server under it; trying again helps."""


class StoreUnavailable(FarmFault):
    """Redis cannot be reached, or refuses the command."""


class StorageUnavailable(FarmFault):
    """Object storage cannot be reached, or refuses the request."""


class StorageAway(StorageUnavailable):
    """Object storage cannot be reached, or answers like an overloaded server: the same request succeeds later.

    `since` is when it was first sent (`time.monotonic`).
    """

    def __init__(self, message: str, *, hint: str = "", since: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.since = since


def shown(value: object) -> str:
    """Return a value for a message: as YAML spells it, and shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:60]}…"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `did you mean …?` for a misspelt word, else a list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"known: {', '.join(names[:20])}{more}" if names else ""
