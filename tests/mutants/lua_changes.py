"""Changes of one line of a script of the store, as for Python. Comments, texts and the names of fields stay."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.mutants.change import Change, other_number

SWAPS = (
    ("comparison", r"==", "~="),
    ("comparison", r"~=", "=="),
    ("comparison", r"<=", "<"),
    ("comparison", r">=", ">"),
    ("comparison", r"<(?!=)", "<="),
    ("comparison", r">(?!=)", ">="),
    ("boolean", r"\band\b", "or"),
    ("boolean", r"\bor\b", "and"),
    ("boolean", r"\bnot\s+", ""),
    ("boolean", r"\btrue\b", "false"),
    ("boolean", r"\bfalse\b", "true"),
    ("arithmetic", r"\+", "-"),
    ("arithmetic", r"(?<=[\w)\]] )-(?= )", "+"),
    ("arithmetic", r"\*", "/"),
    ("arithmetic", r"/", "*"),
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?\b")
CONDITION = re.compile(r"\b(?:if|elseif|while)\s+(.+?)\s+(?:then|do)\b")
STATEMENT = re.compile(
    r"^\s*(?:else )?(?!(?:return|local|if|for|end|function)\b)([\w.:]+\(.*\)|\w[\w.\[\]#+, ]* = .*)\s*$"
)
"""A call, or an assignment to what is there already."""
BOUNDARY = {"<", "<=", ">", ">="}
CLOCK = re.compile(r"\bNOW(?: [-+] [\w.]+)*\s*$"), re.compile(r"[<>]=?\s*NOW\b")
"""The time now on a side of a comparison: nobody notices a millisecond, in which no test can meet it."""
TEXT = re.compile(r"\"[^\"]*\"|--.*$")
FUNCTION = re.compile(r"^(?:local )?function (\w+)\(")


def lua_changes(file: str, source: bytes) -> list[Change]:
    """Return every change of a script, in order of place."""
    return sorted(set(_changes(file, source)))


def _changes(file: str, source: bytes) -> Iterator[Change]:
    start, function = 0, ""
    for number, raw in enumerate(source.decode().splitlines(keepends=True), 1):
        code = TEXT.sub(lambda found: "\0" * len(found[0]), raw.rstrip("\n"))
        if found := FUNCTION.match(code):
            function = found[1]
        for sort, begin, end, new in _of_line(code, raw):
            before = len(raw[:begin].encode())
            yield Change(
                file,
                start + before,
                start + before + len(raw[begin:end].encode()),
                new,
                sort,
                (number, number),
                function=function,
            )
        if code.startswith("end") or (FUNCTION.match(code) and code.rstrip().endswith(" end")):
            function = ""
        start += len(raw.encode())


def _of_line(code: str, raw: str) -> Iterator[tuple[str, int, int, str]]:
    for sort, written, instead in SWAPS:
        for found in re.finditer(written, code):
            if instead in BOUNDARY and (CLOCK[0].search(code[: found.start()]) or CLOCK[1].match(code, found.start())):
                continue
            yield sort, *found.span(), instead
    for found in NUMBER.finditer(code):
        if not re.search(r"unpack\($|\[$", code[: found.start()]):
            # Whether a script did something is asked, not how often.
            told = found[0] == "1" and code[: found.start()].endswith(("return ", "return -"))
            yield (
                "number",
                *found.span(),
                "0" if told else other_number(float(found[0]) if "." in found[0] else int(found[0])),
            )
    for found in CONDITION.finditer(code):
        if not re.fullmatch(r"not\s.*|[^()]*(?:==|~=)[^()]*", found[1]):
            yield "inverted condition", *found.span(1), f"not ({raw[slice(*found.span(1))]})"
    if (found := STATEMENT.match(code)) and code.count("(") == code.count(")") and code.count("{") == code.count("}"):
        yield "dropped statement", *found.span(1), ""
