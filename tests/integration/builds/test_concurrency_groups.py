"""Concurrency groups: a newer build takes the place of what waits in older ones, however they come."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from farm.app import Farm
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from tests.support.api_farm import MANIFEST, POOL, succeed, work

GROUP = "concurrency: {group: nightly, cancel-in-progress: true}\n"


def again(frozen: Frozen, extra: str = GROUP, *, salt: str = "", labels: dict[str, str] | None = None) -> Frozen:
    """The same submission with an id of its own, and other keys with another salt."""
    text = MANIFEST + extra + (f"salt: {salt}\n" if salt else "")
    made = {**frozen.submission, "build_id": f"b-{secrets.token_hex(8)}", "manifest": text, "labels": labels or {}}
    return Frozen(made, frozen.files)


def states(farm: Farm, build_id: str) -> list[str]:
    return sorted(cell["state"] for cell in farm.build_reader.cells("main", build_id))


def claim_one(farm: Farm) -> tuple[str, Any]:
    (job, attempt), *_ = farm.store.jobs.hand_out(POOL.name, 1)
    return job, farm.store.jobs.claim(job, attempt, nonce="n", worker="w1", node="n1")


def test_a_newer_build_cancels_what_waits_in_an_older_one_and_lets_run_what_runs(
    farm: Farm, client: FarmClient, frozen: Frozen, redis_url: str
) -> None:
    old = client.submit(again(frozen, salt="old"))["id"]
    job, claim = claim_one(farm)
    new = client.submit(again(frozen, salt="new"))["id"]
    assert states(farm, old) == ["cancelled", "running"]
    assert states(farm, new) == ["queued", "queued"]
    (gone,) = [cell for cell in client.cells(old) if cell["state"] == "cancelled"]
    assert gone["message"] == f"replaced by build {new}, a newer one of the group nightly"
    made = succeed(farm)(job, claim.order, claim.key)
    assert farm.store.jobs.finish(job, claim.token, made) == "ok"
    farm.build_finisher.finish(old)
    verdict = client.build(old)["verdict"]
    assert verdict and (verdict["exit_code"], verdict["text"]) == (1, "1 of 2 cells succeeded, 1 cancelled")
    assert work(farm) == 2
    farm.build_finisher.finish(new)
    assert client.build(new)["verdict"]["exit_code"] == 0
    last = client.submit(again(frozen, salt="last"))["id"]
    with redis.Redis.from_url(redis_url, decode_responses=True) as connection:
        assert connection.zrange("{farm}:group:main:nightly", 0, -1) == [last], "what has ended leaves the group"


def test_a_job_that_the_newer_build_needs_too_is_not_lost(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    old = client.submit(again(frozen))["id"]
    new = client.submit(again(frozen))["id"]
    assert (states(farm, old), states(farm, new)) == (["cancelled"] * 2, ["queued"] * 2)
    assert work(farm) == 2
    assert states(farm, new) == ["succeeded"] * 2


@pytest.mark.parametrize(
    ("extra", "labels", "cancelled"),
    [
        ("", {}, False),
        ("concurrency: nightly\n", {}, False),
        ("concurrency: {group: other, cancel-in-progress: true}\n", {}, False),
        ("concurrency: {group: nightly, per: branch, cancel-in-progress: true}\n", {"branch": "two"}, False),
        ("concurrency: {group: nightly, per: branch, cancel-in-progress: true}\n", {"branch": "one"}, True),
    ],
)
def test_only_builds_of_the_same_group_are_replaced(
    farm: Farm, client: FarmClient, frozen: Frozen, extra: str, labels: dict[str, str], cancelled: bool
) -> None:
    per = "concurrency: {group: nightly, per: branch, cancel-in-progress: true}\n" if labels else GROUP
    old = client.submit(again(frozen, per, labels={"branch": "one"}))["id"]
    client.submit(again(frozen, extra, labels=labels))
    assert (states(farm, old) == ["cancelled"] * 2) is cancelled


def test_of_many_that_come_at_once_one_is_left(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    sent = [again(frozen, salt=f"s{number}") for number in range(6)]
    client.submit(sent[0])
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda each: farm.builds.submit("main", each.submission, by="me"), sent[1:]))
    left = [each.build_id for each in sent if "queued" in states(farm, each.build_id)]
    newest = max(client.builds(), key=lambda build: (build["created_at"], build["id"]))
    assert left == [newest["id"]]
    assert states(farm, left[0]) == ["queued"] * 2
    client.submit(sent[0])
    assert states(farm, left[0]) == ["queued"] * 2, "an old request that is repeated replaces nothing"


def test_a_submission_that_is_repeated_replaces_what_it_did_not_come_to(
    farm: Farm, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = client.submit(again(frozen, salt="old"))["id"]
    new = again(frozen, salt="new")
    with monkeypatch.context() as patched:
        patched.setattr(farm.admission, "replace_older", lambda build: None)  # Its server died before.
        client.submit(new)
    assert states(farm, old) == ["queued"] * 2
    client.submit(new)
    assert (states(farm, old), states(farm, new.build_id)) == (["cancelled"] * 2, ["queued"] * 2)


def test_groups_survive_the_loss_of_redis(farm: Farm, client: FarmClient, frozen: Frozen, redis_url: str) -> None:
    old = client.submit(again(frozen, salt="old"))["id"]
    claim_one(farm)
    new = client.submit(again(frozen, salt="new"))["id"]
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    row: Any = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [POOL.as_dict()]}
    farm.store.workers.register(row, ttl=600)
    farm.admission.resume()
    assert states(farm, old) == ["cancelled"] * 2
    assert states(farm, new) == ["queued"] * 2


def test_a_retry_replaces_nothing(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    old = client.submit(again(frozen, salt="old"))["id"]
    new = client.submit(again(frozen, salt="new"))["id"]
    farm.build_finisher.finish(old)
    client.retry(old)
    assert states(farm, new) == ["queued"] * 2


def test_a_label_that_is_named_like_a_record_joins_no_other_group(
    farm: Farm, client: FarmClient, frozen: Frozen
) -> None:
    per = "concurrency: {group: nightly, per: branch%s}\n"
    old = client.submit(again(frozen, per % "", labels={"branch": "one"}))["id"]
    client.submit(again(frozen, per % "", labels={"branch": "one:cancels"}))
    client.submit(again(frozen, per % "", labels={"branch": "one"}))
    assert states(farm, old) == ["queued", "queued"], "nobody asked to replace it"
