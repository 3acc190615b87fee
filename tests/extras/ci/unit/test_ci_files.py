"""The files for CI servers: they parse, use what the commands have, and name the files that are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from farm.extras.ci import ci_servers
from tests.contracts.published import command_lines
from tests.support.places import ROOT

FOLDER = ROOT / "deploy" / "ci"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
COMMAND = re.compile(r"(?:bin/farm\"?|(?<![\w/.\"-])farm) (lint|submit|watch|token create)\b([^\n]*)")


def read(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_file_uses_commands_and_options_that_there_are(path: Path) -> None:
    known, found = command_lines(), COMMAND.findall(path.read_text())
    assert found
    for command, rest in found:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))
        assert options <= known[f"farm {command}"]["parameters"].keys(), (command, rest)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yml"], ids=lambda path: path.name)
def test_actions_of_others_are_pinned_and_inputs_are_no_text_of_scripts(path: Path) -> None:
    text = path.read_text()
    assert read(path)
    for used in re.findall(r"^\s*- uses: (\S+)", text, re.MULTILINE):
        assert used.startswith("./") or re.search(r"@[0-9a-f]{40}$", used), used
    scripts = re.findall(r"run: \|\n((?:(?: {8,}.*)?\n)+)", text)
    assert not any("${{" in script for script in scripts)


def test_gitlab_reads_the_reports_that_commands_write() -> None:
    reports = read(FOLDER / "gitlab.yml")[".farm-build"]["artifacts"]["reports"]
    assert reports == {
        "junit": f"{ci_servers.FOLDER}/junit.xml",
        "annotations": f"{ci_servers.FOLDER}/annotations.json",
        "metrics": f"{ci_servers.FOLDER}/metrics.txt",
        "dotenv": f"{ci_servers.FOLDER}/build.env",
    }
    assert f"{ci_servers.FOLDER}/junit.xml" in (FOLDER / "Jenkinsfile").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_what_is_installed_is_known_by_its_hash(path: Path) -> None:
    """A name alone is whatever an index has: anybody may take it there."""
    installs = re.findall(r"(?:pip|bin/pip\"?) install ([^\n']*)", path.read_text())
    wanted = '--quiet --require-hashes --find-links "$FARM_WHEEL" -r "$FARM_LOCK"'
    assert installs and {each.replace("$$", "$") for each in installs} == {wanted}


@pytest.mark.parametrize("name", ["Jenkinsfile", "buildkite.yml"])
def test_files_that_cannot_keep_secrets_from_forks_warn_of_them(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert "Forks:" in text and "`generator`" in text and "--untrusted" in text


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="GitHub's runners have jq and curl")
def test_a_pull_request_has_one_comment_of_a_manifest_which_later_builds_replace(tmp_path: Path) -> None:
    """The step's own script, against a server that keeps comments as GitHub does."""
    found = [{"id": 1, "body": "<!-- farm farm.yaml -->\nno", "user": {"type": "User"}}]

    class Comments(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            sent = json.loads(self.rfile.read(size)) if size else {}
            assert self.headers["Authorization"] == "Bearer secret"
            if self.command == "POST":
                assert self.path == "/repos/team/models/issues/7/comments"
                found.append({**sent, "id": 2, "user": {"type": "Bot"}})
            elif self.command == "PATCH":
                found[int(self.path.removeprefix("/repos/team/models/issues/comments/")) - 1] |= sent
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST = do_PATCH = answer

    step = read(FOLDER / "github" / "action.yml")["runs"]["steps"][-1]
    with ThreadingHTTPServer(("127.0.0.1", 0), Comments) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        named = {"GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}", "GITHUB_REPOSITORY": "team/models"}
        environ = {**os.environ, **named, "TOKEN": "secret", "NUMBER": "7", "MANIFEST": "farm.yaml"}
        for text in ("## failed\n", "## passed\n" + "µ" * 70_000):
            (tmp_path / "farm-summary.md").write_text(text)
            subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=environ, check=True)
        server.shutdown()
    mine, theirs = found[1], found[0]
    assert (len(found), theirs["body"][-2:], mine["body"][:34]) == (2, "no", "<!-- farm farm.yaml -->\n## passed\n")
    assert len(mine["body"]) == 65_000


def test_a_merge_request_has_one_note_of_a_manifest_which_later_builds_replace(tmp_path: Path) -> None:
    """The job's own script, against a server that keeps notes as GitLab does."""
    found = [{"id": 1, "body": "<!-- farm farm.yaml -->\nno", "author": {"id": 4}}]

    class Notes(BaseHTTPRequestHandler):
        def answer(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            assert self.headers["PRIVATE-TOKEN"] == "secret"
            path, _, _ = self.path.partition("?")
            if self.command == "POST":
                assert path == "/api/projects/3/merge_requests/7/notes"
                found.append({**sent, "id": 2, "author": {"id": 5}})
            elif self.command == "PUT":
                found[int(path.removeprefix("/api/projects/3/merge_requests/7/notes/")) - 1] |= sent
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"id": 5} if path == "/api/user" else found).encode())

        do_GET = do_POST = do_PUT = answer

    (script,) = read(FOLDER / "gitlab.yml")[".farm-build"]["after_script"]
    (tmp_path / "farm-report").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Notes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {
            **os.environ, "CI_API_V4_URL": f"http://127.0.0.1:{server.server_port}/api", "CI_PROJECT_ID": "3",
            "FARM_NOTE_TOKEN": "secret", "FARM_MANIFEST": "farm.yaml",
        }  # fmt: skip
        for number, text in (("", "of a branch"), ("7", "## failed\n"), ("7", "## passed\n" + "µ" * 1_000_000)):
            (tmp_path / "farm-report/summary.md").write_text(text)
            named = {**environ, "CI_MERGE_REQUEST_IID": number}
            subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=named, check=True)
        server.shutdown()
    theirs, mine = found
    assert (theirs["body"][-2:], mine["body"][:34]) == ("no", "<!-- farm farm.yaml -->\n## passed\n")
    assert len(mine["body"]) == 900_000


def test_strangers_get_no_secret_but_their_own_token() -> None:
    jobs = read(FOLDER / "github" / "workflow.yml")["jobs"]
    assert "secrets." not in str(jobs["lint"])
    assert re.findall(r"secrets\.(\w+)", str(jobs["strangers"])) == ["FARM_STRANGERS_TOKEN"]
    assert "--untrusted" in jobs["strangers"]["steps"][-1]["run"]
    assert "with" not in jobs["strangers"]["steps"][0], "what is installed is this repository's choice"
    checkout = jobs["strangers"]["steps"][1]["with"]
    assert checkout["persist-credentials"] is False
    assert "head.sha" in checkout["ref"]


def test_the_pre_commit_hook_lints_manifests() -> None:
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    assert hook["entry"] == "farm lint"
    assert re.search(hook["files"], "models/farm.yaml")
    assert not re.search(hook["files"], "models/other.yaml")
