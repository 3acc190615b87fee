"""What operators have to see to: who fell silent, who cannot reach what, other releases, slow disks."""

from __future__ import annotations

import threading

import pytest

import farm
from farm.builds.reading import troubles
from farm.control.loops import Presence
from farm.errors import StorageAway
from farm.node import health
from farm.node.health import DiskWatch
from farm.settings import Settings
from farm.store import Store
from tests.support.helpers import in_a_thread, wait_until
from tests.support.jobs import join_pool
from tests.support.scripted_pool import POOL


def of(store: Store, settings: Settings, who: str) -> list[str]:
    return [line for line in troubles(store, settings) if who in line]


def test_a_node_that_falls_silent_is_named_until_it_is_back_or_another_hour_has_passed(
    store: Store, farm_settings: Settings
) -> None:
    join_pool(store, "w1", node="gone", ttl=0.001)
    wait_until(lambda: of(store, farm_settings, "node gone has been silent for "), message="it is missed")
    assert "gone" not in {worker["node"] for worker in store.workers.list()}
    # It is back under another name: both are said, the jobs are the new one's.
    join_pool(store, "w2", node="renamed")
    assert "has another name now" in of(store, farm_settings, "node gone")[0]
    assert of(store, farm_settings, "renamed") == []
    store.workers.forget_dead()
    assert of(store, farm_settings, "node gone"), "upkeep forgets it only after an hour"
    join_pool(store, "w3", node="gone")
    assert of(store, farm_settings, "gone") == []
    for worker in ("w1", "w2", "w3"):
        store.workers.leave(worker)
    assert of(store, farm_settings, "gone") == of(store, farm_settings, "renamed") == []


def test_a_worker_of_another_release_and_one_with_a_slow_disk_are_named(
    store: Store, farm_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"id": "w1", "node": "old", "slots": 1, "pools": [POOL.as_dict()]}
    store.workers.register({**document, "versions": {"farm": "0.0.1"}}, ttl=60.0)
    assert of(store, farm_settings, f"node old runs release 0.0.1 of the farm, this control plane {farm.__version__}")
    store.workers.register({**document, "versions": {"farm": farm.__version__}}, ttl=60.0)
    assert of(store, farm_settings, "old") == []
    # The disk does not answer, as one that fails does.
    monkeypatch.setattr(health, "SLOW_SECONDS", 0.05)
    kept = threading.Event()
    disk = DiskWatch(farm_settings.data_dir, sync=lambda _: kept.wait(60))
    disk.start()
    store.workers.heartbeat("w1", warning=wait_until(lambda: disk.slow, message="it is slow while it hangs"))
    (said,) = of(store, farm_settings, "node old: its disk is slow: a megabyte took ")
    assert "set data_dir to another disk" in said
    kept.set()
    monkeypatch.setattr(health, "SLOW_SECONDS", 60.0)
    assert DiskWatch(farm_settings.data_dir, sync=lambda _: None).look() == ""
    store.workers.heartbeat("w1", resting="object storage at s3.example did not answer")
    assert of(store, farm_settings, "node old cannot reach object storage: object storage at s3.example did not answer")
    store.workers.heartbeat("w1", resting="its GPU is hot")
    assert of(store, farm_settings, "old") == []
    store.workers.heartbeat("w1")
    assert of(store, farm_settings, "old") == []
    store.workers.leave("w1")


def test_each_control_plane_knows_what_the_others_do_not_reach(
    store: Store, farm_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise StorageAway("object storage at s3.example did not answer")

    presence = Presence(store, refused)
    presence.look()
    presence.report()
    assert of(store, farm_settings, "cannot reach object storage: object storage at s3.example did not answer")
    # One whose packets get lost has no answer yet.
    monkeypatch.setattr("farm.control.loops.PATIENCE", 0.0)
    hangs = threading.Event()
    silent = Presence(store, lambda: hangs.wait(60))
    with in_a_thread(lambda _: silent.look()):
        wait_until(lambda: (silent.report(), of(store, farm_settings, "object storage: no answer for "))[1])
        hangs.set()
    silent.look()
    silent.report()
    assert of(store, farm_settings, "control plane") == []
    short = farm_settings.model_copy(update={"lease_seconds": 0.001})
    wait_until(lambda: of(store, short, "control plane"), message="it is silent for a lease")
    silent.leave()
    assert of(store, short, "control plane") == []
