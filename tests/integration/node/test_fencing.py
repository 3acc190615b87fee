"""Nodes that fail jobs: fenced by what succeeds elsewhere and by their health probes, and let back."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from farm.app import Farm
from farm.compiling.attempt import ANYWHERE, Attempt
from farm.control.loops import fail_unserved
from farm.jobs.state import POLICIES, AttemptLimits, FailureKind, Outcome
from farm.models.frozen import read_model
from farm.node.health import CONTENT, MODEL, lacks_room, probe
from farm.node.survey import SlotKind
from farm.settings import Settings, load_settings
from farm.store import Store
from farm.targets.pools import Target
from tests.support.api_farm import POOL as INSTALLED
from tests.support.helpers import wait_until
from tests.support.jobs import control_plane, explain, join_pool, new_cell, running_worker, submit, take
from tests.support.places import ROOT
from tests.support.scripted_pool import POOL

GPU_FAULT = Outcome.failure(FailureKind.GPU_FAULT, "the GPU reported a fault")


def fenced(store: Store, node: str) -> str:
    return next((worker["fenced"] for worker in store.workers.list() if worker["node"] == node), "")


def fail_on(store: Store, worker: str, node: str, outcome: Outcome = GPU_FAULT) -> str:
    """A job fails on a node, and waits for another one."""
    job, claim = take(store, worker, node)
    assert claim.answer == "run"
    store.jobs.finish(job, claim.token, outcome)
    return job


def succeed_on_good(store: Store, *, hit: bool = False) -> None:
    store.jobs.promote()
    job, claim = take(store, "good-1", "good")
    assert claim.answer == "run"
    store.jobs.finish(job, claim.token, Outcome.success({}, hit=hit))


def two_nodes(store: Store) -> None:
    join_pool(store, "bad-1", node="bad")
    join_pool(store, "good-1", node="good")


# --- the rule -----------------------------------------------------------------------------------------------------


def test_three_jobs_that_succeed_elsewhere_fence_a_node(store: Store) -> None:
    two_nodes(store)
    for already in range(3):
        assert fenced(store, "bad") == "", f"after {already} jobs"
        submit(store, new_cell())
        fail_on(store, "bad-1", "bad")
        succeed_on_good(store)
    assert fenced(store, "bad") == "3 jobs failed on it and then succeeded elsewhere, the last by gpu_fault"
    assert fenced(store, "good") == ""


def test_a_namespace_of_strangers_fences_a_node_once_a_day(store: Store) -> None:
    """Its compilers may fail where they like, and succeed on their second try."""
    two_nodes(store)

    def three_jobs(namespace: str) -> str:
        for _ in range(3):
            submit(store, new_cell(namespace=namespace), namespace=namespace)
            fail_on(store, "bad-1", "bad")
            succeed_on_good(store)
        return fenced(store, "bad")

    assert three_jobs("forks").startswith("3 jobs failed on it")
    assert store.workers.unfence("bad")
    assert three_jobs("forks") == ""
    for namespace in ("others", "main", "main"):
        assert three_jobs(namespace).startswith("3 jobs failed on it"), namespace
        assert store.workers.unfence("bad")


def test_one_job_alone_fences_nobody(store: Store) -> None:
    two_nodes(store)
    submit(store, new_cell())
    fail_on(store, "bad-1", "bad")
    store.jobs.promote()
    fail_on(store, "good-1", "good")
    store.jobs.promote()
    fail_on(store, "bad-1", "bad")
    assert fenced(store, "bad") == fenced(store, "good") == ""


@pytest.mark.parametrize("kind", [kind for kind, each in POLICIES.items() if each.attempts > 1 and not each.node])
def test_what_is_never_the_nodes_doing_does_not_count(store: Store, kind: FailureKind) -> None:
    two_nodes(store)
    for _ in range(4):
        submit(store, new_cell())
        fail_on(store, "bad-1", "bad", Outcome.failure(kind, "as scripted"))
        succeed_on_good(store)
    assert fenced(store, "bad") == ""


def test_a_time_in_which_every_node_had_the_trouble_counts_against_none(store: Store) -> None:
    """Object storage is away: every job fails on both nodes, and then succeeds on one of them."""
    two_nodes(store)
    away = Outcome.failure(FailureKind.STORAGE, "object storage cannot be reached")
    for _ in range(4):
        submit(store, new_cell())
        fail_on(store, "bad-1", "bad", away)
        store.jobs.promote()
        fail_on(store, "good-1", "good", away)
        succeed_on_good(store)
    assert fenced(store, "bad") == fenced(store, "good") == ""


def test_what_cannot_be_killed_fences_its_node_at_once(store: Store) -> None:
    two_nodes(store)
    submit(store, new_cell())
    fail_on(store, "bad-1", "bad", replace(GPU_FAULT, fences="process 7 cannot be killed"))
    assert fenced(store, "bad") == "process 7 cannot be killed"
    assert fenced(store, "good") == ""


def test_a_hit_says_nothing_of_a_node(store: Store) -> None:
    two_nodes(store)
    for _ in range(4):
        submit(store, new_cell())
        fail_on(store, "bad-1", "bad")
        succeed_on_good(store, hit=True)
    assert fenced(store, "bad") == ""


def test_a_fenced_node_gets_nothing_and_its_jobs_say_why(store: Store) -> None:
    join_pool(store, "bad-1", node="bad")
    submit(store, new_cell())
    job, number = store.jobs.hand_out(POOL.name, 1)[0]
    assert store.workers.probed("bad-1", node="bad", wrong="GPU 0: gpu_fault", row=0)
    assert store.jobs.claim(job, number, nonce="n", worker="bad-1", node="bad").answer == "elsewhere"
    wait_until(store.jobs.promote)
    assert store.jobs.hand_out(POOL.name, 1) == []
    explained = explain(store, job)
    assert explained["resting"] == "node bad is fenced: its health probe failed: GPU 0: gpu_fault"
    assert (explained["live_workers"], explained["slots"]) == (1, 0)
    assert store.workers.unfence("bad")
    assert not store.workers.unfence("bad")
    assert store.jobs.hand_out(POOL.name, 1) == [(job, 1)]


def test_a_worker_that_the_store_lost_hears_nothing_of_a_fence(store: Store) -> None:
    """Not even that there is none: it registers with the fence that it knew of, and its answer says so then."""
    assert store.workers.probed("w1", node="n1", wrong="", row=1) is None
    assert store.workers.probed("w1", node="n1", wrong="it hangs", row=0) is None
    join_pool(store)
    assert fenced(store, "n1") == ""
    assert store.workers.probed("w1", node="n1", wrong="it hangs", row=0)
    assert fenced(store, "n1") == "its health probe failed: it hangs"


def test_all_workers_of_a_node_have_to_pass_twice(store: Store) -> None:
    join_pool(store, "gpu-1", node="n1")
    join_pool(store, "cpu-1", node="n1")

    def probed(worker: str, row: int, wrong: str = "") -> bool:
        return bool(store.workers.probed(worker, node="n1", wrong=wrong, row=row))

    assert probed("gpu-1", 0, "it hangs")
    assert probed("cpu-1", 1)
    assert probed("cpu-1", 2)
    assert probed("gpu-1", 1)
    assert probed("gpu-1", 1), "the same call again"
    assert probed("gpu-1", 0, "it hangs again")
    assert probed("gpu-1", 1)
    assert not probed("gpu-1", 2)


def test_a_worker_that_registers_again_does_not_bring_back_a_fence_that_was_lifted(store: Store) -> None:
    """It had been cut off while the operator let its node back; a store that lost its data does hear of the fence."""

    def come_back() -> None:
        worker = {"id": "w1", "node": "n1", "slots": 1, "pools": [POOL.as_dict()]}
        store.workers.register(worker, ttl=60.0, fenced="it hangs")

    come_back()
    assert fenced(store, "n1") == "it hangs"
    store.workers.unfence("n1")
    come_back()
    assert fenced(store, "n1") == ""
    store.workers.probed("w1", node="n1", wrong="it hangs again", row=0)
    store._link.ask("FLUSHALL")
    come_back()
    assert fenced(store, "n1") == "it hangs"


def test_a_worker_without_room_gets_nothing_until_it_has(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    store.workers.heartbeat("w1", resting="its disk is full")
    assert store.jobs.hand_out(POOL.name, 1) == []
    assert store.workers.list()[0]["resting"] == "its disk is full"
    store.workers.heartbeat("w1")
    assert store.jobs.hand_out(POOL.name, 1)


# --- on real workers ----------------------------------------------------------------------------------------------


def test_a_bad_node_among_good_ones_is_fenced_and_every_job_succeeds(
    farm_settings: Settings, store: Store, tmp_path: Path
) -> None:
    """Its probe fails too, until it is mended; then it takes jobs again by itself."""
    wrong = tmp_path / "wrong"
    wrong.touch()
    with (
        control_plane(farm_settings, store) as reports,
        running_worker(farm_settings, store, "bad", wrong=wrong),
        running_worker(farm_settings, store, "n1"),
        running_worker(farm_settings, store, "n2"),
        running_worker(farm_settings, store, "n3"),
    ):
        at_work = set[str]()
        wait_until(lambda: at_work.update(nodes_of_next_build(store, reports)) or len(at_work) == 4)
        wrong.write_text("GPU 0: gpu_fault: the GPU reported a fault")
        script = [{"do": "fail-on", "node": "bad", "kind": "gpu_fault"}]
        builds = [submit(store, *[new_cell(script=script) for _ in range(40)])]
        wait_until(lambda: fenced(store, "bad"))
        builds.append(submit(store, *[new_cell(script=script) for _ in range(40)]))
        for build in builds:
            assert reports.wait(build)["counts"]["succeeded"] == 40
        jobs = [store.jobs.get(cell["job"]) for build in builds for cell in store.builds.cells(build)]
        wasted = sum(one["end"] == "failed" for job in jobs if job for one in job["attempts"])
        assert 1 <= wasted < 40, "of 80, half of them when it was fenced; one fault is enough"
        late = [job for job in jobs[40:] if job and job["node"] == "bad"]
        assert late == []

        asked = (tmp_path / "wrong.asked").read_text().splitlines()
        assert len(asked) < 12, "the pauses between probes grow"
        wrong.write_text("")
        wait_until(lambda: not fenced(store, "bad"), 300)
        again = submit(store, *[new_cell(script=[{"do": "succeed"}]) for _ in range(40)])
        reports.wait(again)
        wait_until(lambda: "bad" in nodes_of_next_build(store, reports))


def nodes_of_next_build(store: Store, reports: Any) -> set[str]:
    build = submit(store, *[new_cell() for _ in range(20)])
    reports.wait(build)
    return {cell["worker"].split("-")[0] for cell in store.builds.cells(build)}


def test_a_node_whose_probe_fails_at_start_takes_nothing(farm_settings: Settings, store: Store, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("it cannot compile")
    port = free_port()
    settings = farm_settings.model_copy(update={"health_port": port})
    with control_plane(farm_settings, store) as reports, running_worker(settings, store, "n1", wrong=wrong):
        wait_until(lambda: fenced(store, "n1"))
        # The worker's port is open by now, and the worker hears of the fence after the store.
        wait_until(lambda: asked(port, "/ready")[1]["workers"][0]["fenced"])
        build = submit(store, new_cell())
        assert fenced(store, "n1") == "its health probe failed: it cannot compile"
        assert asked(port, "/ready")[0] == 503
        assert asked(port, "/live")[0] == 200
        wrong.write_text("")
        assert reports.wait(build)["counts"]["succeeded"] == 1
        wait_until(lambda: asked(port, "/ready")[0] == 200)
        assert asked(port, "/")[0] == 404
        # Its Celery process counts the first, soon after the store has it; the supervisor knows the others.
        wait_until(lambda: 'farm_attempts_total{end="succeeded",kind=""} 1.0' in metrics(port))
        assert 'farm_worker_fenced{kind="cpu"} 0.0' in metrics(port)
        assert "farm_disk_free_bytes " in metrics(port)


def test_a_worker_whose_process_dies_at_start_says_so_and_its_pool_times_out(farm_settings: Settings) -> None:
    settings = farm_settings.model_copy(update={"pool_timeout": 1.0})
    store = Store.connect(settings)
    with control_plane(settings, store) as reports, running_worker(settings, store, app="tests.support.nothing"):
        wait_until(lambda: "its worker process dies at start" in store.workers.list()[0]["resting"])
        build = submit(store, new_cell())
        assert reports.wait(build)["counts"]["failed"] == 1
        cell = store.builds.cells(build)[0]
        assert cell["kind"] == FailureKind.TOOLCHAIN_MISMATCH
        assert "node n1 takes none: its worker process dies at start" in cell["message"]


def test_a_worker_whose_first_probe_has_passed_takes_jobs_before_its_next_heartbeat(
    farm_settings: Settings, store: Store
) -> None:
    settings = farm_settings.model_copy(update={"renew_seconds": 600.0, "lease_seconds": 2400.0})
    with control_plane(farm_settings, store) as reports, running_worker(settings, store):
        assert reports.wait(submit(store, new_cell()))["counts"]["succeeded"] == 1


def test_a_worker_whose_toolchain_was_upgraded_in_place_rests_and_its_node_is_not_fenced(
    farm_settings: Settings, store: Store, tmp_path: Path
) -> None:
    """What it compiles would be published under keys that it is not. Rolled back, it takes jobs again by itself."""
    wrong = tmp_path / "wrong"
    wrong.touch()

    def resting() -> str:
        return str(next(worker["resting"] for worker in store.workers.list() if worker["node"] == "n1"))

    script = [{"do": "fail-on", "node": "n1", "kind": "toolchain_mismatch"}]
    with (
        control_plane(farm_settings, store) as reports,
        running_worker(farm_settings, store, "n1", wrong=wrong),
        running_worker(farm_settings, store, "n2"),
    ):
        wait_until(lambda: "n1" in nodes_of_next_build(store, reports))
        wrong.write_text("onnxruntime/cpu: toolchain_mismatch: here is another")

        def all_succeed() -> bool:
            build = submit(store, *[new_cell(script=script) for _ in range(20)])
            return bool(reports.wait(build)["counts"]["succeeded"] == 20)

        wait_until(lambda: all_succeed() and "here is another; start it again" in resting())
        assert fenced(store, "n1") == ""
        assert "n1" not in nodes_of_next_build(store, reports)
        wrong.write_text("")
        wait_until(lambda: not resting())
        wait_until(lambda: "n1" in nodes_of_next_build(store, reports))


@pytest.mark.parametrize("kind", ["gpu_fault", "gpu_lost"])
def test_a_card_is_probed_after_a_fault_before_its_next_job(
    farm_settings: Settings, store: Store, tmp_path: Path, kind: str
) -> None:
    """One fault is enough, and fences no node whose card is well."""
    wrong = tmp_path / "wrong"
    wrong.touch()
    probes = wrong.with_suffix(".asked")
    script = [{"do": "fail-on", "node": "n1", "kind": kind}, {"do": "succeed"}]
    with control_plane(farm_settings, store) as reports, running_worker(farm_settings, store, "n1", wrong=wrong):
        wait_until(lambda: not store.workers.list()[0]["resting"])
        asked = len(probes.read_text().splitlines())
        build = submit(store, new_cell(script=script))
        wait_until(lambda: len(probes.read_text().splitlines()) > asked, message="one failure, and it is probed")
        reports.wait(build)
        wait_until(lambda: not store.workers.list()[0]["resting"], message="the probe passed")
        assert fenced(store, "n1") == ""
        assert reports.wait(submit(store, new_cell()))["counts"]["succeeded"] == 1


def test_strangers_do_not_have_a_card_probed_for_each_of_their_jobs(
    farm_settings: Settings, store: Store, tmp_path: Path
) -> None:
    """A fault is read in what a compiler prints: each would keep the worker from its next job until the probe ended."""
    wrong = tmp_path / "wrong"
    wrong.touch()
    probes = wrong.with_suffix(".asked")
    script = [{"do": "fail-on", "node": "n1", "kind": "gpu_fault"}, {"do": "succeed"}]
    with control_plane(farm_settings, store) as reports, running_worker(farm_settings, store, "n1", wrong=wrong):
        wait_until(lambda: not store.workers.list()[0]["resting"])
        asked = [len(probes.read_text().splitlines())]
        for _ in range(3):
            for namespace, kind in (("forks", script), ("main", None)):
                build = submit(store, new_cell(namespace=namespace, script=kind), namespace=namespace)
                reports.wait(build)
            asked.append(len(probes.read_text().splitlines()))
    assert asked == [asked[0], *[asked[0] + 1] * 3]


def test_a_fence_outlives_the_loss_of_the_store(farm_settings: Settings, store: Store, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch()
    probes = wrong.with_suffix(".asked")
    settings = farm_settings.model_copy(update={"probe_pause": 600.0})
    with running_worker(settings, store, "n1", wrong=wrong):
        wait_until(lambda: not store.workers.list()[0]["resting"])
        join_pool(store, "another", node="n1")
        store.workers.probed("another", node="n1", wrong="it hangs", row=0)
        wait_until(
            lambda: len(probes.read_text().splitlines()) == 2, message="the worker heard of it, and is probed again"
        )
        store._link.ask("FLUSHALL")
        wait_until(store.workers.list, message="it registers again")
        assert fenced(store, "n1") == "its health probe failed: it hangs"


def test_a_fence_for_a_moment_idles_no_slot_longer(farm_settings: Settings, store: Store, tmp_path: Path) -> None:
    """Three slots of four are free, and take jobs again while the fourth is still at work."""
    wrong, done = tmp_path / "wrong", tmp_path / "done"
    wrong.touch()
    with (
        control_plane(farm_settings, store) as reports,
        running_worker(farm_settings, store, slots=4, wrong=wrong) as worker,
    ):
        long = submit(store, new_cell(script=[{"do": "wait", "until": str(done)}]))
        wait_until(lambda: store.builds.cells(long)[0]["state"] == "running")
        before = worker.celery()
        for _ in range(2):
            (me,) = store.workers.list()
            assert store.workers.probed(me["id"], node="n1", wrong="it hangs", row=0)
            wait_until(lambda: not fenced(store, "n1"), message="it heard of the fence, and its probes passed")
            reports.wait(submit(store, *[new_cell() for _ in range(12)]))
        assert store.builds.cells(long)[0]["state"] == "running"
        done.touch()
        reports.wait(long)
        assert worker.celery() == before
        job = store.jobs.get(store.builds.cells(long)[0]["job"])
        assert [one["end"] for one in job["attempts"]] == ["succeeded"]


def test_a_worker_process_that_dies_while_its_node_is_fenced_loses_its_attempts_at_once(
    farm_settings: Settings, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch()
    port = free_port()
    settings = farm_settings.model_copy(update={"lease_seconds": 600.0, "health_port": port})
    store = Store.connect(settings)
    with control_plane(settings, store) as reports, running_worker(settings, store, wrong=wrong) as worker:
        build = submit(store, new_cell(script=[{"do": "hang"}, {"do": "succeed"}]))
        wait_until(lambda: store.builds.cells(build)[0]["state"] == "running")
        job = store.builds.cells(build)[0]["job"]
        wrong.write_text("it hangs")
        (me,) = store.workers.list()
        assert store.workers.probed(me["id"], node="n1", wrong="it hangs", row=0)
        wait_until(lambda: len(wrong.with_suffix(".asked").read_text().splitlines()) > 1, message="it heard of it")
        os.kill(worker.celery(), signal.SIGKILL)
        wait_until(lambda: store.jobs.get(job)["attempts"][0]["end"] == "lost")
        wait_until(lambda: 'farm_leases_ended_total{why="died"} 1.0' in metrics(port))
        wrong.write_text("")
        assert reports.wait(build)["counts"]["succeeded"] == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def asked(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else {}


# --- the probe itself ---------------------------------------------------------------------------------------------


def test_the_probe_compiles_and_runs_on_a_compiler_that_works(tmp_path: Path) -> None:
    settings = load_settings({}, data_dir=tmp_path)
    kind = SlotKind("cpu", (INSTALLED,), (ANYWHERE,) * 3)
    assert probe(settings, kind) == ""
    assert [path for folder in (tmp_path / "work").iterdir() for path in folder.iterdir()] == []


def test_a_supervisor_that_probes_keeps_neither_onnx_nor_numpy_in_memory(tmp_path: Path) -> None:
    code = """
import json, pathlib, sys
from farm.compiling.attempt import ANYWHERE
from farm.node.health import probe
from farm.node.survey import SlotKind
from farm.node.supervisor import Supervisor
from farm.settings import load_settings
from farm.targets.pools import Pool
pool = Pool.from_dict(json.loads(sys.argv[1]))
assert probe(load_settings({}, data_dir=pathlib.Path(sys.argv[2])), SlotKind("cpu", (pool,), (ANYWHERE,))) == ""
print({"onnx", "numpy"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code, json.dumps(INSTALLED.as_dict()), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_probes_model_is_what_the_probe_takes_it_for() -> None:
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Relu", ["xw"], ["y"])],
        "probe",
        [tensor("x", TensorProto.FLOAT, [16, 16])],
        [tensor("y", TensorProto.FLOAT, [16, 16])],
        [helper.make_tensor("w", TensorProto.FLOAT, [16, 16], [0.25] * 16**2)],
    )
    assert onnx.load(MODEL) == helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert read_model(MODEL, check=lambda *_: CONTENT) == read_model(MODEL)


def test_the_probe_finds_what_was_upgraded_in_place(tmp_path: Path) -> None:
    """Also of a compiler that it does not compile with."""
    settings = load_settings({}, data_dir=tmp_path)
    kind = SlotKind("cpu", (POOL,), (ANYWHERE,))
    assert "toolchain_mismatch" in probe(settings, kind)
    assert f"toolchain {INSTALLED.toolchain}, not {POOL.toolchain}" in probe(settings, kind)
    other = replace(INSTALLED, target=Target("migraphx", "ref"), toolchain="migraphx2.15-00000000")
    assert "migraphx/ref: toolchain_mismatch: here is " in probe(settings, replace(kind, pools=(INSTALLED, other)))


def test_the_probe_says_why_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = load_settings({}, data_dir=file / "data")
    assert "Not a directory" in probe(settings, SlotKind("cpu", (POOL,), (ANYWHERE,)))


def test_a_full_disk_is_said_with_its_figures(tmp_path: Path) -> None:
    settings = load_settings({}, data_dir=tmp_path / "not" / "there", min_free_bytes=10**18)
    assert "GB are needed" in lacks_room(settings)
    assert lacks_room(settings.model_copy(update={"min_free_bytes": 0})) == ""


def test_a_full_disk_whose_cache_cannot_be_cut_lets_the_worker_rest_and_not_end(tmp_path: Path) -> None:
    (tmp_path / "cache" / "ab" / ("ab" * 32)).mkdir(
        parents=True
    )  # No file: nobody may remove it, as on a read-only disk.
    settings = load_settings({}, data_dir=tmp_path, min_free_bytes=10**18)
    assert "GB are needed, and its cache gives none" in lacks_room(settings)


# --- a full disk --------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_ends_the_attempt_as_storage(settings: Settings, small_disk: Path) -> None:
    farm = Farm(settings.model_copy(update={"data_dir": small_disk}))
    digest, size = farm.artifacts.put_blob_bytes(bytes(32 << 20))
    file = {"path": "model.onnx", "digest": digest, "size": size}
    order = {
        "identifier": "net/onnxruntime-cpu/fp32/b1",
        "model": {"files": [file], "format": "onnx", "names": ["y"]},
        "env": {},
    }
    spec = {"compiler": {"name": "onnxruntime"}, "options": {}, "tuning": {"mode": "off"}, "env": {}, "toolchain": ""}
    attempt = Attempt(
        "j-1", 1, "1-t", {**order, "spec": spec}, AttemptLimits(time=60.0, memory=0), namespace="main", key="ab" * 32
    )
    outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
    assert outcome.kind is FailureKind.STORAGE
    assert "No space left on device" in outcome.message


def test_a_worker_gives_its_cache_up_before_it_rests(farm_settings: Settings, store: Store, small_disk: Path) -> None:
    """Its own cache filled the disk: who waits for the operator here waits for ever."""
    settings = farm_settings.model_copy(update={"data_dir": small_disk, "min_free_bytes": 7 << 20})
    cached = [small_disk / "cache" / f"{number:02}" / ("ab" * 32) for number in range(3)]
    for age, path in enumerate(cached):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(4 << 20))
        os.utime(path, (age, age))
    with control_plane(farm_settings, store) as reports, running_worker(settings, store):
        assert reports.wait(submit(store, new_cell()))["counts"]["succeeded"] == 1
    assert [path.exists() for path in cached] == [False, True, True], "no more of it than was needed"


def test_a_worker_on_a_full_disk_takes_nothing_until_there_is_room(
    farm_settings: Settings, store: Store, small_disk: Path
) -> None:
    settings = farm_settings.model_copy(update={"data_dir": small_disk, "min_free_bytes": 8 << 20})
    filler = small_disk / "filler"
    filler.write_bytes(bytes(12 << 20))
    with control_plane(farm_settings, store) as reports, running_worker(settings, store) as worker:
        wait_until(lambda: "its disk is full" in store.workers.list()[0]["resting"])
        build = submit(store, new_cell())
        job = store.builds.cells(build)[0]["job"]
        assert "node n1 takes no jobs: its disk is full" in explain(store, job)["resting"]
        filler.unlink()
        assert reports.wait(build)["counts"]["succeeded"] == 1
        assert [one["end"] for one in store.jobs.get(job)["attempts"]] == ["succeeded"], "none was wasted"
        before = worker.celery()
        filler.write_bytes(bytes(12 << 20))
        wait_until(lambda: "its disk is full" in store.workers.list()[0]["resting"])
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: worker.celery() not in (0, before), message="another process waits for room")
        assert "its disk is full" in store.workers.list()[0]["resting"]
        filler.unlink()
        reports.wait(submit(store, new_cell()))


def test_no_job_fails_because_a_disk_filled_up_while_object_storage_was_away(
    farm_settings: Settings, store: Store, tmp_path: Path
) -> None:
    """Finished programs may wait: the outage is the reason, and for that `pool_timeout` does not count."""
    nowhere = {"s3_bucket": "farm", "s3_endpoint": "http://127.0.0.1:9", "s3_access_key": "a", "s3_secret_key": "s"}
    settings = load_settings(farm_settings.environment(), data_dir=tmp_path / "data", min_free_bytes=10**18, **nowhere)
    with running_worker(settings, store):
        build = submit(store, new_cell())
        wait_until(lambda: store.workers.list()[0]["resting"].startswith("object storage is away"))
        assert fail_unserved(store, 0.0) == 0
        assert store.builds.cells(build)[0]["state"] == "queued"


def test_a_worker_that_starts_on_a_full_disk_rests_and_is_not_fenced(
    farm_settings: Settings, store: Store, small_disk: Path, tmp_path: Path
) -> None:
    settings = farm_settings.model_copy(update={"data_dir": small_disk, "min_free_bytes": 8 << 20})
    filler = small_disk / "filler"
    filler.write_bytes(bytes(12 << 20))
    wrong = tmp_path / "wrong"
    wrong.write_text("it cannot compile")
    with control_plane(farm_settings, store) as reports, running_worker(settings, store, wrong=wrong):
        wait_until(lambda: "its disk is full" in store.workers.list()[0]["resting"])
        assert not wrong.with_suffix(".asked").exists(), "a probe for which there is no room says nothing"
        build = submit(store, new_cell())
        wrong.write_text("")
        filler.unlink()
        assert reports.wait(build)["counts"]["succeeded"] == 1
        assert fenced(store, "n1") == ""
        assert wrong.with_suffix(".asked").exists(), "it takes its first job when its probe has passed"


def test_a_probe_that_fails_as_the_disk_fills_fences_nobody(
    farm_settings: Settings, store: Store, small_disk: Path, tmp_path: Path
) -> None:
    """The disk is full when the answer comes, and was not when it was asked."""
    settings = farm_settings.model_copy(update={"data_dir": small_disk, "min_free_bytes": 8 << 20})
    filler, wrong = small_disk / "filler", tmp_path / "wrong"
    os.mkfifo(wrong)
    with control_plane(farm_settings, store) as reports, running_worker(settings, store, wrong=wrong):
        asked_now = wrong.open("w")  # Opened when the probe reads it.
        filler.write_bytes(bytes(12 << 20))
        asked_now.write("No space left on device")
        asked_now.close()
        wait_until(lambda: "its disk is full" in store.workers.list()[0]["resting"])
        assert fenced(store, "n1") == ""
        wrong.unlink()
        wrong.write_text("")
        filler.unlink()
        assert reports.wait(submit(store, new_cell()))["counts"]["succeeded"] == 1
        assert fenced(store, "n1") == ""
