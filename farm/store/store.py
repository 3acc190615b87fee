"""Store: the records of the job store, one attribute each, on one connection."""

from __future__ import annotations

import secrets

from farm.errors import FarmFault, UsageError
from farm.jobs.state import POLICIES
from farm.settings import Settings
from farm.store.audit_records import AuditRecords
from farm.store.build_records import BuildRecords, EventStreams
from farm.store.index_records import KEPT, History, IndexRecords
from farm.store.job_records import JobRecords, Wakeups
from farm.store.link import Link
from farm.store.worker_records import WorkerRecords

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
        self.history = History(link)
        self.index = IndexRecords(link, self.history, self.epoch)
        self.wakeups = Wakeups(link)
        self.audit = AuditRecords(link)

    @classmethod
    def connect(cls, settings: Settings) -> Store:
        """Return the store at `redis_url`. Connects at its first use; raises UsageError if no address is set."""
        url = settings.redis_url.get_secret_value()
        if not url:
            raise UsageError("no address of Redis is set", hint="set FARM_REDIS_URL, or use `farm run`")
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

    def epoch(self) -> str:
        """Return the store's epoch, which changes with each restart, failover or loss of the server."""
        server = self._link.ask("INFO", "server")["run_id"]
        epoch: str = self._link.run("epoch", server=server, fresh=secrets.token_hex(4))
        return epoch

    def close(self) -> None:
        """Close the connections."""
        self._link.close()
