"""Logs: structured lines on standard error; ids are bound once at the door."""

from __future__ import annotations

import logging
import sys
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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger


def bind_attempt(job_id: str, attempt: int, identifier: str) -> None:
    """Name the attempt in every line that this thread logs from here on; `unbind` ends it."""
    structlog.contextvars.bind_contextvars(job=job_id, attempt=attempt, cell=identifier)


def unbind() -> None:
    """Forget what `bind_attempt` bound."""
    structlog.contextvars.clear_contextvars()
