"""Index: which artifacts are complete, so that planning ten thousand cells reads no sidecar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from farm.jobs.facts import ArtifactFacts
from farm.store.history import History
from farm.store.link import Link, key, lots

LOT = 1000


class IndexRecords:
    """Facts by cache key, for each namespace. Object storage is the record: missing entries are looked up there."""

    def __init__(self, link: Link, history: History, epoch: Callable[[], str]) -> None:
        self._link = link
        self._history = history
        self._epoch = epoch

    def put(self, namespace: str, cache_key: str, facts: ArtifactFacts) -> None:
        """Record a complete artifact."""
        self._link.ask("HSET", key("index", namespace), cache_key, json.dumps(facts))

    def get_many(self, namespace: str, cache_keys: Sequence[str]) -> dict[str, ArtifactFacts]:
        """Return the facts of the known ones among these artifacts."""
        parts = list(lots(cache_keys, LOT))
        answers = self._link.ask_many(["HMGET", key("index", namespace), *lot] for lot in parts)
        return {
            cache_key: json.loads(facts)
            for lot, answer in zip(parts, answers, strict=True)
            for cache_key, facts in zip(lot, answer, strict=True)
            if facts
        }

    def keys(self, namespace: str) -> set[str]:
        """Return the cache keys of all artifacts that are known."""
        return set(self._link.ask("HKEYS", key("index", namespace)))

    def remove(self, namespace: str, cache_keys: Sequence[str]) -> None:
        """Remove artifacts that are gone or broken."""
        if cache_keys:
            self._link.ask("HDEL", key("index", namespace), *cache_keys)

    def complete(self, namespace: str) -> bool:
        """Whether the index holds every complete artifact; false after Redis was lost."""
        return bool(self._link.ask("EXISTS", key("index", namespace, "complete")))

    def fill(self, namespace: str, artifacts: Iterable[tuple[str, ArtifactFacts]]) -> int:
        """Replace a namespace's index by these artifacts and mark it complete.

        Returns their number. Artifacts that are published meanwhile stay: only older entries are dropped. If the store
        loses its data meanwhile, the index is not marked complete.
        """
        epoch = self._epoch()
        gone = self.keys(namespace)
        count = 0
        for lot in lots(artifacts, LOT):
            pairs = [part for cache_key, facts in lot for part in (cache_key, json.dumps(facts))]
            self._link.ask("HSET", key("index", namespace), *pairs)
            self._history.remember(namespace, (facts for _, facts in lot))
            gone.difference_update(pairs[::2])
            count += len(lot)
        for some in lots(gone, LOT):
            self.remove(namespace, some)
        self._link.run("complete_index", namespace=namespace, begun=epoch)
        return count
