"""Packs: a compiled program in the files that serving stacks load, made where it is fetched."""

from farm.extension import Extension

extension: Extension[object] = Extension(name="packs")
