"""What a GPU's use is read from: a recorded tree of amdgpu's files, no card."""

from __future__ import annotations

import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest.mock import MagicMock

import pytest

from farm.compiling.attempt import Attempt, FreeSlots, Slot, unless_held
from farm.jobs.state import AttemptLimits, Outcome
from farm.node.attempts import Attempts, Lease
from farm.node.gpus import Machine, conditions, foreign_users, until_forgotten, watch
from farm.settings import load_settings
from tests.support.recorded import unpack

if TYPE_CHECKING:
    from farm.jobs.state import WorkOrder

GPU = Slot("GPU-1", bdf="0000:0c:00.0")


def test_the_peak_counts_beyond_what_others_hold(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0c:00.0"
    folder.mkdir(parents=True)
    (folder / "mem_info_vram_used").write_text("1000\n")
    (folder / "gpu_busy_percent").write_text("40\n")

    class Allocating(Machine):
        """The program that is watched takes memory after the first look."""

        def text(self, name: str) -> str:
            found = super().text(name)
            if name.endswith("vram_used"):
                (folder / "mem_info_vram_used").write_text("5000\n")
            return found

    with watch(GPU, Allocating(tmp_path)) as usage:
        pass
    assert (usage["busy"], usage["memory"]) == (0.4, 4000)


def test_a_driver_that_does_not_say_and_no_gpu_leave_it_open(tmp_path: Path) -> None:
    for slot in (GPU, Slot()):
        with watch(slot, Machine(tmp_path)) as usage:
            pass
        assert usage == {"busy": None, "memory": None}


def test_clocks_cap_temperatures_and_throttling_are_the_whole_cards(tmp_path: Path) -> None:
    """A partition has no monitor of its own. The files are made by hand, as the kernel documents them."""
    card = tmp_path / "sys/bus/pci/devices/0000:0c:00.0"
    monitor = card / "hwmon/hwmon7"
    monitor.mkdir(parents=True)
    files = {"freq1_input": 2100000000, "freq1_label": "sclk", "temp2_input": 61000, "temp2_label": "junction"}
    for name, value in {**files, "temp3_input": "", "power1_cap": 750000000}.items():
        (monitor / name).write_text(f"{value}\n")
    header = bytes([0x20, 0x01, 1, 4])
    (card / "gpu_metrics").write_bytes(header + bytes(36) + (4).to_bytes(4, "little") + bytes(244))
    sensors = {"clocks": {"sclk": 2100.0}, "temperatures": {"junction": 61.0}, "power_cap": 750.0}
    expected = {**sensors, "throttled": True, "processes": None}
    assert conditions(Slot(bdf="0000:0c:00.1"), Machine(tmp_path)) == expected
    (card / "gpu_metrics").write_bytes(header + bytes(20))
    cut = conditions(Slot(bdf="0000:0c:00.0"), Machine(tmp_path))
    assert cut
    assert cut["throttled"] is None
    assert (
        conditions(Slot(bdf=""), Machine(tmp_path)) is conditions(Slot(bdf="0000:0d:00.0"), Machine(tmp_path)) is None
    )


def test_a_measurement_says_which_cpu_ran_it_and_how_fast_that_may_run(tmp_path: Path) -> None:
    cores = "".join(f"processor\t: {core}\nmodel name\t: EPYC 9654\ncpu MHz\t\t: 1500.000\n\n" for core in (0, 1))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cores)
    known = {"cpu": "EPYC 9654", "processes": None}
    assert conditions(Slot(cpus=(1,)), Machine(tmp_path)) == {**known, "clocks": {"cpu": 1500.0}}
    assert conditions(Slot(gpu="0", bdf="0000:0c:00.0"), Machine(tmp_path)) == {**known, "clocks": {}}
    limit = tmp_path / "sys/devices/system/cpu/cpu1/cpufreq/scaling_max_freq"
    limit.parent.mkdir(parents=True)
    limit.write_text("3700000\n")
    assert conditions(Slot(cpus=(1,)), Machine(tmp_path)) == {**known, "clocks": {"cpu": 3700.0}}


def using(root: Path, held: dict[int, dict[int, int]]) -> None:
    """Write KFD's files: the bytes that processes hold by pid and node, gpu_id being 1000 and the node's number."""
    for pid, nodes in held.items():
        folder = root / f"sys/class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True)
        for node, count in nodes.items():
            (root / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id").write_text(f"{1000 + node}\n")
            (folder / f"vram_{1000 + node}").write_text(f"{count}\n")


def test_others_on_a_partition_are_counted_not_those_on_its_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sees a GPU and holds nothing of it does not use it. A container's own pids are others than these."""
    monkeypatch.setattr("farm.node.gpus.RELEASE_SECONDS", 0.0)
    unpack("mi300x-cpx", tmp_path)
    using(tmp_path, {os.getpid(): {2: 3_000, 3: 70}, 7: {2: 500, 3: 0}, 8: {2: 0, 3: 70}})
    found = [conditions(Slot(bdf=bdf), Machine(tmp_path)) for bdf in ("0000:05:00.0", "0000:05:00.1", "0000:05:00.2")]
    assert [each and each["processes"] for each in found] == [
        {"count": 2, "memory": 3_500},
        {"count": 2, "memory": 140},
        None,
    ]


def test_a_child_that_ended_just_now_is_not_another(tmp_path: Path) -> None:
    """The driver removes its folder later; the first look still finds it."""
    unpack("mi300x-spx", tmp_path)
    using(tmp_path, {9: {2: 500}})

    class Releasing(Machine):
        def text(self, name: str) -> str:
            found = super().text(name)
            if "vram_" in name:
                shutil.rmtree(tmp_path / "sys/class/kfd/kfd/proc/9")
            return found

    found = conditions(Slot(bdf="0000:05:00.0"), Releasing(tmp_path))
    assert found
    assert found["processes"] == {"count": 0, "memory": 0}


def test_a_gpu_that_others_use_is_named_and_one_that_the_farm_holds_is_not(tmp_path: Path) -> None:
    unpack("mi300x-cpx", tmp_path)
    locks = tmp_path
    slots = [Slot(str(number), f"gpu-{number}", bdf=f"0000:05:00.{number}") for number in range(3)]
    using(tmp_path, {7: {2: 3_000_000_000, 3: 1 << 20}, 8: {2: 500_000_000}})
    found = [foreign_users(each, str(locks), Machine(tmp_path)) for each in (slots, slots[1:], [Slot()])]
    assert found == ["GPU 0 is not free: others (process 7 and 1 more) hold 3.5 GB of it", "", ""]
    with FreeSlots(slots, str(locks)).one(threading.Event()) as slot:
        assert slot is slots[0]
        assert foreign_users(slots, str(locks), Machine(tmp_path)) == ""


def test_a_gpu_is_given_back_when_kfd_has_forgotten_the_child(tmp_path: Path) -> None:
    """Its memory is free no earlier (k8s-device-plugin#202); a process that was there before is not waited for."""
    unpack("mi300x-spx", tmp_path)
    using(tmp_path, {7: {2: 500}})
    locks, slot = str(tmp_path), Slot("0", "gpu-0", bdf="0000:05:00.0")
    looks = []

    class Forgetting(Machine):
        def text(self, name: str) -> str:
            found = super().text(name)
            if name.endswith("/9/vram_1002"):
                with unless_held(slot, locks) as free:
                    looks.append(free)
                if len(looks) == 3:
                    shutil.rmtree(tmp_path / "sys/class/kfd/kfd/proc/9")
            return found

    free = FreeSlots([slot], locks, partial(until_forgotten, machine=Forgetting(tmp_path)))
    with free.one(threading.Event()):
        using(tmp_path, {9: {2: 800}})  # The child, which is killed at the end of the block.
    assert looks == [False, False, False]
    with unless_held(slot, locks) as given_back:
        assert given_back


def test_an_attempt_keeps_its_card_until_kfd_has_forgotten_its_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack("mi300x-spx", tmp_path)
    monkeypatch.setattr("farm.node.gpus.HERE.root", tmp_path)
    child, real, looks = tmp_path / "sys/class/kfd/kfd/proc/9", Machine.text, []

    def text(self: Machine, name: str) -> str:
        found = real(self, name)
        if "/9/vram" in name and (looks.append(name) or len(looks) == 3):
            shutil.rmtree(child)
        return found

    class Leaving:
        """Its child is killed, and KFD still has it."""

        def execute(self, *_: object, **__: object) -> Outcome:
            using(tmp_path, {9: {2: 800}})
            return Outcome.cancelled()

    monkeypatch.setattr(Machine, "text", text)
    store, settings = MagicMock(), load_settings({}, lock_dir=str(tmp_path))
    attempts = Attempts(store, Leaving(), settings, [Slot("0", "gpu-0", bdf="0000:05:00.0")], worker="w", node="n")
    order, limits = cast("WorkOrder", {}), AttemptLimits(time=0, memory=0)
    attempt = Attempt("j", 1, "t", order, limits, "main", "k")
    attempts._execute(attempt, Lease(attempt, 0.0, threading.Condition()))
    assert not child.exists()


def test_a_kernel_that_does_not_list_processes_leaves_it_open(tmp_path: Path) -> None:
    unpack("mi300x-spx", tmp_path)
    assert conditions(Slot(bdf="0000:05:00.0"), Machine(tmp_path)) is None
