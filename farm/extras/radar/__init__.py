"""Toolchains side by side: the radar, shadow builds, promoting, rolling back, and bisecting between releases."""

from pathlib import Path

from farm.extension import Extension, late

extension = Extension(
    name="radar",
    routes=["farm.extras.radar.toolchain_routes:router"],
    pages=["farm.extras.radar.toolchain_routes:pages"],
    templates=Path(__file__).parent / "templates",
    loops=late("farm.extras.radar.toolchains:loops"),
)
