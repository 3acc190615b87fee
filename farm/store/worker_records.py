"""Workers and pools: workers are known while they send heartbeats, pools for ever."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from farm.jobs.rows import NewWorker, PoolView, WorkerView
from farm.store.link import Link

WorkerViews = list[WorkerView]
PoolViews = list[PoolView]
Names = list[str]
Jobs = list[tuple[str, str]]
"""Jobs by their ids, with their namespaces."""


QUEUES = ("waiting", "handed")
"""Where a pool's jobs wait for a worker."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The store's answer to a heartbeat.

    `unknown`: register again; `drain`: the operator wants the worker to stop. `running`: its attempts; `unclaimed`:
    seconds for which it has neither started nor ended an attempt while a job handed out to its pools waited. `fenced`
    says why its node takes no jobs; `failed`: jobs that failed there in a row in ways that may be the node's fault.
    """

    answer: Literal["ok", "drain", "unknown"]
    running: int
    unclaimed: float
    fenced: str = ""
    failed: int = 0


class WorkerRecords:
    """The registry of workers and pools."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def register(self, worker: NewWorker, *, ttl: float, resting: str = "", fenced: str = "") -> None:
        """Register a worker.

        It counts as live for `ttl` seconds after each heartbeat; `resting` says why it takes no jobs yet; `fenced` is
        the fence of its node that the worker knows, for a store that lost its data.
        """
        pools = [[pool["name"], json.dumps(pool)] for pool in worker["pools"]]
        document = {**worker, "pools": [pool["name"] for pool in worker["pools"]]}
        self._link.run(
            "register",
            worker=worker["id"],
            node=worker["node"],
            slots=worker["slots"],
            ttl=round(ttl * 1000),
            document=json.dumps(document),
            pools=json.dumps(pools),
            resting=resting,
            fenced=fenced,
            locks=worker.get("locks", ""),
        )

    def heartbeat(self, worker_id: str, *, draining: bool = False, resting: str = "", warning: str = "") -> Beat:
        """Send a heartbeat; `draining`: the worker takes no more jobs, `resting`: why it takes none for now.

        `warning` says what else is wrong there.
        """
        answer, running, unclaimed, fenced, failed = self._link.run(
            "heartbeat", worker=worker_id, draining=int(draining), resting=resting, warning=warning
        )
        return Beat(answer, running, unclaimed / 1000, fenced, failed)

    def probed(self, worker_id: str, *, node: str, wrong: str, row: int) -> str | None:
        """Record the result of a worker's health probe: `wrong` says why it failed, and fences the node.

        `row`: probes passed in a row since the worker learnt of the fence; after two of each of the node's workers
        the fence is lifted. Returns why the node is fenced now, or an empty text; None if the store does not know the
        worker (any more), so that nothing was recorded.
        """
        fenced: str | None = self._link.run("probed", worker=worker_id, node=node, wrong=wrong, row=row)
        return fenced

    def unfence(self, node: str) -> bool:
        """Lift a node's fence for the operator; False if it was not fenced."""
        return bool(self._link.run("unfence", node=node))

    def leave(self, worker_id: str) -> Names:
        """Remove a worker that stopped; release its running attempts without a charge, and return their jobs.

        Call it when none of its processes runs any more.
        """
        return list(self._link.run("leave", worker=worker_id))

    def drain(self, worker_id: str) -> bool:
        """Ask a worker to finish its attempts and stop; its next heartbeat gets the request. False if it is unknown."""
        return bool(self._link.run("drain", worker=worker_id))

    def died(self, worker_id: str, why: str) -> Names:
        """End the attempts of a worker whose process died, for the reason `why`; return their jobs.

        Call it when none of its processes runs any more, and before it may claim again.
        """
        return list(self._link.run("worker_died", worker=worker_id, why=why))

    def list(self, namespace: str = "") -> WorkerViews:
        """Return the live workers; with a `namespace`, the jobs of other namespaces are only counted."""
        ids = self._link.ask("ZRANGE", ("workers",), 0, -1)
        records = self._link.ask_many(["HGETALL", ("worker", worker_id)] for worker_id in ids)
        fenced = self._link.ask_many(["HGET", ("node", record.get("node", "")), "fenced"] for record in records)
        running = self._running()
        return [
            _worker(record, reason or "", running.get(worker_id, []), namespace)
            for worker_id, record, reason in zip(ids, records, fenced, strict=True)
            if record.get("document")
        ]

    def silent(self) -> dict[str, float]:
        """Return the nodes whose workers fell silent within the last hour, and when each was heard last (Unix seconds).

        A node with a live worker is not silent, nor is one whose workers said that they leave.
        """
        ids = self._link.ask("ZRANGE", ("workers",), 0, -1)
        rows = self._link.ask_many(["HMGET", ("worker", worker_id, "last"), "node", "seen_at"] for worker_id in ids)
        live = {worker["node"] for worker in self.list()}
        heard = sorted((int(seen_at) / 1000, node) for node, seen_at in rows if node and node not in live)
        return {node: seen_at for seen_at, node in heard}

    def is_split(self, locks: str) -> bool:
        """Whether a live worker on the same kernel has other lock files than these, as one in another container may."""
        known = self._link.ask("HGETALL", ("worker", "locks", locks.partition(" ")[0]))
        others = [worker_id for worker_id, other in known.items() if other != locks]
        return any(self._link.ask_many(["EXISTS", ("worker", worker_id)] for worker_id in others))

    def pools(self) -> PoolViews:
        """Return all pools ever registered, by name."""
        known: dict[str, str] = self._link.ask("HGETALL", ("pools",))
        resting = set(self._link.ask("SMEMBERS", ("paused",)))
        workers = self.list()
        counts = self._link.ask_many(
            ["ZCARD", ("pool", name, where)] for name in known for where in ("waiting", "handed", "running")
        )
        pools: PoolViews = []
        for position, (name, document) in enumerate(known.items()):
            waiting, handed, running = counts[3 * position : 3 * position + 3]
            serving = [worker for worker in workers if name in worker["pools"]]
            pools.append(
                {
                    "name": name,
                    "pool": json.loads(document),
                    "live_workers": len(serving),
                    "slots": sum(worker["slots"] for worker in serving if _takes_jobs(worker)),
                    "waiting": waiting + handed,
                    "running": running,
                    "paused": name in resting,
                }
            )
        return sorted(pools, key=lambda pool: pool["name"])

    def wanted_slots(self, pool: str) -> int:
        """Return how many slots a pool could use now; jobs that may not start, as of a paused build, do not count."""
        return int(self._link.run("wanted", pool=pool))

    def paused_pools(self) -> Names:
        """Return the names of the pools that are paused."""
        return list(self._link.ask("SMEMBERS", ("paused",)))

    def queue_ages(self) -> dict[str, float]:
        """Return for how many seconds the oldest job of each pool waits; one in the broker since it was sent there."""
        names = self.pool_names()
        (seconds, microseconds), *oldest = self._link.ask_many(
            [
                ["TIME"],
                *(["ZRANGE", ("pool", name, where), 0, 0, "WITHSCORES"] for name in names for where in QUEUES),
            ]
        )
        now = int(seconds) * 1000 + int(microseconds) / 1000
        ages: dict[str, float] = {}
        for position, found in enumerate(oldest):
            if found:
                name = names[position // len(QUEUES)]
                ages[name] = max(ages.get(name, 0.0), (now - float(found[1])) / 1000)
        return ages

    def pause_pool(self, pool: str, *, paused: bool) -> None:
        """Pause or resume a pool. Running jobs go on."""
        self._link.ask("SADD" if paused else "SREM", ("paused",), pool)

    def pool_names(self) -> Names:
        """Return the names of all pools ever registered."""
        return list(self._link.ask("HKEYS", ("pools",)))

    def forget_dead(self) -> None:
        """Drop the names of workers that died an hour ago."""
        now = int(self._link.ask("TIME")[0]) * 1000
        self._link.ask("ZREMRANGEBYSCORE", ("workers",), "-inf", now - 3_600_000)

    def _running(self) -> dict[str, Jobs]:
        """Return the jobs that each worker runs, with their namespaces."""
        jobs = [job for name in ["leases", "kept"] for job in self._link.ask("ZRANGE", (name,), 0, -1)]
        rows = self._link.ask_many(["HMGET", ("job", job), "worker", "namespace"] for job in jobs)
        running: dict[str, Jobs] = {}
        for job, (worker, namespace) in zip(jobs, rows, strict=True):
            running.setdefault(worker, []).append((job, namespace))
        return running


def _worker(record: Mapping[str, str], fenced: str, jobs: Jobs, namespace: str) -> WorkerView:
    registered: WorkerView = json.loads(record["document"])
    ours = [job for job, owner in jobs if owner == namespace or not namespace]
    return {
        **registered,
        "draining": record.get("draining") == "1",
        "registered_at": int(record["registered_at"]) / 1000,
        "seen_at": int(record.get("seen_at", record["registered_at"])) / 1000,
        "running": ours,
        "running_others": len(jobs) - len(ours),
        "fenced": fenced,
        "resting": record.get("resting", ""),
        "warning": record.get("warning", ""),
    }


def _takes_jobs(worker: WorkerView) -> bool:
    return not (worker["draining"] or worker["fenced"] or worker["resting"])
