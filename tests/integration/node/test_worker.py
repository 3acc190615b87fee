"""Jobs on real workers: a supervisor, its Celery process, a Valkey, and a scripted executor."""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import redis
from pydantic import SecretStr

from farm.compiling.attempt import AWAY, CONSUME, PAUSE
from farm.errors import StoreUnavailable
from farm.jobs.state import FailureKind
from farm.local import servers
from farm.settings import Settings
from farm.store import Store, broker
from tests.chaos.proxy import Proxy
from tests.support.helpers import alive, wait_until
from tests.support.jobs import (
    Reports,
    Worker,
    control_plane,
    join_pool,
    new_cell,
    running_worker,
    submit,
)
from tests.support.places import ROOT
from tests.support.scripted_pool import POOL

FOREIGN = ["hello", "7", "{}", '{"headers": {"id": "elsewhere"}}', '{"headers": 1, "body": "", "properties": {}}']
"""What somebody else might put into a queue."""


@pytest.fixture
def reports(farm_settings: Settings, store: Store) -> Iterator[Reports]:
    with control_plane(farm_settings, store) as reports:
        yield reports


@pytest.fixture
def worker(farm_settings: Settings, store: Store) -> Iterator[Worker]:
    with running_worker(farm_settings, store) as worker:
        yield worker


def the_cell(store: Store, build_id: str) -> dict:
    (cell,) = store.builds.cells(build_id)
    return cell


def wait_until_running(store: Store, build_id: str) -> dict:
    return wait_until(
        lambda: (cell := the_cell(store, build_id))["state"] == "running" and cell, message="the cell is running"
    )


def wait_for_another(store: Store, reports: Reports) -> None:
    """Wait until a worker takes jobs while the only slot of another is at work: it is known before it does."""
    reports.wait(submit(store, new_cell()))


def attempts(store: Store, build_id: str) -> list[tuple[str, str]]:
    job = store.jobs.get(the_cell(store, build_id)["job"])
    return [(attempt["end"], attempt["node"]) for attempt in job["attempts"]]


def test_jobs_live_from_submit_to_report(store: Store, reports: Reports, worker: Worker) -> None:
    build_id = submit(store, *[new_cell() for _ in range(30)], new_cell(facts={}))
    build = reports.wait(build_id)
    assert (build["state"], build["counts"]["succeeded"]) == ("reported", 31)
    cells = store.builds.cells(build_id)
    assert sum(cell["hit"] for cell in cells) == 1
    assert {cell["attempt"] for cell in cells if not cell["hit"]} == {1}
    assert reports.resumed == 1, "once, when the control plane starts"


def test_a_message_that_comes_three_times_runs_once(
    farm_settings: Settings, store: Store, reports: Reports, worker: Worker, tmp_path: Path
) -> None:
    """Nor do a message of the past, one of the next release, and one for a job that never was."""
    done = tmp_path / "done"
    build_id = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
    job = wait_until_running(store, build_id)["job"]
    app = broker.make_celery(farm_settings)
    broker.dispatch(app, POOL.name, [(job, 1), (job, 1), (job, 7), ("j-0000000000000000", 1)])
    app.send_task(broker.TASK, args=(job, 1, "later"), kwargs={"more": True}, queue=POOL.name, task_id=f"{job}.1")
    wait_until(lambda: not broker.queued(app, POOL.name))
    done.touch()
    reports.wait(build_id)
    assert attempts(store, build_id) == [("succeeded", "n1")]


def test_an_executor_that_breaks_is_the_farms_fault_and_tried_again(
    store: Store, reports: Reports, worker: Worker
) -> None:
    fine = submit(store, new_cell(script=[{"do": "raise"}, {"do": "succeed"}]))
    broken = submit(store, new_cell(script=[{"do": "raise"}]))
    reports.wait(fine)
    assert attempts(store, fine) == [("failed", "n1"), ("succeeded", "n1")]
    reports.wait(broken)
    cell = the_cell(store, broken)
    assert (cell["kind"], cell["attempt"]) == (FailureKind.INTERNAL, 3)
    assert "ValueError: as scripted" in cell["message"]


def test_a_job_that_is_tried_again_goes_ahead_of_what_the_broker_has(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    settings = farm_settings.model_copy(update={"retry_delay": 0.1})  # The next job has its turn meanwhile.
    scripts = [[{"do": "raise"}, {"do": "succeed"}], [{"do": "wait", "until": str(done)}], *[[{"do": "succeed"}]] * 4]
    build_id = submit(store, *[new_cell(script=script) for script in scripts])
    first = store.builds.cells(build_id)[0]["job"]

    def is_next() -> bool:
        """Whether its message is the next that a worker takes: it is sent to the other end first, and then moved."""
        with redis.Redis.from_url(settings.redis_url.get_secret_value()) as connection:
            messages = connection.lrange(f"{broker.PREFIX}{POOL.name}", -1, -1)
        return any(json.loads(message)["headers"]["id"] == f"{first}.2" for message in messages)

    with running_worker(settings, store, slots=1):
        wait_until(is_next)
        done.touch()
        reports.wait(build_id)
    jobs = [cell["job"] for cell in store.builds.cells(build_id)]
    started = {job: store.jobs.get(job)["started_at"] for job in jobs}
    assert sorted(started, key=started.__getitem__).index(first) == 1, "after the one that ran meanwhile"


def test_while_an_attempt_publishes_the_next_one_has_its_slot(
    store: Store, reports: Reports, worker: Worker, tmp_path: Path
) -> None:
    """One only, for each slot: the others publish, too, before one more could start."""
    done = [tmp_path / str(number) for number in range(5)]
    cells = [new_cell(script=[{"do": "publish", "until": str(path)}], priority=-n) for n, path in enumerate(done)]
    build_id = submit(store, *cells)

    def states() -> list[str]:
        return [cell["state"] for cell in store.builds.cells(build_id)]

    wait_until(lambda: states().count("running") == 4)
    assert states() == ["running"] * 4 + ["queued"]
    found = {"running": 0, "uploading": 4, "waiting": 1}
    wait_until(lambda: found.items() <= next(dict(pool) for pool in store.workers.pools() if pool["waiting"]).items())
    assert store.workers.wanted_slots(POOL.name) == 1, "what only uploads asks for no slot"
    done[1].touch()
    wait_until(lambda: states() == ["running", "succeeded", *["running"] * 3])
    for path in done:
        path.touch()
    assert reports.wait(build_id)["counts"]["succeeded"] == 5
    assert store.workers.wanted_slots(POOL.name) == 0


def test_cancelling_ends_the_child(store: Store, reports: Reports, worker: Worker, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    build_id = submit(store, new_cell(script=[{"do": "child", "pid": str(pid_file)}]))
    pid = wait_until(lambda: pid_file.exists() and int(pid_file.read_text() or 0))
    job = wait_until_running(store, build_id)["job"]
    store.builds.cancel(build_id)
    wait_until(lambda: not alive(pid))
    wait_until(lambda: store.jobs.get(job)["state"] == "cancelled")
    reports.wait(build_id)
    reports.wait(submit(store, new_cell()))


def test_a_worker_with_many_slots_on_a_slow_line_renews_all_its_leases(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path
) -> None:
    """One after the other, forty renewals would take longer than a lease lasts."""
    slots, latency, go = 40, 0.1, tmp_path / "go"
    assert slots * latency > farm_settings.lease_seconds
    url = farm_settings.redis_url.get_secret_value()
    place = urlsplit(url)
    with Proxy(str(place.hostname), int(place.port or 0)) as line:
        through = url.replace(f":{place.port}", f":{line.port}")
        slow = farm_settings.model_copy(update={"redis_url": SecretStr(through)})
        with running_worker(slow, store, slots=slots):
            build_id = submit(store, *[new_cell(script=[{"do": "wait", "until": str(go)}]) for _ in range(slots)])
            wait_until(
                lambda: store.builds.get(build_id)["counts"]["running"] == slots, message="every slot is at work"
            )
            line.latency = latency
            asked = {cell["job"]: end_of_lease(url, cell["job"]) for cell in store.builds.cells(build_id)}
            wait_until(
                lambda: all(end_of_lease(url, job) - end > 9000 for job, end in asked.items()),
                message="each lease was renewed for three times its length",
            )
            line.latency = 0.0
            go.touch()
            reports.wait(build_id)
        ends = [one["end"] for job in asked for one in store.jobs.get(job)["attempts"]]
        assert ends == ["succeeded"] * slots


def end_of_lease(url: str, job: str) -> float:
    """When a job's lease ends, in the server's milliseconds; endless where it is held no more."""
    with redis.Redis.from_url(url) as raw:
        end = raw.zscore("{farm}:leases", job)
    return math.inf if end is None else float(end)


@pytest.mark.parametrize("victim", ["celery", "supervisor"])
def test_a_killed_worker_leaves_nothing_behind_and_its_job_runs_again(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path, victim: str
) -> None:
    pid_file = tmp_path / "pid"
    script = [{"do": "child", "pid": str(pid_file)}, {"do": "succeed"}]
    with running_worker(farm_settings, store, "n1", slots=1) as first:
        build_id = submit(store, new_cell(script=script))
        child = wait_until(lambda: pid_file.exists() and int(pid_file.read_text() or 0))
        celery = first.celery()
        with running_worker(farm_settings, store, "n2"):
            wait_for_another(store, reports)
            os.kill(celery if victim == "celery" else first.supervisor.pid, signal.SIGKILL)
            wait_until(lambda: not alive(child) and not alive(celery))
            reports.wait(build_id)
            assert attempts(store, build_id) == [("lost", "n1"), ("succeeded", "n2")]
            if victim == "celery":
                wait_until(lambda: first.celery() != celery, message="the supervisor started it again")


def test_draining_lets_jobs_end_and_gives_the_rest_back(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path
) -> None:
    """Short of the grace period a job ends as ever; what is longer is given back, uncharged, and runs elsewhere."""
    done = tmp_path / "done"
    with running_worker(farm_settings, store, "n1") as first:
        short = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
        long = submit(store, new_cell(script=[{"do": "hang"}, {"do": "succeed"}]))
        wait_until_running(store, short)
        wait_until_running(store, long)
        first.supervisor.terminate()
        wait_until(lambda: store.workers.list()[0]["draining"])
        waiting = submit(store, new_cell())
        done.touch()
        assert first.supervisor.wait(60) == 0
        assert store.workers.list() == []
        assert attempts(store, short) == [("succeeded", "n1")]
        with running_worker(farm_settings, store, "n2"):
            for build_id in (short, long, waiting):
                reports.wait(build_id)
    assert attempts(store, long) == [("released", "n1"), ("succeeded", "n2")]
    assert store.jobs.get(the_cell(store, long)["job"])["charged"] == 0
    assert attempts(store, waiting) == [("succeeded", "n2")]


def test_a_message_that_a_worker_gives_back_lies_in_the_queue_again(farm_settings: Settings) -> None:
    app, taken = broker.make_celery(farm_settings), []
    broker.dispatch(app, POOL.name, [("j-1", 1)])
    with app.connection_for_read() as connection:
        queue = app.amqp.queues.new_missing(POOL.name)
        with connection.Consumer([queue], on_message=taken.append, accept=["json"]):
            connection.drain_events(timeout=10)
        assert broker.queued(app, POOL.name) == set()
        taken[0].reject(requeue=True)
    assert broker.queued(app, POOL.name) == {("j-1", 1)}


def test_a_second_signal_does_not_wait_for_the_grace_period(
    farm_settings: Settings, store: Store, reports: Reports
) -> None:
    with running_worker(farm_settings.model_copy(update={"grace_seconds": 60.0}), store) as worker:
        build_id = submit(store, new_cell(script=[{"do": "hang"}]))
        wait_until_running(store, build_id)
        worker.supervisor.terminate()
        wait_until(lambda: store.workers.list()[0]["draining"])
        worker.supervisor.terminate()
        assert worker.supervisor.wait(30) == 0, "in half of that period"
    assert attempts(store, build_id) == [("released", "n1")]
    store.builds.cancel(build_id)


def test_a_worker_that_is_stopped_before_it_can_give_back_costs_no_attempt(
    farm_settings: Settings, store: Store, reports: Reports
) -> None:
    with running_worker(farm_settings.model_copy(update={"grace_seconds": 60.0}), store) as worker:
        build_id = submit(store, new_cell(script=[{"do": "hang"}]))
        wait_until_running(store, build_id)
        os.kill(worker.celery(), signal.SIGSTOP)
        wait_until(lambda: worker.supervisor.terminate() or worker.supervisor.poll() is not None, message="it stopped")
    assert attempts(store, build_id) == [("released", "n1")]
    assert store.jobs.get(the_cell(store, build_id)["job"])["charged"] == 0
    store.builds.cancel(build_id)


HEARS = """
import socket, sys
from celery.utils.threads import default_socket_timeout
from farm.compiling.attempt import AWAY
from farm.node.attempts import Attempts
from farm.settings import load_settings
from farm.store import Store

settings = load_settings()
attempts = Attempts(Store.connect(settings), None, settings, [], worker="w1", node="n1")
attempts.obey(int(sys.argv[1]))
with default_socket_timeout(5):  # As Celery does while it shuts down, or lets go of a broker.
    attempts.say(AWAY)
for line in sys.stdin:
    print(attempts.may_consume(-1), flush=True)
"""


def test_a_process_hears_its_supervisor_also_when_it_met_an_outage_while_celery_lost_its_broker(
    farm_settings: Settings,
) -> None:
    ours, its = socket.socketpair()
    ours.sendall(CONSUME)
    environment = {**os.environ, **farm_settings.environment()}
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-c", HEARS, str(its.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[its.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        its.close()
        assert process.stdin
        assert process.stdout
        assert ours.recv(1) == AWAY

        def consumes() -> bool:
            process.stdin.write("?\n")
            process.stdin.flush()
            return process.stdout.readline() == "True\n"

        for word, expected in ((PAUSE, False), (CONSUME, True), (PAUSE, False)):
            ours.sendall(word)
            wait_until(lambda expected=expected: consumes() is expected, 20, f"it has heard {word!r}")
        ours.close()
        assert process.wait(20) == 1, "its supervisor is dead"


def test_an_operator_drains_a_worker(store: Store, worker: Worker) -> None:
    assert store.workers.drain(store.workers.list()[0]["id"])
    assert worker.supervisor.wait(60) == 0
    assert store.workers.list() == []


def test_a_worker_without_work_leaves_by_itself_but_not_while_it_has_some(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    with running_worker(farm_settings, store, idle_seconds=1.0) as worker:
        build_id = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
        wait_until_running(store, build_id)
        with running_worker(farm_settings, store, "n2", idle_seconds=1.0) as idle:
            assert idle.supervisor.wait(60) == 0
        assert [one["node"] for one in store.workers.list()] == ["n1"]
        done.touch()
        reports.wait(build_id)
        assert worker.supervisor.wait(60) == 0
    assert attempts(store, build_id) == [("succeeded", "n1")]
    assert store.workers.list() == []


def test_a_worker_that_slept_through_its_lease_is_superseded(
    farm_settings: Settings, store: Store, reports: Reports, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    with running_worker(farm_settings, store, "n1", slots=1) as first:
        build_id = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
        wait_until_running(store, build_id)
        with running_worker(farm_settings, store, "n2"):
            wait_for_another(store, reports)
            os.kill(first.celery(), signal.SIGSTOP)
            wait_until(lambda: ("lost", "n1") in attempts(store, build_id))
            wait_until_running(store, build_id)
            done.touch()
            os.kill(first.celery(), signal.SIGCONT)
            reports.wait(build_id)
            wait_until(lambda: attempts(store, build_id) == [("superseded", "n1"), ("succeeded", "n2")])


def test_a_worker_that_stops_consuming_is_started_again(store: Store, reports: Reports, worker: Worker) -> None:
    reports.wait(submit(store, new_cell()))
    celery = worker.celery()
    os.kill(celery, signal.SIGSTOP)
    build_id = submit(store, new_cell())
    reports.wait(build_id)
    assert not alive(celery)


def test_what_was_handed_out_is_sent_again_when_the_queue_is_lost(
    farm_settings: Settings, store: Store, reports: Reports, redis_url: str
) -> None:
    """The broker's keys may go: what they carried is in the store."""
    join_pool(store, ttl=farm_settings.lease_seconds)
    build_id = submit(store, new_cell())
    app = broker.make_celery(farm_settings)
    wait_until(lambda: broker.queued(app, POOL.name))
    with redis.Redis.from_url(redis_url) as raw:
        raw.delete(*raw.scan_iter(f"{broker.PREFIX}*"))
    with running_worker(farm_settings, store):
        reports.wait(build_id)


def test_a_restart_of_the_server_loses_no_job_and_kills_no_child(farm_settings: Settings, tmp_path: Path) -> None:
    """The worker keeps its child running and finishes when the store is back; whatever was queued runs."""
    server = servers.start_valkey(tmp_path / "valkey", secrets.token_hex(8))
    settings, done = farm_settings.model_copy(update={"redis_url": SecretStr(server.url)}), tmp_path / "done"
    store = Store.connect(settings)
    try:
        with control_plane(settings, store) as reports, running_worker(settings, store, slots=2):
            running = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
            queued = submit(store, *[new_cell() for _ in range(50)])
            wait_until_running(store, running)
            seen = store.events.read(running)["items"][-1]["id"]
            server.stop()
            done.touch()
            server.spawn()
            assert server.wait_until_ready()
            reports.wait(running)
            reports.wait(queued)
            assert attempts(store, running) == [("succeeded", "n1")]
            assert store.builds.get(queued)["counts"]["succeeded"] == 50
            wait_until(lambda: store.events.read(running, seen)["reset"], message="the epoch is new")
            wait_until(lambda: reports.resumed == 2, message="builds are resumed")
    finally:
        store.close()
        server.stop()


class Troubled(NamedTuple):
    """A farm with a Redis of its own, for a test that troubles it, and what its processes said so far."""

    url: str
    raw: redis.Redis
    store: Store
    reports: Reports
    worker: Worker
    said: Callable[[], str]


@contextmanager
def an_attempt_outlives(farm_settings: Settings, folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Troubled]:
    """An attempt is at work, and another slot waits for a message, while the block lasts; nothing dies of it."""
    server = servers.start_valkey(folder / "valkey", secrets.token_hex(8))
    settings = farm_settings.model_copy(update={"redis_url": SecretStr(server.url), "log_level": "warning"})
    done = folder / "done"
    store = Store.connect(settings)
    lines = []

    def said() -> str:
        lines.append(capfd.readouterr().err)
        return "".join(lines)

    try:
        with (
            control_plane(settings, store) as reports,
            running_worker(settings, store, slots=2) as worker,
            redis.Redis.from_url(server.url) as raw,
        ):
            running = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
            wait_until_running(store, running)
            celery = worker.celery()
            yield Troubled(server.url, raw, store, reports, worker, said)
            assert worker.supervisor.poll() is None
            done.touch()
            reports.wait(running)
            reports.wait(submit(store, new_cell()))
            assert attempts(store, running) == [("succeeded", "n1")]
            assert worker.celery() == celery
    finally:
        print(said())
        store.close()
        server.stop()


def test_a_server_that_takes_no_writes_for_a_while_kills_no_worker_that_waits_for_messages(
    farm_settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It becomes a replica, then is full."""
    with an_attempt_outlives(farm_settings, tmp_path, capfd) as farm:
        farm.raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        wait_until(lambda: "cannot take messages" in farm.said(), message="it is said once")
        farm.raw.execute_command("REPLICAOF", "NO", "ONE")
        farm.reports.wait(submit(farm.store, new_cell()))
        farm.raw.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="refuses: command not allowed when used memory") as full:
            farm.store.workers.pause_pool(POOL.name, paused=True)
        assert "raise its maxmemory" in (full.value.hint or "")
        farm.raw.config_set("maxmemory", 0)
    assert "Traceback" not in farm.said()
    assert "DeprecationWarning" not in farm.said()
    assert farm.said().count("cannot take messages") == 1


def test_a_server_that_is_busy_with_a_script_ends_no_worker(
    farm_settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody else's script, that is: it answers everything with BUSY until that ends."""
    with an_attempt_outlives(farm_settings, tmp_path, capfd) as farm, ThreadPoolExecutor(1) as thread:
        farm.raw.config_set("lua-time-limit", 5)
        script = thread.submit(farm.raw.eval, "while true do end", 0)
        dead = farm.worker.supervisor.poll
        wait_until(lambda: "no heartbeat, trying again" in farm.said() or dead() is not None)
        with pytest.raises(StoreUnavailable, match="refuses: BUSY"):
            farm.store.workers.list()
        with redis.Redis.from_url(farm.url) as killer:
            killer.script_kill()
        with pytest.raises(redis.ResponseError):
            script.result()


def test_a_foreign_entry_in_a_queue_stops_nothing(
    farm_settings: Settings, store: Store, reports: Reports, redis_url: str, tmp_path: Path
) -> None:
    """Neither who looks what lies in the queue, nor the worker that takes it, with an attempt at work."""
    done = tmp_path / "done"
    with running_worker(farm_settings, store, slots=2) as worker, redis.Redis.from_url(redis_url) as raw:
        running = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
        wait_until_running(store, running)
        celery = worker.celery()
        for entry in FOREIGN:
            raw.lpush(broker.PREFIX + POOL.name, entry)
            wait_until(lambda: not raw.llen(broker.PREFIX + POOL.name))
            reports.wait(submit(store, new_cell()))
        done.touch()
        reports.wait(running)
        assert attempts(store, running) == [("succeeded", "n1")]
        assert worker.celery() == celery


def test_foreign_entries_that_lie_in_a_queue_are_passed_over(farm_settings: Settings, redis_url: str) -> None:
    app = broker.make_celery(farm_settings)
    with redis.Redis.from_url(redis_url) as raw:
        raw.lpush(broker.PREFIX + POOL.name, *FOREIGN)
        broker.dispatch(app, POOL.name, [("j-1", 1)])
    assert broker.queued(app, POOL.name) == {("j-1", 1)}


def test_a_lost_server_takes_running_jobs_with_it_and_nothing_else(
    farm_settings: Settings, store: Store, reports: Reports, worker: Worker, redis_url: str, tmp_path: Path
) -> None:
    """What the store forgot, the worker ends; it registers again, its pool is known again, and new builds run."""
    pid_file = tmp_path / "pid"
    build_id = submit(store, new_cell(script=[{"do": "child", "pid": str(pid_file)}]))
    pid = wait_until(lambda: pid_file.exists() and int(pid_file.read_text() or 0))
    wait_until_running(store, build_id)
    with redis.Redis.from_url(redis_url) as raw:
        raw.flushall()
    wait_until(lambda: not alive(pid))
    wait_until(store.workers.list)
    reports.wait(submit(store, *[new_cell() for _ in range(3)]))
    wait_until(lambda: reports.resumed == 2, message="builds are resumed")


def test_two_control_planes_share_the_work(
    farm_settings: Settings, store: Store, reports: Reports, worker: Worker
) -> None:
    with control_plane(farm_settings, store) as others:
        builds = [submit(store, *[new_cell() for _ in range(20)]) for _ in range(4)]
        for build_id in builds:
            wait_until(lambda build_id=build_id: store.builds.get(build_id)["state"] == "reported")
        assert {cell["attempt"] for build_id in builds for cell in store.builds.cells(build_id)} == {1}
        assert reports.resumed + others.resumed == 1, "one of them leads"
