"""Commands about manifests: init, lint, schema. They need no server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from farm import entry_points
from farm.cli import output, render
from farm.errors import ExitCode, UsageError
from farm.inert import inert

SCHEMA = "farm.schema.json"  # Where `farm init` writes the manifest's JSON Schema.
MOST_SHOWN = 50  # Problems of one manifest that people read.


def lint(
    manifest: Annotated[list[Path], Argument(metavar="MANIFEST", help="Manifests, YAML files; - is stdin.")],
    form: Annotated[
        Literal["text", "json", "github", "sarif"], Option("--format", "-f", help="The output format.")
    ] = "text",
    models: Annotated[bool, Option("--models/--no-models", help="Also read the models and data.")] = True,
) -> None:
    """Check manifests and show every problem with its place.

    Needs no server. Exits with 2 if there is a problem.
    """
    from farm.client.authoring import lint as find_problems

    form = "json" if output.as_json() else form
    write = entry_points.required(entry_points.PROBLEMS, form) if form in ("sarif", "github") else None
    found = {file: find_problems(file, models=models) for file in dict.fromkeys(manifest)}
    problems = [problem for each in found.values() for problem in each]
    match form:
        case "json":
            output.emit({"ok": not problems, "problems": [asdict(problem) for problem in problems]})
        case "sarif" | "github":
            written = write(problems) if write else []
            if isinstance(written, Mapping):
                output.emit(written)
            else:
                for line in written:
                    output.say(line, command=True)
        case "text":
            for file, each in found.items():
                for problem in each[:MOST_SHOWN]:
                    output.say(inert(str(problem)))
                if len(each) > MOST_SHOWN:
                    output.say(f"and {len(each) - MOST_SHOWN} more: --json lists all")
                output.say(f"{file}: {render.plural(len(each), 'error') if each else 'ok'}")
    if problems:
        raise typer.Exit(int(ExitCode.USAGE))


def schema(
    draft7: Annotated[bool, Option("--draft7", help="Draft-07, for editors that support no newer draft.")] = False,
) -> None:
    """Print the manifest's JSON Schema."""
    from farm.manifest.entries import manifest_schema

    output.emit(manifest_schema(draft7=draft7))


def init(
    model: Annotated[Path, Argument(metavar="MODEL", help="An ONNX file.")],
    file: Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="The file to write.")] = None,
    target: Annotated[
        list[str] | None, Option("--target", "-t", help="Such as mi300x; default: onnxruntime/cpu. Repeatable.")
    ] = None,
) -> None:
    """Write a commented manifest for a model.

    Fills in the model's inputs and shapes. With --output, also farm.schema.json in its folder, unless that exists:
    editors complete and check fields by it.
    """
    from farm.client.authoring import init_manifest
    from farm.manifest.entries import manifest_schema

    if file:
        output.check_folder(file)
        if file.exists():
            raise UsageError(f"{file} exists already", hint="choose another name, or delete the file")
    text = init_manifest(model, file.parent if file else Path(), SCHEMA if file else "", target or ["onnxruntime/cpu"])
    if file:
        with output.writing(file):
            file.write_text(text, encoding="utf-8")
            if not (schema := file.parent / SCHEMA).exists():
                schema.write_text(f"{json.dumps(manifest_schema(draft7=True), indent=1)}\n", encoding="utf-8")
    said = f"{file}: build it with `farm run {file}`" if file else text.rstrip("\n")
    output.result({"manifest": text, "file": str(file) if file else None}, said)
