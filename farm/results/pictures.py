"""Pictures of measurements, as SVG. Draws by matplotlib (extra `pictures`), imported when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from itertools import accumulate
from typing import Any

from farm.errors import UsageError

PicturePoint = tuple[float, float]

_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and files are small
    "svg.hashsalt": "farm",  # the same picture has the same bytes
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10.0,
}


def curves(*, title: str, x: str, y: str, series: Mapping[str, Sequence[PicturePoint]]) -> bytes:
    """Draw one line with marked points for each series, and return the SVG.

    `x` and `y` are the names of the axes with their units. Series without points are left out. Raises UsageError if
    matplotlib is not installed.
    """
    figure, axes = _figure(title, x, y)
    drawn = {name: sorted(points) for name, points in series.items() if points}
    for name, points in drawn.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=_literal(name))
    heights = [y for points in drawn.values() for _, y in points if y > 0]
    if heights and max(heights) > 20 * min(heights):
        axes.set_yscale("log")  # One outlier would flatten all curves.
    else:
        axes.set_ylim(bottom=0)
    if len(drawn) > 1:
        axes.legend(frameon=False)
    return _written(figure)


def totals(*, title: str, y: str, series: Mapping[str, Mapping[date, float]]) -> bytes:
    """Draw what amounts come to in all by each day, from nothing on the day before the first. As `curves` otherwise.

    One day has to be there at least. Raises UsageError if matplotlib is not installed.
    """
    figure, axes = _figure(title, "day (UTC)", y)
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    known = {day for amounts in series.values() for day in amounts}
    first, last = min(known), max(known)
    days = [first + timedelta(number) for number in range((last - first).days + 1)]
    for name, amounts in series.items():
        sums = accumulate((amounts.get(day, 0.0) for day in days), initial=0.0)
        axes.plot([first - timedelta(1), *days], list(sums), label=_literal(name))
    axes.set_ylim(bottom=0)
    # No tick between two days.
    locator = AutoDateLocator(minticks=min(3, len(days)), maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.legend(frameon=False)
    return _written(figure)


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        hint = "install it with: pip install 'migraphx-farm[pictures]'"
        raise UsageError("pictures need matplotlib", hint=hint) from None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
    axes.set_title(_literal(title), loc="left", wrap=True)
    axes.set_xlabel(_literal(x))
    axes.set_ylabel(_literal(y))
    return figure, axes


def _literal(text: str) -> str:
    """Return text that is drawn as it stands: names are untrusted, and a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _written(figure: Any) -> bytes:
    import matplotlib as mpl

    picture = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
