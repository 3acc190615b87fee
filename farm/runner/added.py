"""Modules that extensions add to a child: compilers, and devices of ONNX Runtime's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .child import add_package

_NAMES: dict[str, str] = {}
"""The names of modules by target (`onnxruntime/cuda`, a pattern)."""


def add(modules: Mapping[str, Sequence[str]]) -> None:
    """Make modules known: `{target: [name, folder of its package]}`. None of them is imported yet."""
    for target, (name, folder) in modules.items():
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            add_package(package, folder)
        _NAMES[target] = name


def find(compiler: str, device: str) -> Any:
    """Import the module that an extension adds for a compiler's device; None if there is none."""
    asked = f"{compiler}/{device}"
    name = next((name for target, name in _NAMES.items() if fnmatchcase(asked, target)), None)
    return importlib.import_module(name) if name else None
