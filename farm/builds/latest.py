"""What a submission may do to `latest`: newer ones win, whenever their builds end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farm.artifacts.refs import SnapshotCell
from farm.jobs.rows import PlannedBuild
from farm.matrix.planned import PlanDocument
from farm.results.report import JudgedCell

LATEST = "latest"
"""The ref that a finished build moves to the cells that passed."""

PROD = "prod"
"""The ref that production reads, by which it is decided which of several toolchains builds use."""

UNNAMED_FOR = 30 * 86_400.0
"""Seconds for which a manifest's submissions must have left an entry out before one of them drops it."""


def submitted(build: PlannedBuild) -> float:
    """Return when the submission was made for which a planned build stands (Unix seconds, by the store's clock).

    A follow-up stands for the build that it follows.
    """
    return build.get("submitted") or build["created_at"]


def given_up(planned: PlanDocument, passed: Sequence[JudgedCell]) -> Callable[[SnapshotCell], bool]:
    """Return a function that says if an entry's manifest gave it up: it was renamed, or another toolchain builds it.

    `planned` is a build's plan, `passed` its judged cells that `latest` may name. An entry whose cell did not pass now
    stays, and a retry, which may have some of the cells alone, drops nothing.
    """
    build = planned["build"]
    before = submitted(build) - UNNAMED_FOR
    waited_for = {cell["identifier"] for cell in planned["cells"]} - {cell["identifier"] for cell in passed}

    def is_given_up(entry: SnapshotCell) -> bool:
        return (
            not build.get("retries")
            and entry.get("manifest") == build["name"]
            and entry["submitted"] < before
            and entry["identifier"] not in waited_for
        )

    return is_given_up
