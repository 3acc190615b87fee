"""Is a document what its type says? pydantic checks it once, where it comes in."""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from farm.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def read(text: str | bytes, kind: type[T], source: str) -> T:
    """Return the document of this type that JSON says. Raises as `parsed` and `checked`."""
    return checked(parsed(text, source), kind, source)


def parsed(text: str | bytes, source: str) -> Any:
    """Return what JSON says. Raises UsageError for anything else, and for whole numbers that no float can hold."""
    try:
        return json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError, OverflowError):
        raise unexpected(source, "not JSON") from None


def _whole(digits: str) -> int:
    float(number := int(digits))  # Raises OverflowError, as whoever prints it would.
    return number


def checked(document: object, kind: type[T], source: str, *, strict: bool = False) -> T:
    """Return a document that is of this type, with fields that the type does not know.

    A number in quotes counts as a number, unless `strict`: for who goes on with the document as it came.

    Raises UsageError that names the source and the first field that is wrong.
    """
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(cast(Hashable, kind)).validate_python([document], strict=strict)[0])
    except ValidationError as error:
        raise unexpected(source, wrong(error)) from None


def unexpected(source: str, what: str) -> UsageError:
    """Return the error for an answer that is not what was asked for."""
    return UsageError(f"unexpected answer from {source}: {what}", hint="is a farm of this release there?")


def wrong(error: ValidationError) -> str:
    """Say in one line which field is wrong, and how."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:40] for part in first["loc"][1:])
    return f"{place}: {first['msg']}" if place else first["msg"]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # A TypedDict takes no configuration from outside; one in a list does.
    return TypeAdapter(list[kind], config=ConfigDict(extra="allow"))
