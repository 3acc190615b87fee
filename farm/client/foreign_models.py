"""Models that extensions bring: from a source that the client does not read itself, or of a format to be converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from farm import entry_points
from farm.manifest.entries import ModelEntry
from farm.manifest.sources import Source
from farm.wire.program import ConversionRecord


class ModelSource(Protocol):
    """Brings the models of a source, such as `hf`, to the submitter's machine."""

    def kept_from_hub(self, source: Source, cache: Path) -> Path | None:
        """Return where a file is in the cache; None if it is not there, or is not what came."""

    def from_hub(self, source: Source, cache: Path, *, onnx: bool) -> Path:
        """Return a file, from the cache or from where it is, with an ONNX model's external data. Raises UsageError."""


class ModelConverter(Protocol):
    """Converts models of a format, such as `torch`, into what compilers read."""

    def kind_of(self, path: Path, format: str) -> str:
        """Return what a model is, in the converter's words; nothing of it is loaded. Raises UsageError."""

    def convert(
        self, path: Path, entry: ModelEntry, cache: Path, pythons: Mapping[str, str]
    ) -> tuple[Path, ConversionRecord]:
        """Convert a model, or find what was converted before. Raises UsageError."""

    def libraries(self, converter: str, python: str) -> dict[str, str]:
        """Return the versions of what an interpreter has to work with the format. Raises UsageError."""

    def source_digest(self, path: Path) -> str:
        """Return the digest of a model before its conversion."""


def source_of(name: str) -> ModelSource:
    """Return what brings the models of a source. Raises UsageError if no extension does."""
    return cast(ModelSource, entry_points.required(entry_points.SOURCES, name))


def converter_of(format: str) -> ModelConverter:
    """Return what converts models of a format. Raises UsageError if no extension does."""
    return cast(ModelConverter, entry_points.required(entry_points.CONVERTERS, format))
