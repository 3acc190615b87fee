"""A log as its page shows it: numbered lines with their colours, opened at the first error. Pure.

All of it is foreign text: only the colours of ANSI become markup, everything else is escaped or left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from markupsafe import Markup, escape

from farm.inert import inert

LINES = 2000
"""Lines on one page."""
BEFORE = 200
"""Lines that are shown before the first error."""
FOUND = 500
"""Lines that a search shows at most."""
LONGEST = 4000
"""Characters of a line that are shown; the raw log has all."""
STYLED = 20_000
"""Changes of style that a page shows; its lines after these are plain. A page of nothing else took nine seconds."""

FOLDED = 12
"""Lines of a stage that is worth folding."""

_STAGE = re.compile(r"== ([a-z]{3,20}) ==")
"""How the farm begins a stage in the log of an attempt (`farm.compiling.children`)."""
_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_WRONG = re.compile(
    r"^\s*(traceback \(most recent|terminate called|panic:|fatal\b|error\b|e\s{2,})"
    r"|\b(error|exception|failure|fatal|assertion failed|segmentation fault|out of memory|aborted)\b\s*[:(!]"
    r"|\b(\w+Error|\w+Exception)\b"
    r"|\[(error|fatal)\]",
    re.IGNORECASE,
)
_FINE = re.compile(r"\b(0|no) (errors?|failures?)\b", re.IGNORECASE)
_CLASSES = {
    1: "bold", 2: "dim", 3: "italic", 4: "under",
    **{code: f"c{code - 30}" for code in range(30, 38)},
    **{code: f"c{code - 90}" for code in range(90, 98)},
}  # fmt: skip
_COLOURS = {f"c{number}" for number in range(8)}


class LogLine(NamedTuple):
    """One line, from 1 on."""

    number: int
    markup: Markup
    is_first_error: bool
    part: int = 0
    """The part of the log that has it, from 0; its number counts from that part's beginning."""


class LogStage(NamedTuple):
    """The lines of one stage of an attempt; those before the first stage have no name."""

    name: str
    lines: Sequence[LogLine]
    folded: bool


class LogPage(NamedTuple):
    """Some lines of a log. `before` and `after` are the first lines of the pages around it, 0 if there is none."""

    lines: Sequence[LogLine]
    total: int
    first_error: int
    before: int
    after: int
    left_out: int
    """Lines that a search found and that are not shown."""


def page(text: str, *, start: int = 0, known: str = "") -> LogPage:
    """Return the lines of a log, or of a part of it, from `start` on, or around the first error.

    `known` is what the farm already took out of the log as the useful lines: its first line is where it went wrong.
    """
    lines = _lines(text)
    wrong = first_error(lines, known)
    if not start:
        start = wrong - BEFORE if wrong else len(lines) - LINES + 1
    start = max(1, min(start, max(1, len(lines))))
    if start <= BEFORE and wrong <= LINES:
        start = 1 if wrong else start
    end = min(len(lines), start + LINES - 1)
    styled = dict(_styled(lines, set(range(start, end + 1))))
    chosen = [LogLine(number, styled[number], number == wrong) for number in range(start, end + 1)]
    before = max(1, start - LINES) if start > 1 else 0
    after = end + 1 if end < len(lines) else 0
    return LogPage(chosen, len(lines), wrong, before, after, 0)


def search(parts: Iterable[str], wanted: str) -> LogPage:
    """Return the lines of a log that contain a text, in letters of any case; its parts are read one after the other."""
    chosen, total, left_out = list[LogLine](), 0, 0
    for part, text in enumerate(parts):
        total += text.count("\n") + (text[-1:] not in ("", "\n"))
        if wanted.lower() not in _plain(text).lower():
            continue
        lines = _lines(text)
        found = [number for number, line in enumerate(_all_plain(lines), 1) if wanted.lower() in line.lower()]
        shown = found[: FOUND - len(chosen)]
        left_out += len(found) - len(shown)
        styled = dict(_styled(lines, set(shown)))
        chosen += [LogLine(number, styled[number], False, part) for number in shown]
    return LogPage(chosen, total, 0, 0, 0, left_out)


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def stages(page: LogPage) -> list[LogStage]:
    """Return the lines of a page by stage. If one has the error, the others are folded unless they are short."""
    found: list[tuple[str, list[LogLine]]] = []
    for line in page.lines:
        head = _STAGE.fullmatch(str(line.markup))
        if head or not found:
            found.append((head[1] if head else "", []))
        found[-1][1].append(line)
    has_error = [any(line.is_first_error for line in lines) for _, lines in found]
    return [
        LogStage(name, lines, any(has_error) and not wrong and len(lines) > FOLDED)
        for (name, lines), wrong in zip(found, has_error, strict=True)
    ]


def first_error(lines: Sequence[str], known: str = "") -> int:
    """Return the number of the line where it went wrong, 0 if none looks so."""
    plain = list(enumerate(_all_plain(lines), 1))
    wanted = next((line.strip() for line in known.splitlines() if len(line.strip()) > 8), "")
    named = (number for number, line in plain if wanted and wanted in line)
    shown = ((number, line[:LONGEST]) for number, line in plain)
    wrong = (number for number, line in shown if _WRONG.search(line) and not _FINE.search(line))
    return next(chain(named, wrong), 0)


def _plain(text: str) -> str:
    return _STYLE.sub("", text)


def _all_plain(lines: Sequence[str]) -> list[str]:
    # All at once: a line at a time takes a second for half a million of them.
    return _plain("\n".join(lines)).split("\n")[: len(lines)]


def _styled(lines: Sequence[str], wanted: set[int]) -> Iterator[tuple[int, Markup]]:
    """Yield lines as markup; a colour that was turned on holds until it is turned off, over lines too."""
    active: list[str] = []
    left = STYLED
    for number, line in enumerate(lines, 1):
        if number in wanted:
            shown = line[:LONGEST]
            left -= shown.count("\x1b[")
            markup, active = _markup(shown if left > 0 else _plain(shown), active)
            if len(line) > LONGEST:
                markup += Markup('<span class="dim"> … {} characters more</span>').format(len(line) - LONGEST)
            yield number, markup
        elif "\x1b[" in line:
            for found in _STYLE.finditer(line):
                active = _after(active, found[1])


def _markup(line: str, active: list[str]) -> tuple[Markup, list[str]]:
    parts, at = [], 0
    for found in [*_STYLE.finditer(line), None]:
        piece = inert(line[at : found.start() if found else len(line)])
        if piece:
            shown = Markup('<span class="{}">{}</span>').format(" ".join(active), piece) if active else escape(piece)
            parts.append(shown)
        if found:
            active, at = _after(active, found[1]), found.end()
    return Markup("").join(parts), active


def _after(active: list[str], codes: str) -> list[str]:
    """Return the styles after a control sequence; what is not known changes nothing."""
    # No compiler sends more at once.
    for text in codes[:40].split(";") if codes else ["0"]:
        code = int(text[:4]) if text else 0
        if code == 0:
            active = []
        elif code == 39:
            active = [name for name in active if name not in _COLOURS]
        elif code == 22:
            active = [name for name in active if name not in ("bold", "dim")]
        elif name := _CLASSES.get(code):
            active = [each for each in active if each != name and not ({each, name} <= _COLOURS)] + [name]
    return active
