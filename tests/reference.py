"""Writes the pages of `docs/` that are made of the code's own texts, and counts the words that people write.

python -m tests.reference --write    write the generated pages again (`make docs`); a test compares them
python -m tests.reference            say how many words each folder of documents has
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.places import ROOT

AGAIN = "`make docs` writes it again"
DOCS = ROOT / "docs"


def _table(*head: str) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _prose(text: str | None) -> str:
    """Return a docstring as paragraphs of Markdown."""
    parts = re.split(r"\n\s*\n", textwrap.dedent(text or "").strip())
    return "\n\n".join(textwrap.fill(" ".join(part.replace("\f", "").split()), 120) for part in parts)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the page of the command line: each command with its arguments and options, as its help has them."""
    import typer

    from farm.cli.commands import EXAMPLES, app
    from farm.errors import ExitCode

    group = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        f"Generated from the help of the commands: {AGAIN}. What all commands share is in [cli.md](cli.md).",
        "Each command also has `--help` (`-h`) and `--json`.",
    ]
    for words, command in _commands(group, typer.Context(group, info_name="farm")):
        context = typer.Context(command, info_name=words, max_content_width=1000, terminal_width=1000)
        records = [
            (param.param_type_name, record)
            for param in command.get_params(context)
            if param.name not in ("as_json", "help") and (record := param.get_help_record(context))
        ]
        places = [
            name if "[required]" in about or name.startswith("[") else f"[{name}]"
            for name, about in ((_plain(record[0]), record[1]) for kind, record in records if kind == "argument")
        ]
        lines += ["", f"## farm {words}", ""]
        if places:
            lines += [_code(" ".join(["farm", words, *places])), ""]
        lines += [_prose(command.help)]
        if records:
            lines += ["", *_table("option", "what it does")]
            lines += [_row(_code(_plain(record[0])), record[1].replace("  [required]", "")) for _, record in records]
        if examples := EXAMPLES.get(words):
            lines += ["", "```sh", *examples, "```"]
    lines += ["", "## Exit codes", "", *_table("code", "meaning")]
    lines += [_row(str(int(code)), code.meaning) for code in ExitCode]
    return "\n".join(lines) + "\n"


def _plain(option: str) -> str:
    """Return an option without the type that its help names in angle brackets, unless that is a choice."""
    return re.sub(r" <[^|>]+>", "", option)


def _commands(group: Any, context: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that name it."""
    for name in group.list_commands(context):
        command, words = group.get_command(context, name), f"{before}{name}"
        if hasattr(command, "list_commands"):
            yield from _commands(command, context, f"{words} ")
        elif words != "help":
            yield words, command


# --- routes ----------------------------------------------------------------------------------------------------------

_EVERYWHERE = ("Farm-Namespace",)
"""Parameters of nearly every route; `api.md` explains them."""


def routes() -> str:
    """Return the page of the HTTP API: each route with what its code says about it."""
    from farm.app import Farm
    from farm.serving.server import create_app
    from farm.settings import load_settings

    app = create_app(Farm(load_settings({})), loopback=True)
    document = app.openapi()
    roles = {(method, route.path): _role(route.dependant) for route in _routes(app) for method in route.methods}
    lines = [
        "# Routes",
        "",
        f"Generated from the API's own document, [openapi.json](openapi.json): {AGAIN}.",
        "The document also has the form of every answer. [api.md](api.md) says how to call, and what errors look like.",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            rows = by_tag.setdefault((route.get("tags") or ["other"])[0], [])
            role = roles[method.upper(), path.removeprefix("/v1")]
            rows.append(_row(_code(f"{method.upper()} {path}"), role, " ".join(_route(route, document))))
    for tag, rows in by_tag.items():
        lines += ["", f"## {tag[0].upper()}{tag[1:]}", "", *_table("route", "role", "what it does"), *rows]
    return "\n".join(lines) + "\n"


def _routes(router: Any) -> Iterator[Any]:
    """Yield the routes of a router, and of those that it includes; their paths begin below `/v1`."""
    for route in router.routes:
        if hasattr(route, "dependant"):
            yield route
        elif hasattr(route, "original_router"):
            yield from _routes(route.original_router)


def _role(dependant: Any) -> str:
    """Return the role that a route asks for: the highest of its dependencies."""
    found = [inspect.getclosurevars(each.call).nonlocals.get("role") for each in dependant.dependencies if each.call]
    highest = max((role for role in found if role is not None), default=None)
    return str(highest.name).lower() if highest is not None else ""


def _route(route: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a route does, its parameters, and the fields of its body."""
    yield _prose(route.get("description")).replace("\n\n", " ")
    parameters = [each for each in route.get("parameters", []) if each["name"] not in _EVERYWHERE]
    for each in parameters:
        if each["in"] != "path":
            yield f"<br>`{each['name']}`: {each['description']}" if each.get("description") else f"<br>`{each['name']}`"
    if fields := list(_fields_of_body(route, document)):
        yield f"<br>Body: {', '.join(fields)}."


def _fields_of_body(route: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    for content in route.get("requestBody", {}).get("content", {}).values():
        reference = content.get("schema", {}).get("$ref", "")
        schema = document["components"]["schemas"].get(reference.rpartition("/")[2], {})
        for name in schema.get("properties", {}):
            yield _code(name) if name in schema.get("required", []) else f"[{_code(name)}]"


# --- settings --------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Return the page of the settings: those of `configs/farm.toml`, with its comments."""
    from farm.settings import FOR_FOLDERS, Settings

    lines = [
        "# Settings",
        "",
        f"Generated from `configs/farm.toml`: {AGAIN}. [running.md](running.md) says where settings come from.",
        "Each setting is also an environment variable (`FARM_REDIS_URL`), in which commas separate items of a list.",
        "A setting with * may also stand in the `./farm.toml` of a folder that you do not trust.",
    ]
    about: list[str] = []
    named: set[str] = set()
    text = (ROOT / "configs" / "farm.toml").read_text().partition("\n\n")[2]
    for before, line in pairwise(["", *text.splitlines()]):
        if line.startswith("# ---"):
            title = line.strip("# -").capitalize()
            lines += ["", f"## {title}", "", *_table("setting", "default", "what it is")]
        elif line.startswith("#"):
            about = [*(about if before.startswith("#") and "---" not in before else []), line.removeprefix("# ")]
        elif line:
            if not named:
                lines += ["", *_table("setting", "default", "what it is")]
            name, _, value = line.partition(" = ")
            named.add(name)
            lines.append(_row(f"{_code(name)}{' *' if name in FOR_FOLDERS else ''}", _code(value), " ".join(about)))
    assert named == set(Settings.model_fields), named ^ set(Settings.model_fields)
    return "\n".join(lines) + "\n"


# --- failure kinds ---------------------------------------------------------------------------------------------------


def failure_kinds() -> str:
    """Return the page of the failure kinds: whose turn it is, and what to try."""
    from farm.jobs.state import FailureKind, policy_of

    lines = [
        "# Failure kinds",
        "",
        f"Generated from `farm/jobs/state.py`: {AGAIN}.",
        "",
        "- **Whose** says who has to act. The user's kinds end a build with exit code 1, the farm's with 6.",
        "- **Attempts** is how many charged attempts a job gets before the kind is final.",
        "  Each next attempt waits longer, and goes to another node if the pool has one.",
        "- A kind with * may be the node's fault ([nodes that fail](running.md#nodes-that-fail)).",
        "- A gate is a build's check of a job that succeeded. If only gates failed, the exit code is 3.",
        "- `farm reproduce` reruns an attempt of any kind without the farm ([reproduce](cli.md#reproduce)).",
        "",
        *_table("kind", "whose", "attempts", "what happened", "what to try"),
    ]
    for kind in FailureKind:
        policy = policy_of(kind)
        name = f"{_code(kind.value)}{' *' if policy.node else ''}{' (gate)' if policy.gate else ''}"
        lines.append(_row(name, policy.fault, str(policy.attempts), policy.sentence, policy.advice))
    return "\n".join(lines) + "\n"


# --- fields of a manifest --------------------------------------------------------------------------------------------


def fields() -> str:
    """Return the page of a manifest's fields, as its JSON Schema explains them."""
    from farm.manifest.entries import manifest_schema

    schema = manifest_schema()
    lines = [
        "# Fields of a manifest",
        "",
        f"Generated from the manifest's JSON Schema (`farm schema`): {AGAIN}.",
        "[manifest.md](manifest.md) has an example, and says how cells are made of these fields.",
        "",
        "## Manifest",
        "",
        *_fields(schema),
    ]
    for name, entry in schema["$defs"].items():
        if entry.get("properties"):
            lines += ["", f"## {name.removesuffix('Entry')}", "", _prose(entry.get("description")), "", *_fields(entry)]
    return "\n".join(lines) + "\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from _table("field", "default", "values", "what it is")
    for name, field in schema["properties"].items():
        required = name in schema.get("required", [])
        default = "required" if required else _code(_shown(field.get("default")))
        yield _row(_code(name), default, _values(field), field.get("description", ""))


def _shown(value: Any) -> str:
    import json

    return "" if value in (None, "", [], {}) else json.dumps(value).strip('"')


def _values(field: Mapping[str, Any]) -> str:
    """Return what a field may be, in short: its choices, its type, or the section of the form that it has."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2].removesuffix("Entry")
        return f"[{name}](#{name.lower()})"
    if choices := field.get("enum"):
        return ", ".join(_code(str(choice)) for choice in choices if choice)
    if "const" in field:
        return _code(str(field["const"]))
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(found for option in options if (found := _values(option))))
    if field.get("type") == "array":
        inner = _values(field.get("items", {}))
        return f"list of {inner}" if inner else "list"
    return {"object": "mapping", "boolean": "true, false"}.get(str(field.get("type", "")), str(field.get("type", "")))


# --- compilers -------------------------------------------------------------------------------------------------------


def compilers() -> str:
    """Return the page of the compilers: their devices, precisions, options and environment variables."""
    from farm.targets.compilers import compilers

    lines = [
        "# Compilers",
        "",
        f"Generated from `farm/targets`: {AGAIN}. [manifest.md](manifest.md) says how to write options and variables.",
        "A precision with * is computed in a wider type on some devices.",
    ]
    for compiler in compilers().values():
        lines += ["", f"## {compiler.name}", "", *_table("devices", "precisions", "tuning")]
        for kind in compiler.devices:
            precisions = ", ".join(f"{name}{' *' if name in compiler.emulated else ''}" for name in kind.precisions)
            lines.append(_row(_code(kind.pattern), precisions, ", ".join(kind.tuning)))
        if compiler.options:
            lines += ["", f"### Options of {compiler.name}", "", *_table("option", "default", "values", "what it is")]
            lines += [_option(name, option) for name, option in compiler.options.items()]
        quantization = [(name, each) for name, options in compiler.quantization.items() for each in options.items()]
        if quantization:
            lines += ["", f"### Options of {compiler.name} by precision", ""]
            lines += _table("precision: option", "default", "values", "what it is")
            lines += [_option(name, option, f"{precision}: ") for precision, (name, option) in quantization]
        if compiler.refused_options:
            lines += ["", f"### Names that {compiler.name} has and `options` has not", "", *_table("name", "why")]
            lines += _together(compiler.refused_options)
        if compiler.env:
            lines += ["", f"### Environment variables of {compiler.name}", "", *_table("variable", "value")]
            lines += _together({name: _variable(variable) for name, variable in compiler.env.items()})
        if compiler.refused_env:
            lines += [
                "",
                f"### Environment variables that {compiler.name} is not given",
                "",
                *_table("variable", "why"),
            ]
            lines += _together(compiler.refused_env)
    return "\n".join(lines) + "\n"


def _together(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a row for each text, with all names that have it."""
    for text in dict.fromkeys(texts.values()):
        yield _row(", ".join(_code(name) for name, each in texts.items() if each == text), text)


def _option(name: str, option: Any, before: str = "") -> str:
    values = ", ".join(_code(_shown(choice)) for choice in option.choices)
    if not values:
        values = "true, false" if option.type is bool else {int: f"from {option.low} on"}.get(option.type, "")
    only = "" if option.devices == ("*",) else f" (only {', '.join(option.devices)})"
    default = ", ".join(option.default) if isinstance(option.default, tuple) else _shown(option.default)
    return _row(f"{before}{_code(name)}", _code(default), values, f"{option.help}{only}")


def _variable(variable: Any) -> str:
    return {
        "flag": "true; false means unset",
        "switch": "true, false",
        "number": f"a whole number from {variable.low} on",
        "text": f"text like {_code(variable.pattern)}",
        "file": "`{path: FILE}`, which is uploaded",
    }[variable.kind]


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return the page of the metrics: what the code says about each."""
    from prometheus_client.metrics import MetricWrapperBase

    from farm.metrics import instruments
    from farm.metrics.instruments import GAUGES

    own = [value for value in vars(instruments).values() if isinstance(value, MetricWrapperBase)]
    lines = [
        "# Metrics",
        "",
        f"Generated from `farm/metrics`: {AGAIN}. [running.md](running.md#metrics) says how to ask for them.",
        "",
        *_table("metric", "kind", "labels", "what it is"),
    ]
    for name, (about, labels) in GAUGES.items():
        lines.append(_row(_code(name), "gauge", ", ".join(map(_code, labels)), about))
    for instrument in own:
        (family,) = instrument.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(_code(label) for label in instrument._labelnames)
        lines.append(_row(_code(name), family.type, labels, family.documentation))
    return "\n".join(lines) + "\n"


# --- faults ----------------------------------------------------------------------------------------------------------


def faults() -> str:
    """Return the page of the faults that tests cause, with what has to hold."""
    import tomllib

    lines = [
        "# Faults that tests cause",
        "",
        f"Generated from `tests/chaos/counts.toml`: {AGAIN}. [faults.md](faults.md) says how they are tested.",
        "L is the length of a lease.",
        "",
        *_table("name", "fault", "what has to hold", "full counts"),
    ]
    for name, fault in tomllib.loads((ROOT / "tests" / "chaos" / "counts.toml").read_text()).items():
        counts = ", ".join(f"{what} {count:,}" for what, count in fault["full"].items())
        lines.append(_row(name, fault["fault"], fault["passes"], counts))
    return "\n".join(lines) + "\n"


# --- what tests show -------------------------------------------------------------------------------------------------


def shown() -> str:
    """Return the page of the tests that show what documents promise: their names are sentences."""
    import tomllib

    lines = ["# What tests show", "", f"Generated from the names of tests that `tests/shown.toml` lists: {AGAIN}."]
    for title, files in tomllib.loads((ROOT / "tests" / "shown.toml").read_text()).items():
        lines += ["", f"## {title}", "", *_table("what is shown", "by")]
        lines += [
            _row(name.removeprefix("test_").replace("_", " "), f"[{file.removeprefix('tests/')}](../{file})")
            for file, names in files.items()
            for name in names
        ]
    return "\n".join(lines) + "\n"


def details() -> str:
    """Return the page of what users asked for before the farm was built, point by point."""
    import tomllib

    lines = [
        "# What users asked for",
        "",
        f"Generated from `tests/details.toml`: {AGAIN}.",
        "Each point says whether the farm has it, and which tests show it.",
    ]
    for title, section in tomllib.loads((ROOT / "tests" / "details.toml").read_text()).items():
        lines += ["", f"## {title}", "", *_table("asked for", "the farm", "")]
        for point, state, words, *by in section["points"]:
            tests = [f"[{name}](../tests/{file})" for file, name in (each.split(":") for each in by)]
            lines.append(_row(point, state, " ".join([words, *tests])))
    return "\n".join(lines) + "\n"


# --- limits ----------------------------------------------------------------------------------------------------------

BEHIND = ("manifest", "matrix", "builds", "results", "artifacts", "store")
"""Rooms behind the API, whose limits are those of the whole farm."""


def limits() -> str:
    """Return the page of limits and waits: each constant that is a number, with its own words."""
    lines = [
        "# Limits and waits",
        "",
        f"Generated from the constants in the code: {AGAIN}. [settings.md](settings.md) has what can be set.",
    ]
    for room in BEHIND:
        rows = [_row(*each) for path in sorted((ROOT / "farm" / room).rglob("*.*")) for each in _limits(path)]
        lines += ["", f"## {room.capitalize()}", "", *_table("where", "limit", "what it is"), *rows]
    return "\n".join(lines) + "\n"


def _limits(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the constants of a file: where, value, words. Times are in seconds, but in scripts in milliseconds."""
    where = path.relative_to(ROOT / "farm").with_suffix("").as_posix()
    if path.suffix == ".lua":
        for name, value, words in re.findall(r"^local ([A-Z]+) = (\d+) +-- (.+)$", path.read_text(), re.M):
            yield _code(f"{where}: {name}"), f"{int(value):,}", words
    elif path.suffix == ".py":
        module = importlib.import_module(f"farm.{where.replace('/', '.')}")
        text = path.read_text()
        lines, body = text.splitlines(), ast.parse(text).body
        for constant, below in zip(body, [*body[1:], None], strict=True):
            match constant, below:
                case ast.Assign(targets=[ast.Name(id=name)], end_lineno=int(last)), _ if "  # " in lines[last - 1]:
                    words = lines[last - 1].partition("  # ")[2]
                case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(words))):
                    pass
                case _:
                    continue
            if name[0] != "_" and isinstance(value := getattr(module, name), int | float | timedelta):
                yield _code(f"{where}: {name}"), str(value) if isinstance(value, timedelta) else f"{value:,}", words


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "compilers.md": compilers,
    "details.md": details,
    "failure-kinds.md": failure_kinds,
    "fault-list.md": faults,
    "fields.md": fields,
    "limits.md": limits,
    "metrics.md": metrics,
    "routes.md": routes,
    "settings.md": settings,
    "shown.md": shown,
}
"""The generated pages of `docs/`, and what makes each."""

ELSEWHERE = ("walk.md",)
"""Pages of `docs/` that another command writes, which they name."""


def words() -> dict[str, int]:
    """Return the words that people wrote, by document: README, CONTRIBUTING, CHANGELOG and all of `docs/`."""
    made = {DOCS / name for name in (*PAGES, *ELSEWHERE)}
    made |= {page for page in (DOCS / "gpu" / "amd").glob("*.md") if page.name != "README.md"}  # Reports of runs.
    files = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
    return {file.relative_to(ROOT).as_posix(): len(file.read_text().split()) for file in files if file not in made}


def main() -> None:
    """Write the generated pages, or say how many words there are."""
    if sys.argv[1:] == ["--write"]:
        for name, made in PAGES.items():
            (DOCS / name).write_text(made(), encoding="utf-8")
        return
    found = words()
    folders: dict[str, int] = {}
    for name, count in found.items():
        folder = name.rpartition("/")[0] or "."
        folders[folder] = folders.get(folder, 0) + count
    for folder, count in [*folders.items(), ("all", sum(found.values()))]:
        sys.stdout.write(f"{count:7,} {folder}\n")


if __name__ == "__main__":
    main()
