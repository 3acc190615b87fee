"""Templates: documents in, HTML out. All text is escaped and made inert, whoever wrote it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from farm.inert import inert, one_line
from farm.pages import drawing, quantities
from farm.pages.build_view import SIGNS, ranked

FOLDER = Path(__file__).parent
STATIC = {"farm.css": "text/css; charset=utf-8", "farm.js": "text/javascript; charset=utf-8"}
"""Files that browsers fetch beside pages, with their types."""


def render(template: str, **context: Any) -> str:
    """Return a page."""
    return _environment().get_template(f"{template}.html").render(context)


@cache
def static(name: str) -> bytes:
    """Return a file that pages use. Raises KeyError for a name that is none."""
    if name not in STATIC:
        raise KeyError(name)
    return (FOLDER / "static" / name).read_bytes()


@cache
def version_of(name: str) -> str:
    """Return what changes with a file's bytes: pages name it in the URL, so browsers may keep the file for ever."""
    return hashlib.sha256(static(name)).hexdigest()[:12]


def _harmless(value: object) -> object:
    """Return what a template puts out without control characters, and without what reverses text or hides in it."""
    return inert(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"SIGNS": SIGNS, "ranked": ranked, "share": drawing.share, "version_of": version_of}
    environment.filters |= {
        name: getattr(quantities, name)
        for name in (
            "latency",
            "milliseconds",
            "duration",
            "size",
            "percent",
            "error",
            "moment",
            "machine_moment",
            "ago",
        )
    }
    environment.filters |= {"plural": quantities.plural, "one_line": one_line, "inert": inert}
    return environment
