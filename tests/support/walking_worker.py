"""A worker for random walks: a thread that takes the broker's messages and does with each what a draw says.

It is the real worker's counterpart to the store and to object storage, without a compiler: claim, renew, publish,
finish. What the store must answer, whatever came before, is checked at each call; what was wrong is in `Notes`.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import redis

from farm.app import Farm
from farm.artifacts.sidecar import facts
from farm.errors import FarmFault
from farm.jobs.state import FailureKind, Outcome
from farm.store import Claim, broker
from farm.targets.pools import Pool

TTL = 5.0


@dataclass(frozen=True, slots=True)
class Fate:
    """How the attempts for one cache key go: so many of a job fail in one way, the next succeeds."""

    kind: FailureKind | None = None
    times: int = 0


FATES = (
    *[Fate()] * 8,
    Fate(FailureKind.COMPILER_ERROR, 1),
    Fate(FailureKind.COMPILER_CRASH, 1),
    Fate(FailureKind.COMPILER_CRASH, 2),
    Fate(FailureKind.INTERNAL, 2),
    Fate(FailureKind.GPU_FAULT, 3),
    Fate(FailureKind.OUT_OF_MEMORY, 1),
    Fate(FailureKind.WORKER_LOST, 3),
)


def fate_of(spec: Mapping[str, Any]) -> Fate:
    """The fate of what a spec describes: the same in every walk of that salt."""
    return random.Random(f"{spec['salt']} {spec['batch']} {spec['toolchain']}").choice(FATES)


@dataclass
class Notes:
    """What workers did, and what was wrong."""

    wrong: list[str] = field(default_factory=list)
    published: Counter[str] = field(default_factory=Counter)
    """How often the sidecar of a key was written."""
    did: Counter[str] = field(default_factory=Counter)
    ended: dict[tuple[str, int], str] = field(default_factory=dict)
    """How attempts (job id, number) ended whose end the store took; no others may count."""
    storage: set[tuple[str, int]] = field(default_factory=set)
    """Attempts for which object storage was away for too long."""
    fates: dict[str, Fate] = field(default_factory=dict)
    """By job id."""


class WalkingWorker(threading.Thread):
    """One slot on a node of its own. It lives many lives: each has an id, and serves some of `pools`."""

    def __init__(
        self, farm: Farm, raw: redis.Redis, node: str, pools: Sequence[Pool], *, seed: str, lease: float, notes: Notes
    ) -> None:
        super().__init__(name=f"worker-{node}")
        self.node = node
        self.over = threading.Event()
        self._farm = farm
        self._raw = raw
        self._pools = pools
        self._lease = lease
        self._notes = notes
        self._chance = random.Random(f"{seed} {node}")
        self._lives = 0

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self._live()
        except Exception:
            self._notes.wrong.append(f"{self.name} broke: {traceback.format_exc()}")

    def _live(self) -> None:
        """From a registration to the next: until it dies, drains, is forgotten, or all is over."""
        self._lives += 1
        workers, name = self._farm.store.workers, f"{self.node}-{self._lives}"
        served = self._chance.sample(self._pools, self._chance.randint(1, len(self._pools)))
        pools = [pool.as_dict() for pool in served]
        workers.register({"id": name, "node": self.node, "slots": 1, "pools": pools}, ttl=TTL)
        while not self.over.is_set() and (beat := workers.heartbeat(name)).answer == "ok":
            if not self._serve(name, served):
                self._notes.did["died"] += 1
                if self._draw(0.5):  # a supervisor sees it
                    workers.died(name, "was killed by a draw")
                return
            if self._draw(0.01):
                break
        if self.over.is_set() or beat.answer != "unknown":
            workers.leave(name)

    def _serve(self, name: str, served: Sequence[Pool]) -> bool:
        """Take a message, if there is one soon, and see to its attempt; False where the worker is dead then."""
        queues = [broker.PREFIX + pool.name for pool in self._chance.sample(served, len(served))]
        taken: Any = self._raw.brpop(queues, timeout=0.1)
        if not taken:
            return True
        queue, message = taken
        if self._draw(0.03):
            self._notes.did["lost a message"] += 1
            return True
        if self._draw(0.05):
            self._notes.did["doubled a message"] += 1
            self._raw.lpush(queue, message)
        job_id, _, number = json.loads(message)["headers"]["id"].rpartition(".")
        (pool,) = [pool for pool in served if broker.PREFIX + pool.name == queue]
        claim = self._claim(name, job_id, int(number))
        return claim.answer != "run" or self._run(name, pool, job_id, claim)

    def _claim(self, name: str, job_id: str, number: int) -> Claim:
        jobs, nonce = self._farm.store.jobs, secrets.token_hex(8)
        claim = jobs.claim(job_id, number, nonce=nonce, worker=name, node=self.node)
        if claim.answer == "run" and self._draw(0.2):
            again = jobs.claim(job_id, number, nonce=nonce, worker=name, node=self.node)
            self._expect(again.answer == "stale" or again == claim, f"{job_id}: a claim again was answered {again}")
            rival = jobs.claim(job_id, number, nonce=secrets.token_hex(8), worker=name, node="elsewhere")
            self._expect(rival.answer == "stale", f"{job_id}: two have attempt {number}: {rival}")
        return claim

    def _run(self, name: str, pool: Pool, job_id: str, claim: Claim) -> bool:
        jobs, spec = self._farm.store.jobs, claim.order["spec"]
        described, ours = (spec["toolchain"], spec["compiler"]["recipe"]), (pool.toolchain, pool.recipe)
        self._expect(described == ours, f"{job_id} is for {described}, and came to a worker with {ours}")
        self._notes.fates[job_id] = fate = fate_of(spec)
        if fate.kind is FailureKind.WORKER_LOST or self._draw(0.03):
            return False
        asleep = self._draw(0.06)
        # An attempt after a lost one is slow, so that the one who slept wakes up meanwhile.
        slow = self._draw(0.2 if claim.attempt == 1 else 0.5)
        seconds = 2 * self._lease if asleep or slow else self._chance.choice([0.0, 0.02, 0.05, 0.1])
        unwanted, answer = threading.Event(), "ok"
        with ThreadPoolExecutor(1) as aside:
            made = aside.submit(self._make, name, job_id, claim, unwanted, seconds)
            while not wait([made], self._lease / 6).done:
                answer = jobs.renew(claim.token, job_id, phase="compiling") if not asleep else answer
                if answer == "cancel":
                    unwanted.set()
        outcome = Outcome.released() if self._draw(0.03) else made.result()
        ended = jobs.finish(job_id, claim.token, outcome)
        self._notes.did[f"{outcome.end}, {ended}"] += 1
        if ended == "ok":
            self._notes.ended[job_id, claim.attempt] = outcome.end
        self._expect(
            ended == "superseded" or answer != "lost", f"{job_id}: attempt {claim.attempt} was lost, and counts"
        )
        if self._draw(0.2):
            again = jobs.finish(job_id, claim.token, outcome)
            self._expect(again == ended, f"{job_id}: the end of attempt {claim.attempt} was {ended}, then {again}")
        return True

    def _make(self, name: str, job_id: str, claim: Claim, unwanted: threading.Event, seconds: float) -> Outcome:
        """What a compiler would do, by the key's fate; a program is published as ever."""
        if unwanted.wait(seconds):
            return Outcome.cancelled()
        fate, artifacts = fate_of(claim.order["spec"]), self._farm.artifacts
        try:
            if found := artifacts.lookup(["main"], claim.key):
                return Outcome.success(facts(found), hit=True)
            if fate.kind and claim.previous.count(fate.kind) < fate.times:
                return Outcome.failure(fate.kind, "as drawn")
            digest, size = artifacts.put_blob_bytes(f"{claim.key} by {name}".encode())
            published = artifacts.publish("main", self._sidecar(name, job_id, claim, digest, size))
        except FarmFault as error:
            self._notes.storage.add((job_id, claim.attempt))
            return Outcome.failure(FailureKind.STORAGE, error.message)
        is_ours = (published["job"], published["attempt"]) == (job_id, claim.attempt)
        self._notes.published[claim.key] += is_ours
        return Outcome.success(facts(published), hit=not is_ours)

    def _sidecar(self, name: str, job_id: str, claim: Claim, digest: str, size: int) -> dict[str, Any]:
        return {
            "schema": 1,
            "key": claim.key,
            "namespace": "main",
            "identifier": claim.order["identifier"],
            "spec": claim.order["spec"],
            "blobs": {"program": {"path": "program", "digest": digest, "size": size}},
            "toolchain": claim.order["spec"]["toolchain"],
            "device": {"arch": "cpu"},
            "created": "2026-01-01T00:00:00Z",
            "job": job_id,
            "attempt": claim.attempt,
            "worker": name,
        }

    def _draw(self, share: float) -> bool:
        return self._chance.random() < share

    def _expect(self, holds: bool, wrong: str) -> None:
        if not holds:
            self._notes.wrong.append(wrong)
