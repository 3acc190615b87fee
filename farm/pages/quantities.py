"""Quantities as pages show them: a number with few digits, and its unit. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

NOTHING = "–"  # Stands for a quantity that was not measured.

_PLACES = ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4), (1e-4, 5))
"""From which size on a number has how many decimal places."""

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def digits(value: float) -> str:
    """Return three significant digits, an exponent only if it is tiny: `0.0213`, `2.15`, `34.4`, `1,204`."""
    if not value:
        return "0"
    return next((f"{value:,.{places}f}" for least, places in _PLACES if abs(value) >= least), f"{value:.1e}")


def latency(seconds: float | None) -> str:
    """Return a short time: `820 µs`, `4.31 ms`, `12.0 s`."""
    if seconds is None:
        return NOTHING
    for least, unit in _TIMES:
        if abs(seconds) >= least:
            return f"{digits(seconds / least)} {unit}"
    return f"{digits(seconds * 1e6)} µs" if seconds else "0 s"


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds without its unit, for columns that say the unit once."""
    return NOTHING if seconds is None else digits(seconds * 1e3)


def duration(seconds: float | None) -> str:
    """Return how long something took: `820 ms`, `12.0 s`, `3 min 20 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds is None:
        return NOTHING
    if seconds < 100:
        return latency(seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def size(count: float | None) -> str:
    """Return bytes: `512 B`, `3.20 MB`."""
    if count is None:
        return NOTHING
    for least, unit in _SIZES:
        if count >= least:
            return f"{digits(count / least)} {unit}"
    return f"{count:.0f} B"


def percent(share: float) -> str:
    """Return a change as a percentage with its sign: `+12 %`, `−3.1 %`."""
    value = share * 100
    text = f"{abs(value):.0f}" if abs(value) >= 10 else f"{abs(value):.1f}"
    return f"{'+' if value >= 0 else '−'}{text} %"


def part(share: float, places: int = 0) -> str:
    """Return a share of a whole: `10 %`."""
    return f"{100 * share:.{places}f} %"


def error(value: float) -> str:
    """Return a relative error: `0`, `5.8e-04`."""
    return f"{value:.1e}" if value else "0"


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
