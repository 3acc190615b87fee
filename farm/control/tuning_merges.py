"""Tuning: merges the deltas of attempts into the heads of the tuning databases."""

from __future__ import annotations

from datetime import UTC, datetime

from farm.artifacts import ArtifactStore
from farm.errors import ArtifactGone, FarmFault
from farm.logging import get_logger
from farm.tuning.database import databases

log = get_logger(__name__)

INTERVAL = 60.0
"""Seconds between two checks. Restoring reads deltas too, so a late merge costs only time."""


def merge_tuning(artifacts: ArtifactStore) -> int:
    """Merge databases with enough deltas; return their number. A failure does not stop the others."""
    merged = 0
    for database in databases(artifacts, artifacts.list_folders("ns/")):
        try:
            if database.merge_due(datetime.now(UTC)):
                database.merge()
                merged += 1
        except (ArtifactGone, FarmFault) as error:
            where = {"namespace": database.namespace, "database": database.name}
            log.error("cannot merge tuning; its deltas stay", **where, error=error.message, hint=error.hint)
    return merged
