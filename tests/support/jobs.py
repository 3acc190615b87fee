"""Cells, control planes and workers for tests of the job store and what moves its jobs."""

import ctypes
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from farm.compiling.attempt import ANYWHERE
from farm.control.loops import job_loops, repeat_all
from farm.jobs.state import Outcome
from farm.logging import configure
from farm.node.supervisor import Supervisor
from farm.node.survey import SlotKind
from farm.settings import Settings, load_settings
from farm.store import Claim, Store, broker
from tests.support.helpers import alive, in_a_thread, wait_until
from tests.support.places import ROOT
from tests.support.scripted_pool import POOL, ask


def new_cell(key: str | None = None, *, script: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A cell with a key of its own; `script` says what tests/support/scripted.py does with it."""
    key = key or secrets.token_hex(32)
    return {
        "identifier": f"model/onnxruntime-cpu/fp32/{key[:8]}{key[-8:]}",
        "key": key,
        "namespace": "main",
        "pool": POOL.name,
        "priority": 0,
        "limits": {"time": 60.0, "memory": 0},
        "expected_seconds": None,
        "order": {"identifier": key[:12], "script": script or [{"do": "succeed"}], "spec": {"filling": "x" * 1000}},
        "facts": None,
        **changes,
    }


def submit(store: Store, *cells: dict[str, Any], **changes: Any) -> str:
    """Create a build of these cells and return its id."""
    build_id = f"b-{secrets.token_hex(8)}"
    build = {"id": build_id, "namespace": "main", "name": "test", "cells": len(cells), **changes}
    store.builds.create(build, cells)
    return build_id


def join_pool(store: Store, worker: str = "w1", *, node: str = "n1", slots: int = 1, ttl: float = 60.0) -> None:
    """Register a worker that exists in the store only."""
    pools = [POOL.as_dict()]
    store.workers.register({"id": worker, "node": node, "slots": slots, "pools": pools}, ttl=ttl)


def take(store: Store, worker: str = "w1", node: str = "n1") -> tuple[str, Claim]:
    """Hand out one more job and claim it, as dispatcher, broker and worker do."""
    (handed,) = store.jobs.hand_out(POOL.name, 1)
    return handed[0], store.jobs.claim(*handed, nonce=secrets.token_hex(8), worker=worker, node=node)


def run_next(store: Store, outcome: Outcome, **where: str) -> str:
    """Take one job, end its attempt with `outcome` and return the job's id."""
    job_id, claim = take(store, **where)
    assert store.jobs.finish(job_id, claim.token, outcome) == "ok"
    return job_id


def explain(store: Store, job_id: str) -> dict[str, Any]:
    """Why a queued job waits."""
    (facts,) = store.jobs.explain([job_id])
    assert facts
    return facts


class Reports:
    """Takes the place of `farm.builds.service`: notes which builds ended, and marks them reported."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids: set[str] = set()
        self._change = threading.Condition()
        self.resumed = 0

    def finish(self, build_id: str) -> None:
        self._store.builds.mark_reported(build_id, {"exit_code": 0})
        with self._change:
            self._ids.add(build_id)
            self._change.notify_all()

    def resume(self) -> None:
        self.resumed += 1

    def wait(self, build_id: str, timeout: float = 120.0) -> dict[str, Any]:
        """Wait until a build is reported and return it."""
        with self._change:
            reported = self._change.wait_for(lambda: build_id in self._ids, timeout)
        build = self._store.builds.get(build_id)
        assert reported, f"not reported within {timeout} s: {build}"
        assert build is not None
        return build


@contextmanager
def control_plane(settings: Settings, store: Store) -> Iterator[Reports]:
    """The control plane's loops in a thread, as in the server process."""
    app = broker.make_celery(settings)
    reports = Reports(store)
    loops = job_loops(
        settings,
        store,
        send=partial(broker.dispatch, app),
        queued=partial(broker.queued, app),
        finish=reports.finish,
        resume=reports.resume,
    )
    with in_a_thread(partial(repeat_all, store, loops)):
        yield reports


FORKS = multiprocessing.get_context("forkserver")
"""Forks from a process that has imported a supervisor: each start of a fresh one would take 0.6 s of CPU for that."""


class Ours:
    """A descriptor that a forked process gets from the one that asked for it, under the same number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (self._number, reduction.DupFd(self._number))


def _take(number: int, ours: Any) -> None:
    os.dup2(ours.detach(), number)


class OurNetwork:
    """The network of the thread that asks: a test may have put it on another host than the one that forks."""

    def __init__(self) -> None:
        self._space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self._space)

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, (reduction.DupFd(self._space),)


def _enter(network: Any) -> None:
    space = network.detach()
    if os.fstat(space).st_ino != Path("/proc/self/ns/net").stat().st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "cannot enter the network of the test")
    os.close(space)


def supervise(
    _: Sequence[object],
    environment: Mapping[str, str],
    node: str,
    app: str,
    slots: int,
    wrong: Path,
    options: Mapping[str, Any],
) -> None:
    """What a supervisor's process does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    settings = load_settings()
    configure(settings)
    kind = SlotKind("cpu", (POOL,), (ANYWHERE,) * slots)
    supervisor = Supervisor(settings, [kind], node=node, app=app, probe=lambda *_: ask(wrong), **options)
    raise SystemExit(supervisor.run())


class ForkedSupervisor:
    """A supervisor's process, with what `subprocess.Popen` offers."""

    def __init__(self, *arguments: Any) -> None:
        FORKS.set_forkserver_preload([__name__])
        self._process = FORKS.Process(
            target=supervise, args=([Ours(1), Ours(2), OurNetwork()], *arguments), daemon=True
        )
        self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        """Exit status, or less than zero for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status at its end, which has to come in so many seconds."""
        self._process.join(timeout)
        status = self.poll()
        assert status is not None, f"the supervisor runs after {timeout} s"
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Worker:
    """A supervisor process with its Celery process, both real; executor (that of `app`) and health probe are scripted.

    The probe says what is in the file `wrong`.
    """

    def __init__(
        self,
        settings: Settings,
        node: str,
        slots: int,
        *,
        wrong: Path | None = None,
        app: str = "tests.support.scripted",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`options` are further ones of the supervisor."""
        self.node = node
        variables = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT), **(environment or {})}
        self.supervisor = ForkedSupervisor(variables, node, app, slots, wrong or Path(os.devnull), options)

    def celery(self) -> int:
        """Process id of the Celery process."""
        return wait_until(lambda: children_of(self.supervisor.pid), message="a Celery process")[0]

    def kill(self) -> None:
        """End both processes now, where they have not ended: what a test needs no more need not drain."""
        if self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGSTOP)  # It starts no other.
            children = children_of(self.supervisor.pid)
            self.supervisor.kill()
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not any(alive(pid) for pid in children))
        self.supervisor.wait()

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
        if self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGTERM)
        return self.supervisor.wait(60)


@contextmanager
def running_worker(
    settings: Settings, store: Store, node: str = "n1", slots: int = 2, **options: Any
) -> Iterator[Worker]:
    """A worker, from its registration to its end."""
    with running_workers(settings, store, [node], slots, **options) as (worker,):
        yield worker


@contextmanager
def running_workers(
    settings: Settings, store: Store, nodes: Sequence[str], slots: int = 2, **options: Any
) -> Iterator[list[Worker]]:
    """Workers, one on each node, from their registration to their end."""
    workers = [Worker(settings, node, slots, **options) for node in nodes]
    try:
        wait_until(
            lambda: {one["node"] for one in store.workers.list()} >= set(nodes), timeout=120, message="the workers"
        )
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process' main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
