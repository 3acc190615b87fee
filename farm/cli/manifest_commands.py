"""Commands about manifests: init, lint, schema. They need no server."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from farm.cli import output, render
from farm.errors import ExitCode, Problem, UsageError
from farm.inert import inert

ANNOTATIONS = 10
"""Annotations of one step that GitHub shows; it drops the rest silently."""


class Format(StrEnum):
    """Output formats of `farm lint`."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def lint(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The manifest, a YAML file.")],
    form: Annotated[Format, typer.Option("--format", "-f", help="The output format.")] = Format.TEXT,
    models: Annotated[bool, typer.Option("--models/--no-models", help="Also read the models and data.")] = True,
    as_json: output.Json = False,
) -> None:
    """Check a manifest and show every problem with its place.

    Needs no server. Exits with 2 if there is a problem.
    """
    from farm.client.authoring import lint as find_problems

    problems = find_problems(manifest, models=models)
    form = Format.JSON if as_json else form
    match form:
        case Format.JSON:
            output.emit({"ok": not problems, "problems": [problem.as_dict() for problem in problems]})
        case Format.GITHUB:
            for line in github_lines(problems):
                output.say(line, command=True)
        case Format.TEXT:
            for problem in problems:
                output.say(inert(str(problem)))
            output.say(f"{manifest}: {render.plural(len(problems), 'error') if problems else 'ok'}")
    if problems:
        raise typer.Exit(int(ExitCode.USAGE))


def schema(
    draft7: Annotated[
        bool, typer.Option("--draft7", help="Draft-07, for editors that support no newer draft.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Print the manifest's JSON Schema."""
    from farm.manifest import manifest_schema

    _ = as_json  # It is JSON anyway.
    output.emit(manifest_schema(draft7=draft7))


def init(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")],
    file: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = None,
    as_json: output.Json = False,
) -> None:
    """Write a commented manifest for a model.

    Fills in the model's inputs and shapes.
    """
    from farm.client.authoring import init_manifest

    if file and file.exists():
        raise UsageError(f"{file} exists already", hint="choose another name, or delete the file")
    text = init_manifest(model, file.parent if file else Path())
    if file:
        with output.writing(file):
            file.write_text(text, encoding="utf-8")
    if as_json:
        output.emit({"manifest": text, "file": str(file) if file else None})
    elif file:
        output.say(f"{file}: build it with `farm run {file}`")
    else:
        output.say(text.rstrip("\n"))


# --- how they do it -------------------------------------------------------------------------------------------------


def github_lines(problems: Sequence[Problem]) -> list[str]:
    """Return problems as GitHub workflow commands, at most as many as GitHub shows."""
    shown = problems if len(problems) <= ANNOTATIONS else problems[: ANNOTATIONS - 1]
    lines = [_annotation(problem) for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"::error::and {len(problems) - len(shown)} more problems; `farm lint` lists them all")
    return lines


def _annotation(problem: Problem) -> str:
    place = {"file": problem.file, "line": problem.line, "col": problem.column}
    properties = ",".join(f"{name}={_escaped(str(value), property=True)}" for name, value in place.items() if value)
    message = problem.message + (f"\n{problem.hint}" if problem.hint else "")
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str, *, property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
