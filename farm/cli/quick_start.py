"""What is set for a process before anything is imported: what takes time and is hardly ever needed, and proxies."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any


def compile_less() -> None:
    """Compile neither annotations nor, for each frozen dataclass, what refuses changes. To be called before imports.

    Every field of a TypedDict and every annotation that is a text makes a `ForwardRef`, which compiles the text: 1,500
    times at a start. Few of them are evaluated, and `eval` takes texts too. Python 3.14 no longer compiles them.

    A frozen dataclass gets a `__setattr__` and a `__delattr__` from texts: 140 at a start, half of them for pydantic.
    Python 3.13 compiles all methods of a class at once. All of that is a fifteenth of a start.
    """
    vars(typing).setdefault("compile", lambda text, *_: text)
    if sys.version_info < (3, 13):
        vars(dataclasses)["_frozen_get_del_attr"] = _refusals


def let_idle_threads_sleep() -> None:
    """Let the threads sleep that numpy starts for linear algebra: by default they spin for 2^26 ticks (OpenBLAS).

    While they spin, importing numpy costs half as much again. What the user sets stays.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


def reach_this_machine_directly() -> None:
    """Keep the environment's proxy from the parts of a farm on this machine: it would look for them on its own machine.

    Many set a proxy for all that they run, and no exception. All libraries that ask over HTTP read these variables.
    """
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if excepted.strip() != "*" and any(name.lower().endswith("_proxy") for name in os.environ):
        every = dict.fromkeys([*filter(None, excepted.split(",")), "localhost", "127.0.0.1", "::1"])
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(every)


def _refusals(cls: Any, fields: Iterable[dataclasses.Field[Any]], _: object) -> tuple[Callable[..., None], ...]:
    """Return what `dataclasses` gives a frozen class, as closures."""
    names = frozenset(field.name for field in fields)

    def __setattr__(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__
