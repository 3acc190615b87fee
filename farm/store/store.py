"""Store: the records of the job store, one attribute each, on one connection."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

from redis.exceptions import ResponseError

from farm.errors import FarmFault, UsageError
from farm.jobs.state import POLICIES
from farm.settings import Settings
from farm.store.build_records import BuildRecords, EventStreams
from farm.store.index_records import KEPT, History, IndexRecords, SignedRefs
from farm.store.job_records import JobRecords, Wakeups
from farm.store.link import Link, key, lots
from farm.store.worker_records import WorkerRecords

LOT = 100
"""Records that are asked about at once."""


class AuditRecords:
    """Finds records that contradict each other; that happens only if a script has a bug."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def builds(self) -> Iterator[tuple[str, str, str]]:
        """Yield namespace, build and one sentence for each contradiction about a build."""
        for namespace in self._link.ask("SMEMBERS", ("namespaces",)):
            ids = self._link.ask("ZRANGE", ("builds", namespace), 0, -1)
            for build_id, problem in self._asked("build", ids):
                yield namespace, build_id, problem

    def jobs(self) -> Iterator[tuple[str, str, str]]:
        """Yield namespace, job and one sentence for each contradiction about a job."""
        for job_id, problem in self._asked("job", self._job_ids()):
            yield self._link.ask("HGET", ("job", job_id), "namespace") or "", job_id, problem

    def count(self) -> dict[str, int]:
        """Return the numbers of builds and jobs in the store."""
        namespaces = self._link.ask("SMEMBERS", ("namespaces",))
        builds = self._link.ask_many(["ZCARD", ("builds", namespace)] for namespace in namespaces)
        return {"builds": sum(builds), "jobs": sum(1 for _ in self._job_ids())}

    def _asked(self, record: str, ids: Iterator[str] | list[str]) -> Iterator[tuple[str, str]]:
        for lot in lots(ids, LOT):
            answers = self._link.run_many(f"audit_{record}", [{record: one} for one in lot])
            for one, problems in zip(lot, answers, strict=True):
                for problem in problems:
                    yield one, problem

    def _job_ids(self) -> Iterator[str]:
        cursor, prefix, seen = "0", key("job", ""), set[str]()
        while True:
            cursor, names = self._link.ask("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000)
            for name in names:
                job_id = name.removeprefix(prefix)
                # A scan may return a key twice.
                if ":" not in job_id and job_id not in seen:
                    seen.add(job_id)
                    yield job_id
            if str(cursor) == "0":
                return


EVENTS_KEPT = 50_000
"""About the number of events that the stream of a build keeps."""


class Leader:
    """The leader's lease, which saves the control planes double work. Two leaders do no harm."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def lead(self, process: str, seconds: float) -> bool:
        """Take or renew the lease for `seconds`; return whether `process` has it."""
        return bool(self._link.run("lead", process=process, ttl=round(seconds * 1000)))

    def resign(self, process: str) -> None:
        """Release the lease."""
        self._link.run("resign", process=process)


class ControlPlanes:
    """What the control planes say of themselves, so that each one's pages know of all."""

    def __init__(self, link: Link) -> None:
        self._link = link

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
        self.now = link.now
        self.builds = BuildRecords(link)
        self.jobs = JobRecords(link)
        self.workers = WorkerRecords(link)
        self.events = EventStreams(link, self.epoch)
        self.leader = Leader(link)
        self.planes = ControlPlanes(link)
        self.history = History(link)
        self.index = IndexRecords(link, self.history, self.epoch)
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
            raise UsageError("no address of Redis is set", hint="set FARM_REDIS_URL, or use `farm run`")
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
            raise FarmFault(
                f"Redis at {self.address} may evict jobs: its maxmemory-policy is {policy}",
                hint="set `maxmemory-policy noeviction` (CONFIG SET maxmemory-policy noeviction)",
            )

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

    def epoch(self) -> str:
        """Return the store's epoch, which changes with each restart, failover or loss of the server."""
        server = self._link.ask("INFO", "server")["run_id"]
        epoch: str = self._link.run("epoch", server=server, fresh=secrets.token_hex(4))
        return epoch

    def close(self) -> None:
        """Close the connections."""
        self._link.close()
