"""Loads that may not hurt others: a huge build and small ones at once."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median

import pytest

from tests.chaos.conftest import Rigs
from tests.chaos.report import Fault
from tests.chaos.rig import pause
from tests.support.helpers import wait_until

SEED = 5


@pytest.mark.fault("fair")
def test_small_builds_behind_a_huge_one(fault: Fault, rig: Rigs) -> None:
    """Small builds come at any moment of the jobs that run, and wait from the record of their last job on.

    All times are the store's. A job length is the time from one claim of a slot to its next, for the jobs that ran
    while the small build waited: what the machine adds to each job is in it, and nothing is added to two of them.
    """
    farm, chance, seconds = rig(), random.Random(SEED), 1.0
    client = farm.serve()
    workers = farm.workers("n1", "n2", "n3", "n4", slots=1)
    farm.script({"": [{"seconds": seconds}]})
    huge = farm.submit(client, fault.count.jobs)
    wait_until(lambda: len(farm.running(huge)) == len(workers), timeout=60, message="every slot is at work")
    small, waiting = [], []
    for _ in range(fault.count.builds):
        pause(chance.uniform(0, 2 * seconds))
        waiting.append(farm.store.builds.get(huge)["counts"]["queued"])
        small.append([farm.store.jobs.get(cell["job"]) for cell in farm.wait(farm.submit(client, 3))])
    client.cancel(huge)
    done = [farm.store.jobs.get(cell["job"]) for cell in farm.wait(huge) if cell["state"] == "succeeded"]
    claims: dict[str, list[float]] = {}
    for job in [*done, *(job for build in small for job in build)]:
        for one in job["attempts"]:
            claims.setdefault(one["node"], []).append(one["started_at"])
    turns = [turn for starts in claims.values() for turn in pairwise(sorted(starts))]
    lengths, first, third = [], [], []
    for build in small:
        since = max(job["created_at"] for job in build)
        begun = sorted(job["attempts"][0]["started_at"] for job in build)
        lengths.append(median(end - start for start, end in turns if start < begun[0] and end > since))
        first.append((begun[0] - since) / lengths[-1])
        third.append((begun[2] - since) / lengths[-1])
    fault.measured(
        waiting_at_least=min(waiting),
        job_length_seconds=median(lengths),
        first_job_after_median=median(first),
        first_job_after_max=max(first),
        third_job_after_median=median(third),
        third_job_after_max=max(third),
        **farm.ledger(),
    )
    assert max(first) <= 2, f"the first job started after {max(first):.2f} job lengths"
