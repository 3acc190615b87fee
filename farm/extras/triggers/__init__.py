"""Stored manifests, and triggers that build them: at a time, when an object changes, when a toolchain appears."""

from pathlib import Path

from farm.extension import Extension, late

extension = Extension(
    name="triggers",
    routes=["farm.extras.triggers.manifest_routes:router"],
    pages=["farm.extras.triggers.manifest_routes:pages"],
    templates=Path(__file__).parent / "templates",
    menu=[("automation", "Automation")],
    loops=late("farm.extras.triggers.firing:loops"),
)
