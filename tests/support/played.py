"""A worker with several toolchains that a test plays: no compiler runs, so 64 versions cost a second."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from farm.app import Farm
from farm.artifacts.sidecar import facts, validate
from farm.client.client import FarmClient
from farm.extension import publishing
from farm.jobs.state import FailureKind, Outcome
from farm.results.report import Report
from farm.results.speed import Comparison
from farm.targets.pools import Pool
from tests.support.api_farm import POOL
from tests.support.helpers import in_a_thread

Says = Callable[[Mapping[str, Any]], "Made | FailureKind"]
"""Says about a work order what comes of it."""


@dataclass(frozen=True)
class Made:
    """What the compiler makes: the program's bytes, its error, seconds, and its speed as a ratio to the other's."""

    size: int = 100
    error: float = 1e-7
    latency: float = 1e-3
    compile_seconds: float = 10.0
    ratio: float | None = 1.0
    verdict: str = "slower"


def toolchain(version: str) -> Pool:
    """The pool of a version of ONNX Runtime."""
    return replace(POOL, toolchain=f"onnxruntime{version}-{version.replace('.', '').zfill(8)[-8:]}")


@dataclass
class Player:
    """Runs whatever waits in the pools of one node."""

    farm: Farm
    pools: Sequence[Pool]
    says: Says = lambda order: Made()
    compiled: list[tuple[str, str]] = field(default_factory=list)
    """Identifier and toolchain of every compile."""

    def join(self, *pools: Pool) -> None:
        """Register the node with these pools, next to those that it has."""
        self.pools = [*self.pools, *pools]
        worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2}
        self.farm.store.workers.register({**worker, "pools": [pool.as_dict() for pool in self.pools]}, ttl=600)

    def work(self) -> None:
        """Run every job that waits."""
        for pool in self.pools:
            for job_id, attempt in self.farm.store.jobs.hand_out(pool.name, 100):
                claim = self.farm.store.jobs.claim(job_id, attempt, nonce=secrets.token_hex(4), worker="w1", node="n1")
                outcome = self._outcome(claim.order, claim.key, claim.build, job_id, claim.namespace)
                assert self.farm.store.jobs.finish(job_id, claim.token, outcome) == "ok"

    def finish(self, client: FarmClient, build_id: str) -> Report:
        """Run a build to its end and return its report."""
        self.work()
        self.farm.build_finisher.finish(build_id)
        return client.report(build_id)

    def _outcome(self, order: Mapping[str, Any], key: str, build: str, job_id: str, namespace: str) -> Outcome:
        said = self.says(order)
        self.compiled.append((order["identifier"], order["spec"]["toolchain"]))
        if isinstance(said, FailureKind):
            return Outcome.failure(said, "as played")
        program, size = self.farm.artifacts.put_blob_bytes(key.encode().ljust(said.size)[: said.size])
        log, log_size = self.farm.artifacts.put_blob_bytes(b"compiled\n")
        against = order.get("against") if said.ratio else None
        turns = Comparison(said.ratio or 1.0, (said.ratio or 1.0) - 0.01, (said.ratio or 1.0) + 0.01, said.verdict)
        sidecar = {
            "schema": 1,
            "key": key,
            "namespace": namespace,
            "identifier": order["identifier"],
            "spec": order["spec"],
            "blobs": {
                "program": {"path": "program.onnx", "digest": program, "size": size},
                "log": {"path": "log.txt", "digest": log, "size": log_size},
            },
            "toolchain": order["spec"]["toolchain"],
            "device": {"arch": "cpu"},
            "verification": {
                "reference": "onnxruntime",
                "samples": 8,
                "errors": {"y": said.error},
                "spread": {"y": 1.0},
            },
            "measurements": {
                "latency": {"median": said.latency},
                "against": {"key": against, **turns.as_dict()} if against else None,
            },
            "phases": {"compiling": said.compile_seconds},
            "node": "n1",
            "created": datetime.now(UTC).isoformat(timespec="microseconds"),
            "build": build,
            "job": job_id,
        }
        self.farm.artifacts.publish(namespace, sidecar, sign=publishing(self.farm.settings))
        self.farm.store.index.put(namespace, key, facts(validate(sidecar)))
        return Outcome.success(facts(validate(sidecar)), log=log)


@contextmanager
def played_to_the_end(player: Player) -> Iterator[None]:
    """Run and finish every build that is submitted while the block runs, as workers and control plane do."""

    def go_on(over: threading.Event) -> None:
        while not over.wait(0.02):
            try:
                player.work()
            except Exception:
                for row in player.farm.store.builds.unreported():
                    player.farm.store.builds.cancel(row["id"])
                raise
            for row in player.farm.store.builds.unreported():
                player.farm.build_finisher.finish(row["id"])

    with in_a_thread(go_on):
        yield
