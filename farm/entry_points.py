"""What other packages add to a farm, by entry points. Nothing is imported before it is asked for.

`docs/extend.md` says what each group holds, and who asks for it.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXTENSIONS, COMMANDS, APIS, TRUST = "farm.extensions", "farm.commands", "farm.apis", "farm.trust"
REPORTS, PROBLEMS, PIPELINES = "farm.reports", "farm.problems", "farm.pipelines"
COMPILERS, GPUS = "farm.compilers", "farm.gpus"
LAYOUTS, VERIFIERS, CHECKS = "farm.layouts", "farm.verifiers", "farm.checks"
REPRODUCERS = "farm.reproducers"
SOURCES, CONVERTERS, CHILDREN = "farm.sources", "farm.converters", "farm.children"


def load(group: str) -> list[tuple[EntryPoint, Any]]:
    """Import all that installed packages have in a group, by name. Raises UsageError for what cannot be imported."""
    found = [(entry, _loaded(entry)) for entry in _entries(group)]
    return [(entry, each) for entry, each in found if each is not None]


def modules(group: str) -> dict[str, str]:
    """Return the names of the modules that installed packages have in a group. Imports none of them."""
    return {entry.name: entry.module for entry in _entries(group) if _source(entry)}


def packages() -> list[tuple[str, str]]:
    """Return the names of all installed extensions, each with its package and release. Imports none of them."""
    found = [(entry.name, entry.dist) for entry in _entries(EXTENSIONS) if _source(entry)]
    return [(name, f"{package.name} {package.version}" if package else "") for name, package in found]


def find(group: str, name: str) -> Any:
    """Import what a package has in a group by this name; None if there is none. Raises UsageError if it is broken."""
    return next((found for entry in _entries(group) if entry.name == name and (found := _loaded(entry))), None)


def required(group: str, name: str) -> Any:
    """Import what a package has in a group by this name. Raises UsageError if none has it."""
    found = find(group, name)
    if found is None:
        hint = "migraphx-farm has it: install it again, whole"
        raise UsageError(f"`{name}` needs an extension that is not installed", hint=hint)
    return found


def about(group: str, name: str) -> str:
    """Return the docstring of what has this name, or else of its module. It is read, not imported."""
    for entry in _entries(group):
        if entry.name == name and (path := _source(entry)):
            import ast

            module = ast.parse(path.read_bytes())
            own = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == entry.attr]
            return ast.get_docstring(own[0] if own else module) or ""
    return ""


def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(_installed().select(group=group), key=lambda entry: entry.name))


@cache
def _installed() -> Any:  # Python 3.11 and 3.12 return different types; both can select.
    from importlib.metadata import entry_points  # It takes 20 ms, which most commands need not pay.

    return entry_points()


def _loaded(entry: EntryPoint) -> Any:
    """Import what an entry point names; None if its module is missing, as after `farm/extras` was deleted."""
    try:
        return entry.load()
    except Exception as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{entry.module}.".startswith(f"{missing}."):
            return None
        package = entry.dist.name if entry.dist else entry.module
        if missing and package == "migraphx-farm":
            raise  # The command line says which extra has it.
        raise UsageError(
            f"the extension {entry.name} of {package} cannot be imported: {type(error).__name__}: {error}",
            hint=f"update the package, or remove it: pip uninstall {package}",
        ) from error


def _source(entry: EntryPoint) -> Path | None:
    """Return the file of an entry point's module, without an import of the package around it; None if it is missing."""
    top, *inner = entry.module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not inner and spec.origin:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *inner)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None
