"""Commands inside a CI server: what it learns of a build, and how a pipeline names what it built."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from ruamel.yaml import YAML

from farm.app import Farm
from farm.cli import main
from farm.client.client import FarmClient
from farm.extras.ci import ci_formats
from farm.extras.ci.ci_servers import FOLDER
from farm.jobs.state import FailureKind, Outcome
from tests.support.api_farm import MANIFEST, commands, freeze_manifest, succeed, work
from tests.support.places import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GITHUB = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SHA": COMMIT,
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "me/models",
    "GITHUB_RUN_ID": "7",
}


@pytest.fixture(autouse=True)
def worker(farm: Farm, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A manifest in the current folder, a farm that commands find, and a worker that cannot compile fp16."""
    freeze_manifest(tmp_path, MANIFEST)
    stop, refused = threading.Event(), Outcome.failure(FailureKind.COMPILER_ERROR, "no: 100%\nnever")

    def run() -> None:
        while not stop.wait(0.05):
            work(
                farm,
                lambda job, order, key: refused if "/fp16/" in order["identifier"] else succeed(farm)(job, order, key),
            )
            for build_id in farm.store.builds.ended_unreported():
                farm.build_finisher.finish(build_id)

    with commands(farm, url, tmp_path, monkeypatch):
        thread = threading.Thread(target=run)
        thread.start()
        yield
        stop.set()
        thread.join()


def within(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_github_gets_a_summary_and_annotations_at_the_manifests_lines(
    client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    within(monkeypatch, **GITHUB, GITHUB_WORKSPACE=str(tmp_path), GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "outputs"))
    assert main(["submit", "farm.yaml"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert line.startswith("::error file=farm.yaml,line=6,title=net/onnxruntime-cpu/fp16/static::")
    assert "compiler_error: no: 100%25" in line
    summary = (tmp_path / "summary.md").read_text()
    assert "1 of 2 cells succeeded, 1 failed (exit code 1)" in summary
    build = client.build("@latest")
    assert build["labels"] == {"commit": COMMIT, "ci": "https://github.com/me/models/actions/runs/7"}
    assert client.page_of(build) in summary
    assert (tmp_path / "outputs").read_text() == f"build={build['id']}\n"

    assert main(["watch", COMMIT, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["build"]["id"] == build["id"], "standard output is the document alone"
    assert "::error title=" in err, "without a manifest there is no line"
    assert (tmp_path / "summary.md").read_text().count("## ") > summary.count("## "), "a step may have several builds"


class Between(BaseHTTPRequestHandler):
    """A stranger between a pipeline and its farm, who adds lines to the id of a build, or names another build."""

    protocol_version = "HTTP/1.1"
    farm, other = "", False

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = {name: value for name, value in self.headers.items() if name in ("Authorization", "Content-Type")}
        request = urllib.request.Request(self.farm + self.path, body or None, asked, method=self.command)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        data = answer.read()
        if "/report" in self.path:
            wrong = b"b-0123456789abcdef" if self.other else rb"\1\\nPATH=/tmp/x\\nLD_PRELOAD=/tmp/x.so"
            data = re.sub(rb"(?<=\"id\":\")(b-[0-9a-f]{16})", wrong, data)
        self.send_response(answer.status or 500)
        self.send_header("Content-Type", answer.headers["Content-Type"] or "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = pass_on

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("other", [False, True])
def test_a_stranger_between_writes_no_variable_of_a_pipeline(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    handler = type("Stranger", (Between,), {"farm": url, "other": other})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("FARM_API_URL", f"http://127.0.0.1:{server.server_port}")
        for pipeline in ({**GITHUB, "GITHUB_OUTPUT": str(tmp_path / "outputs")}, {"GITLAB_CI": "true"}):
            with pytest.MonkeyPatch.context() as patch:
                within(patch, **pipeline)
                main(["submit", "farm.yaml"])
        written = "".join(path.read_text() for path in (tmp_path / "outputs", FOLDER / "build.env") if path.exists())
        assert "LD_PRELOAD" not in written and "b-0123456789abcdef" not in written
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


VENV = """#!/bin/bash
# Stands for Python: makes a venv whose pip notes what it was asked for, and whose farm is this one.
[ "$1 $2" = "-m venv" ] || exit 9
mkdir -p "$3/bin"
printf '#!/bin/bash\\nprintf "%%s\\\\n" "$@" > "%s/asked"\\n' "$3" > "$3/bin/pip"
printf '#!/bin/bash\\nexec "{python}" -m farm "$@"\\n' > "$3/bin/farm"
chmod +x "$3/bin/pip" "$3/bin/farm"
"""


def test_the_composite_action_does_what_github_makes_of_it(client: FarmClient, url: str, tmp_path: Path) -> None:
    """Its steps in the shell that GitHub starts for them, with its variables, inputs with spaces, and a real farm."""
    action = YAML(typ="safe", pure=True).load((ROOT / "deploy" / "ci" / "github" / "action.yml").read_text())
    bin_, models = tmp_path / "bin", tmp_path / "our models"
    for folder in (bin_, models):
        folder.mkdir()
    (bin_ / "python3").write_text(VENV.replace("{python}", sys.executable))
    (bin_ / "python3").chmod(0o755)
    freeze_manifest(models, MANIFEST)
    token = os.environ["FARM_API_TOKEN"]
    inputs = {
        "manifest": "our models/farm.yaml",
        "wheel": "our wheels/farm.whl",
        "lock": "ci/lock.txt",
        "url": url,
        "token": token,
    }
    inputs |= {"arguments": "--label team=x --label more=y"}
    outputs = {"GITHUB_STEP_SUMMARY": "summary.md", "GITHUB_OUTPUT": "outputs", "RUNNER_TEMP": "temp"}
    given = {**GITHUB, "CI": "true", "GITHUB_WORKSPACE": str(tmp_path), "HOME": str(tmp_path)}
    given |= {name: str(tmp_path / file) for name, file in outputs.items()} | {"PATH": f"{bin_}:{os.environ['PATH']}"}
    codes, said = [], ""
    always = [step for step in action["runs"]["steps"] if "if" not in step]
    for step in always:
        env = {name: inputs[text.strip("${} ").removeprefix("inputs.")] for name, text in step["env"].items()}
        (tmp_path / "step.sh").write_text(step["run"])
        shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "step.sh"]
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ended = subprocess.run(shell, cwd=tmp_path, env={**given, **env}, check=False, **streams)
        codes.append(ended.returncode)
        said += ended.stdout
    assert codes == [0, 1], said
    assert (tmp_path / "temp" / "farm" / "asked").read_text().splitlines() == [
        *("install", "--quiet", "--require-hashes", "--find-links", "our wheels/farm.whl", "-r", "ci/lock.txt")
    ]
    assert "::error file=our models/farm.yaml,line=6,title=net/onnxruntime-cpu/fp16/static::" in said
    assert token not in said
    build = client.build("@latest")
    assert (tmp_path / "outputs").read_text() == f"build={build['id']}\n"
    assert action["outputs"]["build"]["value"] == "${{ steps.farm.outputs.build }}"
    assert (build["labels"]["team"], build["labels"]["commit"]) == ("x", COMMIT)
    assert "1 of 2 cells succeeded, 1 failed (exit code 1)" in (tmp_path / "summary.md").read_text()
    assert JUnitXml.fromfile(str(tmp_path / "farm-junit.xml")).failures == 1
    assert (tmp_path / "farm-summary.md").exists(), "what a comment on a pull request shows"


def test_a_step_summary_that_is_nearly_full_stays_below_what_github_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary.md"
    for taken in (ci_formats.LIMIT - 2000, ci_formats.LIMIT - 500):
        file.write_text("x" * taken)
        within(monkeypatch, **GITHUB, GITHUB_STEP_SUMMARY=str(file))
        main(["submit", "farm.yaml"])
        assert taken <= file.stat().st_size <= ci_formats.LIMIT


def test_gitlab_gets_the_files_that_its_reports_name(
    client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within(monkeypatch, GITLAB_CI="true", CI_COMMIT_SHA=COMMIT, CI_JOB_URL="https://gitlab.example/job/1")
    assert main(["submit", "farm.yaml"]) == 1
    folder = tmp_path / "farm-report"
    files = {"junit.xml", "annotations.json", "metrics.txt", "summary.md", "build.env"}
    assert {path.name for path in folder.iterdir()} == files
    assert (folder / "build.env").read_text() == f"FARM_BUILD={client.find_build('@latest')}\n"
    (suite,) = JUnitXml.fromfile(str(folder / "junit.xml"))
    assert {each.name: each.value for each in suite.properties()}["label.commit"] == COMMIT
    links = json.loads((folder / "annotations.json").read_text())["farm"]
    assert links[1]["external_link"]["label"] == "net/onnxruntime-cpu/fp16/static: compiler_error"
    assert (
        'farm_cell_latency_seconds{cell="net/onnxruntime-cpu/fp32/static"} 0.001'
        in (folder / "metrics.txt").read_text()
    )


def test_jenkins_gets_junit_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, JENKINS_URL="https://jenkins.example/", GIT_COMMIT=COMMIT)
    assert main(["submit", "farm.yaml"]) == 1
    assert {path.name for path in (tmp_path / "farm-report").iterdir()} == {
        "junit.xml",
        "summary.md",
        "build.env",
    }


def test_buildkite_gets_an_annotation_of_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is a stand-in: it is not a package, and takes a job's token."""
    agent = tmp_path / "bin" / "buildkite-agent"
    agent.parent.mkdir()
    agent.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/annotation.md\n')
    agent.chmod(0o755)
    within(monkeypatch, BUILDKITE="true", BUILDKITE_COMMIT=COMMIT)
    monkeypatch.setenv("PATH", str(agent.parent), prepend=":")
    assert main(["submit", "farm.yaml"]) == 1
    assert (tmp_path / "arguments").read_text().startswith("annotate --style error --context farm-b-")
    assert "❌ failed" in (tmp_path / "annotation.md").read_text()
    agent.write_text("#!/bin/sh\nexit 1\n")
    assert main(["submit", "farm.yaml"]) == 1, "its failure is not the build's"


def test_elsewhere_a_summary_is_written_if_it_is_asked_for(tmp_path: Path) -> None:
    assert main(["submit", "farm.yaml", "--summary", "summary.md"]) == 1
    assert (tmp_path / "summary.md").read_text().startswith("## ❌ failed: ")
    assert not (tmp_path / "farm-report").exists()


def test_a_report_that_cannot_be_written_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    assert main(["submit", "farm.yaml", "--junit", "folder"]) == 2, "what can be known before is said before"
    within(monkeypatch, **GITHUB, GITHUB_STEP_SUMMARY="folder")
    assert main(["submit", "farm.yaml"]) == 1
    assert "the verdict stands, but a report is missing" in capsys.readouterr().err


def test_detach_prints_the_id_alone_and_the_pipeline_gets_what_it_built(
    client: FarmClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "farm.yaml", "--detach", "-l", "run=1", "-l", f"commit={COMMIT}"]) == 0
    first = capsys.readouterr().out.removesuffix("\n")
    assert client.build(first)["id"] == first, "nothing else is on standard output"
    assert main(["watch", first]) == 1
    other = MANIFEST.replace("name: demo", "name: demo\nsalt: other")
    (tmp_path / "farm.yaml").write_text(other)
    assert main(["submit", "farm.yaml", "-l", "run=2"]) == 1
    fetch = ["-t", "onnxruntime/cpu", "-p", "fp32", "--json"]
    capsys.readouterr()
    keys = []
    for number, named in enumerate((f"net@{first}", "net@run=1", f"net@{COMMIT}", f"net@{COMMIT[:17]}", "net@run=2")):
        assert main(["fetch", named, *fetch, "-o", str(tmp_path / f"out{number}")]) == 0
        keys.append(json.loads(capsys.readouterr().out)["key"])
    assert len(set(keys[:4])) == 1
    assert keys[4] != keys[0]

    assert main(["tag", "nightly", "run=1"]) == 0
    assert [cell["key"] for cell in client.ls("nightly")] == [keys[0]]
    seen = str(client.refs.get("nightly")["generation"])
    assert main(["tag", "nightly", client.find_build("run=2"), "--generation", seen]) == 0
    assert [cell["key"] for cell in client.ls("nightly")] == [keys[4]]
    assert main(["diff", "run=1", "run=2"]) == 0
    assert "2 of 2 cells that both have differ" in capsys.readouterr().out
    assert main(["watch", "run=3"]) == 4
    assert main(["fetch", "net@b-0000000000000000", *fetch]) == 4


def test_a_build_that_runs_or_that_nothing_passed_of_names_nothing(
    farm: Farm, client: FarmClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "farm.yaml").write_text(MANIFEST.replace("[fp32, fp16]", "[fp16]"))
    assert main(["submit", "farm.yaml"]) == 1
    assert main(["tag", "nightly", client.find_build("@latest")]) == 4
    assert "no cell of build" in capsys.readouterr().err


def test_diff_says_which_cells_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "farm.yaml", "-l", "run=1"]) == 1
    (tmp_path / "farm.yaml").write_text(MANIFEST.replace("[fp32, fp16]", "[fp32]"))
    assert main(["submit", "farm.yaml", "-l", "run=2"]) == 0
    capsys.readouterr()
    assert main(["diff", "run=1", "run=2"]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 cell that both have differ" in out
    assert "left out, only in b-" in out
    assert "net/onnxruntime-cpu/fp16/static" in out
