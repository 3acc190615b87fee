"""Foreign text on every way to a screen or a CI server's log: neither obeys it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from farm.cli import main, output, render
from farm.cli.artifact_commands import describe_program
from farm.cli.output import Lines, Screen
from farm.errors import FarmError, ManifestError, Problem, UsageError
from farm.extras.ci.ci_formats import github_commands
from farm.extras.reproduce import reproduction
from farm.inert import inert, inert_json, one_line
from farm.logging import configure, get_logger
from farm.results.verdict import changes_of
from farm.settings import load_settings
from tests.support.places import ROOT

PIECES = (
    "::", ":", "error", "set-output name=a::b", "#", "##", "[", "vso[task.x]", "VSO[", "teamcity[", "error]", "\n",
    "\r",
    "\r\n", " ", "\t", "\x0b", "\x0c", "\x85", "\u2028", "\u00a0", "\u3000", "\u200b", "\u00ad", "\ufeff", "\u202e",
    "\x1b", "\x1b[0m", "\x1b[31m", "\x1b[8m", "\x1b[2J", "\x1b]0;", "\x07", "\x9b2J", "\x1b[", "m", "0m", "\x00", "x",
    "\ud800", "\U000e0041", "}", '"', "\\",
)  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)

STYLE = re.compile(r"\x1b\[[0-9;]*m")
OBEYED = re.compile(
    r"^\s*::|##[a-z]*\[|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]",
    re.MULTILINE | re.IGNORECASE,
)
"""What no line that is printed may have, once its colours are taken off."""


def a_cell(text: str, state: str = "failed") -> dict[str, Any]:
    names = ("message", "detail", "advice", "kind", "waiting", "worker", "phase", "warning", "job", "log", "identifier")
    names += ("model", "target", "precision", "shape", "reason")
    return {"state": state, "attempt": 1, "as_expected": False, "hit": False, **dict.fromkeys(names, text)}


def drawn(text: str) -> None:
    screen = Screen()
    nothing = dict.fromkeys(("eta", "slot_seconds", "gpu_hours", "spent_seconds", "unknown"))
    outlook = {**nothing, "unserved": [text]}
    screen.show([a_cell(text, "running"), a_cell(text)], outlook)
    for lively in (False, True):
        plain = io.StringIO()
        # Rich's own sequences move the cursor: its lines are looked at without them.
        Console(file=plain, width=4000, height=20, force_terminal=lively, color_system=None).print(screen)
        sys.stdout.write(plain.getvalue())


def logged(text: str, form: str) -> None:
    configure(load_settings({"FARM_LOG_FORMAT": form}))
    log = get_logger("test")
    log.warning("a line", text=text)
    logging.getLogger("a library").warning("%s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("failed")


def rerun(text: str) -> None:
    document = {"ended": {"kind": text, "message": text}}
    found = {
        "key": text, "expected_key": text, "toolchain": text, "expected_toolchain": text,
        "ended": {"kind": text, "message": text},
    }  # fmt: skip
    reproduction.print_inert("\n".join(reproduction.report(document, found)))


def crashed(text: str) -> None:
    from farm.cli import commands

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "app", broken)
        assert main(["doctor"]) == 6


def problem(text: str) -> Problem:
    return Problem(file=text, message=text, hint=text, line=1, column=1)


def in_json(error: FarmError) -> None:
    before = output.AS_JSON.set(True)
    output.complain(error)
    output.AS_JSON.reset(before)


def program(text: str) -> dict[str, Any]:
    port = {"name": text, "dtype": text, "shape": [text]}
    return {
        "format": "onnx", "size": 1, "opsets": {text: text}, "inputs": [port], "outputs": [port], "weights": {text: 1},
        "modules": {text: {"operators": {text: 1}}},
    }  # fmt: skip


PATHS: dict[str, Callable[[str], object]] = {
    "say": output.say,
    "say with colours": lambda text: output.say(f"\x1b[31m{text}\x1b[0m:\x1b[1m{text}"),
    "note": output.note,
    "json": lambda text: output.emit({text: [text]}),
    "an error": lambda text: in_json(FarmError(text, hint=text)),
    "an error in a manifest": lambda text: in_json(ManifestError([problem(text)] * 2)),
    "lines": lambda text: Lines().show([a_cell(text), a_cell(text, "running")]),
    "screen": drawn,
    "outcome": lambda text: [output.say(line) for line in render.failures([a_cell(text)], text)],
    "remarks": lambda text: [output.say(line) for line in render.remarks([a_cell(text)], changes_of([a_cell(text)]))],
    "lists": lambda text: [output.say(line) for line in render.under_way([a_cell(text)])],
    "a program": lambda text: [output.say(line) for line in describe_program(text, program(text))],
    "wrong usage": lambda text: main(["ls", f"--{text}"]),
    "an unknown command": lambda text: main([f"a{text}"]),
    "a mistake": crashed,
    "log": lambda text: logged(text, "console"),
    "log in JSON": lambda text: logged(text, "json"),
    "a rerun": rerun,
}


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """What is written meanwhile; on standard output and standard error alike."""
    both = io.StringIO()
    with contextlib.redirect_stdout(both), contextlib.redirect_stderr(both):
        yield both


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_nothing_that_is_printed_is_obeyed(path: str, text: str) -> None:
    with printed() as both:
        PATHS[path](text)
    assert OBEYED.search(STYLE.sub("", both.getvalue())) is None
    both.getvalue().encode()


@settings(max_examples=300)
@given(text=HOSTILE)
def test_text_stays_inert_when_its_colours_are_taken_off(text: str) -> None:
    shown = inert(text, colours=True)
    assert OBEYED.search(STYLE.sub("", shown)) is None
    assert inert(shown, colours=True) == shown
    assert "\n" not in one_line(text)


def test_json_names_a_file_whose_name_is_no_text() -> None:
    with printed() as both:
        output.emit({"file": "a\udcff.yaml"})
    assert json.loads(both.getvalue()) == {"file": "a\udcff.yaml"}
    both.getvalue().encode()


@settings(max_examples=300)
@given(text=HOSTILE)
def test_json_says_the_same(text: str) -> None:
    document = json.dumps({"said": text}, indent=2, ensure_ascii=False)
    shown = inert_json(document)
    assert json.loads(shown) == {"said": text}
    assert OBEYED.search(shown) is None


@settings(max_examples=100)
@given(text=HOSTILE)
def test_a_command_of_ours_carries_no_other(text: str) -> None:
    for line in github_commands([problem(text)]):
        with printed() as both:
            output.say(line, command=True)
        assert both.getvalue().startswith("::error ")
        assert OBEYED.search(both.getvalue()[2:]) is None


def test_a_colour_between_hides_no_command() -> None:
    """The ways that were found: what is stripped after the look, and what ends a line for others only."""
    for text in ("fine\n\x1b[0m::error::x", "#\x1b[31m#vso[task.x]", "\u00a0::error::x", "a\u2028::error::x"):
        with printed() as both:
            output.say(text)
        assert OBEYED.search(both.getvalue()) is None, text


def test_one_module_prints_for_all_commands() -> None:
    """So that nothing goes around it: elsewhere there is no `print`, `echo` or `write` to a stream."""
    found = []
    for path in [
        *sorted((ROOT / "farm" / "cli").glob("*.py")),
        ROOT / "farm" / "extras" / "reproduce" / "reproduction.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("print", "typer.echo", "typer.secho", "traceback.print_exc") or re.fullmatch(
                    r"sys\.std(out|err)\b.*write", name
                ):
                    found.append(f"{path.name} {name}")
    assert sorted(set(found)) == ["main.py print", "output.py typer.echo", "reproduction.py print"]


def test_wrong_usage_still_says_what_is_wrong() -> None:
    with printed() as both:
        assert main(["ls", "--refs"]) == 2
    assert "--refs" in both.getvalue() and "Usage: farm ls" in both.getvalue()
    assert UsageError("x").exit_code == 2
