"""Manifest: a user's request. It is read and checked as a whole, and each problem has its place.

The fields are documented in `docs/manifest.md`; `manifest_schema` gives editors the same rules as JSON Schema.
What the entries together mean (the matrix) is in `farm.matrix`.
"""

from farm.manifest.entries import (
    Budgets,
    Concurrency,
    Conversion,
    Debug,
    Gates,
    IncludeEntry,
    InputEntry,
    Limits,
    Manifest,
    ModelEntry,
    OverrideEntry,
    SelectEntry,
    TriggerEntry,
    Tuning,
    Verify,
)
from farm.manifest.parsing import check_manifest, load_manifest, manifest_of, parse_manifest, read_manifest
from farm.manifest.schema import manifest_schema
from farm.manifest.sources import Data, EnvFile, Source

__all__ = [
    "Budgets",
    "Concurrency",
    "Conversion",
    "Data",
    "Debug",
    "EnvFile",
    "Gates",
    "IncludeEntry",
    "InputEntry",
    "Limits",
    "Manifest",
    "ModelEntry",
    "OverrideEntry",
    "SelectEntry",
    "Source",
    "TriggerEntry",
    "Tuning",
    "Verify",
    "check_manifest",
    "load_manifest",
    "manifest_of",
    "manifest_schema",
    "parse_manifest",
    "read_manifest",
]
