"""Toolchains side by side: the radar, shadow builds, promoting, rolling back, and bisecting between releases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farm.extension import Extension, Loop

if TYPE_CHECKING:
    from farm.app import Farm

RADAR_SECONDS = 30.0  # Seconds between two looks for toolchains that have appeared.


def _loops(farm: Farm) -> list[Loop]:
    """Return the loop that looks for new toolchains, if the farm has a radar: one of its own, it plans whole builds."""
    from farm.extras.radar.toolchains import Toolchains

    if not farm.settings.radar:
        return []
    step = partial(farm.part(Toolchains).follow, farm.settings.radar)
    return [Loop("radar", step, RADAR_SECONDS, first=RADAR_SECONDS)]


extension = Extension(
    name="radar",
    routes=["farm.extras.radar.toolchain_routes:router"],
    pages=["farm.extras.radar.toolchain_routes:pages"],
    templates=Path(__file__).parent / "templates",
    loops=_loops,
)
