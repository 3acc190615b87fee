"""Jobs and their attempts: handed out, claimed, renewed, finished, lost; and what wakes the control plane for them."""

from __future__ import annotations

import json
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import AttemptView, JobView, WaitReasons
from farm.jobs.state import AttemptLimits, Outcome, WorkOrder
from farm.store.link import Records
from farm.units import in_seconds, lots

LOT = 500  # Jobs that are asked about at once.
_ASKED = ("turns", "unmeasured")  # Facts that are about one build's question.
PACKED_TOGETHER = 50  # Ended jobs that are compressed together: they are much alike.

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


def facts_of(kept: bytes) -> ArtifactFacts:
    """Return facts that the index has kept."""
    facts: ArtifactFacts = json.loads(zlib.decompressobj(zdict=_LIKELY).decompress(kept))
    return facts


Record = tuple[dict[str, str], list[str], dict[str, str]]  # A job's fields, the names of its cells, and its attempts.
Handed = list[tuple[str, int]]  # Job ids with the numbers of the attempts that were handed out.


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: `run` with all that an attempt needs, or `stale` or `elsewhere`, and nothing to do.

    `limits` are the largest of the live cells; `build` is the first build with the job; `previous` are the
    failure kinds of the job's earlier attempts ("" if one did not fail). `is_split`: a live worker on the same kernel
    has other lock files, as one in another container may.
    """

    answer: Literal["run", "stale", "elsewhere"]
    attempt: int
    token: str = ""
    order: WorkOrder | None = None
    limits: AttemptLimits = field(default_factory=lambda: AttemptLimits(time=0.0, memory=0))
    namespace: str = ""
    key: str = ""
    build: str = ""
    is_split: bool = False
    previous: tuple[str, ...] = ()


Renewed = Literal["ok", "cancel", "lost"]
"""The answer to a renewal. `cancel`: nobody wants the attempt any more, end it and finish; `lost`: another attempt has
the job."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What an attempt says about itself when its lease is renewed; `log_tail` is kept until the next renewal.

    `paused` are the seconds for which it was paused so far (None: as it said before).

    `kept`: its finished program is on its node's disk. From now on the job waits for that node until `outbox_hours`
    after the last renewal, whatever happens to the worker. `left`: it only uploads, and no longer holds its slot.
    """

    token: str
    job_id: str
    phase: str = ""
    progress: float | None = None
    detail: str = ""
    paused: float | None = None
    log_tail: bytes | None = None
    kept: bool = False
    left: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the script."""
        return {
            "job": self.job_id,
            "token": self.token,
            "phase": self.phase,
            "progress": "" if self.progress is None else self.progress,
            "detail": self.detail,
            "paused": "" if self.paused is None else round(self.paused * 1000),
            "log": self.log_tail or b"",
            "kept": int(self.kept),
            "left": int(self.left),
        }


class JobRecords(Records):
    """Jobs, from their first cell until some time after their end."""

    # --- a worker's calls ---------------------------------------------------------------------------------------

    def claim(self, job_id: str, attempt: int, *, nonce: str, worker: str, node: str) -> Claim:
        """Claim the attempt that a message names. The same nonce gets the same answer again."""
        fresh = f"{attempt}-{secrets.token_hex(16)}"
        answer, *rest = self._link.run(
            "claim", job=job_id, attempt=attempt, nonce=nonce, token=fresh, worker=worker, node=node
        )
        if answer != "run":
            return Claim(answer, attempt)
        token, order, seconds, memory, namespace, cache_key, build, split, *previous = rest
        limits, found = AttemptLimits(time=float(seconds), memory=int(memory)), json.loads(order)
        return Claim("run", attempt, token, found, limits, namespace, cache_key, build, split == 1, tuple(previous))

    def renew(self, token: str, job_id: str, **says: Any) -> Renewed:
        """Renew one lease; `says` are the other fields of a `Renewal`."""
        return self.renew_all([Renewal(token, job_id, **says)])[0]

    def renew_all(self, renewals: Sequence[Renewal]) -> list[Renewed]:
        """Renew leases at the cost of one: a node has many, and none may wait for the others' answers."""
        return self._link.run_many("renew", [renewal.arguments for renewal in renewals])

    def finish(self, job_id: str, token: str, outcome: Outcome) -> Literal["ok", "superseded"]:
        """End an attempt; the policy of its failure kind decides what follows. A success is also recorded in the index,
        without what only this build asked (`turns`, `unmeasured`).

        `superseded`: the attempt had lost its lease, and its outcome changes nothing.
        """
        answer: Literal["ok", "superseded"] = self._link.run(
            "finish",
            job=job_id,
            token=token,
            how=outcome.end.value,
            kind=outcome.kind.value if outcome.kind else "",
            outcome=_text({**asdict(outcome), "facts": outcome.facts or {}}),
            facts=indexed({name: value for name, value in (outcome.facts or {}).items() if name not in _ASKED}),
            hit=int(outcome.hit),
        )
        return answer

    # --- the control plane's calls ------------------------------------------------------------------------------

    def hand_out(self, pool: str, per_slot: int) -> Handed:
        """Choose the next jobs for the broker, in order; it holds at most `per_slot` unclaimed jobs per live slot."""
        return _pairs(self._link.run("hand_out", pool=pool, per_slot=per_slot))

    def strays(self, pool: str, seconds: float) -> Handed:
        """Return the jobs that were handed out more than `seconds` ago and are not claimed."""
        return _pairs(self._link.run("strays", pool=pool, age=round(seconds * 1000)))

    def hand_again(self, pool: str, job_ids: Sequence[str]) -> int:
        """Record that jobs were sent to the broker again; return how many of them are still unclaimed."""
        return int(self._link.run("hand_again", pool=pool, jobs=json.dumps(list(job_ids))))

    def promote(self) -> int:
        """Queue the jobs whose delay has passed; return their number."""
        return int(self._link.run("promote", limit=LOT))

    def expire_leases(self, reaper: str) -> list[str]:
        """End the attempts whose leases expired, or whose nodes did not publish a kept program; return their jobs.

        Nothing expires until `reaper` has called for one whole lease without a gap of half a lease.
        """
        return list(self._link.run("expire_leases", reaper=reaper, limit=LOT))

    def fail_unserved(self, pool: str, seconds: float) -> int:
        """Fail jobs that waited longer than `seconds` for a pool whose workers took none; return their number."""
        return int(self._link.run("fail_unserved", pool=pool, timeout=round(seconds * 1000), limit=LOT))

    # --- reading ------------------------------------------------------------------------------------------------

    def pending(self, pool: str) -> int:
        """Return the number of jobs of a pool that wait to be handed out."""
        return int(self._link.ask("ZCARD", ("pool", pool, "waiting")))

    def are_short(self, pool: str) -> bool:
        """Whether jobs of a pool wait to be handed out, and no claim of those in the broker has to come first."""
        sizes = [["ZCARD", ("pool", pool, "waiting")], ["ZCARD", ("pool", pool, "handed")]]
        waiting, handed, low = self._link.ask_many([*sizes, ["GET", ("pool", pool, "low")]])
        return bool(waiting) and handed <= int(low or 0)

    def phases(self) -> Counter[str]:
        """Return how many running jobs are in each phase; "" is the time before the first."""
        running = self._link.ask("ZRANGE", ("leases",), 0, -1)
        found = self._link.ask_many([["HGET", ("job", job), "phase"] for job in running])
        return Counter(phase or "" for phase in found)

    def set_aside(self) -> dict[str, int]:
        """Return how many jobs wait for their delay or for storage, and how many builds for their report."""
        names = ("delayed_jobs", "kept_jobs", "unreported_builds")
        counts = self._link.ask_many([["ZCARD", ("delayed",)], ["ZCARD", ("kept",)], ["SCARD", ("unreported",)]])
        return dict(zip(names, counts, strict=True))

    def unfinished(self, namespace: str, job_keys: Sequence[str]) -> set[str]:
        """Return the job keys (`farm.jobs.state.job_key`) with a queued or running job."""
        found: set[str] = set()
        for lot in lots(job_keys, LOT):
            jobs = self._link.ask("MGET", *[("active", namespace, job_key) for job_key in lot])
            found |= {job_key for job_key, job in zip(lot, jobs, strict=True) if job}
        return found

    def log_tail(self, job_id: str) -> bytes | None:
        """Return the end of the log of a job's latest attempt, as last sent."""
        tail: bytes | None = self._link.ask("GET", ("job", job_id, "log"), binary=True)
        return tail

    def get(self, job_id: str) -> JobView | None:
        """Return a job, its attempts and the cells that joined it."""
        record = self._records([job_id]).get(job_id) or self._packed(job_id)
        return _view(job_id, *record) if record else None

    def _records(self, job_ids: Sequence[str]) -> dict[str, Record]:
        asked: list[list[Any]] = []
        for job in job_ids:
            attempts = ["HGETALL", ("job", job, "attempts")]
            asked += [["HGETALL", ("job", job)], ["HKEYS", ("job", job, "cells")], attempts]
        found = iter(self._link.ask_many(asked, together=True))
        return {
            job: record for job, record in zip(job_ids, zip(found, found, found, strict=True), strict=True) if record[0]
        }

    def _packed(self, job_id: str) -> Record | None:
        build, _, lot = (self._link.ask("GET", ("job", job_id, "packed")) or "").partition(" ")
        data = self._link.ask("HGET", ("build", build, "packed"), lot, binary=True) if lot else None
        return _unpacked(data)[job_id] if data else None

    def pack(self, build_id: str, job_ids: Iterable[str]) -> None:
        """Compress the records of a build's ended jobs, many together: those in a row are read fastest in that order.

        Repeating changes nothing. From then on a late `finish` is `superseded` whatever it says, and not recorded.
        """
        for lot in lots(dict.fromkeys(job_ids), PACKED_TOGETHER):
            ended = {job: record for job, record in self._records(lot).items() if "ended_at" in record[0]}
            if ended:
                jobs = json.dumps(list(ended))
                logged = json.dumps([job for job, record in ended.items() if _view(job, *record)["log"]])
                packed = zlib.compress(json.dumps(ended).encode(), 9)
                self._link.run("pack_jobs", build=build_id, jobs=jobs, logged=logged, packed=packed)

    def explain(self, job_ids: Sequence[str]) -> list[WaitReasons | None]:
        """Return for each job why it waits while it is queued; None for an unknown job."""
        answers = self._link.run("explain", jobs=json.dumps(list(job_ids))) if job_ids else []
        return [_explained(json.loads(answer)) if answer else None for answer in answers]


def _view(job_id: str, row: Mapping[str, str], cells: Sequence[str], attempts: Mapping[str, str]) -> JobView:
    outcome = json.loads(row.get("outcome", "{}"))
    tried = list(_attempts(attempts))
    view = {
        "id": job_id,
        **{name: row[name] for name in ("state", "namespace", "key", "pool")},
        **{name: row.get(name) for name in ["worker", "node", "phase"]},
        **{name: row.get(name) == "1" for name in ("cancelling", "quarantined")},
        **{name: in_seconds(row.get(name)) for name in ("created_at", "queued_at", "started_at", "ended_at")},
        "priority": int(row["priority"]),
        "attempt": int(row["number"]),
        "charged": int(row["charged"]),
        "order": json.loads(row["order"]),
        "progress": float(row["progress"]) if row.get("progress") else None,
        "detail": outcome.get("detail") or row.get("detail") or "",
        "kind": outcome.get("kind"),
        "message": outcome.get("message") or "",
        "facts": outcome.get("facts") or None,
        "log": outcome.get("log") or next((one["log"] for one in reversed(tried) if one["log"]), None),
        "attempts": tried,
        "cells": [{"build": one[0], "identifier": one[1]} for one in (cell.split("|", 1) for cell in cells)],
    }
    return cast(JobView, view)


@lru_cache(maxsize=4)  # Who asks for one often asks for all, one after the other.
def _unpacked(data: bytes) -> dict[str, Record]:
    return {job: tuple(record) for job, record in json.loads(zlib.decompress(data)).items()}


def _text(document: Mapping[str, object]) -> bytes:
    """JSON that scripts can read: they do not know lone surrogates, which a compiler's output may contain."""
    return json.dumps(document, ensure_ascii=False).encode(errors="replace")


def _pairs(flat: Sequence[str]) -> Handed:
    return [(job, int(number)) for job, number in zip(flat[::2], flat[1::2], strict=True)]


def _explained(row: Mapping[str, Any]) -> WaitReasons:
    said = {name: row.get(name) for name in WaitReasons.__annotations__}
    before = next(_attempts(row["before"]), None)
    return cast(WaitReasons, {**said, "delayed_until": in_seconds(row.get("delayed_until")), "before": before})


def _attempts(row: Mapping[str, str]) -> Iterator[AttemptView]:
    numbers = sorted({int(name.partition(":")[0]) for name in row})
    for number in numbers:
        start = json.loads(row.get(f"{number}:start", "{}"))
        end = json.loads(row.get(f"{number}:end", "{}"))
        outcome = end.get("outcome") or {}
        yield {
            "number": number,
            "worker": start.get("worker"),
            "node": start.get("node"),
            "started_at": in_seconds(start.get("started_at")),
            "ended_at": in_seconds(end.get("at")),
            "limits": {"time": start.get("time", 0), "memory": start.get("memory", 0)},
            "end": end.get("end"),
            "kind": outcome.get("kind"),
            "message": outcome.get("message") or "",
            "detail": outcome.get("detail") or "",
            "log": outcome.get("log") or None,
            "phases": outcome.get("phases") or {},
        }


LONGEST_WAIT = 2.0  # Most seconds that one call blocks: less than the socket's timeout.


class Wakeups(Records):
    """Pools with jobs to hand out, and builds that ended or have to be stopped. Each wake-up goes to one process."""

    def next(self, what: Literal["pools", "builds"], seconds: float) -> str | None:
        """Wait for a pool that may have jobs to hand out, or a build that ended or whose cells have to be cancelled."""
        found = self._link.ask("BZPOPMIN", ("wake", what), min(seconds, LONGEST_WAIT))
        return str(found[1]) if found else None

    def wake_pool(self, pool: str) -> None:
        """Wake a dispatcher for a pool."""
        self._link.ask("ZADD", ("wake", "pools"), 0, pool)
