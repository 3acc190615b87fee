"""The control plane's loops: what one step of them meets keeps no other."""

import threading

from farm.control.loops import ControlPlane
from farm.settings import load_settings
from farm.store import Store
from tests.support.helpers import wait_until
from tests.support.jobs import Reports, join_pool, new_cell, submit


def test_a_queue_that_cannot_be_read_keeps_no_job_from_its_pools_timeout(redis_url: str) -> None:
    """A message was lost with the only worker, so the queue is looked at each second."""
    settings = load_settings({}, redis_url=redis_url, pool_timeout=1.0, log_level="error")
    store, asked, stop = Store.connect(settings), threading.Event(), threading.Event()

    def broken(_: str) -> set[tuple[str, int]]:
        asked.set()
        raise ValueError("no message")

    reports = Reports(store)
    plane = ControlPlane(
        settings,
        store,
        send=lambda *_: None,
        queued=broken,
        finish_build=reports.finish,
        resume=reports.resume,
        tidy=lambda: None,
        merge=lambda: None,
    )
    thread = threading.Thread(target=plane.run, args=(stop,))
    thread.start()
    try:
        join_pool(store)
        build = submit(store, new_cell())
        wait_until(asked.is_set)
        store.workers.leave("w1")
        assert reports.wait(build)["counts"]["failed"] == 1
    finally:
        stop.set()
        thread.join()
