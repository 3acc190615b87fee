"""What one entry of a manifest says about another: names, targets and options that do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from farm.errors import Problem, suggestion
from farm.manifest.cron import schedule_problem
from farm.manifest.values import SPELLINGS
from farm.manifest.yaml import Unchecked, YamlDocument
from farm.targets.compilers import COMPILERS, canonical_precision
from farm.targets.pools import understand_target


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
    for index, trigger in enumerate(_list(data.get("triggers"))):
        yield from _trigger(document, _mapping(trigger), ("triggers", index))
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
    """Yield the problems of the targets, data, options and variables that a manifest or one of its entries names."""
    for field in ("targets", "target"):
        texts = _list(holder.get(field)) if field == "targets" else [holder.get(field)]
        for position, text in enumerate(texts):
            place = (*path, field, position) if field == "targets" else (*path, field)
            if isinstance(text, str):
                yield from _target(document, text, place)
    for use in ("calibration", "samples"):
        yield from _dataset(document, holder.get(use), (*path, use))
    for name, value in _mapping(holder.get("options")).items():
        yield from _option(document, name, value, (*path, "options", name))
    for name, value in _mapping(holder.get("env")).items():
        yield from _variable(document, name, value, (*path, "env", name))


def _trigger(document: YamlDocument, trigger: Unchecked, path: tuple[str | int, ...]) -> Iterator[Problem]:
    schedule, timezone = trigger.get("schedule"), trigger.get("timezone", "UTC")
    if isinstance(schedule, str) and isinstance(timezone, str) and (found := schedule_problem(schedule, timezone)):
        field, message, hint = found
        yield document.problem(message, (*path, field), hint=hint)
    if isinstance(trigger.get("toolchain"), str):
        yield from _target(document, trigger["toolchain"], (*path, "toolchain"))


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


def _target(document: YamlDocument, text: str, path: tuple[str | int, ...]) -> Iterator[Problem]:
    try:
        understand_target(text)
    except ValueError as error:
        message, _, hint = str(error).partition(": ")
        yield document.problem(message, path, hint=hint)


def _option(document: YamlDocument, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    options = option_table()
    refused = next(
        (compiler.refused_options[name] for compiler in COMPILERS.values() if name in compiler.refused_options), ""
    )
    if refused:
        yield document.problem(f"`{name}` is not an option here", path, hint=refused, key=True)
    elif name not in options:
        yield document.problem(f"no compiler has an option `{name}`", path, hint=suggestion(name, options), key=True)
    elif all(option.problem(value) for option in options[name]):
        yield document.problem(f"option `{name}` {options[name][0].problem(value)}", path)


def _variable(document: YamlDocument, name: str, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    compiler = next((compiler for compiler in COMPILERS.values() if compiler.has_env(name)), None)
    if compiler is None:
        known = {known for compiler in COMPILERS.values() for known in compiler.env}
        yield document.problem(
            f"`{name}` is not an environment variable that may be set", path, hint=suggestion(name, known), key=True
        )
    elif compiler.is_file(name) and not isinstance(value, dict):
        yield document.problem(f"`{name}` names a file", path, hint="write {path: FILE}: the client uploads it")
    elif not compiler.is_file(name) and (problem := compiler.env_problem(name, value)):
        yield document.problem(f"`{name}` {problem}", path, key=problem.startswith("is refused"))


def option_table() -> dict[str, list[Any]]:
    """Return every option of every compiler, and of every quantizer, by name."""
    table: dict[str, list[Any]] = {}
    for compiler in COMPILERS.values():
        for options in (compiler.options, *compiler.quantization.values()):
            for name, option in options.items():
                table.setdefault(name, []).append(option)
    return table
