"""What a build tells the CI server that runs this command: summary, annotations and report files.

The server is recognised by the variables that it sets. Nothing here changes a verdict: what cannot be written is said.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farm.cli import output
from farm.errors import FarmError

if TYPE_CHECKING:
    from farm.results.report import BuildView, JudgedCell

FOLDER = Path("farm-report")
"""Where GitLab and Jenkins find the files of a build: `deploy/ci/` names them."""

_ANNOTATE_SECONDS = 60.0


class CiServer(StrEnum):
    """The CI servers that are recognised, and none of them."""

    GITHUB = "github"
    GITLAB = "gitlab"
    BUILDKITE = "buildkite"
    JENKINS = "jenkins"
    NONE = ""


_COMMITS = {
    CiServer.GITHUB: "GITHUB_SHA",
    CiServer.GITLAB: "CI_COMMIT_SHA",
    CiServer.BUILDKITE: "BUILDKITE_COMMIT",
    CiServer.JENKINS: "GIT_COMMIT",
}
_PAGES = {CiServer.GITLAB: "CI_JOB_URL", CiServer.BUILDKITE: "BUILDKITE_BUILD_URL", CiServer.JENKINS: "BUILD_URL"}


class WantedReports(NamedTuple):
    """What the user wants written of a build: JUnit XML, Markdown; and the manifest that was submitted, if one was."""

    junit: Path | None = None
    summary: Path | None = None
    manifest: Path | None = None


def detect(environ: Mapping[str, str]) -> CiServer:
    """Return the CI server that runs this process."""
    if environ.get("GITHUB_ACTIONS") == "true":
        return CiServer.GITHUB
    if environ.get("GITLAB_CI"):
        return CiServer.GITLAB
    if environ.get("BUILDKITE") == "true":
        return CiServer.BUILDKITE
    return CiServer.JENKINS if environ.get("JENKINS_URL") else CiServer.NONE


def labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a build gets by itself: the `commit` of the pipeline, and its page (`ci`)."""
    server = detect(environ)
    if server is CiServer.NONE:
        return {}
    commit = environ.get(_COMMITS[server], "")
    page = environ.get(_PAGES.get(server, ""), "")
    if server is CiServer.GITHUB and environ.get("GITHUB_RUN_ID"):
        page = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/actions/runs/{GITHUB_RUN_ID}".format_map(_SetVariables(environ))
    return {name: value[:256] for name, value in (("commit", commit), ("ci", page)) if value}


def publish(
    build: BuildView,
    cells: Sequence[JudgedCell],
    wanted: WantedReports,
    *,
    junit: Callable[[], str],
    link: str,
    quiet: bool,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Write what was asked for, and what the CI server shows. `quiet`: standard output belongs to a document."""
    from farm.results import markdown

    server = detect(environ)
    steps: list[Callable[[], None]] = []
    if wanted.junit:
        steps.append(lambda: _write(wanted.junit, junit()))
    if wanted.summary:
        steps.append(lambda: _write(wanted.summary, markdown.summary(build, cells, link)))
    match server:
        case CiServer.GITHUB:
            steps.append(lambda: _github(build, cells, wanted.manifest, link, environ, quiet=quiet))
        case CiServer.GITLAB:
            steps.append(lambda: _gitlab(build, cells, junit(), link))
        case CiServer.JENKINS:
            steps.append(lambda: _jenkins(build, cells, junit(), link))
        case CiServer.BUILDKITE:
            steps.append(lambda: _buildkite(build, cells, link, environ))
    for step in steps:
        try:
            step()
        except (FarmError, OSError, subprocess.SubprocessError) as error:
            output.note(f"the verdict stands, but a report is missing: {error}")


def _github(
    build: BuildView,
    cells: Sequence[JudgedCell],
    manifest: Path | None,
    link: str,
    environ: Mapping[str, str],
    *,
    quiet: bool,
) -> None:
    from farm.results import annotations, markdown

    file = _in_repository(manifest, Path(environ.get("GITHUB_WORKSPACE", "."))) if manifest else ""
    for line in annotations.github_commands(annotations.of_cells(cells, file), f"in the summary of {build['id']}"):
        # GitHub reads commands on both streams.
        output.note(line, command=True) if quiet else output.say(line, command=True)
    if named := environ.get("GITHUB_OUTPUT"):
        with Path(named).open("a", encoding="utf-8") as outputs:
            outputs.write(f"build={build['id']}\n")
    if named := environ.get("GITHUB_STEP_SUMMARY"):
        path = Path(named)
        taken = path.stat().st_size if path.exists() else 0
        room = markdown.LIMIT - taken
        if room > 1000:
            with path.open("a", encoding="utf-8") as summary:
                summary.write(markdown.summary(build, cells, link, limit=room))


def _gitlab(build: BuildView, cells: Sequence[JudgedCell], junit: str, link: str) -> None:
    from farm.results import annotations, markdown, open_metrics

    _files(
        {
            "junit.xml": junit,
            "annotations.json": json.dumps(annotations.gitlab_links(build, cells, link)),
            "metrics.txt": open_metrics.render(cells),
            "summary.md": markdown.summary(build, cells, link),
            "build.env": _build_env(build),
        }
    )


def _jenkins(build: BuildView, cells: Sequence[JudgedCell], junit: str, link: str) -> None:
    from farm.results import markdown

    summary = markdown.summary(build, cells, link)
    _files({"junit.xml": junit, "summary.md": summary, "build.env": _build_env(build)})


def _build_env(build: BuildView) -> str:
    """Return the variables that later jobs get."""
    return f"FARM_BUILD={build['id']}\n"


def _buildkite(build: BuildView, cells: Sequence[JudgedCell], link: str, environ: Mapping[str, str]) -> None:
    from farm.results import markdown

    agent = shutil.which("buildkite-agent", path=environ.get("PATH"))
    if agent is None:
        output.note("no annotation: there is no buildkite-agent")
        return
    verdict = build["verdict"]
    style = "success" if verdict and verdict["exit_code"] == 0 else "error"
    subprocess.run(
        [agent, "annotate", "--style", style, "--context", f"farm-{build['id']}"],
        input=markdown.summary(build, cells, link).encode(),
        check=True,
        timeout=_ANNOTATE_SECONDS,
    )


def _files(files: Mapping[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in files.items():
        _write(FOLDER / name, text)
    output.note(f"reports are in {FOLDER}: {', '.join(files)}")


def _write(path: Path | None, text: str) -> None:
    assert path
    with output.writing(path):
        path.write_text(text, encoding="utf-8")


def _in_repository(file: Path, root: Path) -> str:
    try:
        return file.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return file.as_posix()


class _SetVariables(dict[str, str]):
    """Variables, of which some may not be set."""

    def __missing__(self, key: str) -> str:
        return ""
