"""Published documents, command lines and errors, as the code has them."""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from farm import errors
from farm.api.gate import Unauthenticated
from farm.api.problems import problem
from farm.artifacts.sidecar import schema as artifact_schema
from farm.client.fetching import family_schema
from farm.errors import ExitCode, FarmError, InputsMissing, ManifestError, Problem
from farm.manifest.entries import manifest_schema
from farm.serving.server import openapi
from tests.support.command_line import whole_command_line

ROOT = Path(__file__).parent.parent.parent

DOCUMENTS = {
    "configs/manifest.schema.json": manifest_schema,
    "configs/manifest.draft7.schema.json": lambda: manifest_schema(draft7=True),
    "configs/artifact.schema.json": artifact_schema,
    "configs/family.schema.json": family_schema,
    "docs/openapi.json": openapi,
}
"""Documents that are checked in, with what writes each."""

FRAMEWORKS_OWN = {"HTTPValidationError", "ValidationError"}
"""Schemas that FastAPI adds: its releases change them."""

Document = dict[str, Any]


def digests() -> Document:
    """SHA-256 of the canonical JSON of every document that is checked in; without the version of the farm."""
    found = {}
    for name in DOCUMENTS:
        document = json.loads((ROOT / name).read_text())
        document.get("info", {}).pop("version", None)
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def without_words(document: Any) -> Any:
    """Leave out of a schema what only people read, and what libraries add: both change with their releases."""
    match document:
        case dict():
            words = {name for name in ("title", "description", "summary") if isinstance(document.get(name), str)}
            names = document.keys() - words - FRAMEWORKS_OWN - ({"version"} if "title" in words else set())
            return {name: without_words(document[name]) for name in sorted(names)}
        case list():
            return [without_words(item) for item in document]
        case _:
            return document


# --- command lines ----------------------------------------------------------------------------------------------------


def command_lines() -> Document:
    """Every command with its options and arguments."""
    return dict(_commands("farm", whole_command_line()))


def _commands(name: str, command: Any) -> Any:
    yield (
        name,
        {
            "hidden": command.hidden,
            "parameters": {
                (each.opts[0] if _is_option(each) else each.name): _parameter(each) for each in command.params
            },
        },
    )
    for below, child in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {below}", child)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def _parameter(parameter: Any) -> Document:
    kind = parameter.type_descriptor.annotation if getattr(parameter, "type_descriptor", None) else str
    default = parameter.default
    return {
        "names": [*parameter.opts, *parameter.secondary_opts],
        "kind": "option" if _is_option(parameter) else "argument",
        "type": _type(kind),
        "default": default if isinstance(default, bool | int | float | str | None) else str(default),
        "required": parameter.required,
        "multiple": getattr(parameter, "multiple", False),
        "values": parameter.nargs,
        "flag": getattr(parameter, "is_flag", False),
        "hidden": getattr(parameter, "hidden", False),
        "metavar": parameter.metavar,
        "variable": parameter.envvar,
    }


def _type(kind: Any) -> Any:
    """The name of a type without its module, or what may be chosen."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [each.value for each in kind]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return f"list[{_type(get_args(kind)[0])}]" if get_origin(kind) is list else kind.__name__


# --- errors -----------------------------------------------------------------------------------------------------------


def exit_codes() -> Document:
    """The table of exit codes, and what every class of errors becomes: an exit code, a status, a document."""
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, FarmError)]
    return {
        "codes": {str(int(code)): {"name": code.name, "means": code.meaning} for code in ExitCode},
        "errors": {each.__name__: _error(each) for each in [*classes, Unauthenticated]},
    }


def _error(kind: type[FarmError]) -> Document:
    """What one class of errors becomes. `under` are the classes as which others may catch it."""
    if issubclass(kind, ManifestError):
        error: FarmError = kind([Problem("what happened", "farm.yaml", 3, 5, "what to do", "- here")])
    elif issubclass(kind, InputsMissing):
        error = kind("what happened", ["ab" * 32], hint="what to do")
    else:
        error = kind("what happened", hint="what to do")
    under = [each.__name__ for each in kind.__mro__[1:] if issubclass(each, FarmError)]
    return {"exit": int(error.exit_code), "status": error.http_status, "under": under, "document": problem(error)}
