"""Templates: documents in, HTML out. All text is escaped and made inert."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from farm.inert import inert, one_line
from farm.pages import quantities
from farm.pages.build_view import SIGNS, ranked, said

FOLDER = Path(__file__).parent
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
STATIC = {name: _TYPES[Path(name).suffix] for name in ("farm.css", "farm.js")}
"""Files that pages ask browsers to fetch, with their types."""


_folders = [str(FOLDER / "templates")]


def render(template: str, **context: Any) -> str:
    """Return a page."""
    return _environment().get_template(f"{template}.html").render(context)


def macro(template: str, name: str) -> Callable[..., Markup]:
    """Return a macro of a template."""
    found: Callable[..., Markup] = getattr(_environment().get_template(f"{template}.html").module, name)
    return found


def add_templates(folders: Iterable[Path]) -> None:
    """Let pages use templates of these folders, too."""
    _folders.extend(str(folder) for folder in folders if str(folder) not in _folders)


@cache
def static(name: str) -> bytes:
    """Return a file that pages use. Raises KeyError for an unknown name."""
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


_QUOTED = re.compile(r"`([^`]{1,300})`")


def _marked(text: str) -> Markup:
    """Return the farm's own text of one line, with what is to be typed marked as code."""
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(one_line(text, 1000)))))  # noqa: S704 - escaped


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(())
    loader.searchpath = _folders  # It may grow.
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"SIGNS": SIGNS, "ranked": ranked, "version_of": version_of}
    environment.filters |= dict(getmembers(quantities, isfunction))
    environment.filters |= {
        "marked": _marked,
        "said": said,
        "short": lambda name: name[:10],
        "places": lambda number, count=2: f"{number:.{count}f}",
        "one_line": one_line,
        "inert": inert,
    }
    return environment
