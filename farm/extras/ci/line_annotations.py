"""What a CI server shows at a line of the manifest, or as a link of a job: GitHub's commands, GitLab's report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farm.errors import Problem
from farm.jobs.state import Fault, State
from farm.results.gates import undecided
from farm.results.report import BuildView, JudgedCell
from farm.results.verdict import change_of

SHOWN = 10
"""Errors and warnings of one step that GitHub shows, each; it drops the rest silently."""

Commands = Mapping[str, Sequence[str]]
"""Workflow commands of GitHub by their level, `error` or `warning`."""


def render(problems: Iterable[Problem]) -> list[str]:
    """Return a manifest's problems as GitHub's workflow commands, a line each."""
    found = [
        _command("error", "\n".join(filter(None, (each.message, each.hint))), each.file, each.line, col=each.column)
        for each in problems
    ]
    return bounded({"error": found}, "problems; `farm lint` lists them all")


def of_cells(cells: Sequence[JudgedCell], file: str = "") -> Commands:
    """Return what is said about a build's cells, the worst first: the farm's faults, failures, gates, then warnings.

    `file` is the manifest that they are of, as a path in the repository.
    """
    failed = _failed(cells)
    failed.sort(
        key=lambda cell: (cell["fault"] != Fault.FARM, bool(cell["facts"]), change_of(cell).effect == "still failing")
    )
    errors = [
        _of_cell("error", cell, "\n".join(filter(None, (f"{cell['kind']}: {cell['message']}", cell["advice"]))), file)
        for cell in failed
    ]
    warnings = [
        _of_cell("warning", cell, "; ".join(said), file)
        for cell in cells
        if cell["state"] == State.SUCCEEDED
        and (said := [*filter(None, [cell["warning"]]), *undecided(cell.get("compared") or [])])
    ]
    return {"error": errors, "warning": warnings}


def bounded(commands: Commands, rest: str) -> list[str]:
    """Return at most ten commands of each level; `rest` says where the others are."""
    lines: list[str] = []
    for level, found in commands.items():
        shown = found if len(found) <= SHOWN else found[: SHOWN - 1]
        lines += shown
        if len(found) > len(shown):
            lines.append(_command(level, f"and {len(found) - len(shown)} more {rest}"))
    return lines


def gitlab_links(build: BuildView, cells: Sequence[JudgedCell], link: str) -> Mapping[str, object]:
    """Return GitLab's annotations report: links on the job's page to the build and to its worst cells."""
    links = [(f"{build['name']} {build['id']}", link)]
    links += [
        (f"{cell['identifier']}: {cell['kind']}", f"{link}/cells/{cell['identifier']}")
        for cell in _failed(cells)[: SHOWN - 1]
    ]
    return {"farm": [{"external_link": {"label": label, "url": url}} for label, url in links]}


def _failed(cells: Sequence[JudgedCell]) -> list[JudgedCell]:
    return [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]


def _of_cell(level: str, cell: JudgedCell, message: str, file: str) -> str:
    line = int(cell.get("line") or 0) if file else 0
    return _command(level, f"{cell['identifier']}: {message}", file, line, title=cell["identifier"])


def _command(level: str, message: str, file: str = "", line: int = 0, **more: str | int) -> str:
    """Return a workflow command about a place (line and column count from 1), or about none."""
    place = {"file": file, "line": line, **more}
    properties = ",".join(f"{name}={_escaped(str(value), property=True)}" for name, value in place.items() if value)
    return f"::{level}{' ' * bool(properties)}{properties}::{_escaped(message)}"


def _escaped(text: str, *, property: bool = False) -> str:
    text = text.replace("\x1b", "").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
