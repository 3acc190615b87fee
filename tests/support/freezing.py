"""Freezing of a matrix that has to succeed."""

from __future__ import annotations

from typing import Any

from farm.client.freezing import FrozenInputs, ManifestReader


def freeze(*given: Any, **options: Any) -> FrozenInputs:
    """Read the inputs of a matrix. Raises ManifestError for problems."""
    return ManifestReader(*given, **options).read().required()
