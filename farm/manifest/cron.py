"""Schedules: when a cron expression is due, by the clock of a time zone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from datetime import UTC, datetime


def runs_after(schedule: str, timezone: str, after: float) -> Iterator[float]:
    """Yield the times (Unix seconds) at which a schedule is due after a time.

    As in Debian's cron: a time that a change of the clock skips is due right after it, one that it repeats is due once.
    """
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

    for when in CronSim(schedule, datetime.fromtimestamp(after, ZoneInfo(timezone))):
        if when.timestamp() > after:  # In a repeated hour it also names the first of the two times.
            yield when.timestamp()


def schedule_problem(schedule: str, timezone: str) -> tuple[str, str, str] | None:
    """Return what is wrong with a schedule: the field, a message and a hint."""
    from zoneinfo import ZoneInfo, available_timezones

    from cronsim import CronSimError

    try:
        ZoneInfo(timezone)
    except (ValueError, OSError, LookupError):
        close = difflib.get_close_matches(timezone, sorted(available_timezones()), n=1)
        hint = f"did you mean `{close[0]}`?" if close else "such as Europe/Berlin, America/New_York or UTC"
        return "timezone", f"unknown time zone `{timezone}`", hint
    example = "minute, hour, day of the month, month, day of the week: `17 3 * * 1-5` is 03:17 on workdays"
    try:
        if next(runs_after(schedule, "UTC", datetime.now(UTC).timestamp()), None) is None:
            return "schedule", f"`{schedule}` is never due", example
    except (CronSimError, ValueError, OverflowError) as error:
        return "schedule", f"`{schedule}` is not a schedule: {str(error).lower()}", example
    return None
