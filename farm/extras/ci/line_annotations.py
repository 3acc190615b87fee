"""What a CI server shows at a line of the manifest, or as a link of a job: GitHub's commands, GitLab's report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from typing_extensions import TypedDict

from farm.errors import Problem
from farm.jobs.state import Fault, State
from farm.results.gates import undecided
from farm.results.report import BuildView, JudgedCell
from farm.results.verdict import change_of

SHOWN = 10
"""Errors and warnings of one step that GitHub shows, each; it drops the rest silently."""


class Annotation(NamedTuple):
    """One remark: `error` or `warning`, and its place if it has one (line and column count from 1)."""

    level: str
    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    title: str = ""


class ExternalLink(TypedDict):
    """A link that GitLab shows on the page of a job."""

    label: str
    url: str


def render(problems: Iterable[Problem]) -> list[str]:
    """Return a manifest's problems as GitHub's workflow commands, a line each."""
    return github_commands(of_problems(problems), "problems; `farm lint` lists them all")


def of_problems(problems: Iterable[Problem]) -> list[Annotation]:
    """Return what is said about a manifest's problems."""
    return [
        Annotation(
            "error",
            problem.message + (f"\n{problem.hint}" if problem.hint else ""),
            problem.file,
            problem.line,
            problem.column,
        )
        for problem in problems
    ]


def of_cells(cells: Sequence[JudgedCell], file: str = "") -> list[Annotation]:
    """Return what is said about a build's cells, the worst first: the farm's faults, failures, gates, then warnings.

    `file` is the manifest that they are of, as a path in the repository.
    """
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    failed.sort(
        key=lambda cell: (cell["fault"] != Fault.FARM, bool(cell["facts"]), change_of(cell).effect == "still failing")
    )
    found = [
        _of_cell(
            "error",
            cell,
            f"{cell['kind']}: {cell['message']}" + (f"\n{cell['advice']}" if cell["advice"] else ""),
            file,
        )
        for cell in failed
    ]
    for cell in cells:
        if cell["state"] == State.SUCCEEDED:
            said = [cell["warning"]] if cell["warning"] else []
            said += undecided(cell.get("compared") or [])
            found += [_of_cell("warning", cell, "; ".join(said), file)] if said else []
    return found


def github_commands(annotations: Sequence[Annotation], rest: str) -> list[str]:
    """Return workflow commands, at most ten of each level; `rest` says where the others are."""
    lines: list[str] = []
    for level in ("error", "warning"):
        found = [each for each in annotations if each.level == level]
        shown = found if len(found) <= SHOWN else found[: SHOWN - 1]
        lines += [_command(each) for each in shown]
        if len(found) > len(shown):
            lines.append(f"::{level}::{_escaped(f'and {len(found) - len(shown)} more {rest}')}")
    return lines


def gitlab_links(build: BuildView, cells: Sequence[JudgedCell], link: str) -> dict[str, list[dict[str, ExternalLink]]]:
    """Return GitLab's annotations report: links on the job's page to the build and to its worst cells."""
    links: list[ExternalLink] = [{"label": f"{build['name']} {build['id']}", "url": link}]
    failed = [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]
    links += [
        {"label": f"{cell['identifier']}: {cell['kind']}", "url": f"{link}/cells/{cell['identifier']}"}
        for cell in failed[: SHOWN - 1]
    ]
    return {"farm": [{"external_link": each} for each in links]}


def _of_cell(level: str, cell: JudgedCell, message: str, file: str) -> Annotation:
    line = int(cell.get("line") or 0) if file else 0
    return Annotation(level, f"{cell['identifier']}: {message}", file, line, title=str(cell["identifier"]))


def _command(found: Annotation) -> str:
    place = {"file": found.file, "line": found.line, "col": found.column, "title": found.title}
    properties = ",".join(f"{name}={_escaped(str(value), property=True)}" for name, value in place.items() if value)
    return f"::{found.level}{' ' * bool(properties)}{properties}::{_escaped(found.message)}"


def _escaped(text: str, *, property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
