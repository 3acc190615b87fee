"""A build's numbers as OpenMetrics text: GitLab shows in a merge request which of them changed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import State
from farm.results.report import JudgedCell

_NUMBERS = {
    "farm_cell_latency_seconds": ("latency", "Median time of a run."),
    "farm_cell_shared": ("shared", "1 if it was not measured alone: its time is rough."),
    "farm_cell_size_bytes": ("size", "Size of the program."),
    "farm_cell_error": ("error", "Largest relative error of an output."),
    "farm_cell_compile_seconds": ("compile_seconds", "Time of the compile."),
}


def render(cells: Sequence[JudgedCell]) -> str:
    """Return the numbers of a build's cells that have a program, those that a gate refused first.

    They are for this report, not for scraping.
    """
    lines: list[str] = []
    found = [
        (cell["identifier"], _numbers(cell["facts"]))
        for cell in sorted(cells, key=lambda cell: cell["state"] == State.SUCCEEDED)
        if cell["facts"]
    ]
    for name, (number, what) in _NUMBERS.items():
        lines += [f"# TYPE {name} gauge", f"# HELP {name} {what}"]
        for identifier, numbers in found:
            if (value := numbers[number]) is not None:
                lines.append(f'{name}{{cell="{_escaped(identifier)}"}} {value:.9g}')
    return "\n".join([*lines, "# EOF"]) + "\n"


def _numbers(facts: ArtifactFacts) -> dict[str, float | None]:
    errors = (facts.get("errors") or {}).values()
    return {
        "latency": facts.get("latency"),
        "shared": float(facts["shared"]) if facts.get("latency") else None,
        "size": facts["program"]["size"],
        "error": max(errors, default=None),
        "compile_seconds": facts.get("compile_seconds"),
    }


def _escaped(text: str) -> str:
    return re.sub(r"[^ -~]", "?", text).replace("\\", r"\\").replace('"', r"\"")
