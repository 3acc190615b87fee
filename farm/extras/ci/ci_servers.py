"""What a build tells the CI server that runs this command: summary, annotations and report files.

The server is recognised by the variables that it sets.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farm.cli import output

if TYPE_CHECKING:
    from farm.results.report import Report

FOLDER = Path("farm-report")  # Where GitLab and Jenkins find the files of a build: `deploy/ci/` names them.

_ANNOTATE_SECONDS = 60.0


SERVERS = {
    "github": ("GITHUB_ACTIONS", "GITHUB_SHA", ""),
    "gitlab": ("GITLAB_CI", "CI_COMMIT_SHA", "CI_JOB_URL"),
    "buildkite": ("BUILDKITE", "BUILDKITE_COMMIT", "BUILDKITE_BUILD_URL"),
    "jenkins": ("JENKINS_URL", "GIT_COMMIT", "BUILD_URL"),
}
"""The variables of each CI server: the one by which it is recognised, the commit, and the pipeline's page."""


def detect(environ: Mapping[str, str]) -> str:
    """Return the name of the CI server that runs this process; empty if none does."""
    return next((name for name, (sign, *_) in SERVERS.items() if environ.get(sign, "false") not in ("", "false")), "")


def labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a build gets by itself: the `commit` of the pipeline, and its page (`ci`)."""
    server = detect(environ)
    if not server:
        return {}
    commit, page = (environ.get(name, "") for name in SERVERS[server][1:])
    if server == "github" and environ.get("GITHUB_RUN_ID"):
        where = [environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY")]
        page = "/".join([*where, "actions/runs", environ["GITHUB_RUN_ID"]])
    return {name: value[:256] for name, value in (("commit", commit), ("ci", page)) if value}


def publish(
    report: Report, *, manifest: Path | None, link: str, quiet: bool, environ: Mapping[str, str] = os.environ
) -> None:
    """Write what the CI server shows. `quiet`: standard output belongs to a document.

    Raises FarmError, OSError, SubprocessError.
    """
    match detect(environ):
        case "github":
            _github(report, manifest, link, environ, quiet=quiet)
        case "gitlab" | "jenkins" as server:
            _files(report, link, gitlab=server == "gitlab")
        case "buildkite":
            _buildkite(report, link, environ)


def _github(report: Report, manifest: Path | None, link: str, environ: Mapping[str, str], *, quiet: bool) -> None:
    from farm.extras.ci.ci_formats import LIMIT, bounded, commands_of, markdown

    build, cells = report["build"], report["cells"]
    file = _in_repository(manifest, Path(environ.get("GITHUB_WORKSPACE", "."))) if manifest else ""
    for line in bounded(commands_of(cells, file), f"in the summary of {build['id']}"):
        # GitHub reads commands on both streams.
        output.note(line, command=True) if quiet else output.say(line, command=True)
    if named := environ.get("GITHUB_OUTPUT"):
        with Path(named).open("a", encoding="utf-8") as outputs:
            outputs.write(f"build={build['id']}\n")
    if named := environ.get("GITHUB_STEP_SUMMARY"):
        path = Path(named)
        taken = path.stat().st_size if path.exists() else 0
        room = LIMIT - taken
        if room > 1000:
            with path.open("a", encoding="utf-8") as summary:
                summary.write(markdown(report, link, limit=room))


def _files(report: Report, link: str, *, gitlab: bool) -> None:
    """Write the files that GitLab and Jenkins find; `build.env` has the variables that later jobs get."""
    from farm.extras.ci.ci_formats import gitlab_links, junit_xml, markdown, open_metrics

    build, cells = report["build"], report["cells"]
    files = {"junit.xml": junit_xml(report, link), "summary.md": markdown(report, link)}
    files["build.env"] = f"FARM_BUILD={build['id']}\n"
    if gitlab:
        files["annotations.json"] = json.dumps(gitlab_links(build, cells, link))
        files["metrics.txt"] = open_metrics(cells)
    FOLDER.mkdir(exist_ok=True)
    for name, text in files.items():
        with output.writing(FOLDER / name):
            (FOLDER / name).write_text(text, encoding="utf-8")
    output.note(f"reports are in {FOLDER}: {', '.join(files)}")


def _buildkite(report: Report, link: str, environ: Mapping[str, str]) -> None:
    from farm.extras.ci.ci_formats import markdown

    agent = shutil.which("buildkite-agent", path=environ.get("PATH"))
    if agent is None:
        output.note("no annotation: there is no buildkite-agent")
        return
    build, verdict = report["build"], report["build"]["verdict"]
    style = "success" if verdict and verdict["exit_code"] == 0 else "error"
    subprocess.run(
        [agent, "annotate", "--style", style, "--context", f"farm-{build['id']}"],
        input=markdown(report, link).encode(),
        check=True,
        timeout=_ANNOTATE_SECONDS,
    )


def _in_repository(file: Path, root: Path) -> str:
    try:
        return file.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return file.as_posix()
