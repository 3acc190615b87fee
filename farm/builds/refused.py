"""Programs that a gate refused: `latest` takes none of them because somebody left the rule out or loosened it.

One document for each namespace. A refusal ends when the program passes the same rule in a later build, or by a person's
word: a tag that is pointed to it, or a failure that is acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from typing_extensions import TypedDict

from farm.artifacts.storage import ArtifactStore, until_moved
from farm.builds.acknowledged import AcknowledgedFailures, today
from farm.errors import Conflict
from farm.logging import get_logger
from farm.results.gate_rules import REMEMBERED, Rules, joined, left_out, rules_of, written_rule
from farm.results.ref_rules import has_passed
from farm.results.report import JudgedCell

log = get_logger(__name__)

MOST = 100_000
"""Programs of one namespace that are remembered; beyond that the oldest are forgotten."""


class Refusal(TypedDict):
    """Why a program is refused: by which rules (`farm.results.gate_rules`), in which cell and build, and when (ISO)."""

    cell: str
    kind: str
    build: str
    rules: Rules
    at: str


Refusals = Mapping[str, Refusal]
"""By cache key."""


class RefusedPrograms:
    """What gates refused, in all namespaces."""

    def __init__(self, artifacts: ArtifactStore, acknowledged: AcknowledgedFailures) -> None:
        self._artifacts = artifacts
        self._acknowledged = acknowledged

    def hold(self, namespace: str, build_id: str, cells: Sequence[JudgedCell]) -> Collection[str]:
        """Remember what a build's gates refused, forget what passed the same rule, and return what stays refused.

        A cell that passed, and whose program stays refused, says so (`JudgedCell.held`). Repeating it changes nothing.
        """
        there = self._read(namespace)
        refused = {key: refusal for key, cell in _by_key(cells) if (refusal := _refusal(cell, build_id))}
        passed = [(key, cell) for key, cell in _by_key(cells) if has_passed(cell)]
        known = self._known(namespace) if any(key in there for key, _ in passed) else frozenset()
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
            self._change(namespace, change)
        still = change(there)
        for key, cell in passed:
            if key in still:
                cell["held"] = _sentence(still[key])
        return still.keys()

    def taken(self, namespace: str, keys: Collection[str]) -> None:
        """Forget refusals of the programs to which a person has pointed a tag."""
        if self._read(namespace).keys() & set(keys):
            log.info("refused programs were tagged", namespace=namespace)
            self._change(namespace, lambda now: {key: each for key, each in now.items() if key not in keys})

    def _known(self, namespace: str) -> frozenset[tuple[str, str]]:
        entries = self._acknowledged.list(namespace)
        return frozenset((entry["cell"], entry["kind"]) for entry in entries if entry["until"] >= str(today()))

    def _read(self, namespace: str) -> Refusals:
        found = self._artifacts.get_object(_key(namespace))
        return dict(json.loads(found.data)["programs"]) if found else {}

    def _change(self, namespace: str, change: Callable[[Refusals], Refusals]) -> None:
        def attempt() -> bool | None:
            found = self._artifacts.get_object(_key(namespace))
            there: dict[str, Refusal] = json.loads(found.data)["programs"] if found else {}
            newest = sorted(change(there).items(), key=lambda each: each[1]["at"])[-MOST:]
            data = json.dumps({"schema": 1, "programs": dict(newest)}).encode()
            with suppress(Conflict):
                self._artifacts.put_object(
                    _key(namespace), data, create=found is None, if_match=found.etag if found else ""
                )
                return True
            return None

        until_moved(_key(namespace), attempt)


def _by_key(cells: Sequence[JudgedCell]) -> list[tuple[str, JudgedCell]]:
    return [(facts["key"], cell) for cell in cells if (facts := cell["facts"])]


def _refusal(cell: JudgedCell, build_id: str) -> Refusal | None:
    rules = {name: limit for name, limit in rules_of(cell).items() if name.startswith(REMEMBERED)}
    if not cell["kind"] or not rules:
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cell": cell["identifier"], "kind": cell["kind"], "build": build_id, "rules": rules, "at": at}


def _sentence(refusal: Refusal) -> str:
    rules = "; ".join(written_rule(name, limit) for name, limit in refusal["rules"].items())
    return (
        f"{rules} refused this program in {refusal['build']}: `latest` takes it when it passes the same rule, or by "
        "your word (point a tag to a build with it, or acknowledge the failure)"
    )


def _key(namespace: str) -> str:
    return f"ns/{namespace}/refused.json"
