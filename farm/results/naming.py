"""Which cells of a build a ref may name, and as what: those that passed. Pure."""

from __future__ import annotations

from farm.artifacts.refs import SnapshotCell
from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import State
from farm.results.report import JudgedCell, Report


def has_passed(cell: JudgedCell) -> bool:
    """Whether a cell has an artifact and no gate says anything against it."""
    return cell["state"] == State.SUCCEEDED and not cell["warning"] and cell["facts"] is not None


def named_cell(manifest: str, when: float, cell: JudgedCell, facts: ArtifactFacts) -> SnapshotCell:
    """Return a cell as a ref names it; `manifest` is a manifest's name, submitted at `when` (Unix seconds)."""
    return {
        "manifest": manifest,
        "submitted": when,
        "identifier": cell["identifier"],
        "model": cell["model"],
        "target": cell["target"],
        "precision": cell["precision"],
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        # The artifact's key: if the tuning was cut short, it differs from the cell's.
        "key": facts["key"],
        "device": facts["device"],
        "toolchain": facts["toolchain"],
        "program": facts["program"],
        "sidecar": facts["sidecar"],
        "seconds": facts["seconds"],
    }


def named_cells(report: Report) -> list[SnapshotCell]:
    """Return the cells of a finished build that passed, as a ref names them."""
    build = report["build"]
    return [
        named_cell(build["name"], build["created_at"], cell, cell["facts"])
        for cell in report["cells"]
        if has_passed(cell) and cell["facts"]
    ]
