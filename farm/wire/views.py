"""Views: what people see of a stored document, which has more fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

View = TypeVar("View")


def view_of(kind: type[View], document: Mapping[str, object]) -> View:
    """Return the fields of a document that a view of it (a TypedDict) has."""
    return cast("View", {name: document[name] for name in kind.__annotations__})
