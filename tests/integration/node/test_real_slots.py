"""Real workers with real, sealed children that a script drives: a hostile one among others, paused ones that end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.compiling import cgroups
from farm.compiling.alone import SHORT
from farm.jobs.state import PAUSED
from farm.runner.seal import unsealable
from tests.chaos.rig import Rig
from tests.support.helpers import alive, wait_until

needs_seal = pytest.mark.skipif(bool(unsealable()), reason=f"this kernel cannot seal {', '.join(unsealable())}")


@pytest.fixture
def rig(tmp_path: Path, s3_settings: dict[str, str]) -> Iterator[Rig]:
    (locks := tmp_path / "locks").mkdir()
    with Rig(tmp_path, **s3_settings, lock_dir=str(locks), grace_seconds=60) as rig:
        yield rig


@needs_seal
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "no groups"])
def test_one_hostile_child_among_four_slots_leaves_nothing_and_harms_no_other(
    rig: Rig, tmp_path: Path, grouped: bool
) -> None:
    """Four attempts share one worker process; the three others go on until the hostile one has ended."""
    if grouped and not cgroups.find().folder:
        pytest.skip(f"no control group can be made here, {cgroups.find()}")
    go_on = tmp_path / "data" / "go on"
    calm = {"wait": str(go_on)}
    rig.script({"": [calm], "1": [{"hostile": "escape"}]})
    client = rig.serve()
    rig.workers("n0", slots=4, environment={} if grouped else {"CHAOS_WITHOUT_GROUPS": "1"})
    build = rig.submit(client, 4)
    states = wait_until(
        lambda: (
            (found := sorted(cell["state"] for cell in rig.store.builds.cells(build))).count("running") == 3
            and "succeeded" in found
            and found
        ),
        message="the hostile one has ended, the three others run",
    )
    assert states == ["running"] * 3 + ["succeeded"]
    wait_until(lambda: len(rig.compilers()) == 9, message="launcher, guard and child of three; nothing of the fourth")
    go_on.touch()
    cells = rig.wait(build)
    assert [cell["state"] for cell in cells] == ["succeeded"] * 4
    wait_until(lambda: rig.compilers() == [])
    (hostile,) = (cell for cell in cells if cell["identifier"].endswith("b1"))
    log = rig.artifacts.read_blob(rig.attempts(hostile)[-1]["log"], 1 << 20).decode()
    (escaped,) = re.findall(r"escaped as (\d+)", log)
    assert not alive(int(escaped))


@pytest.mark.parametrize(
    ("number", "grouped", "patient"),
    [(signal.SIGTERM, False, True), (signal.SIGINT, True, False)],
    ids=["SIGTERM", "Ctrl-C twice, groups"],
)
def test_a_worker_with_a_paused_child_ends_as_any_other(
    rig: Rig, tmp_path: Path, number: signal.Signals, grouped: bool, patient: bool
) -> None:
    """What is paused continues and finishes, or is given back at the second signal, which costs no attempt."""
    if grouped and not cgroups.find().folder:
        pytest.skip(f"no control group can be made here, so none can be frozen: {cgroups.find()}")
    begins, ends = (tmp_path / "data" / name for name in ("begins", "ends"))
    measuring = {"until": str(begins), "alone": True, "wait": str(ends)}
    rig.script({"1": [{"wait": str(ends)}, {}], "2": [measuring, {}], "": [{}]})
    client = rig.serve()
    (worker,) = rig.workers("n0", slots=2, environment={} if grouped else {"CHAOS_WITHOUT_GROUPS": "1"})
    build = rig.submit(client, 2)
    wait_until(lambda: len(rig.running(build)) == 2 and len(rig.compilers()) == 3, message="the first one compiles")
    begins.touch()
    wait_until(
        lambda: "tuning" in [cell["phase"] for cell in rig.running(build)],
        message="the second one measures, so the first one is paused",
    )
    (paused,) = wait_until(
        lambda: [cell for cell in rig.farm.build_reader.cells("main", build) if PAUSED in cell["waiting"]],
        message="and is shown to be",
    )
    since, lease = rig.store.now() - SHORT, rig.raw.zscore("{farm}:leases", paused["job"])
    worker.supervisor.send_signal(number)
    wait_until(lambda: rig.store.workers.list()[0]["draining"])
    wait_until(lambda: rig.raw.zscore("{farm}:leases", paused["job"]) > lease, message="its lease is renewed")
    stood = rig.store.now() - since

    def left_out() -> bool:
        """Whether what is paused counts as running for less time than since its attempt began."""
        (cell,) = (each for each in rig.store.builds.cells(build) if each["job"] == paused["job"])
        return rig.store.now() - rig.attempts(cell)[-1]["started_at"] - (cell["elapsed"] or 0.0) > SHORT

    wait_until(left_out, message="the time left of it shrinks no more")
    if patient:
        ends.touch()
    else:
        worker.supervisor.send_signal(number)
    assert worker.supervisor.wait(30) == 0, "in half of its grace period"
    assert rig.compilers() == []
    if not patient:
        rig.workers("n1")
    cells = rig.wait(build)
    assert [cell["state"] for cell in cells] == ["succeeded"] * 2
    before = [] if patient else [("released", "n0")]
    for cell in cells:
        ends_of = [(attempt["end"], attempt["node"]) for attempt in rig.attempts(cell)]
        assert ends_of == [*before, ("succeeded", "n0" if patient else "n1")]
        if patient and cell["job"] == paused["job"]:
            (attempt,) = rig.attempts(cell)
            took, facts = attempt["ended_at"] - attempt["started_at"], cell["facts"]
            assert max(facts["seconds"], sum(attempt["phases"].values())) < took - stood, "estimates learn no pause"
