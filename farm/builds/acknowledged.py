"""Acknowledged failures: what somebody knows of a failing cell, and until when the farm expects it.

The same thing as an entry of `expected` in a manifest, made on a page or over the API: it is written into the plans of
the builds that are submitted from then on. `docs/decisions/0045-an-acknowledged-failure-is-an-expected-one.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta

from typing_extensions import TypedDict

from farm.artifacts.storage import ArtifactStore, Object, rewrite
from farm.errors import NotFound, UsageError
from farm.jobs.state import FailureKind
from farm.logging import get_logger
from farm.matrix.planned import CellPlan

log = get_logger(__name__)

LONGEST = 90
"""Days for which a failure can be acknowledged: what nobody looks at again is forgotten."""
KEPT = 30
"""Days for which an entry is kept after its last day."""
MOST = 2000
"""Entries of one namespace."""


class Acknowledged(TypedDict):
    """One entry: a cell, the kind of failure, why, the last day on which it is expected (ISO), where it is discussed.

    `by` is the token's name, `at` in Unix seconds.
    """

    cell: str
    kind: str
    reason: str
    until: str
    link: str
    by: str
    at: float


class AcknowledgedFailures:
    """The acknowledged failures of all namespaces, one document each."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts

    def list(self, namespace: str) -> list[Acknowledged]:
        """Return the entries of a namespace, those that end first in front; some may be over."""
        found = self._artifacts.get_object(_key(namespace))
        entries: list[Acknowledged] = json.loads(found.data)["entries"] if found else []
        return sorted(entries, key=lambda entry: (entry["until"], entry["cell"]))

    def put(self, namespace: str, entry: Acknowledged) -> Acknowledged:
        """Acknowledge a cell's failure, in place of an entry that it has. Repeating it is harmless.

        Raises UsageError for a kind that does not exist, for a day that is over or too far away, and for too many.
        """
        if entry["kind"] not in list(FailureKind):
            raise UsageError(f"{entry['kind'][:100]} is not a kind of failure", hint="docs/failure-kinds.md lists them")
        try:
            last = date.fromisoformat(entry["until"])
        except ValueError:
            raise UsageError(f"{entry['until'][:100]} is not a day", hint="write it as 2026-12-31") from None
        if not today() <= last <= today() + timedelta(days=LONGEST):
            raise UsageError(f"{last} is not within {LONGEST} days from today", hint="acknowledge it again later")

        def changed(entries: Sequence[Acknowledged]) -> Sequence[Acknowledged]:
            kept = [each for each in entries if each["cell"] != entry["cell"]]
            if len(kept) >= MOST:
                raise UsageError(f"{MOST} failures are acknowledged already", hint="mend some, or use `expected`")
            return [*kept, entry]

        self._change(namespace, changed)
        log.info("failure acknowledged", namespace=namespace, cell=entry["cell"], kind=entry["kind"], by=entry["by"])
        return entry

    def delete(self, namespace: str, cell: str) -> None:
        """Forget what was acknowledged of a cell. Raises NotFound."""

        def changed(entries: Sequence[Acknowledged]) -> Sequence[Acknowledged]:
            kept = [each for each in entries if each["cell"] != cell]
            if len(kept) == len(entries):
                raise NotFound(f"nothing is acknowledged of {cell[:300]}")
            return kept

        self._change(namespace, changed)

    def attach(self, namespace: str, cells: Sequence[CellPlan]) -> None:
        """Write the valid entries into planned cells for which the manifest expects nothing."""
        valid = {entry["cell"]: entry for entry in self.list(namespace) if entry["until"] >= str(today())}
        for cell in cells if valid else ():
            entry = valid.get(cell["identifier"])
            if entry and cell["expected"] is None:
                cell["expected"] = {
                    "kind": entry["kind"],
                    "reason": entry["reason"],
                    "until": entry["until"],
                    "link": entry["link"],
                    "by": entry["by"],
                }

    def _change(self, namespace: str, change: Callable[[Sequence[Acknowledged]], Sequence[Acknowledged]]) -> None:
        oldest = str(today() - timedelta(days=KEPT))

        def changed(found: Object | None) -> bytes:
            there: Sequence[Acknowledged] = json.loads(found.data)["entries"] if found else []
            entries = [entry for entry in change(there) if entry["until"] >= oldest]
            return json.dumps({"schema": 1, "entries": entries}).encode()

        rewrite(self._artifacts, _key(namespace), changed)


def today() -> date:
    """Return the day, in UTC."""
    return datetime.now(UTC).date()


def _key(namespace: str) -> str:
    return f"ns/{namespace}/acknowledged.json"
