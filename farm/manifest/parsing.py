"""Reading a manifest: from text to entries, with the place of everything that is wrong.

Also of what one entry says about another: names, targets and options that do not go together.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import copy, deepcopy
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from farm.errors import ManifestError, Problem, UsageError, shown, suggestion
from farm.manifest.entries import Budgets, Gates, Manifest, ModelEntry
from farm.manifest.values import NAME, SPELLINGS, Source
from farm.manifest.yaml import Unchecked, YamlDocument, in_yaml, read_document
from farm.targets.compilers import canonical_precision, compilers
from farm.targets.pools import understand_target

if TYPE_CHECKING:
    from farm.wire.asked import ChosenGates


def load_manifest(path: str | Path, folder: Path | None = None) -> Manifest:
    """Read a manifest from a file; patterns start at `folder`, by default the file's. Raises ManifestError."""
    return _required(*read_manifest(path, folder))


def manifest_of(data: Mapping[str, object], folder: Path) -> Manifest:
    """Read a manifest from its content; patterns of file names start at `folder`.

    Its text is JSON, which YAML includes. Raises ManifestError, UsageError for a value that no manifest has.
    """
    try:
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=os.fspath)
    except (TypeError, ValueError) as error:
        raise UsageError(f"this is not the content of a manifest: {error}") from None
    document = read_document(text, "manifest")
    return parse_manifest(freeze_globs(document, folder))


def read_manifest(path: str | Path, folder: Path | None = None) -> tuple[Manifest | None, list[Problem]]:
    """Read a manifest from a file (`-`: from standard input), and return all that is wrong in it.

    Where nothing but unknown fields is wrong there is a manifest, without them: its files can be looked at.

    Raises ManifestError if there is no such file, the text is not YAML, or a pattern of files cannot be used.
    """
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else Path(path).open("rb") as stream:
            # Never more of a huge file than what shows that it is too large.
            content = stream.read(64 << 20)
    except OSError as error:
        missing = Problem(error.strerror or str(error), str(path), hint="`farm init MODEL` writes a manifest")
        raise ManifestError([missing]) from None
    document = read_document(content, str(path))
    text = freeze_globs(document, folder or Path(path).parent)
    return _build(document if text == document.text else read_document(text, str(path)))


def parse_manifest(text: str, file: str = "manifest") -> Manifest:
    """Read a manifest from its text; `file` names it in messages. Raises ManifestError."""
    return _required(*_build(read_document(text, file)))


def unwritten(manifest: Manifest, file: str) -> Manifest:
    """Return a manifest that a program made of entries, as if it had been read; `file` names it in messages."""
    return _with_globs(manifest, read_document("{}", file))


def _required(manifest: Manifest | None, problems: list[Problem]) -> Manifest:
    if manifest is None or problems:
        raise ManifestError(problems)
    return manifest


def _build(document: YamlDocument) -> tuple[Manifest | None, list[Problem]]:
    manifest, wrong = _validated(document.data)
    unknown = [details["loc"] for details in wrong if details["type"] == "extra_forbidden"]
    if wrong and len(unknown) == len(wrong):
        # Without these fields more may look wrong, only because they are missing: that is not reported.
        manifest, _ = _validated(_without(document.data, unknown))
    problems = [_explain(details, document) for details in wrong]
    if disagreements := list(cross_checks(document)):
        manifest, problems = None, problems + disagreements
    if manifest is not None:
        manifest = _with_globs(manifest, document)
    return manifest, sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.column))


def _validated(data: Any) -> tuple[Manifest | None, list[ErrorDetails]]:
    try:
        return Manifest.model_validate(data), []
    except ValidationError as error:
        # A list is also called too short when its entries are wrong.
        return None, [details for details in error.errors() if details["type"] != "too_short" or not details["input"]]


def _without(data: Any, paths: Iterable[tuple[str | int, ...]]) -> Any:
    """Return a copy of a manifest's data without the fields at these paths."""
    left = deepcopy(data)
    for *parents, name in paths:
        holder = left
        with suppress(LookupError, TypeError):  # In the data, a short form that was read as a mapping is not a mapping.
            for part in parents:
                holder = holder[part]
            del holder[name]
    return left


def _with_globs(manifest: Manifest, document: YamlDocument) -> Manifest:
    """Return a manifest with an entry for each file of each glob. Raises ManifestError for names that are twice."""
    models: list[tuple[int, ModelEntry]] = []
    problems: list[Problem] = []
    named = ((index, entry.name) for index, entry in enumerate(manifest.models) if entry.name)
    seen = {name: f"the model on line {document.place(('models', index))[0]}" for index, name in named}
    for index, entry in enumerate(manifest.models):
        place = ("models", index, "source", "glob")
        for pattern, files in entry.source.glob.items():
            if not files:
                hint = "submit by `farm submit` or the client, which write the files into the manifest"
                problems.append(document.problem(f"which files `{pattern}` matches is not said", place, hint=hint))
            for file in files:
                name = valid_name(Path(file).stem)
                if not name or name in seen:
                    why = f"would be model `{name}`, as {seen[name]}" if name else "gives no name"
                    hint = "rename the file, or give it its own entry"
                    problems.append(document.problem(f"`{file}` {why}", place, hint=hint))
                else:
                    seen[name] = f"`{file}`"
                    models.append((index, entry.model_copy(update={"name": name, "source": Source(path=file)})))
        if not entry.source.glob:
            models.append((index, entry))
    if problems:
        raise ManifestError(problems)
    expanded = manifest.model_copy(update={"models": tuple(entry for _, entry in models)})
    expanded._written = copy(document)
    expanded._written.models = [index for index, _ in models]
    return expanded


WHOLE = "`farm init MODEL` writes a whole manifest"
_FROM_FILES = ("source", "calibration", "samples")  # Fields that say where a file is.
_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
}
"""What a value should have been, by pydantic's name of the error."""


def _explain(details: ErrorDetails, document: YamlDocument) -> Problem:
    """Turn one of pydantic's errors into a sentence with its place."""
    path = [part for part in details["loc"] if part != "[key]"]
    where = _dotted(path)
    context, given = details.get("ctx", {}), details["input"]
    on_key, hint = "[key]" in details["loc"], ""
    match details["type"]:
        case "extra_forbidden":
            name, on_key = str(path[-1]), True
            message, hint = f"unknown field `{where}`", suggestion(name, _fields_at(path[:-1]))
        case "missing":
            message = f"`{where}` is missing"
            hint = {"models": WHOLE, "version": "write `version: 1`, the version of the format"}.get(where, "")
        case "string_pattern_mismatch" if context["pattern"] == NAME:
            message = f"{where}: {shown(given)} is not a name: names are made of a-z, 0-9, '.', '_' and '-'"
            name = valid_name(str(given))
            hint = f"`{name}` would do" if name else ""
        case "string_pattern_mismatch":
            message = f"{where}: {shown(given)} does not look right (it has to match {context['pattern']})"
        case "literal_error":
            allowed = re.findall(r"'([^']*)'|(\d+)", context["expected"])
            message = f"{where}: {shown(given)} is not possible here"
            hint = suggestion(str(given), (text or number for text, number in allowed))
        case "too_short":
            message = f"{where}: must have at least one entry"
        case kind if kind in _WANTED:
            message = f"{where or 'a manifest'}: must be {_WANTED[kind]}, not {shown(given)}"
            if kind == "model_type" and isinstance(given, str) and path and path[-1] in _FROM_FILES:
                hint = f"write `{path[-1]}: {{path: {given}}}`"
            elif not path or where == "models":
                hint = WHOLE
        case "value_error":
            message = f"{where}: {context['error']}" if where else str(context["error"])
            hint = getattr(context["error"], "hint", "")
            if "needs `sha256`" in message:
                hint = "`sha256sum FILE` prints it"
        case _:
            message = f"{where}: {details['msg']}"
    return document.problem(message, path, hint=hint, key=on_key)


def _dotted(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def valid_name(text: str) -> str:
    """Return the name of a manifest or model that is most like a text; empty if nothing of it may be in a name."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:100]


def _fields_at(path: Iterable[str | int]) -> list[str]:
    kind: Any = Manifest
    fields: dict[str, Any] = {}
    for part in (*path, ""):
        while typing.get_origin(kind) is Annotated or type(None) in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
        known = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
        fields = {field.alias or name: field.annotation for name, field in known.items()}
        inner = typing.get_args(kind)
        kind = fields.get(str(part)) or (inner[-1 if typing.get_origin(kind) is dict else 0] if inner else None)
    return list(fields)


def cross_checks(document: YamlDocument) -> Iterator[Problem]:
    """Yield contradictions between entries. Works on the raw data, so it also runs if there are other errors."""
    data = _mapping(document.data)
    models = list(enumerate(_mapping(model) for model in _list(data.get("models"))))
    seen: dict[Any, int] = {}
    for index, model in models:
        path: tuple[str | int, ...] = ("models", index)
        name = model.get("name")
        if isinstance(name, str) and seen.setdefault(name, index) != index:
            first = document.place(("models", seen[name], "name"))[0]
            hint = "the same model with other options needs another name"
            message = f"model `{name}` occurs twice (first on line {first})"
            yield document.problem(message, (*path, "name"), hint=hint)
        if "targets" not in model and "targets" not in data:
            hint = "write `targets: [onnxruntime/cpu]`"
            yield document.problem(f"model `{name}` has no targets, and the manifest has no default", path, hint=hint)
        said = [name for name in ("batches", "sweep") if name in model]
        said += ["dims.batch"] if "batch" in _mapping(model.get("dims")) else []
        if len(said) > 1:
            message = f"`{said[0]}` and `{said[1]}` mean the same"
            yield document.problem(message, (*path, said[0]), key=True)
        yield from _size_given_twice(document, model, path)
    holders: list[tuple[tuple[str | int, ...], Unchecked]] = [((), data)]
    holders += [(("models", index), model) for index, model in models]
    for path, holder in holders:
        yield from _duplicates(document, holder, path)
        yield from _batch_of_zero(document, holder, path)
    for field in ("include", "overrides"):
        holders += [((field, index), _mapping(entry)) for index, entry in enumerate(_list(data.get(field)))]
    for path, holder in holders:
        yield from _settings(document, holder, path)


def _settings(document: YamlDocument, holder: Unchecked, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield the problems of the data, options and variables that a manifest or one of its entries names."""
    for use in ("calibration", "samples"):
        yield from _dataset(document, holder.get(use), (*path, use))
    for name, value in _mapping(holder.get("options")).items():
        yield from _option(document, name, value, (*path, "options", name))
    for name, value in _mapping(holder.get("env")).items():
        yield from _variable(document, name, value, (*path, "env", name))


def _mapping(value: Any) -> Unchecked:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dataset(document: YamlDocument, use: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    name = use if isinstance(use, str) else _mapping(use).get("dataset")
    known = _mapping(_mapping(document.data).get("datasets"))
    if isinstance(name, str) and name not in known:
        hint = suggestion(name, known) or "describe it under `datasets:`, or write {path: FILE} here"
        yield document.problem(f"no dataset `{name}`", path, hint=hint)


def _duplicates(document: YamlDocument, holder: Unchecked, path: tuple[str | int, ...]) -> Iterator[Problem]:
    for field, canonical in (("targets", _slug), ("precisions", _canonical), ("toolchains", str)):
        seen: dict[str, int] = {}
        for position, text in enumerate(_list(holder.get(field))):
            if isinstance(text, str) and seen.setdefault(canonical(text), position) != position:
                yield document.problem(f"`{text}` occurs twice", (*path, field, position))


def _canonical(precision: str) -> str:
    return canonical_precision(precision) if precision in SPELLINGS else precision


def _slug(target: str) -> str:
    try:
        return understand_target(target).slug
    except ValueError:
        return target


def _batch_of_zero(document: YamlDocument, holder: Unchecked, path: tuple[str | int, ...]) -> Iterator[Problem]:
    points = [((*path, "dims"), _mapping(holder.get("dims")))]
    points += [((*path, "shapes", name), _mapping(point)) for name, point in _mapping(holder.get("shapes")).items()]
    for place, point in points:
        sizes = point.get("batch")
        sizes = sizes if isinstance(sizes, list) else [sizes]
        if 0 in (size.get("min") if isinstance(size, dict) else size for size in sizes):
            yield document.problem("a batch has at least one sample", (*place, "batch"))


def _size_given_twice(document: YamlDocument, model: Unchecked, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Complain if a named shape and the product of `dims` both give a dimension a size."""
    for name, point in _mapping(model.get("shapes")).items():
        for dimension in _mapping(point):
            fields = [name for name in ("batches", "sweep") if dimension == "batch" and name in model]
            field = next(iter(fields), "dims")
            if fields or dimension in _mapping(model.get("dims")):
                message = f"shape `{name}` gives `{dimension}` a size, and so does `{field}`"
                hint = f"set it in one place: every shape is built with each size of `{field}`"
                yield document.problem(message, (*path, "shapes", name, dimension), hint=hint, key=True)


def _option(document: YamlDocument, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    known = compilers().values()
    tables = [table for each in known for table in (each.options, *each.quantization.values())]
    options = [table[name] for table in tables if name in table]
    if refused := next((each.refused_options[name] for each in known if name in each.refused_options), ""):
        yield document.problem(f"`{name}` is not an option here", path, hint=refused, key=True)
    elif not options:
        hint = suggestion(name, {each for table in tables for each in table})
        yield document.problem(f"no compiler has an option `{name}`", path, hint=hint, key=True)
    elif all(problems := [option.problem(value) for option in options]):
        yield document.problem(f"option `{name}` {problems[0]}", path)


def _variable(document: YamlDocument, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    compiler = next((compiler for compiler in compilers().values() if compiler.variable(name)), None)
    if compiler is None:
        hint = suggestion(name, {known for compiler in compilers().values() for known in compiler.env})
        yield document.problem(f"`{name}` is not an environment variable that may be set", path, hint=hint, key=True)
    elif compiler.is_file(name) and not isinstance(value, dict):
        yield document.problem(f"`{name}` names a file", path, hint="write {path: FILE}: the client uploads it")
    elif not compiler.is_file(name) and (problem := compiler.env_problem(name, value)):
        yield document.problem(f"`{name}` {problem}", path, key=problem.startswith("is refused"))


# --- patterns of files -------------------------------------------------------------------------------------------

MAX_FILES = 5000  # Files that one pattern may match.


def freeze_globs(document: YamlDocument, folder: Path) -> str:
    """Return a manifest's text with the files that its patterns match; relative patterns start at `folder`.

    `{"models/*.onnx": ["models/a.onnx", …]}` takes the place of the pattern's text, on the same line. So the farm
    stores the name of every file, and the lines in later messages are those of the user's own file.

    Raises ManifestError for every pattern that matches nothing, or very much.
    """
    problems = []
    changes: dict[tuple[int, int], str] = {}
    for path, pattern in _patterns(document):
        if "**" in pattern and (pattern.startswith("/") or ".." in pattern.split("/")):
            message = f"`{pattern}` would search outside the manifest's folder"
            problems.append(document.problem(message, path, hint="`**` searches below the manifest's folder only"))
            continue
        found = glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207 (keeps names relative)
        # In a list of fixed order: the manifest is the same wherever its files are.
        files = sorted(islice((name for name in found if (folder / name).is_file()), MAX_FILES + 1))
        if not files:
            there = [entry.name for entry in folder.iterdir()]
            hint = suggestion(pattern.partition("/")[0], there) if "/" in pattern else "patterns start at the manifest"
            problems.append(document.problem(f"no file matches `{pattern}`", path, hint=hint))
        elif len(files) > MAX_FILES:
            message = f"`{pattern}` matches more than {MAX_FILES} files"
            problems.append(document.problem(message, path, hint="write a narrower pattern"))
        else:
            changes[document.span(path)] = in_yaml({pattern: files})
    if problems:
        raise ManifestError(problems)
    text = document.text
    for (start, end), files_text in sorted(changes.items(), reverse=True):
        anchor = re.match(r"&\S+\s+", text[start:end])
        # As many lines as before, also if the pattern was written over several.
        lines = "\n" * text.count("\n", start, end)
        text = text[:start] + (anchor[0] if anchor else "") + files_text + lines + text[end:]
    return text


def _patterns(document: YamlDocument) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the place and the text of every pattern; the parser reports all other problems."""
    for index, entry in enumerate(_list(_mapping(document.data).get("models"))):
        pattern = _mapping(_mapping(entry).get("source")).get("glob")
        if isinstance(pattern, str) and pattern:
            yield ("models", index, "source", "glob"), pattern


def read_gates(
    limits: Iterable[str], budgets: Iterable[str], baseline: str = "", *, first: bool = False
) -> ChosenGates | None:
    """Return the gates that texts of the form NAME=VALUE ask for, `off` as None; None if there are none.

    `first`: the baseline need not exist yet.

    Raises UsageError for a name that no gate has, and for an invalid value.
    """
    chosen: ChosenGates = {"baseline": baseline, "limits": {}, "budgets": {}}
    if first:
        chosen["first"] = True
    for text in limits:
        chosen["limits"] |= _read(Gates, text, "--gate", "latency=5%")
    for text in budgets:
        chosen["budgets"] |= _read(Budgets, text, "--budget", "latency=10ms")
    if baseline:
        _checked(Gates, {"baseline": baseline}, f"--baseline {baseline}")
    return chosen if any(chosen.values()) else None


def _read(kind: type[Gates | Budgets], text: str, option: str, example: str) -> dict[str, float | None]:
    name, equals, value = text.partition("=")
    field = name.replace("-", "_")
    if not equals or field not in Budgets.model_fields:
        known = [each.replace("_", "-") for each in Budgets.model_fields]
        hint = suggestion(name, known) if equals else f"such as {option} {example}"
        raise UsageError(f"{option} {text}: not NAME=VALUE of a gate", hint=hint)
    if value == "off":
        return {field: None}
    is_rate = field == "throughput" and kind is Budgets and value.replace(".", "", 1).isdecimal()
    number = float(value) if is_rate else value
    return {field: float(getattr(_checked(kind, {name.replace("_", "-"): number}, f"{option} {text}"), field))}


def _checked(kind: type[Gates | Budgets], values: dict[str, str | float], where: str) -> Gates | Budgets:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {problem}") from None
