"""Packs, as a client knows them: which layouts there are, and what was written. An extension writes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from typing_extensions import TypedDict

from farm.spec import FileReference

PACK = "pack.json"
SIDECAR = "artifact.json"  # So all names of sidecars end; in a pack it is the whole name.


class Layout(StrEnum):
    """The files that `farm fetch` writes."""

    PLAIN = "plain"
    """The program and its sidecar."""
    ONNXRUNTIME = "onnxruntime"
    """An ONNX model with one node that names the program, for ONNX Runtime with MIGraphX's plug-in."""
    ONNXRUNTIME_CACHE = "onnxruntime-cache"
    """The model, and a cache with the program, for ONNX Runtime with its built-in MIGraphX provider."""
    TRITON = "triton"
    """A model repository of Triton's, with such a cache outside it."""


class PackIndex(TypedDict):
    """`pack.json`: what a pack is and which files it has, with their paths relative to it.

    `onnxruntime` is the version that finds the cache's file.
    """

    schema: int
    layout: str
    identifier: str
    key: str
    onnxruntime: str
    files: list[FileReference]


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that was written."""

    folder: Path
    index: PackIndex

    @property
    def files(self) -> list[Path]:
        """Its files, in the order of their names."""
        return [self.folder / file["path"] for file in self.index["files"]]
