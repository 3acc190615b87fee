"""Packs: a compiled program in the files that serving stacks load, made where it is fetched."""
