"""Entry of the child process; small, because it forks before anything heavy is imported.

Started by path, by whatever interpreter the compiler needs (Python 3.10 or newer). Its folder is taken off
the import path and becomes the package `farm.runner`, so that no module of it can shadow one that a compiler
imports. Of the farm there is nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

PACKAGE = "farm.runner"


def start(work: Callable[[Any, Any], Any] | None = None) -> int:
    """Run the request named on the command line below a launcher; return the launcher's exit code.

    With a descriptor, and what a template is for, serve as one. `work` takes the request and a `launcher.Messages`, and
    returns the result; without it, `actions.py` does what the request asks for.
    """
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is imported later)
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != folder]  # noqa: PTH100
    add_package(PACKAGE, folder)
    first, second, *rest = sys.argv[1:]
    if not rest:
        template = importlib.import_module(f"{PACKAGE}.template")
        return int(template.serve(int(first), json.loads(second), work))
    launcher = importlib.import_module(f"{PACKAGE}.launcher")
    return int(launcher.run(first, int(second), int(rest[0]), work))


def add_package(name: str, folder: str) -> None:
    """Make a folder of modules importable as a package of this name. The packages around it are made, and are empty."""
    around = name.rpartition(".")[0]
    while around and around not in sys.modules:
        sys.modules[around] = empty = types.ModuleType(around)
        empty.__path__ = []
        around = around.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"no modules in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.exit(start())
