"""History: durations of the newest compiles of each sort; restored from object storage with the index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from farm.jobs.estimate import Sample
from farm.jobs.facts import ArtifactFacts, ComparableWork
from farm.store.link import Link, key

KEPT = 200
"""Compiles of one sort that are remembered."""


class History:
    """Past durations by sort (`farm.jobs.estimate.comparable`), for each namespace."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def remember(self, namespace: str, artifacts: Iterable[ArtifactFacts]) -> None:
        """Record the durations of artifacts, by their facts. Repeating changes nothing."""
        known = [(facts, work) for facts in artifacts if (work := facts.get("work"))]
        names = {work["like"]: key("history", namespace, work["like"]) for _, work in known}
        adding = [
            ["ZADD", names[work["like"]], re.sub(r"\D", "", facts["created"])[:14], _member(facts, work)]
            for facts, work in known
        ]
        trimming = [["ZREMRANGEBYRANK", name, 0, -KEPT - 1] for name in names.values()]
        self._link.ask_many([*adding, *trimming])

    def samples(self, namespaces: Sequence[str], sorts: Iterable[str]) -> dict[str, list[Sample]]:
        """Return the durations of each sort, in all of these namespaces together."""
        wanted = [(sort, key("history", namespace, sort)) for sort in set(sorts) for namespace in namespaces]
        answers = self._link.ask_many(["ZRANGE", name, 0, -1] for _, name in wanted)
        found: dict[str, list[Sample]] = {}
        for (sort, _), members in zip(wanted, answers, strict=True):
            found.setdefault(sort, []).extend(map(_sample, members))
        return found


def _member(facts: ArtifactFacts, work: ComparableWork) -> str:
    """As `remember` in `_attempts.lua` writes it."""
    return f"{facts['key']} {work['model']} {work['size']} {facts['seconds']:.14g}"


def _sample(member: str) -> Sample:
    _, model, size, seconds = member.split(" ")
    return Sample(model, int(size), float(seconds))
