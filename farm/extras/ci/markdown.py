"""A build's report as Markdown, for the page of a pipeline: the verdict, what changed, and a table of all cells.

GitHub drops a step's summary of more than 1 MiB whole, and Buildkite an annotation; so the text is cut, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from farm.jobs.state import State
from farm.results.gates import movements
from farm.results.report import JudgedCell, Remark, Report
from farm.results.verdict import changes_of
from farm.units import duration, named, size, together

LIMIT = 1_000_000
"""Bytes of a summary; GitHub and Buildkite take 1 MiB."""

SHOWN = 50
"""Cells of each list; the table has all of them, while there is room."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def render(report: Report, link: str = "", *, limit: int = LIMIT) -> str:
    """Return a build's report in at most `limit` bytes; `link` is where all of it can be read."""
    build, cells = report["build"], report["cells"]
    found = changes_of(cells)
    verdict = build["verdict"]
    code, text = (verdict["exit_code"], verdict["text"]) if verdict else (None, "not ended")
    name = _escaped(f"{build['name']} {build['id']}")
    lines = [
        f"## {'✅ passed' if code == 0 else '❌ failed'}: {f'[{name}]({link})' if link else name}",
        "",
        f"{_escaped(text)} (exit code {code})",
    ]
    around: list[Remark]
    around = [{"identifier": cell["identifier"], "text": text} for cell in cells for text in cell.get("around", ())]
    lines += [*_list("What else changed", around), *_moved(cells, link)]
    for title, remarks in (
        ("New failures", found["new_failures"]),
        ("Still failing", found["still_failing"]),
        ("Not judged by gates", found["undecided"]),
        ("New to the baseline", found.get("new", [])),
        ("Fixed", found["fixed"]),
        ("No longer judged", found.get("unjudged", [])),
        ("Not in `latest`", found.get("held", [])),
        ("Better", found["improvements"]),
    ):
        lines += _list(title, remarks)
    recompiled = found["recompiled"]
    lines += ["", f"{len(found['hits'])} of {len(cells)} cells were hits."]
    lines += _list("Compiled again, because", recompiled)
    head = "\n".join(lines) + "\n"
    return _with_table(head, cells, link, limit)


def _moved(cells: Sequence[JudgedCell], link: str) -> list[str]:
    """Return a table of the numbers that are worse or better than a baseline's, or too close to tell, worst first."""
    rows = movements(cells)
    lines = [
        f"| {_linked(cell, link)} | {' | '.join(map(_escaped, said[:4]))} | {_escaped(said.verdict)} |"
        for cell, said in rows[:SHOWN]
    ]
    names = ("cell", "number", "before: median (fastest to p90)", "after", "change (99 % interval)", "")
    head = ["", "### Before and after", "", f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    return [*head, *lines, *([f"\n_{len(rows) - SHOWN} more._"] if len(rows) > SHOWN else [])] if rows else []


def _with_table(head: str, cells: Sequence[JudgedCell], link: str, limit: int) -> str:
    names = ("cell", "state", "size", "latency", "error", "time", "sha256")
    title = f"\n### Cells\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    reserve = 200
    if len(head.encode()) + len(title.encode()) + reserve > limit:
        cut = head.encode()[: limit - reserve].decode(errors="ignore").rpartition("\n")[0]
        return f"{cut}\n\n_The rest of this summary and {len(cells)} rows are left out._\n"
    parts, room = [head, title], limit - len(head.encode()) - len(title.encode()) - reserve
    rows = sorted(cells, key=lambda cell: (cell["state"] == State.SUCCEEDED, bool(cell["hit"])))
    for number, cell in enumerate(rows):
        row = _row(cell, link)
        room -= len(row.encode())
        if room < 0:
            parts.append(f"\n_{len(rows) - number} rows are left out._\n")
            break
        parts.append(row)
    return "".join(parts)


def _row(cell: JudgedCell, link: str) -> str:
    facts = cell["facts"]
    errors = list(facts["errors"].values()) if facts else []
    state = f"{cell['state']} {cell['kind'] or ''}".rstrip()
    shared = " shared" if facts and facts["shared"] and facts["latency"] else ""
    columns = (
        _linked(cell["identifier"], link),
        _escaped(f"{state} as expected" if cell["as_expected"] else state),
        size(facts["program"]["size"]) if facts else "",
        duration(facts["latency"]) + shared if facts else "",
        "" if not errors else f"{worst:.1e}" if (worst := max(errors)) else "0",
        "hit" if cell["hit"] else duration(cell["elapsed"]),
        f"`{facts['program']['digest'][:12]}`" if facts else "",
    )
    return f"| {' | '.join(columns)} |\n"


def _list(title: str, remarks: Sequence[Remark]) -> list[str]:
    if not remarks:
        return []
    alike = together((remark["identifier"], remark["text"]) for remark in remarks)
    lines = [f"- {_escaped(named(names))}: {_escaped(text)}" for names, text in alike[:SHOWN]]
    more = [f"- and {sum(len(names) for names, _ in alike[SHOWN:])} more"] if len(alike) > SHOWN else []
    return ["", f"### {title} ({len(remarks)})", "", *lines, *more]


def _linked(cell: str, link: str) -> str:
    return f"[{_escaped(cell)}]({link}/cells/{quote(cell)})" if link else _escaped(cell)


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it stands, on one line: names and messages are untrusted."""
    return _SPECIAL.sub(r"\\\1", " ".join(_visible(text))).replace("@", "@\u200b")


def _visible(text: str) -> Iterable[str]:
    """Yield the words of a text, without characters that are not shown."""
    return "".join(character if character.isprintable() else " " for character in text).split()
