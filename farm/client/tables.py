"""Cells as rows: for notebooks, for pandas, and as CSV or Parquet files."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

from farm.errors import UsageError
from farm.results.report import JudgedCell
from farm.results.tradeoff import error_of, marks_of
from farm.units import duration, error, size

Row = dict[str, Any]

OF_CELLS = (
    "identifier", "model", "target", "precision", "shape", "state", "kind", "message", "hit", "as_expected", "elapsed",
)  # fmt: skip
OF_PROGRAMS = (
    "latency", "p99", "throughput", "shared", "load", "compile_seconds", "peak_memory", "toolchain", "device",
    "driver", "node", "key",
)  # fmt: skip
SHOWN = 200  # Rows of a notebook's table.


def rows(cells: Sequence[JudgedCell]) -> list[Row]:
    """Return a row for each cell, all with the same columns. Seconds, bytes, samples a second; None if not known.

    `marks` say what makes numbers weak: `shared`, `noisy`, `weak`, `unverified`.
    """
    found: list[Row] = []
    for cell in cast("Sequence[Row]", cells):
        facts: Any = cell["facts"] or {}
        more = {"size": (facts.get("program") or {}).get("size"), "error": error_of(facts)}
        more |= {"marks": " ".join(marks_of(facts)) if facts else None}
        found.append({name: cell[name] for name in OF_CELLS} | {name: facts.get(name) for name in OF_PROGRAMS} | more)
    return found


def frame(cells: Sequence[JudgedCell]) -> Any:
    """Return the rows as a pandas.DataFrame. Raises UsageError without pandas."""
    return _required("pandas").DataFrame(rows(cells))


def write(cells: Sequence[JudgedCell], file: Path) -> None:
    """Write the rows to a file that is named `.csv` or `.parquet`. Raises UsageError for another, OSError."""
    found = rows(cells)
    if file.suffix == ".parquet":
        table = _required("pyarrow").Table.from_pylist(found)
        _required("pyarrow.parquet").write_table(table, file)
    elif file.suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as opened:
            writer = csv.DictWriter(opened, list(found[0]) if found else OF_CELLS)
            writer.writeheader()
            writer.writerows({name: _inert(value) for name, value in row.items()} for row in found)
    else:
        raise UsageError(f"cannot write {file}: not .csv or .parquet")


def _inert(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula: messages are a compiler's, of anybody's model."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def html(title: str, url: str, cells: Sequence[JudgedCell]) -> str:
    """Return a build's cells as a table for a notebook; all text is escaped."""
    lines = []
    for row in rows(cells[:SHOWN]):
        state = " ".join(filter(None, (row["state"], row["kind"], "as expected" if row["as_expected"] else "")))
        numbers = (duration(row["latency"]), size(row["size"]), error(row["error"]), row["marks"] or "")
        lines.append("".join(f"<td>{escape(str(text))}</td>" for text in (row["identifier"], state, *numbers)))
    head = "".join(f"<th>{name}</th>" for name in ("cell", "state", "latency", "size", "error", "marks"))
    more = f"<p>and {len(cells) - SHOWN} more cells</p>" if len(cells) > SHOWN else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<p><a href="{escape(url)}">{escape(title)}</a></p><table><tr>{head}</tr>{body}</table>{more}'


def _required(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        name = library.partition(".")[0]
        raise UsageError(f"this needs {name}, which is not installed", hint=f"pip install {name}") from None
