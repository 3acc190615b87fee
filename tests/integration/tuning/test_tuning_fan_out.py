"""Slices that are tuned in several slots at once: who tunes what, who gives way, what a death costs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.client.freezing import freeze
from farm.compiling.attempt import FreeSlots, Slot
from farm.compiling.pipeline import StepEnded
from farm.jobs.state import Phase
from farm.node.attempts import Attempts
from farm.settings import Settings
from farm.tuning.records import RecordStore
from farm.tuning.tuner import Tuner
from tests.benchmarks.tuning_kills import kill_at_random
from tests.support.api_farm import POOL
from tests.support.helpers import wait_until
from tests.support.scripted_tuner import CANDIDATES, PER_SLICE, Begun, begun, database, save_model, tuner_for, worked
from tests.support.transformer import save_encoder

OPERATIONS = [f"conv-{index}" for index in range(24)]
SLICES = OPERATIONS[::PER_SLICE]
ENCODER = """
version: 1
name: encoder
targets: [onnxruntime/cpu]
precisions: [fp32]
tuning: quick
models:
  - name: encoder
    source: {path: net.onnx}
    inputs: {ids: {shape: [batch, seq], range: [0, 99]}}
    dims: {batch: [1], seq: [8]}
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


def gpus(count: int) -> FreeSlots:
    """Return the slots of a worker, made up."""
    return FreeSlots([Slot(f"GPU-{index}") for index in range(count)])


@contextmanager
def tuning(tuner: Tuner, model: Path) -> Iterator[Future[Any]]:
    """Tune and compile a model in another thread, which is cancelled where the block does not end."""
    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(tuner.compile, model, None)
        finally:
            tuner.children.cancelled.set()


@contextmanager
def tuner_in(free: FreeSlots, artifacts: S3Store, settings: Settings, folder: Path, **options: Any) -> Iterator[Tuner]:
    """What tunes in one of these slots, its own while the block lasts, and in the others while they are free."""
    with free.one(threading.Event()) as own:
        assert own
        yield tuner_for(artifacts, settings, folder, "one", slot=own, free=free, **options)


def wait_begun(gate: Path, count: int) -> list[Begun]:
    return wait_until(lambda: len(found := begun(gate)) == count and found)


def open_gates(gate: Path, gpus: Sequence[str]) -> None:
    for gpu in gpus:
        (gate / gpu).touch()


def test_all_spare_slots_tune_at_once_and_the_database_is_as_if_one_had(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path
) -> None:
    """Three slices are in hand before any may go on; each is tuned once, and nothing again in the whole."""
    free, details = gpus(3), list[str]()
    model = save_model(tmp_path, OPERATIONS, gate=gate)

    def hear(phase: Phase, share: float | None, detail: str) -> None:
        if phase is Phase.TUNING:
            details.append(detail)

    with (
        tuner_in(free, artifacts, farm_settings, tmp_path, on_phase=hear) as tuner,
        tuning(tuner, model) as ended,
    ):
        first = wait_begun(gate, 3)
        assert {each.gpu for each in first} == {"GPU-0", "GPU-1", "GPU-2"}
        open_gates(gate, ["GPU-0", "GPU-1", "GPU-2"])
        ended.result(300)
    assert Counter(each.slice for each in begun(gate)) == Counter(SLICES)
    assert (tuner.search.work.tuned, tuner.search.work.known, tuner.search.work.untunable) == (24, 0, 0)
    assert worked(model) == 24 * CANDIDATES
    assert any(detail.endswith("; 3 GPUs at work") for detail in details)
    assert "slices that were tuned on GPU-1:" in tuner.children.log_path.read_text()

    alone = tuner_for(artifacts, farm_settings, tmp_path, "alone", mode="full")
    alone.compile(save_model(tmp_path / "alone", OPERATIONS), None)
    many, one = (database(artifacts, mode).read().snapshot for mode in ("exhaustive", "full"))
    for store in (RecordStore.PROBLEM_CACHE, RecordStore.SLICES):
        values = [
            {
                key: value if store is RecordStore.PROBLEM_CACHE else ""
                for key, (value, _) in found.tables[store, ""].items()
            }
            for found in (many, one)
        ]
        assert values[0] == values[1]
    assert many.log.total() == replace(tuner.search.work, sessions=1)


def test_an_attempt_that_comes_waits_for_one_slice_at_most(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path
) -> None:
    """The lent slot is given to it, though slices are left, and lent again when it has ended."""
    free = gpus(2)
    model = save_model(tmp_path, OPERATIONS, gate=gate)
    with tuner_in(free, artifacts, farm_settings, tmp_path) as tuner:
        with tuning(tuner, model) as ended, ThreadPoolExecutor(1) as thread:
            wait_begun(gate, 2)
            came, leave = threading.Event(), threading.Event()

            def attempt() -> str:
                with free.one(threading.Event()) as slot:
                    came.set()
                    leave.wait(300)
                    return slot.gpu if slot else ""

            other = thread.submit(attempt)
            wait_until(lambda: free._waiting)
            open_gates(gate, ["GPU-1"])
            assert came.wait(300)
            assert len(begun(gate)) == 2
            assert not ended.done()
            leave.set()
            assert other.result(300) == "GPU-1"
            assert wait_begun(gate, 6)[2].gpu == "GPU-1", "GPU-0 still waits at its gate"
            open_gates(gate, ["GPU-0"])
            ended.result(300)
    assert worked(model) == 24 * CANDIDATES


def test_a_child_that_is_killed_in_a_lent_slot_costs_its_slice(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path
) -> None:
    """The attempt's own slot does that slice again, and the other is borrowed no more: it may be broken."""
    free = gpus(2)
    model = save_model(tmp_path, OPERATIONS, gate=gate)
    with tuner_in(free, artifacts, farm_settings, tmp_path) as tuner:
        with tuning(tuner, model) as ended:
            (lent,) = [each for each in wait_begun(gate, 2) if each.gpu == "GPU-1"]
            os.kill(lent.pid, signal.SIGKILL)
            open_gates(gate, ["GPU-0", "GPU-1"])
            ended.result(300)
    found = Counter(each.slice for each in begun(gate))
    assert found == Counter([*SLICES, lent.slice])
    assert [each.gpu for each in begun(gate)].count("GPU-1") == 1
    assert tuner.search.work.tuned == 24
    assert worked(model) == 24 * CANDIDATES


def test_a_cancel_ends_the_children_in_all_slots(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path
) -> None:
    """Afterwards every slot is free."""
    free = gpus(3)
    model = save_model(tmp_path, OPERATIONS, gate=gate)
    with tuner_in(free, artifacts, farm_settings, tmp_path) as tuner:
        with tuning(tuner, model) as ended:
            children = wait_begun(gate, 3)
            tuner.children.cancelled.set()
            with pytest.raises(StepEnded, match="cancelled"):
                ended.result(300)
            assert not [each for each in children if Path(f"/proc/{each.pid}").exists()]
    with free.one(threading.Event()), free.one(threading.Event()), free.one(threading.Event()) as last:
        assert last


def test_a_budget_ends_in_all_slots(artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path) -> None:
    """What was in hand and what was not begun is left over, and counted once."""
    free = gpus(2)
    with tuner_in(free, artifacts, farm_settings, tmp_path, budget=5.0) as tuner:
        tuner.compile(save_model(tmp_path, OPERATIONS, gate=gate), None)
    assert tuner.search.cut
    report = tuner.report(published=True)
    assert (report["finished"], report["operations"], report["tuned"]) == (False, 24, 0)
    assert {each.gpu for each in begun(gate)} == {"GPU-0", "GPU-1"}


def test_a_dead_worker_loses_the_slices_in_hand_at_most(farm_settings: Settings, tmp_path: Path) -> None:
    kills = kill_at_random(farm_settings, tmp_path, kills=3, operations=24, slots=2)
    assert max(kills.lost) <= 2 * PER_SLICE * CANDIDATES
    assert not kills.unreadable


def test_attempts_on_two_nodes_leave_slices_to_each_other(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, gate: Path
) -> None:
    """What the other has committed meanwhile is not tuned again, though it was missing at the start."""
    model = save_model(tmp_path, OPERATIONS, gate=gate)
    slow = tuner_for(artifacts, farm_settings, tmp_path, "slow", slot=Slot("GPU-far"))
    fast = tuner_for(artifacts, farm_settings, tmp_path, "fast", slot=Slot("GPU-near"))
    with tuning(slow, model) as ended:
        wait_begun(gate, 1)
        open_gates(gate, ["GPU-near"])
        fast.compile(model, None)
        database(artifacts).merge()
        open_gates(gate, ["GPU-far"])
        ended.result(300)
    assert [each.gpu for each in begun(gate)].count("GPU-far") == 1
    assert (slow.search.work.known, slow.search.work.tuned) == (20, 4)
    assert slow.search.work.saved > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two slots with CPUs of their own need two CPUs")
def test_slots_with_cpus_of_their_own_tune_a_real_model_together(farm: Farm, tmp_path: Path) -> None:
    """As a worker runs it, with ONNX Runtime: what each slot measured is in the program's choice and the database."""
    save_encoder(tmp_path / "net.onnx", layers=2)
    (tmp_path / "farm.yaml").write_text(ENCODER)
    frozen = freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache")
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.submit("main", frozen.submission, by="test")
    ((job, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    slots = [Slot(cpus=(cpu,)) for cpu in cpus]
    assert farm.executor
    Attempts(farm.store, farm.executor, farm.settings, slots, worker="w1", node="n1").run(job, number)
    (cell,) = farm.store.builds.cells(frozen.submission["build_id"])
    assert cell["state"] == "succeeded", cell
    found = farm.artifacts.get_object(cell["facts"]["sidecar"])
    assert found
    sidecar = json.loads(found.data)
    tuning, log = sidecar["tuning"], farm.artifacts.read_blob(sidecar["blobs"]["log"]["digest"], 1 << 20).decode()
    assert (tuning["tuned"], tuning["untunable"], tuning["finished"]) == (tuning["operations"], 0, True)
    assert f"slices that were tuned on CPUs {cpus[1]}:" in log
