"""Store: the records of the job store, one attribute each, on one connection; those of workers, pools, index, audit."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redis.exceptions import ResponseError

from farm.errors import FarmFault, UsageError
from farm.jobs.estimate import Compile
from farm.jobs.facts import ArtifactFacts, ComparableWork
from farm.jobs.rows import NewWorker, PoolView, WorkerView
from farm.jobs.state import POLICIES
from farm.settings import Settings
from farm.store.build_records import BuildRecords, EventStreams
from farm.store.job_records import JobRecords, Wakeups, facts_of, indexed
from farm.store.link import Link, Records, key
from farm.units import lots

WorkerViews = list[WorkerView]
PoolViews = list[PoolView]
Names = list[str]
Jobs = list[tuple[str, str]]  # Jobs by their ids, with their namespaces.
QUEUES = ("waiting", "handed")  # Where a pool's jobs wait for a worker.


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


class WorkerRecords(Records):
    """The registry of workers and pools."""

    def register(self, worker: NewWorker, *, ttl: float, resting: str = "", fenced: str = "") -> None:
        """Register a worker.

        It counts as live for `ttl` seconds after each heartbeat; `resting` says why it takes no jobs yet; `fenced` is
        the fence of its node that the worker knows, for a store that lost its data.
        """
        pools = json.dumps([[pool["name"], json.dumps(pool)] for pool in worker["pools"]])
        document = json.dumps({**worker, "pools": [pool["name"] for pool in worker["pools"]]})
        self._link.run(
            "register", ttl=round(ttl * 1000), document=document, pools=pools, resting=resting, fenced=fenced
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
        records = self._link.ask_many([["HGETALL", ("worker", worker_id)] for worker_id in ids])
        fenced = self._link.ask_many([["HGET", ("node", record.get("node", "")), "fenced"] for record in records])
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
        rows = self._link.ask_many([["HMGET", ("worker", worker_id, "last"), "node", "seen_at"] for worker_id in ids])
        live = {worker["node"] for worker in self.list()}
        heard = sorted((int(seen_at) / 1000, node) for node, seen_at in rows if node and node not in live)
        return {node: seen_at for seen_at, node in heard}

    def pools(self) -> PoolViews:
        """Return all pools ever registered, by name."""
        known, resting = self._link.ask_many([["HGETALL", ("pools",)], ["SMEMBERS", ("paused",)]])
        workers, names = self.list(), sorted(known)
        asked = (("ZCARD", "waiting"), ("ZCARD", "handed"), ("ZCARD", "running"), ("SCARD", "left"))
        counts = iter(self._link.ask_many([[count, ("pool", name, of)] for name in names for count, of in asked]))
        takers = [each for each in workers if not (each["draining"] or each["fenced"] or each["resting"])]
        pools: PoolViews = []
        for name, waiting, handed, running, left in zip(names, counts, counts, counts, counts, strict=True):
            pools.append(
                {
                    "name": name,
                    "pool": json.loads(known[name]),
                    "live_workers": sum(name in worker["pools"] for worker in workers),
                    "slots": sum(worker["slots"] for worker in takers if name in worker["pools"]),
                    "waiting": waiting + handed,
                    "running": running - left,
                    "uploading": left,
                    "paused": name in resting,
                }
            )
        return pools

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
            [["TIME"], *(["ZRANGE", ("pool", name, where), 0, 0, "WITHSCORES"] for name in names for where in QUEUES)]
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
        self._link.ask("ZREMRANGEBYSCORE", ("workers",), "-inf", 1000 * (self._link.now() - 3600))

    def _running(self) -> dict[str, Jobs]:
        jobs = [job for name in ["leases", "kept"] for job in self._link.ask("ZRANGE", (name,), 0, -1)]
        rows = self._link.ask_many([["HMGET", ("job", job), "worker", "namespace"] for job in jobs])
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


KEPT = 200  # Compiles of one sort that are remembered.


class History(Records):
    """Past durations by sort (`farm.jobs.estimate.comparable`), for each namespace."""

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
        answers = self._link.ask_many([["ZRANGE", name, 0, -1] for _, name in wanted])
        found: dict[str, list[Compile]] = {sort: [] for sort, _ in wanted}
        for (sort, _), members in zip(wanted, answers, strict=True):
            for member in members:
                _, model, size, seconds = member.split(" ")
                found[sort].append(Compile(model, int(size), float(seconds)))
        return found


def _member(facts: ArtifactFacts, work: ComparableWork) -> str:
    """As `remember` in `finish.lua` writes it."""
    return f"{facts['key']} {work['model']} {work['size']} {facts['seconds']:.14g}"


LOT = 1000  # Artifacts that are put at once.


class IndexRecords(Records):
    """Facts by cache key, for each namespace. Object storage is the record: missing entries are looked up there."""

    def put(self, namespace: str, cache_key: str, facts: ArtifactFacts) -> None:
        """Record a complete artifact."""
        self._link.ask("HSET", ("index", namespace, "facts"), cache_key, indexed(facts))

    def get_many(self, namespace: str, cache_keys: Sequence[str]) -> dict[str, ArtifactFacts]:
        """Return the facts of the known ones among these artifacts."""
        parts = list(lots(cache_keys, LOT))
        answers = self._link.ask_many([["HMGET", ("index", namespace, "facts"), *lot] for lot in parts], binary=True)
        return {
            cache_key: facts_of(facts)
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
        epoch, history = self._link.epoch(), History(self._link)
        gone = self.keys(namespace)
        count = 0
        for lot in lots(artifacts, LOT):
            pairs = [part for cache_key, facts in lot for part in (cache_key, indexed(facts))]
            self._link.ask("HSET", ("index", namespace, "facts"), *pairs)
            history.remember(namespace, (facts for _, facts in lot))
            gone.difference_update(pairs[::2])
            count += len(lot)
        for some in lots(gone, LOT):
            self.remove(namespace, some)
        self._link.run("complete_index", namespace=namespace, begun=epoch)
        return count


class SignedRefs(Records):
    """The newest version that was signed of each ref, by `NAMESPACE/TAG`: object storage may answer with older ones."""

    def remember(self, path: str, version: int) -> None:
        """Record a version that was written. A newer one stays."""
        self._link.ask("ZADD", ("signed",), "GT", version, path)

    def version(self, path: str) -> int:
        """Return the newest version of a ref; 0 if none is known."""
        return int(float(self._link.ask("ZSCORE", ("signed",), path) or 0))

    def forget(self, path: str = "") -> None:
        """Forget a ref, or all."""
        self._link.ask(*(["ZREM", ("signed",), path] if path else ["DEL", ("signed",)]))


AUDITED = 100  # Records that are asked about at once.


class AuditRecords(Records):
    """Finds records that contradict each other; that happens only if a script has a bug."""

    def builds(self) -> Iterator[tuple[str, str]]:
        """Yield a build and one sentence for each contradiction about one."""
        for namespace in self._link.ask("SMEMBERS", ("namespaces",)):
            yield from self._asked("build", self._link.ask("ZRANGE", ("builds", namespace), 0, -1))

    def jobs(self) -> Iterator[tuple[str, str]]:
        """Yield a job and one sentence for each contradiction about one."""
        return self._asked("job", self._job_ids())

    def count(self) -> dict[str, int]:
        """Return the numbers of builds and jobs in the store."""
        namespaces = self._link.ask("SMEMBERS", ("namespaces",))
        builds = self._link.ask_many([["ZCARD", ("builds", namespace)] for namespace in namespaces])
        return {"builds": sum(builds), "jobs": len(self._job_ids())}

    def _asked(self, record: str, ids: Iterable[str]) -> Iterator[tuple[str, str]]:
        for lot in lots(ids, AUDITED):
            answers = self._link.run_many(f"audit_{record}", [{record: one} for one in lot])
            for one, problems in zip(lot, answers, strict=True):
                for problem in problems:
                    yield one, problem

    def _job_ids(self) -> set[str]:
        prefix = key("job", "")
        found = (name.removeprefix(prefix) for name in self._link.names(f"{prefix}*"))
        return {job_id for job_id in found if ":" not in job_id}


EVENTS_KEPT = 50_000  # About the number of events that the stream of a build keeps.


class ControlPlanes(Records):
    """The leader's lease, which saves the control planes double work: two leaders do no harm. And what each says of
    itself, so that each one's pages know of all.
    """

    def lead(self, process: str, seconds: float) -> bool:
        """Take or renew the lease for `seconds`; return whether `process` has it."""
        return bool(self._link.run("lead", process=process, ttl=round(seconds * 1000)))

    def resign(self, process: str) -> None:
        """Release the lease."""
        self._link.run("resign", process=process)

    def report(self, name: str, away: str) -> None:
        """Note that a control plane is there, and what it cannot reach (empty: nothing)."""
        now = int(self._link.now() * 1000)
        self._link.ask("HSET", ("planes",), name, json.dumps([now, away]))

    def leave(self, name: str) -> None:
        """Forget a control plane that ends."""
        self._link.ask("HDEL", ("planes",), name)

    def forget_dead(self) -> None:
        """Drop control planes that have been silent for an hour."""
        for name, (at, _) in self.list().items():
            if at < self._link.now() - 3600:
                self.leave(name)

    def list(self) -> dict[str, tuple[float, str]]:
        """Return by name when each was heard last (Unix seconds), and what it said that it cannot reach."""
        said = {name: json.loads(text) for name, text in self._link.ask("HGETALL", ("planes",)).items()}
        return {name: (at / 1000, away) for name, (at, away) in sorted(said.items())}


class Store:
    """The records of the job store, one attribute each. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.now, self.epoch = link.now, link.epoch
        self.builds = BuildRecords(link)
        self.jobs = JobRecords(link)
        self.workers = WorkerRecords(link)
        self.events = EventStreams(link)
        self.planes = ControlPlanes(link)
        self.history = History(link)
        self.index = IndexRecords(link)
        self.signed = SignedRefs(link)
        self.wakeups = Wakeups(link)
        self.audit = AuditRecords(link)

    @classmethod
    def connect(cls, settings: Settings) -> Store:
        """Return the store at `redis_url`. Connects at its first use.

        Raises UsageError if no address is set, and FarmFault if kombu could not use it: Celery fails only at work.
        """
        url = settings.redis_url.get_secret_value()
        if not url:
            raise UsageError("no address of Redis is set", hint="set FARM_REDIS_URL, or use `farm run` or `farm up`")
        if url.startswith("sentinel"):
            from farm.store.broker import require_sentinels

            require_sentinels()
        attempts = ", ".join(f"{kind.value} = {policy.attempts}" for kind, policy in POLICIES.items())
        blames = ", ".join(f"{kind.value} = true" for kind, policy in POLICIES.items() if policy.node)
        constants = {
            "LEASE": settings.lease_seconds * 1000,
            "KEEP": settings.keep_days * 86_400_000,
            "HOLD": settings.outbox_hours * 3_600_000,
            "RETRY": settings.retry_delay * 1000,
            "EVENTS": EVENTS_KEPT,
            "HISTORY": KEPT,
        }
        lines = [f"local {name} = {round(value)}" for name, value in constants.items()]
        tables = [f"local ATTEMPTS = {{{attempts}}}", f"local BLAMES_NODE = {{{blames}}}"]
        return cls(Link(url, "\n".join([*lines, *tables])))

    def next_moment(self) -> float:
        """Return the time by the server's clock (Unix seconds), but later than all moments that were returned before.

        Submissions, and what people choose, are ordered by it, also where somebody set the clock back.
        """
        return int(self._link.run("next_moment", now=round(self.now() * 1000))) / 1000

    @property
    def address(self) -> str:
        """Host and port of the server, for messages."""
        return self._link.address

    def check(self) -> None:
        """Refuse a server that would lose work: raises FarmFault that says what to set.

        Raises StoreUnavailable if it is away or refuses writes: it is full, a replica, or cannot write to its disk.
        """
        config = self._link.config("save", "appendonly", "maxmemory-policy")
        if config.get("appendonly") == "no" and config.get("save") == "":
            raise FarmFault(
                f"Redis at {self.address} keeps nothing on disk, so a restart would lose every job",
                hint="set `appendonly yes` in its configuration (CONFIG SET appendonly yes)",
            )
        policy = config.get("maxmemory-policy", "noeviction")
        if policy != "noeviction":
            hint = "set `maxmemory-policy noeviction` (CONFIG SET maxmemory-policy noeviction)"
            raise FarmFault(f"Redis at {self.address} may evict jobs: its maxmemory-policy is {policy}", hint=hint)

        self._link.ask("SETRANGE", ("nothing",), 0, "")  # writes nothing, but is refused like a write

    def make_users(self, rules: str) -> tuple[dict[str, str], bool]:
        """Make those users of an ACL file that are missing; return their passwords, and whether a restart keeps them.

        Raises StoreUnavailable if this user may not.
        """
        known = {line.split()[1] for line in self._link.ask("ACL", "LIST")}
        users = {name: words for _, name, *words in map(str.split, rules.splitlines()) if name not in known}
        passwords = {name: secrets.token_hex(24) for name in users}
        for name, words in users.items():
            self._link.ask("ACL", "SETUSER", name, *words, f">{passwords[name]}")
        try:
            if passwords:
                self._link.ask("ACL", "SAVE")
        except ResponseError:  # It has no ACL file, or may not write it.
            return passwords, False
        return passwords, True

    def close(self) -> None:
        """Close the connections."""
        self._link.close()
