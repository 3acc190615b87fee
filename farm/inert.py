"""Foreign text made harmless, as the last thing before it is printed: it drives no terminal and commands no CI server.

What is checked first and changed afterwards (colours that are stripped, lines that are joined) is another text.
"""

from __future__ import annotations

import re
from functools import cache

_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""What a terminal obeys (ECMA-48): control sequences, strings (titles, links, clipboards), single escapes."""
_COLOUR = re.compile(r"\x1b\[(?:0|1|3[1-6])m")  # The styles that the farm uses. Others can hide text.
_UNSEEN = (
    "\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
)
"""Control characters of one byte, line separators, what reverses text or takes no room, halves of characters."""
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")  # All of these, but tab and newline.
_COMMAND = re.compile(r"^([^\S\n]*:)(?=:)|(#)(?=#[a-z]*\[)", re.MULTILINE | re.IGNORECASE)
"""How a command for GitHub begins a line; what GitHub, Azure and TeamCity take for a command anywhere."""


def inert(text: str, *, colours: bool = False, command: bool = False) -> str:
    """Return text that neither drives a terminal nor commands a CI server, even if a reader removes its colours.

    `colours` keeps the farm's own styles. With `command`, the text begins with a command of the farm's own.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = _COLOUR.split(text) if colours else [text]
    styles = [*_COLOUR.findall(text), ""] if colours else [""]
    parts = [_CONTROL.sub(" ", _SEQUENCE.sub("", part)) for part in parts]
    # Commands are searched without the colours, since a CI server may remove colours first.
    breaks = [found.end() for found in _COMMAND.finditer("".join(parts))]
    if command and breaks[:1] == [1]:
        del breaks[0]
    shown, place = "", 0
    for part, style in zip(parts, styles, strict=True):
        cuts = [cut - place for cut in breaks if place < cut <= place + len(part)]
        place += len(part)
        shown += " ".join(part[start:end] for start, end in zip([0, *cuts], [*cuts, len(part)], strict=True)) + style
    return shown


def one_line(text: object, limit: int = 300) -> str:
    """Return foreign text on one line without control characters, so that a log cannot drive the terminal."""
    plain = " ".join(inert(str(text or "")).split())
    return plain if len(plain) <= limit else f"{plain[: limit - 1]}…"


@cache
def _escaped() -> re.Pattern[str]:
    # It takes milliseconds to compile, and few commands print JSON.
    return re.compile(f"[{_UNSEEN}]|#(?=#[a-z]*\\[)", re.IGNORECASE)


def inert_json(text: str) -> str:
    """Return JSON that says the same and is harmless to print: what `inert` would change is escaped."""
    if text.isascii() and "\x7f" not in text and "##" not in text:  # A large plan is searched for half a second.
        return text
    return _escaped().sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _units(found[0])), text)


def _units(character: str) -> list[int]:
    """Return the units of UTF-16, in which JSON escapes a character."""
    code = ord(character)
    return [code] if code < 0x10000 else [0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code & 0x3FF)]
