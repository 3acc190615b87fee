"""YAML 1.2 as the farm reads it: plain data, the place of everything in it, and nothing that can blow up.

Built on ruamel's events rather than its constructor, so that depth, size and aliases are bounded before anything
is built, and every problem of a document is found in one pass. Its nodes (`compose`) do not do: they do not say whether
a tag was written, and a deep document ends them in a RecursionError, without its place.

Tags are refused; scalars follow YAML's core schema (`on`, `no` and dates are text); two equal keys in one mapping are
an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml import events as yaml_events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from farm.errors import ManifestError, Problem

Unchecked = Mapping[str, object]  # A mapping as the user wrote it: until it is checked, any key may have any value.

MAX_BYTES = 256 * 1024
"""Largest document. Reading takes two to four seconds for a million characters, so this bounds time as well."""
MAX_DEPTH = 32  # Lists and mappings in one another.
MAX_NODES = 20_000  # Scalars, lists and mappings of one document; every alias counts as the value that it stands for.
MAX_PROBLEMS = 100  # Reading ends after so many problems; nobody reads more.

_SNIPPET = 160
_DIGITS = 20

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_QUOTES = "put quotes around a value with such a character, or indent the line as the others of its block"
_WAYS_OUT = {
    "'\\t'": "indent with spaces: YAML allows no tabs",
    "that cannot start": _QUOTES,
    "mapping values": _QUOTES,
    "block end": "indent all lines of a block equally, and begin each item of a list with `- `",
    "escape": "write `\\\\` for a backslash, or put the text in single quotes",
}
"""What may be wrong, by words of ruamel's problem."""

DocumentPath = Sequence[str | int]  # Keys and indexes from the root of a document to a value.


@dataclass(slots=True)
class Node:
    """A value with its place (counted from 1). Aliases share the node of their anchor."""

    value: Any
    line: int
    column: int
    span: tuple[int, int]  # Where its text begins and ends, in characters.
    size: int = 1
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class YamlDocument:
    """A document that was read: its data, and the place of every value."""

    def __init__(self, root: Node, text: str, file: str) -> None:
        self._root = root
        self._lines = text.splitlines()
        self.text = text
        self.file = file
        self.data = root.plain()
        self.models: Sequence[int] = ()
        """Which entry each model of a manifest is of, where a `glob` is one entry for many of them."""

    def place(self, path: DocumentPath, *, key: bool = False) -> tuple[int, int]:
        """Return line and column of the value at `path` (of its key, with `key`).

        Where the path leaves the document, that of the last value on the way.
        """
        node, place = self._root, (self._root.line, self._root.column)
        if self.models and path[:1] == ("models",):
            path = ("models", *(self.models[int(index)] for index in path[1:2]), *path[2:])
        for part in path:
            if isinstance(node.value, dict) and part in node.value:
                of_key, node = node.keys[str(part)], node.value[part]
            elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                of_key = (node.line, node.column)
            else:
                return place
            place = of_key if key else (node.line, node.column)
        return place

    def span(self, path: DocumentPath) -> tuple[int, int]:
        """Return where in the text the value at `path` begins and ends. Raises KeyError if there is none."""
        node = self._root
        for part in path:
            node = node.value[part]
        return node.span

    def problem(self, message: str, path: DocumentPath, *, hint: str = "", key: bool = False) -> Problem:
        """Return a problem at the place of `path`, with the line that it is on."""
        return make_problem(message, self._lines, self.file, *self.place(path, key=key), hint=hint)


def in_yaml(value: object) -> str:
    """Return a JSON value on one line of YAML: what YAML takes for a line break, or not at all, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08X}" for each in text)


def make_problem(message: str, lines: Sequence[str], file: str, line: int, column: int, *, hint: str = "") -> Problem:
    """Return a problem with the text of its line, if the line is short enough to show."""
    text = lines[line - 1] if line <= len(lines) else ""
    visible = "".join(character if character.isprintable() else " " for character in text[:_SNIPPET])
    return Problem(message, file, line, column, hint, visible if column <= _SNIPPET else "")


def _is_binary(start: bytes) -> bool:
    """Whether a file that starts like this is not text. One control character in a text is a mistake with a place."""
    return len(re.findall(rb"[\x00-\x08\x0e-\x1f]", start)) > 1 and not start.startswith((b"\xff\xfe", b"\xfe\xff"))


def read_document(content: str | bytes, file: str) -> YamlDocument:
    """Read one YAML document.

    Raises ManifestError with each problem that can be found. The reading ends at a document that is too large, too deep
    or not YAML; it goes on after repeated keys, tags and numbers that are not finite.
    """
    if isinstance(content, bytes) and _is_binary(content[:1000]):
        hint = f"`farm init {file}` writes a manifest for an ONNX model"
        raise ManifestError([Problem("this is a binary file, not a manifest", file, 1, 1, hint)])
    size = len(content) if isinstance(content, bytes) else len(content.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"the document has {size} bytes, more than {MAX_BYTES}"
        raise ManifestError([Problem(message, file, 1, 1, "split it, or keep data in files that it names")])
    text = _decode(content, file) if isinstance(content, bytes) else content
    return _EventReader(text.removeprefix("\ufeff"), file).read()


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        lines = content.decode(errors="replace").split("\n")
        message = f"byte 0x{content[error.start]:02x} is not UTF-8"
        hint = "save the file as UTF-8"
        raise ManifestError([make_problem(message, lines, file, line, column, hint=hint)]) from None


class _TooMuch(Exception):
    """A bound of the document is passed; reading ends here."""


class _EventReader:
    """One pass over the events of one document."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.file = file
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node] = {}
        self.begun: list[tuple[str, int]] = []  # What is being read: how its start ends, and on which line.
        self.count = 0

    def read(self) -> YamlDocument:
        root: Node | None = None
        with suppress(_TooMuch):
            root = self.root()
        if self.problems or root is None:
            raise ManifestError(self.problems)
        return YamlDocument(root, self.text, self.file)

    def root(self) -> Node | None:
        root: Node | None = None
        try:
            events = iter(YAML(typ="safe", pure=True).parse(self.text))
            for event in events:
                if isinstance(event, yaml_events.DocumentStartEvent) and root is not None:
                    self.complain("a second document begins here", event)
                    break
                if isinstance(event, yaml_events.NodeEvent):
                    root = self.node(event, events, 1)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = self.what_is_wrong(error) or " ".join(part for part in (error.context, error.problem) if part)
            self.add(f"not YAML: {message}", mark.line + 1, mark.column + 1, "")
        except ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            column = error.position - self.text.rfind("\n", 0, error.position)
            code = error.character if isinstance(error.character, int) else ord(error.character)
            self.add(f"character U+{code:04X} is not allowed", line, column, "remove it, or write it as an escape")
        except (YAMLError, ValueError, OverflowError) as error:
            self.add(f"not YAML: {error}", 1, 1, "")
        if not self.problems and root is None:
            self.add("the document is empty", 1, 1, "`farm init MODEL` writes a whole manifest")
        return root

    def what_is_wrong(self, error: MarkedYAMLError) -> str:
        """Return what may be wrong, in words of somebody who does not know YAML's grammar."""
        context, problem = error.context or "", error.problem or ""
        if ways := [way for words, way in _WAYS_OUT.items() if words in problem]:
            return ways[0]
        if "flow node" in context:
            bracket, line = next(each for each in reversed(self.begun) if each[0] in "[{")
            return f"the `{bracket}` on line {line} is not closed"
        if error.context_mark and ("flow" in context or "quoted" in context):
            what = "quote" if "quoted" in context else "`[`" if "sequence" in context else "`{`"
            return f"the {what} on line {error.context_mark.line + 1} is not closed"
        return ""

    def add(self, message: str, line: int, column: int, hint: str) -> None:
        self.problems.append(make_problem(message, self.lines, self.file, line, column, hint=hint))
        if len(self.problems) >= MAX_PROBLEMS:
            raise _TooMuch

    def complain(self, message: str, event: Any, hint: str = "") -> None:
        self.add(message, event.start_mark.line + 1, event.start_mark.column + 1, hint)

    def stop(self, message: str, event: Any) -> NoReturn:
        self.complain(message, event)
        raise _TooMuch

    def grow(self, size: int, event: Any) -> None:
        self.count += size
        if self.count > MAX_NODES:
            self.stop(f"more than {MAX_NODES} values, aliases counted as what they stand for", event)

    def node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        if isinstance(event, yaml_events.AliasEvent):
            return self.alias(event)
        if depth > MAX_DEPTH:
            self.stop(f"nested deeper than {MAX_DEPTH}", event)
        self.grow(1, event)
        if event.tag not in (None, "!"):
            self.complain(f"tags are not allowed: {str(event.tag)[:80]}", event, "write the value without a tag")
        span = (event.start_mark.index, event.end_mark.index)
        self.begun.append((self.text[event.end_mark.index - 1], event.end_mark.line + 1))
        node = Node(None, event.start_mark.line + 1, event.start_mark.column + 1, span)
        if isinstance(event, yaml_events.ScalarEvent):
            node.value = self.scalar(event)
        elif isinstance(event, yaml_events.SequenceStartEvent):
            node.value = self.sequence(events, depth)
            node.size += sum(item.size for item in node.value)
        elif isinstance(event, yaml_events.MappingStartEvent):
            node.value = self.mapping(node, events, depth)
            node.size += sum(1 + item.size for item in node.value.values())
        self.begun.pop()
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def alias(self, event: yaml_events.AliasEvent) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            self.stop(f"no anchor &{event.anchor} before this alias", event)
        self.grow(node.size, event)
        return node

    def sequence(self, events: Iterator[Any], depth: int) -> list[Node]:
        items = []
        for event in events:
            if isinstance(event, yaml_events.SequenceEndEvent):
                break
            items.append(self.node(event, events, depth + 1))
        return items

    def mapping(self, node: Node, events: Iterator[Any], depth: int) -> dict[str, Node]:
        items: dict[str, Node] = {}
        for event in events:
            if isinstance(event, yaml_events.MappingEndEvent):
                break
            key: str | None = event.value if isinstance(event, yaml_events.ScalarEvent) else None
            if key is None:
                self.complain("a key must be plain text", event)
                self.node(event, events, depth + 1)
            self.grow(1, event)
            place = (event.start_mark.line + 1, event.start_mark.column + 1)
            value = self.node(next(events), events, depth + 1)
            if value.value is None:
                # An absent value stands somewhere after its key, perhaps lines below.
                value.line, value.column = place
            if key in items:
                self.add(f"`{key[:80]}` occurs twice", *place, f"the first is on line {node.keys[key][0]}")
            elif key is not None:
                items[key], node.keys[key] = value, place
        return items

    def scalar(self, event: yaml_events.ScalarEvent) -> Any:
        text = event.value
        if event.style or not event.implicit[0]:
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            # A digest may be all digits; no number that a document needs is so long.
            return text if len(text) > _DIGITS else int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and not math.isfinite(float(text))):
            self.complain(f"{text[:40]} is not a finite number", event)
        return float(text) if _FLOAT.fullmatch(text) else text
