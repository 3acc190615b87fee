"""Packs: a compiled program in the files that serving stacks load, made where it is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.extension import Extension

if TYPE_CHECKING:
    from farm.wire.program import Sidecar


def _packs(_: object, __: str, made: Sidecar) -> list[tuple[str, str]]:
    """Say which packs can be made of a program; the farm keeps none."""
    from farm.client.packs import Layout
    from farm.extras.packs.layouts import fits

    found = [layout for layout in Layout if layout is not Layout.PLAIN and fits(layout, made)]
    if not found:
        return [("packs", "none can be made of it")]
    name = "@".join(filter(None, (made["identifier"], made["build"])))
    return [("packs", f"{', '.join(found)}: `farm fetch {name} --layout {found[0]}` makes one")]


extension: Extension[object] = Extension(name="packs", artifact_facts=_packs)
