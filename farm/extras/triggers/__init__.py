"""Stored manifests, and triggers that build them: at a time, when an object changes, when a toolchain appears."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farm.extension import Extension, Loop

if TYPE_CHECKING:
    from farm.app import Farm

FIRE_SECONDS = 10.0  # Seconds between two looks at the triggers: each reads the heads of all stored manifests.


def _loops(farm: Farm) -> list[Loop]:
    """Return the loop that fires triggers: one of its own, because to accept a large build takes long."""
    from farm.extras.triggers.firing import TriggerRounds

    return [Loop("triggers", TriggerRounds(farm).go, FIRE_SECONDS)]


extension = Extension(
    name="triggers",
    routes=["farm.extras.triggers.manifest_routes:router"],
    pages=["farm.extras.triggers.manifest_routes:pages"],
    templates=Path(__file__).parent / "templates",
    menu=[("automation", "Automation")],
    loops=_loops,
)
