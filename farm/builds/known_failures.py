"""Known failures: what somebody acknowledged of a cell, and which programs a gate refused.

One document of each sort for a namespace. `docs/decisions/0045-an-acknowledged-failure-is-an-expected-one.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from typing_extensions import TypedDict

from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import Object, rewrite
from farm.errors import NotFound, UsageError
from farm.jobs.state import FailureKind
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, ExpectedFailure
from farm.results.gates import Rules, joined, left_out, rules_of, written_rule
from farm.results.ref_rules import has_passed
from farm.results.report import JudgedCell
from farm.units import view_of

log = get_logger(__name__)

LONGEST = 90  # Days for which a failure can be acknowledged: what nobody looks at again is forgotten.
KEPT = 30  # Days for which an entry is kept after its last day.
MOST = 2000  # Entries of one namespace.
MOST_REFUSED = 100_000  # Programs of one namespace that are remembered; beyond that the oldest are forgotten.


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


class Refusal(TypedDict):
    """Why a program is refused: by which rules (`farm.results.gates`), in which cell and build, and when (ISO)."""

    cell: str
    kind: str
    build: str
    rules: Rules
    at: str


Refusals = Mapping[str, Refusal]  # By cache key.


class KnownFailures:
    """What somebody acknowledged, and what gates refused, in all namespaces: two documents each."""

    def __init__(self, artifacts: S3Store) -> None:
        self._artifacts = artifacts

    def acknowledged(self, namespace: str) -> list[Acknowledged]:
        """Return the entries of a namespace, those that end first in front; some may be over."""
        found = self._artifacts.get_object(_key(namespace))
        entries: list[Acknowledged] = json.loads(found.data)["entries"] if found else []
        return sorted(entries, key=lambda entry: (entry["until"], entry["cell"]))

    def acknowledge(self, namespace: str, entry: Acknowledged) -> Acknowledged:
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

    def forget(self, namespace: str, cell: str) -> None:
        """Forget what was acknowledged of a cell. Raises NotFound."""

        def changed(entries: Sequence[Acknowledged]) -> Sequence[Acknowledged]:
            kept = [each for each in entries if each["cell"] != cell]
            if len(kept) == len(entries):
                raise NotFound(f"nothing is acknowledged of {cell[:300]}")
            return kept

        self._change(namespace, changed)

    def attach(self, namespace: str, cells: Sequence[CellPlan]) -> None:
        """Write the valid entries into planned cells for which the manifest expects nothing."""
        valid = {entry["cell"]: entry for entry in self.acknowledged(namespace) if entry["until"] >= str(today())}
        for cell in cells if valid else ():
            entry = valid.get(cell["identifier"])
            if entry and cell["expected"] is None:
                cell["expected"] = view_of(ExpectedFailure, entry)

    def _change(self, namespace: str, change: Callable[[Sequence[Acknowledged]], Sequence[Acknowledged]]) -> None:
        oldest = str(today() - timedelta(days=KEPT))

        def changed(found: Object | None) -> bytes:
            there: Sequence[Acknowledged] = json.loads(found.data)["entries"] if found else []
            entries = [entry for entry in change(there) if entry["until"] >= oldest]
            return json.dumps({"schema": 1, "entries": entries}).encode()

        rewrite(self._artifacts, _key(namespace), changed)

    # --- refused programs ---------------------------------------------------------------------------------------

    def hold(self, namespace: str, build_id: str, cells: Sequence[JudgedCell]) -> Collection[str]:
        """Remember what a build's gates refused, forget what passed the same rule, and return what stays refused.

        A cell that passed, and whose program stays refused, says so (`JudgedCell.held`). Repeating it changes nothing.
        """
        there = self._refused(namespace)
        refused = {key: refusal for key, cell in _by_key(cells) if (refusal := _refusal(cell, build_id))}
        passed = [(key, cell) for key, cell in _by_key(cells) if has_passed(cell)]
        entries = self.acknowledged(namespace) if any(key in there for key, _ in passed) else []
        known = {(entry["cell"], entry["kind"]) for entry in entries if entry["until"] >= str(today())}
        ended = {
            key
            for key, cell in passed
            if (past := there.get(key))
            and (not left_out(past["rules"], rules_of(cell)) or (past["cell"], past["kind"]) in known)
        } - refused.keys()

        def change(now: Refusals) -> Refusals:
            again = {
                key: Refusal(**{**each, "rules": joined(now[key]["rules"], each["rules"])}) if key in now else each
                for key, each in refused.items()
            }
            return {key: each for key, each in {**now, **again}.items() if key not in ended}

        if refused or ended:
            self._change_refused(namespace, change)
        still = change(there)
        for key, cell in passed:
            if key in still:
                cell["held"] = _sentence(still[key])
        return still.keys()

    def taken(self, namespace: str, keys: Collection[str]) -> None:
        """Forget refusals of the programs that a person has chosen, by a tag or a promotion."""
        if self._refused(namespace).keys() & set(keys):
            log.info("refused programs were chosen", namespace=namespace)
            self._change_refused(namespace, lambda now: {key: each for key, each in now.items() if key not in keys})

    def _refused(self, namespace: str) -> Refusals:
        found = self._artifacts.get_object(_refused_key(namespace))
        return dict(json.loads(found.data)["programs"]) if found else {}

    def _change_refused(self, namespace: str, change: Callable[[Refusals], Refusals]) -> None:
        def changed(found: Object | None) -> bytes:
            there: dict[str, Refusal] = json.loads(found.data)["programs"] if found else {}
            newest = sorted(change(there).items(), key=lambda each: each[1]["at"])[-MOST_REFUSED:]
            return json.dumps({"schema": 1, "programs": dict(newest)}).encode()

        rewrite(self._artifacts, _refused_key(namespace), changed)


def today() -> date:
    """Return the day, in UTC."""
    return datetime.now(UTC).date()


def _key(namespace: str) -> str:
    return f"ns/{namespace}/acknowledged.json"


def _by_key(cells: Sequence[JudgedCell]) -> list[tuple[str, JudgedCell]]:
    return [(facts["key"], cell) for cell in cells if (facts := cell["facts"])]


def _refusal(cell: JudgedCell, build_id: str) -> Refusal | None:
    if not cell["kind"] or not (rules := rules_of(cell)):
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cell": cell["identifier"], "kind": cell["kind"], "build": build_id, "rules": rules, "at": at}


def _sentence(refusal: Refusal) -> str:
    rules = "; ".join(written_rule(name, limit) for name, limit in refusal["rules"].items())
    return (
        f"{rules} refused this program in {refusal['build']}: `latest` takes it when it passes the same rule, or by "
        "your word (`farm tag` a build with it, or "
        f"`farm acknowledge {refusal['cell']} {refusal['kind']}`, then build again)"
    )


def _refused_key(namespace: str) -> str:
    return f"ns/{namespace}/refused.json"
