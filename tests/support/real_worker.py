"""A worker in this process: real executor and sealed children, for all toolchains of the node; no broker between."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from farm.app import Farm
from farm.compiling.attempt import Attempt
from farm.node.survey import survey, with_other_toolchains
from farm.settings import Settings
from farm.targets.pools import Pool
from tests.support.helpers import in_a_thread


def with_toolchains(settings: Settings, pythons: Sequence[str]) -> tuple[Farm, list[Pool]]:
    """Return a farm whose executor has these interpreters and its own, and the pools of them all."""
    found = survey(settings)
    resolved = with_other_toolchains(settings.model_copy(update={"other_toolchains": tuple(pythons)}), found)
    farm = Farm(resolved)
    farm.store.workers.register(
        {"id": "w1", "node": "n1", "slots": 1, "pools": [pool.as_dict() for pool in found.pools]}, ttl=3600
    )
    return farm, found.pools


@contextmanager
def at_work(farm: Farm, pools: Sequence[Pool]) -> Iterator[None]:
    """Run and finish every build that is submitted while the block runs."""

    def go_on(over: threading.Event) -> None:
        while not over.wait(0.05):
            for pool in pools:
                for job_id, number in farm.store.jobs.hand_out(pool.name, 1):
                    _run(farm, job_id, number)
            for row in farm.store.builds.unreported():
                farm.build_finisher.finish(row["id"])

    with in_a_thread(go_on):
        yield


def _run(farm: Farm, job_id: str, number: int) -> None:
    claim = farm.store.jobs.claim(job_id, number, nonce=secrets.token_hex(4), worker="w1", node="n1")
    assert claim.order
    attempt = Attempt(
        job_id,
        number,
        claim.token,
        claim.order,
        claim.limits,
        claim.namespace,
        claim.key,
        build=claim.build,
        worker="w1",
        previous=claim.previous,
    )
    outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
    assert farm.store.jobs.finish(job_id, claim.token, outcome) == "ok"
