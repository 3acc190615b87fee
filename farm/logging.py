"""Logs: structured lines on standard error; ids are bound once at the door."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial

import structlog

from farm.inert import inert, inert_json
from farm.settings import Settings

Logger = structlog.stdlib.BoundLogger


def configure(settings: Settings) -> None:
    """Send structlog's lines and those of libraries to standard error, in the chosen form and from the chosen level."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        # Not the prettier ones: they show local variables, and passwords among them.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(sys.stderr)
    harmless = inert_json if settings.log_format == "json" else partial(inert, colours=True)
    last: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        renderer,
        lambda _, __, line: harmless(str(line)),
    ]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=last, foreign_pre_chain=shared))
    handler.addFilter(Folding())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class Folding(logging.Filter):
    """Writes a repeated warning or error only so many times a minute, and says how many were left out.

    A client that causes warnings could otherwise fill the server's disk with them.
    """

    def __init__(self, most: int = 100, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._seconds, self._clock = most, seconds, clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is written; it may get a field that says what is left out."""
        if record.levelno < logging.WARNING:
            return True
        event = record.msg.get("event") if isinstance(record.msg, dict) else record.msg
        # The text of asyncio's own complaints names the connection: their beginning is the same.
        what = (record.name, record.levelno, str(event)[:40])
        now = self._clock()
        since, count = self._seen.get(what, (now, 0))
        left_out = 0
        if now - since >= self._seconds:
            since, count, left_out = now, 0, max(0, count - self._most)
        if len(self._seen) >= _KINDS and what not in self._seen:
            self._seen.clear()
        self._seen[what] = since, count + 1
        if left_out:
            _add(record, f"{left_out} lines like this were left out")
        elif count + 1 == self._most:
            _add(record, f"more lines like this are left out for {self._seconds:g} s")
        return count < self._most


_KINDS = 1000  # Kinds of lines that are counted at once.


def _add(record: logging.LogRecord, note: str) -> None:
    if isinstance(record.msg, dict):
        record.msg = {**record.msg, "note": note}
    else:
        record.msg, record.args = f"{record.getMessage()} ({note})", None


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger


bound = structlog.contextvars.bound_contextvars
"""In its block, every logged line has these fields, also in threads that requests are answered in."""
