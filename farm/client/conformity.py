"""Is an answer what its type says? A farm that nobody should trust, or anything else at its address, may send it.

Types are TypedDicts: fields that a newer farm adds are ignored, and of those that an older one does not write only what
names a thing must be there.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import (
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import is_typeddict

from farm.errors import UsageError

T = TypeVar("T")

NAMES = frozenset(
    {
        "attempt", "build", "cells", "device", "digest", "id", "identifier", "key", "model", "name", "namespace",
        "path", "precision", "program", "shape", "state", "tag", "target", "toolchain",
    }
)  # fmt: skip
"""Fields that say what a document is about: no farm leaves one out that its type has."""

_HINT = "is a farm of this release there?"

_Check = Callable[[Any], str | None]
"""Takes a value; returns where in it something is wrong and what is expected there, or None."""


class FieldMissing(UsageError, KeyError):
    """A field that was asked for is not in a document."""


class AnswerDocument(dict[str, Any]):
    """What a farm answers: a field that is asked for and left out is a farm's mistake, and said in one line."""

    def __missing__(self, name: str) -> Any:
        raise FieldMissing(f"the farm answers what no farm does: .{name} is missing", hint=_HINT)


def parsed(text: str | bytes, source: str) -> Any:
    """Return what JSON says, with each object in it a `AnswerDocument`. Raises UsageError for anything else."""
    try:
        return json.loads(text, object_hook=AnswerDocument)
    except (ValueError, RecursionError):
        raise UsageError(f"{source} answers what no farm does: not JSON", hint=_HINT) from None


def conforming(answer: object, kind: type[T], source: str) -> T:
    """Return an answer that is of this type. Raises UsageError that names the first field that is not."""
    wrong = _check_of(cast("Hashable", kind))(answer)
    if wrong is not None:
        raise UsageError(f"{source} answers what no farm does: {wrong}", hint=_HINT)
    return cast(T, answer)


@cache
def _check_of(kind: Any) -> _Check:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (NotRequired, Required):
        return _check_of(arguments[0])
    if is_typeddict(origin or kind):
        return _document(origin or kind)
    if origin in (Union, types.UnionType):
        return _any_of([_check_of(each) for each in arguments])
    if origin is Literal:
        return _one_of(arguments)
    return _collection(origin, arguments) or _plain(origin or kind)


def _collection(origin: Any, arguments: Sequence[Any]) -> _Check | None:
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return _list(_check_of(arguments[0]))
    return _mapping(_check_of(arguments[1])) if origin in (dict, Mapping) else None


def _document(kind: Any) -> _Check:
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # Imported for the type checker alone.
        return _plain(dict)
    # Where annotations are text, `__required_keys__` knows which class is total, but nothing of NotRequired.
    needed = [name for name in NAMES & kind.__required_keys__ if get_origin(hints[name]) is not NotRequired]
    checks: dict[str, _Check] = {}  # Filled at first use: types may hold themselves.

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return " is no document"
        for name in needed:
            if name not in value:
                return f".{name} is missing"
        if not checks:
            checks.update({name: _check_of(hint) for name, hint in hints.items()})
        for name, each in value.items():
            if name in checks and (wrong := checks[name](each)) is not None:
                return f".{name}{wrong}"
        return None

    return check


def _any_of(checks: Sequence[_Check]) -> _Check:
    def check(value: Any) -> str | None:
        found = [wrong for each in checks if (wrong := each(value)) is not None]
        return None if len(found) < len(checks) else max(found, key=len)

    return check


def _one_of(values: Sequence[object]) -> _Check:
    # A newer farm may have more of them.
    kinds = tuple({type(value) for value in values})
    return lambda value: None if isinstance(value, kinds) else " is of another type"


def _list(check_of_item: _Check) -> _Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return " is no list"
        for index, each in enumerate(value):
            if (wrong := check_of_item(each)) is not None:
                return f"[{index}]{wrong}"
        return None

    return check


def _mapping(check_of_value: _Check) -> _Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return " is no document"
        for name, each in value.items():
            if (wrong := check_of_value(each)) is not None:
                return f".{name[:40]}{wrong}"
        return None

    return check


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}


def _plain(kind: Any) -> _Check:
    if kind is Any or kind is object or not isinstance(kind, type) or kind not in (*_WORDS, dict, list, tuple):
        return lambda value: None
    kinds: tuple[type, ...] = {float: (int, float), tuple: (list,)}.get(kind, (kind,))
    words = f" is not {_WORDS.get(kind, kind.__name__)}"

    def check(value: Any) -> str | None:
        right = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        return None if right else words

    return check
