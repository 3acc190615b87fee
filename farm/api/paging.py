"""Lists in parts: a cursor is the name of the last row, so rows that come in front meanwhile move nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from farm.errors import UsageError
from farm.jobs.rows import Listed

Row = TypeVar("Row")

NO_END = 1 << 30


def page_of_rows(rows: Sequence[Row], name: str, after: str, limit: int) -> Listed[Row]:
    """Return up to `limit` rows after the one whose field `name` is `after`. Raises UsageError if there is none."""
    start = 0
    if after:
        start = next((place for place, row in enumerate(rows, 1) if _name(row, name) == after), -1)
        if start < 0:
            raise UsageError(f"the list has no {after[:100]} any more", hint="begin again without `after`")
    shown = list(rows[start : start + limit])
    more = start + limit < len(rows)
    return {"items": shown, "next": _name(shown[-1], name) if more else None}


def _name(row: object, name: str) -> str:
    return str(cast("dict[str, object]", row)[name])
