"""Faults of workers and of the compilers in them: real supervisors and Celery processes, a scripted compiler."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise

import psutil
import pytest

from tests.chaos.conftest import Rigs
from tests.chaos.pace import Pace
from tests.chaos.report import Fault
from tests.chaos.rig import LEASE, gone, is_compiler, pause
from tests.support.helpers import wait_until
from tests.support.jobs import control_plane, new_cell, submit
from tests.support.undying import undying

SEED = 5


def compilers_of(pid: int) -> list[int]:
    """Compilers that a process has started, guards and launchers included."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if is_compiler(child)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.fault("1")
def test_killed_workers(fault: Fault, rig: Rigs) -> None:
    """A victim is always a worker with a compiler at work, and the queue is full: what it lost goes ahead of that."""
    farm, chance = rig(), random.Random(SEED)
    client = farm.serve()
    workers = farm.workers("n0", "n1", "n2", "n3")
    pace = Pace(farm, client)
    farm.script({"": [{"seconds": 4.0}]})
    builds = [farm.submit(client, fault.count.jobs)]
    killed: list[tuple[float, list[str]]] = []
    left = 0.0
    while len(killed) < fault.count.kills:
        if farm.store.builds.get(builds[-1])["counts"]["queued"] < 8:
            builds.append(farm.submit(client, fault.count.jobs))
        victim = chance.choice(workers)
        pid = victim.celery()
        running = [cell for build_id in builds for cell in farm.running(build_id)]
        mine = [cell for cell in running if (cell["worker"] or "").startswith(f"{victim.node}-")]
        compilers = compilers_of(pid)
        # One at a time: the others are at work. And only first attempts: a job that lost three workers is quarantined,
        # which is fault 7.
        others = all(compilers_of(worker.celery()) for worker in workers if worker is not victim)
        if not others or not compilers or not mine or any(cell["attempt"] > 1 for cell in mine):
            pause(0.1)
            continue
        os.kill(pid, signal.SIGKILL)
        killed.append((time.time(), [cell["job"] for cell in mine]))
        start = time.monotonic()
        wait_until(lambda compilers=compilers: gone(compilers), message="its compilers are gone")
        left = max(left, time.monotonic() - start)
    for build_id in builds:
        farm.wait(build_id, timeout=900)
    recoveries = []
    for at, jobs in killed:
        for job in jobs:
            attempts = farm.store.jobs.get(job)["attempts"]
            hit = [one for one in attempts if one["end"] == "lost" and one["started_at"] <= at <= one["ended_at"]]
            recoveries += [attempts[one["number"]]["started_at"] - at for one in hit]
    pace.measure()
    fault.measured(
        killed=len(killed),
        attempts_lost=len(recoveries),
        compilers_gone_after=left,
        small_build=pace.build,
        **farm.ledger(),
    )
    assert fault.figures["succeeded"] == fault.figures["accepted"]
    assert left <= pace.bound(5, 10) or not fault.alone
    fault.recovered(recoveries, LEASE + pace.bound(5, 10))


@pytest.mark.fault("2")
def test_dying_compilers(fault: Fault, rig: Rigs) -> None:
    """Each death is tried once more, on the other node; a good job stands behind each."""
    farm, each = rig(), fault.count.each
    client = farm.serve()
    workers = farm.workers("n1", "n2", slots=1)
    deaths = {"SIGSEGV": {"die": "SIGSEGV"}, "SIGABRT": {"die": "SIGABRT"}, "SIGKILL": {"die": "SIGKILL"}}
    deaths["code 42"] = {"exit": 42}
    script: dict[str, list[dict[str, object]]] = {"": [{}]}
    expected = {}
    for number in range(4 * each):
        name = list(deaths)[number % 4]
        script[str(2 * number + 1)] = [deaths[name]]
        expected[2 * number + 1] = name
    farm.script(script)
    processes = [worker.celery() for worker in workers]
    cells = farm.wait(farm.submit(client, 8 * each), timeout=1200)
    assert [worker.celery() for worker in workers] == processes, "a worker process died with its compiler"
    right, runs = 0, []
    for cell in cells:
        attempts = farm.attempts(cell)
        runs += [(one["node"], one["started_at"], one["ended_at"], one["end"]) for one in attempts]
        if (batch := int(cell["identifier"].rpartition("/b")[2])) in expected:
            right += cell["kind"] == "compiler_crash" and expected[batch] in cell["message"] and len(attempts) == 2
        else:
            assert cell["state"] == "succeeded", cell
    runs.sort()
    gaps: dict[str, list[float]] = defaultdict(list)
    for (before, _, ended, end), (after, begun, *_) in pairwise(runs):
        if before == after:
            gaps[end].append(begun - ended)
    fault.measured(
        deaths=sum(end == "failed" for *_, end in runs),
        kinds_right=f"{right} of {4 * each}",
        slowest_after_success=max(gaps["succeeded"], default=0.0),
        **farm.ledger(),
    )
    assert right == 4 * each
    # Seconds on a machine that does nothing else; where it does, what follows a success tells how much.
    fault.recovered(gaps["failed"], max(2.0, 4 * max(gaps["succeeded"], default=0.0)))


@pytest.mark.fault("3")
def test_compilers_out_of_memory(fault: Fault, rig: Rigs) -> None:
    farm = rig()
    client = farm.serve()
    (worker,) = farm.workers("n1")
    farm.wait(farm.submit(client, 4))  # warm
    celery = psutil.Process(worker.celery())
    before = celery.memory_info().rss
    farm.script({"": [{"eat": 400 << 20}]})
    cells = farm.wait(farm.submit(client, fault.count.jobs, options="limits: {memory: 150MiB}"), timeout=600)
    grown = (celery.memory_info().rss - before) / 2**20
    kinds = Counter(cell["kind"] for cell in cells)
    tries = Counter(len(farm.attempts(cell)) for cell in cells)
    fault.measured(kinds=dict(kinds), attempts=dict(tries), worker_grew_mib=grown, **farm.ledger())
    assert kinds == {"out_of_memory": fault.count.jobs}
    assert max(tries) <= 2
    assert grown < 50


@pytest.mark.fault("4")
def test_hanging_compilers(fault: Fault, rig: Rigs) -> None:
    """Twice as many jobs as slots at the least, so most of them wait for longer than the limit before they start."""
    limit = 3.0
    farm = rig(hang_seconds=limit)
    client = farm.serve()
    farm.workers("n1", slots=4)
    pace = Pace(farm, client)
    farm.script({"": [{"hang": True}]})
    build_id = farm.submit(client, fault.count.jobs)
    cells = farm.wait(build_id, timeout=600)
    took = [one["ended_at"] - one["started_at"] for cell in cells for one in farm.attempts(cell)]
    kinds = Counter(cell["kind"] for cell in cells)
    pace.measure()
    fault.measured(
        kinds=dict(kinds),
        attempts=len(took),
        shortest=min(took),
        longest=max(took),
        small_build=pace.build,
        **farm.ledger(),
    )
    assert kinds == {"hang": fault.count.jobs}
    assert min(took) >= limit, "the wait in the queue was counted"
    assert max(took) <= limit + pace.bound(5, 10)
    assert farm.compilers() == []


@pytest.mark.fault("answer")
def test_answers_that_lack_a_field(fault: Fault, rig: Rigs) -> None:
    """No mistake of the farm's, which would be tried three times."""
    fields = ["inputs", "outputs", "weight_dtypes", "quantized", "verification", "measurements"]
    farm = rig()
    client = farm.serve()
    farm.workers("n1")
    lacks = fields * fault.count.each
    farm.script({"": [{}], **{str(number + 1): [{"lack": name}] for number, name in enumerate(lacks)}})
    cells = farm.wait(farm.submit(client, len(lacks)))
    right = 0
    for cell in cells:
        lacked = lacks[int(cell["identifier"].rpartition("/b")[2]) - 1]
        right += cell["kind"] == "compiler_error" and f"lacks '{lacked}'" in cell["message"]
        assert len(farm.attempts(cell)) == 1
    fault.measured(kinds_right=f"{right} of {len(lacks)}", **farm.ledger())
    assert right == len(lacks)


@pytest.mark.fault("stuck")
def test_compilers_that_cannot_be_killed(fault: Fault, rig: Rigs) -> None:
    """One after the other hangs on a node, is killed for it, and stays; its job goes to the other node."""
    limit, dying = 3.0, 2.0
    farm = rig(hang_seconds=limit)
    client = farm.serve()
    (worker,) = farm.workers("bad", slots=2)
    pace = Pace(farm, client)
    celery = worker.celery()
    took, builds = [], []
    for _ in range(fault.count.jobs):
        farm.script({"": [{"hang": True, "dying": dying}, {}]})
        builds.append(farm.submit(client, 1))
        inner = wait_until(lambda: hanging(celery), message="the compiler hangs")
        with undying(inner):
            job = farm.store.jobs.get(farm.store.builds.cells(builds[-1])[0]["job"])
            wait_until(lambda id=job["id"]: farm.store.jobs.get(id)["attempt"] == 2, message="the attempt has ended")
            bad = next(one for one in farm.store.workers.list() if one["node"] == "bad")
            assert f"process {inner} cannot be killed" in bad["fenced"]
            farm.workers("good")
            (cell,) = farm.wait(builds[-1])
        first, second = farm.attempts(cell)
        assert (first["kind"], second["end"]) == ("gpu_fault", "succeeded")
        assert second["node"] == "good"
        took.append(first["ended_at"] - first["started_at"])
        farm.store.workers.drain(next(one for one in farm.store.workers.list() if one["node"] == "good")["id"])
        wait_until(lambda: [one["node"] for one in farm.store.workers.list()] == ["bad"])
        farm.store.workers.unfence("bad")
        farm.script({"": [{}]})
        farm.wait(farm.submit(client, 4))
        assert worker.celery() == celery
    pace.measure()
    fault.measured(longest=max(took), small_build=pace.build, **farm.ledger())
    assert max(took) <= limit + dying + pace.bound(10, 15)


def hanging(celery: int) -> int:
    """The process of a worker's compiler that hangs, below its guard and above a child of its own; 0 until it does."""
    compilers = compilers_of(celery)
    guards = [pid for pid in compilers if psutil.Process(pid).ppid() in compilers]
    return next((pid for pid in guards if psutil.Process(pid).ppid() in guards and children_of(pid)), 0)


def children_of(pid: int) -> list[psutil.Process]:
    """What a process has started."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


@pytest.mark.fault("5")
def test_workers_that_sleep(fault: Fault, rig: Rigs) -> None:
    """Supervisor and process sleep; half of the attempts wait to look the key up, half have a compiler that goes on."""
    farm, at_once = rig(), min(10, fault.count.stops)
    client = farm.serve()
    sleepers = farm.workers(*(f"s{number}" for number in range(at_once)), slots=1)
    others: list[object] = []
    stops, superseded, cells_seen = 0, 0, 0
    while stops < fault.count.stops:
        count = min(at_once, fault.count.stops - stops)
        go = farm.folder / f"go-{stops}"
        first = [{"until": str(go)}, {"seconds": 1.0}]
        farm.script({str(number + 1): [first[number % 2], {}] for number in range(count)} | {"": [{}]})
        build_id = farm.submit(client, count)
        wait_until(lambda b=build_id, n=count: len(farm.running(b)) == n, timeout=180, message="all run")
        pids = [pid for worker in sleepers for pid in (worker.supervisor.pid, worker.celery())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            asleep = time.monotonic()
            if not others:
                others += farm.workers("awake", slots=4)
            cells = farm.wait(build_id, timeout=300)
            go.touch()
            pause(max(0.0, 3 * LEASE - (time.monotonic() - asleep)))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for cell in cells:
            ends = wait_until(
                lambda cell=cell: (e := [one["end"] for one in farm.attempts(cell)])[0] != "lost" and e,
                message="the late result came",
            )
            superseded += ends == ["superseded", "succeeded"]
        cells_seen += len(cells)
        stops += count
        # The next round is for the sleepers again.
        wait_until(lambda: len(farm.store.workers.list()) == at_once + 1, message="all are known again")
        if stops < fault.count.stops:
            awake = others.pop()
            awake.stop()
            wait_until(lambda: len(farm.store.workers.list()) == at_once)
    fault.measured(superseded=f"{superseded} of {stops}", adopted=farm.adopted(), **farm.ledger())
    assert superseded == stops == cells_seen


@pytest.mark.fault("6")
def test_rolling_restart(fault: Fault, rig: Rigs) -> None:
    """Every slot is at work. Half of a worker's jobs end within the grace period, the others are given back."""
    grace = 2.0
    farm = rig(grace_seconds=grace)
    client = farm.serve()
    count, slots = fault.count, fault.count.jobs // fault.count.workers
    go = {number: farm.folder / f"go-{number}" for number in range(1, count.jobs + 1)}
    workers = farm.workers(*(f"n{number}" for number in range(count.workers)), slots=slots)
    pace = Pace(farm, client)
    farm.script({str(number): [{"wait": str(path)}] for number, path in go.items()})
    build_id = farm.submit(client, count.jobs)

    def compiling(node: str) -> list[int]:
        cells = [cell for cell in farm.running(build_id) if cell["worker"].startswith(f"{node}-")]
        return [int(cell["identifier"].rpartition("/b")[2]) for cell in cells if cell["phase"] == "compiling"]

    for worker in workers:
        wait_until(lambda node=worker.node: len(compiling(node)) == slots, timeout=120, message="every slot is at work")
    exits = []
    for number, worker in enumerate(workers):
        mine = compiling(worker.node)
        assert len(mine) == slots
        start = time.monotonic()
        worker.supervisor.terminate()
        for batch in mine[: slots // 2]:
            go[batch].touch()
        assert worker.supervisor.wait(60) == 0
        exits.append(time.monotonic() - start)
        farm.workers(f"m{number}", slots=slots)
    for path in go.values():
        path.touch()
    cells = farm.wait(build_id, timeout=120)
    charged = sum(farm.store.jobs.get(cell["job"])["charged"] for cell in cells)
    ends = Counter(one["end"] for cell in cells for one in farm.attempts(cell))
    succeeded = sum(cell["state"] == "succeeded" for cell in cells)
    pace.measure()
    fault.measured(
        attempts_charged=charged,
        ends=dict(ends),
        longest_exit=max(exits),
        small_build=pace.build,
        **farm.ledger(),
    )
    assert charged == 0
    assert set(ends) == {"succeeded", "released"}
    assert succeeded == count.jobs
    assert max(exits) <= grace + pace.bound(5, 10)


@pytest.mark.fault("7")
def test_a_job_that_kills_workers(fault: Fault, rig: Rigs) -> None:
    """It ends what other slots run, too: that is tried again, and done. Submitted again, it takes one worker more."""
    farm = rig()
    client = farm.serve()
    bad = fault.count.good // 2
    farm.script({"": [{}], str(bad): [{"kill": True}]})
    workers = farm.workers("n0", "n1", "n2", "n3")
    first = [worker.celery() for worker in workers]
    salt = secrets.token_hex(8)
    cells = farm.wait(farm.submit(client, fault.count.good + 1, salt=salt), timeout=900)
    by_state = Counter(cell["state"] for cell in cells)
    (killer,) = [cell for cell in cells if cell["state"] == "failed"]
    attempts = farm.attempts(killer)
    job = farm.store.jobs.get(killer["job"])
    restarts = sum(worker.celery() != pid for worker, pid in zip(workers, first, strict=True))
    again = farm.wait(farm.submit(client, fault.count.good + 1, salt=salt))
    (once_more,) = [cell for cell in again if cell["state"] == "failed"]
    fault.measured(
        done=f"{by_state['succeeded']} of {fault.count.good}",
        workers_lost=len({one["worker"] for one in attempts}),
        restarts=restarts,
        workers_lost_when_submitted_again=len(farm.attempts(once_more)),
        **farm.ledger(),
    )
    assert (once_more["kind"], len(farm.attempts(once_more))) == ("worker_lost", 1)
    assert (killer["kind"], job["quarantined"]) == ("worker_lost", True)
    assert killer["identifier"].endswith(f"/b{bad}")
    assert len({one["worker"] for one in attempts}) == len(attempts) == 3
    assert by_state["succeeded"] == fault.count.good
    assert restarts <= 3


@pytest.mark.fault("14")
def test_wrong_clocks(fault: Fault, rig: Rigs, shifted: Callable[[int], dict[str, str]]) -> None:
    """Valkey's clock alone counts. Object storage refuses a clock that is wrong by 15 minutes: that worker rests."""
    farm = rig()
    options = {"slots": 4, "app": "tests.support.scripted"}
    farm.workers("resting", environment=shifted(3600), **options)
    refused = "its object storage refuses: "
    wait_until(lambda: [one["resting"][: len(refused)] for one in farm.store.workers.list()] == [refused])
    farm.stop_workers()
    without_storage = farm.settings.model_copy(update={"s3_bucket": ""})
    with control_plane(farm.settings, farm.store) as reports:
        for hours in (1, -1):
            farm.workers(f"n{hours:+d}", settings=without_storage, environment=shifted(3600 * hours), **options)
        go = farm.folder / "go"
        long = [new_cell(script=[{"do": "wait", "until": str(go)}]) for _ in range(8)]
        build_id = submit(farm.store, *long, *[new_cell() for _ in range(fault.count.jobs - 8)])
        wait_until(lambda: len(farm.running(build_id)) == 8, message="the long ones run")
        pause(3 * LEASE)
        go.touch()
        reports.wait(build_id, 300)
    cells = farm.store.builds.cells(build_id)
    ends = Counter(one["end"] for cell in cells for one in farm.attempts(cell))
    nodes = Counter(one["node"] for cell in cells for one in farm.attempts(cell))
    findings = [*farm.store.audit.builds(), *farm.store.audit.jobs()]
    fault.measured(accepted=len(cells), ends=dict(ends), nodes=dict(nodes), leases_ended_early=ends["lost"])
    assert ends == {"succeeded": len(cells)}
    assert len(nodes) == 2
    assert findings == []
