"""Paths: names of builds and other things as parts of a URL; what cannot be a name is not there."""

from __future__ import annotations

import re

from farm.errors import NotFound, UsageError

BUILD = re.compile(r"@latest|(b-)?[0-9a-f]{1,16}")
"""How a build may be named: its id, the start of it, or the latest."""


def build_named(build_id: str) -> str:
    """Return a build's id as part of a path. Raises UsageError for anything else."""
    if not BUILD.fullmatch(build_id):
        raise UsageError(
            f"{build_id!r} is not a build id", hint="b- and hex digits, a unique start of them, or @latest"
        )
    return build_id if build_id.startswith(("b-", "@")) else f"b-{build_id}"


def split_ref(name: str) -> tuple[str, str]:
    """Return the two parts of NAME[@REF]. Raises UsageError if nothing follows the @: a variable may be unset."""
    artifact, at, ref = name.partition("@")
    if at and not ref:
        raise UsageError(f"{name}: no ref after the @", hint="name a tag or a build, or leave out the @")
    return artifact, ref


def named(what: str, name: str) -> str:
    """Return a name as part of a path. Raises NotFound for what cannot be one; `what` says of what it is the name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NotFound(f"no {what} is named {name!r}", hint="names are made of a-z, 0-9, '.', '_' and '-'")
    return name


def database_named(database: str) -> str:
    """Return a tuning database's name as part of a path. Raises NotFound for anything else."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:+-]*(/[A-Za-z0-9][\w.:+-]*){2}", database, re.ASCII):
        raise NotFound(f"no tuning database is named {database!r}", hint="the name is POOL/DEVICE/MODE")
    return database
