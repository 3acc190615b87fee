"""Quantities as pages show them: a number with few digits, and its unit. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from farm import units

NOTHING = "–"  # Stands for a quantity that was not measured.

_PLACES = ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4), (1e-4, 5))
"""From which size on a number has how many decimal places."""


def digits(value: float) -> str:
    """Return three significant digits, an exponent only if it is tiny: `0.0213`, `2.15`, `34.4`, `1,204`."""
    if not value:
        return "0"
    return next((f"{value:,.{places}f}" for least, places in _PLACES if abs(value) >= least), f"{value:.1e}")


def _or_nothing(write: Callable[[float | None], str]) -> Callable[[float | None], str]:
    return lambda value: write(value) or NOTHING


duration, size, error = map(_or_nothing, (units.duration, units.size, units.error))
"""As everywhere (`farm.units`), but a table has no gap where something is not known."""


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds without its unit, for columns that say the unit once."""
    return NOTHING if seconds is None else digits(seconds * 1e3)


def percent(share: float) -> str:
    """Return a change as a percentage with its sign: `+12 %`, `−3.1 %`."""
    value = share * 100
    text = f"{abs(value):.0f}" if abs(value) >= 10 else f"{abs(value):.1f}"
    return f"{'+' if value >= 0 else '−'}{text} %"


def part(share: float, places: int = 0) -> str:
    """Return a share of a whole: `10 %`."""
    return f"{100 * share:.{places}f} %"


def moment(when: float | str | None) -> str:
    """Return a point in time (Unix seconds, or ISO 8601) in UTC: `2026-11-22 17:04:31`."""
    if isinstance(when, str):
        when = datetime.fromisoformat(when).timestamp() if when else None
    return NOTHING if when is None else f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S}"


def day(seconds: float) -> str:
    """Return a point in time (Unix seconds) in UTC as people name it: `Fri 20 Nov 17:04`."""
    return f"{datetime.fromtimestamp(seconds, UTC):%a %-d %b %H:%M}"


def ago(seconds: float) -> str:
    """Return how long ago something was, roughly: `just now`, `5 min ago`, `3 d ago`."""
    for least, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= least:
            return f"{seconds // least:.0f} {unit} ago"
    return "just now"
