"""Completion: what a shell offers for builds, refs, artifacts, targets and pools; the farm has a moment to say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from farm.client.client import FarmClient

PATIENCE = 0.25
"""Seconds that the farm has to answer: somebody holds a key."""

Names = list[str]


def builds(incomplete: str) -> Names:
    """Return ids and names of the newest builds, `@latest`, and labels."""

    def ask(client: FarmClient) -> Iterable[str]:
        for build in client.builds(50):
            yield from (build["id"], build["name"], *(f"{name}={value}" for name, value in build["labels"].items()))

    return _fitting(["@latest", *_asked(ask)], incomplete)


def cells(ctx: Any, incomplete: str) -> Names:
    """Return the cells of the build that is named before."""
    build = str(ctx.params.get("what") or "@latest")
    found = _asked(lambda client: client.cells(client.find_build(build)))
    return _fitting([cell["identifier"] for cell in found], incomplete)


def refs(incomplete: str) -> Names:
    """Return the refs."""
    return _fitting(_asked(lambda client: client.refs.all()), incomplete)


def artifacts(incomplete: str) -> Names:
    """Return models, whole names of their artifacts once a model is named, and refs after `@`."""
    name, at, ref = incomplete.partition("@")
    if at:
        return [f"{name}@{each}" for each in refs(ref)]
    found = _asked(lambda client: client.ls())
    return _fitting([cell["identifier" if "/" in incomplete else "model"] for cell in found], incomplete)


def stored(incomplete: str) -> Names:
    """Return whole names of artifacts once a model is named; else the shell offers files, which count as well."""
    return artifacts(incomplete) if "/" in incomplete else []


def listings(incomplete: str) -> Names:
    """Return what can be listed."""
    from farm.cli.artifact_commands import Listing

    return _fitting(Listing, incomplete)


def _of_cells(field: Literal["target", "precision", "shape"], *more: str) -> Callable[[Any, str], Names]:
    """Return what offers the values of a field that the artifacts of the model have which is named before."""

    def offer(ctx: Any, incomplete: str) -> Names:
        model, _, ref = str(ctx.params.get("name") or "").partition("@")
        cells = [cell for cell in _asked(lambda client: client.ls(ref or "latest")) if model in ("", cell["model"])]
        return _fitting([*more, *(cell[field] for cell in cells)], incomplete)

    return offer


targets, precisions, shapes = _of_cells("target", "auto"), _of_cells("precision"), _of_cells("shape")


def pools(incomplete: str) -> Names:
    """Return pools and builds, which can be paused."""
    names = _asked(lambda client: (pool["name"] for pool in client.pools.all()))
    return _fitting(names, incomplete) + builds(incomplete)


def workers(incomplete: str) -> Names:
    """Return the live workers."""
    return _fitting(_asked(lambda client: (worker["id"] for worker in client.workers.all())), incomplete)


def _asked(ask: Callable[[FarmClient], Iterable[Any]]) -> list[Any]:
    """Return what a farm answers; nothing if none does at once, whatever the reason."""
    from farm.client import transport
    from farm.client.client import FarmClient
    from farm.errors import FarmError
    from farm.settings import load_settings

    transport.RETRY_DELAYS = ()  # This process does nothing else.
    try:
        with FarmClient.from_settings(load_settings(), timeout=PATIENCE) as client:
            return list(ask(client))
    except FarmError:
        return []


def _fitting(names: Iterable[str], incomplete: str) -> Names:
    """Return what begins so, without names that a shell would take for more: they become a part of its command line."""
    from farm.units import by_number

    return sorted({name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name)}, key=by_number)


_PLAIN = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@._/:+=,-]*")
