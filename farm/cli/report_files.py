"""What a command writes of an ended build: files that it was asked for, and what the CI server around it shows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from farm import entry_points
from farm.cli import output
from farm.errors import FarmError, UsageError

if TYPE_CHECKING:
    from farm.results.report import Report


class PipelineHooks(Protocol):
    """What an extension knows of CI servers, found in the environment of this process."""

    def labels(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the labels that a build gets by itself; none outside of a CI server."""

    def publish(self, report: Report, *, manifest: Path | None, link: str, quiet: bool) -> None:
        """Show a build's report there; `link` is its page. `quiet`: standard output belongs to a document.

        Raises FarmError, OSError, SubprocessError.
        """


class WantedReports(NamedTuple):
    """What the user wants written of a build, by its format; and the manifest that was submitted, if one was."""

    files: Mapping[str, Path]
    manifest: Path | None = None


def wanted_reports(junit: Path | None, summary: Path | None, manifest: Path | None = None) -> WantedReports:
    """Return what `--junit` and `--summary` ask for. Raises UsageError, before hours of work, if it cannot be had."""
    files = {form: path for form, path in (("junit", junit), ("markdown", summary)) if path}
    for form, path in files.items():
        check_folder(path)
        entry_points.required(entry_points.REPORTS, form)
    return WantedReports(files, manifest)


def labels() -> dict[str, str]:
    """Return the labels that a build gets by itself, such as the commit of the pipeline."""
    return {name: value for each in _pipelines() for name, value in each.labels(os.environ).items()}


def publish(report: Report, wanted: WantedReports, *, link: str, quiet: bool) -> None:
    """Write what was asked for, and what a CI server shows. A verdict stays as it is, also if one cannot be written."""
    steps: list[Callable[[], None]] = [partial(_write, path, form, report, link) for form, path in wanted.files.items()]
    steps += [partial(each.publish, report, manifest=wanted.manifest, link=link, quiet=quiet) for each in _pipelines()]
    for step in steps:
        try:
            step()
        except (FarmError, OSError, subprocess.SubprocessError) as error:
            output.note(f"the verdict stands, but a report is missing: {error}")


def check_folder(file: Path | None) -> None:
    """Refuse a file that cannot be written before hours of work, not after."""
    if file and file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder", hint="name a file in it")
    if file and file.parent.is_dir() and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"cannot write {file}: permission denied", hint="choose another place")
    if file and not file.parent.is_dir():
        raise UsageError(
            f"cannot write {file}: there is no folder {file.parent}", hint="make the folder, or choose another"
        )


def _pipelines() -> list[PipelineHooks]:
    return [each for _, each in entry_points.load(entry_points.PIPELINES)]


def _write(path: Path, form: str, report: Report, link: str) -> None:
    render: Callable[[Report, str], str] = entry_points.find(entry_points.REPORTS, form)
    with output.writing(path):
        path.write_text(render(report, link), encoding="utf-8")
