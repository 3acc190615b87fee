"""Index: which artifacts are complete, and how long they took, so that planning ten thousand cells reads no sidecar."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence

from farm.jobs.estimate import Compile
from farm.jobs.facts import ArtifactFacts, ComparableWork
from farm.store.link import Link, lots

KEPT = 200
"""Compiles of one sort that are remembered."""


class History:
    """Past durations by sort (`farm.jobs.estimate.comparable`), for each namespace."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def remember(self, namespace: str, artifacts: Iterable[ArtifactFacts]) -> None:
        """Record the durations of artifacts, by their facts. Repeating changes nothing."""
        known = [(facts, work) for facts in artifacts if (work := facts.get("work"))]
        names = {work["like"]: ("history", namespace, work["like"]) for _, work in known}
        adding = [
            ["ZADD", names[work["like"]], re.sub(r"\D", "", facts["created"])[:14], _member(facts, work)]
            for facts, work in known
        ]
        trimming = [["ZREMRANGEBYRANK", name, 0, -KEPT - 1] for name in names.values()]
        self._link.ask_many([*adding, *trimming])

    def samples(self, namespaces: Sequence[str], sorts: Iterable[str]) -> dict[str, list[Compile]]:
        """Return the durations of each sort, in all of these namespaces together."""
        wanted = [(sort, ("history", namespace, sort)) for sort in set(sorts) for namespace in namespaces]
        answers = self._link.ask_many(["ZRANGE", name, 0, -1] for _, name in wanted)
        found: dict[str, list[Compile]] = {}
        for (sort, _), members in zip(wanted, answers, strict=True):
            found.setdefault(sort, []).extend(map(_sample, members))
        return found


def _member(facts: ArtifactFacts, work: ComparableWork) -> str:
    """As `remember` in `_workers.lua` writes it."""
    return f"{facts['key']} {work['model']} {work['size']} {facts['seconds']:.14g}"


def _sample(member: str) -> Compile:
    _, model, size, seconds = member.split(" ")
    return Compile(model, int(size), float(seconds))


LOT = 1000
"""Artifacts that are put at once."""

_LIKELY = (
    b'"carried":null,"mode":"quick","finished":true,"published":"tuned"},"measured":"2026-"against":{"key":"'
    b'{"key":"","namespace":"main","sidecar":"ns/main/artifacts//.json","program":{"path":"program.mxr","digest":"'
    b'","size":10},"toolchain":"onnxruntime1.","device":"cpu","driver":"","verified":true,"unverified":"",'
    b'"errors":{"output":1e-07},"rms":{"output":1e-07},"equal":{},"nonfinite":[],"spread":{"output":1.0},"weak":false,'
    b'"doubted":{},"latency":0.001,"p99":0.001,"baseline_latency":null,"ratio":null,"against":null,"runs_as":"",'
    b'"tuning":null,"load":0.01,"throughput":null,"compile_seconds":10.0,"node":"","shared":false,"processes":null,'
    b'"peak_memory":null,"quantized":{},"fallback":{},"seconds":1.0,"work":{"like":"onnxruntime-cpu.fp32.off",'
    b'"model":"","size":10},"created":"2026-11-28T10:00:00.000000+00:00"}'
)
"""What most facts share, so that compressing leaves a third. Whoever changes it also renames the keys of the index."""


def indexed(facts: object) -> bytes:
    """Return facts as the index keeps them."""
    press = zlib.compressobj(level=1, zdict=_LIKELY)
    return press.compress(json.dumps(facts, separators=(",", ":")).encode()) + press.flush()


class IndexRecords:
    """Facts by cache key, for each namespace. Object storage is the record: missing entries are looked up there."""

    def __init__(self, link: Link, history: History, epoch: Callable[[], str]) -> None:
        self._link = link
        self._history = history
        self._epoch = epoch

    def put(self, namespace: str, cache_key: str, facts: ArtifactFacts) -> None:
        """Record a complete artifact."""
        self._link.ask("HSET", ("index", namespace, "facts"), cache_key, indexed(facts))

    def get_many(self, namespace: str, cache_keys: Sequence[str]) -> dict[str, ArtifactFacts]:
        """Return the facts of the known ones among these artifacts."""
        parts = list(lots(cache_keys, LOT))
        answers = self._link.ask_many((["HMGET", ("index", namespace, "facts"), *lot] for lot in parts), binary=True)
        return {
            cache_key: json.loads(zlib.decompressobj(zdict=_LIKELY).decompress(facts))
            for lot, answer in zip(parts, answers, strict=True)
            for cache_key, facts in zip(lot, answer, strict=True)
            if facts
        }

    def count(self, namespace: str) -> int:
        """Return how many artifacts are known."""
        return int(self._link.ask("HLEN", ("index", namespace, "facts")))

    def program_bytes(self, namespace: str) -> int:
        """Return the size of all programs that artifacts name; one that several name counts once."""
        sizes: dict[str, int] = {}
        for lot in lots(sorted(self.keys(namespace)), LOT):
            programs = (facts["program"] for facts in self.get_many(namespace, lot).values())
            sizes |= {program["digest"]: program["size"] for program in programs}
        return sum(sizes.values())

    def keys(self, namespace: str) -> set[str]:
        """Return the cache keys of all artifacts that are known."""
        return set(self._link.ask("HKEYS", ("index", namespace, "facts")))

    def remove(self, namespace: str, cache_keys: Sequence[str]) -> None:
        """Remove artifacts that are gone or broken."""
        if cache_keys:
            self._link.ask("HDEL", ("index", namespace, "facts"), *cache_keys)

    def complete(self, namespace: str) -> bool:
        """Whether the index holds every complete artifact; false after Redis was lost."""
        return bool(self._link.ask("EXISTS", ("index", namespace, "facts", "complete")))

    def fill(self, namespace: str, artifacts: Iterable[tuple[str, ArtifactFacts]]) -> int:
        """Replace a namespace's index by these artifacts and mark it complete.

        Returns their number. Artifacts that are published meanwhile stay: only older entries are dropped. If the store
        loses its data meanwhile, the index is not marked complete.
        """
        epoch = self._epoch()
        gone = self.keys(namespace)
        count = 0
        for lot in lots(artifacts, LOT):
            pairs = [part for cache_key, facts in lot for part in (cache_key, indexed(facts))]
            self._link.ask("HSET", ("index", namespace, "facts"), *pairs)
            self._history.remember(namespace, (facts for _, facts in lot))
            gone.difference_update(pairs[::2])
            count += len(lot)
        for some in lots(gone, LOT):
            self.remove(namespace, some)
        self._link.run("complete_index", namespace=namespace, begun=epoch)
        return count


class SignedRefs:
    """The newest version that was signed of each ref, by `NAMESPACE/TAG`: object storage may answer with older ones."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def remember(self, path: str, version: int) -> None:
        """Record a version that was written. A newer one stays."""
        self._link.ask("ZADD", ("signed",), "GT", version, path)

    def version(self, path: str) -> int:
        """Return the newest version of a ref; 0 if none is known."""
        return int(float(self._link.ask("ZSCORE", ("signed",), path) or 0))

    def forget(self, path: str = "") -> None:
        """Forget a ref, or all."""
        self._link.ask(*(["ZREM", ("signed",), path] if path else ["DEL", ("signed",)]))
