"""What a worker makes of a node: GPUs, ROCm, slots. The nodes are in tests/support/nodes/ (written, not recorded)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from farm.compiling.attempt import FreeSlots, Slot, slots_of
from farm.node.amd_gpus import find_amd_gpus, find_rocm
from farm.node.gpus import Gpu, Machine
from farm.node.survey import share_out
from farm.settings import Settings, load_settings
from farm.spec import Device
from farm.targets.compilers import MIGRAPHX
from farm.targets.pools import Pool, Target, profiles
from tests.support.helpers import wait_until
from tests.support.recorded import NODES, program, recorded
from tests.support.undying import undying

PROGRAMS = ["/opt/rocm/bin"]
KFD = "sys/class/kfd/kfd/topology/nodes"


def look(machine: Machine) -> tuple[list[Gpu], str]:
    """The GPUs of a machine, and all notes in one text."""
    gpus, notes = find_amd_gpus(machine, PROGRAMS)
    return gpus, "\n".join(map(str, notes))


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "profile", "count", "partition"),
    [
        ("mi100", "mi100", 2, ""),
        ("mi210", "mi210", 2, ""),
        ("mi250x", "mi250x", 2, ""),
        ("mi300x-spx", "mi300x", 2, "SPX"),
        ("mi300x-cpx", "mi300x-cpx", 8, "CPX"),
        ("mi350x", "mi350x", 1, "SPX"),
        ("rx6900xt", "rx6900xt", 1, ""),
        ("rx7900xtx", "rx7900xtx", 1, ""),
        ("rx9070xt", "rx9070xt", 1, ""),
    ],
)
def test_a_node_is_what_its_profile_says(tmp_path: Path, name: str, profile: str, count: int, partition: str) -> None:
    """So that jobs for the profile's name find the node's pool, and their keys are the same everywhere."""
    gpus, notes = look(recorded(name, tmp_path))
    assert {gpu.device for gpu in gpus} == {profiles()[profile].device}
    assert (len(gpus), {gpu.partition for gpu in gpus}, notes) == (count, {partition}, "")
    assert all(gpu.memory and abs(gpu.memory / profiles()[profile].memory - 1) < 0.01 for gpu in gpus)
    assert all(gpu.model.startswith("AMD ") for gpu in gpus)


@pytest.mark.parametrize("name", sorted(path.stem for path in NODES.glob("*.txt")))
@pytest.mark.parametrize("tool", ["rocminfo", "amd-smi"])
def test_each_source_alone_tells_the_same_gpus(tmp_path: Path, name: str, tool: str) -> None:
    """Where KFD's files are not there (WSL, a container without /sys), either tool will do."""
    machine = recorded(name, tmp_path)
    whole, _ = look(machine)
    for source in [KFD, *({"opt/rocm/bin/rocminfo", "opt/rocm/bin/amd-smi"} - {f"opt/rocm/bin/{tool}"})]:
        if (tmp_path / source).exists():
            (tmp_path / source).rename(tmp_path / f"away-{Path(source).name}")
    alone, _ = look(machine)
    short = [(gpu.arch.partition(":")[0], gpu.compute_units, gpu.uuid) for gpu in whole]
    assert [(gpu.arch.partition(":")[0], gpu.compute_units, gpu.uuid) for gpu in alone] == short


def test_partitions_that_share_a_uuid_are_pinned_by_index_and_locked_apart(tmp_path: Path) -> None:
    """ROCr shows nothing for a UUID that two GPUs have."""
    gpus, _ = look(recorded("mi300x-cpx", tmp_path))
    assert len({gpu.uuid for gpu in gpus}) == 1
    assert [gpu.pin for gpu in gpus] == [str(index) for index in range(8)]
    assert len({gpu.lock for gpu in gpus}) == 8
    whole, _ = look(recorded("mi300x-spx", tmp_path / "spx"))
    assert [gpu.pin for gpu in whole] == [gpu.uuid for gpu in whole] == [gpu.lock for gpu in whole]


def test_gpus_are_distinguished_by_their_names_and_not_by_order(tmp_path: Path) -> None:
    """rocminfo may list what it finds in another order, and leave one out."""
    machine = recorded("mixed", tmp_path)
    straight, _ = look(machine)
    tool = tmp_path / "opt/rocm/bin/rocminfo"
    head, *agents = tool.read_text().split("*******                  \nAgent ")
    agents = [agent.removesuffix("*** Done ***             '\nexit 0\n") for agent in agents]
    mark = "*******                  \nAgent "
    tool.write_text(head + "".join(mark + agent for agent in reversed(agents)) + "'\n")
    assert look(machine)[0] == straight
    tool.write_text(head + "".join(mark + agent for agent in agents[:-1]) + "'\n")
    gpus, notes = look(machine)
    assert [gpu.arch for gpu in gpus] == ["gfx90a:sramecc+:xnack-", "gfx1100"]
    assert "the kernel has 2, rocminfo 1: the value of the kernel is used" in notes


def test_a_worker_keeps_to_the_gpus_that_it_was_left(tmp_path: Path) -> None:
    gpus, notes = look(recorded("mi300x-spx", tmp_path, ROCR_VISIBLE_DEVICES="1"))
    assert [gpu.index for gpu in gpus] == [1]
    assert "leaves 1 of 2" in notes


# --- broken nodes ----------------------------------------------------------------------------------------------------


def test_a_truncated_description_is_filled_from_other_sources_or_refused(tmp_path: Path) -> None:
    machine = recorded("rx7900xtx", tmp_path)
    (tmp_path / KFD / "1/properties").write_text("cpu_cores_count 0\nsimd_count 192\nlocation_id 768\nsimd_per_c")
    gpus, _ = look(machine)
    assert [(gpu.arch, gpu.compute_units) for gpu in gpus] == [("gfx1100", 96)]
    program(tmp_path / "opt/rocm/bin/rocminfo", "", status=1)
    program(tmp_path / "opt/rocm/bin/amd-smi", "Traceback (most recent call last):")
    gpus, notes = look(machine)
    assert gpus == []
    assert "GPU 0 (0000:03:00.0): nothing says its architecture" in notes


def test_an_architecture_that_the_kernel_does_not_tell_is_taken_from_rocminfo(tmp_path: Path) -> None:
    machine = recorded("mi210", tmp_path)
    rewrite(tmp_path / KFD / "2/properties", "gfx_target_version 90010", "gfx_target_version 0")
    gpus, notes = look(machine)
    assert [gpu.arch for gpu in gpus] == ["gfx90a:sramecc+:xnack-"] * 2
    assert notes == ""


def test_without_rocminfo_feature_bits_are_said_to_be_unknown(tmp_path: Path) -> None:
    machine = recorded("mi300x-spx", tmp_path)
    program(tmp_path / "opt/rocm/bin/rocminfo", "ROCk module is NOT loaded, possibly no GPU devices", status=1)
    gpus, notes = look(machine)
    assert [(gpu.arch, gpu.compute_units, gpu.model) for gpu in gpus] == [("gfx942", 304, "AMD Instinct MI300X")] * 2
    assert "feature bits of gfx942 are unknown" in notes


def test_a_gpu_that_poses_as_another_is_refused(tmp_path: Path) -> None:
    gpus, notes = look(recorded("mi210", tmp_path, HSA_OVERRIDE_GFX_VERSION="9.4.2"))
    assert gpus == []
    assert "start the worker without HSA_OVERRIDE_GFX_VERSION" in notes
    # Also where the variable was set for rocminfo alone, in its own start script.
    machine = recorded("rx6900xt", tmp_path / "other")
    rewrite(tmp_path / "other" / KFD / "1/properties", "gfx_target_version 100300", "gfx_target_version 100301")
    gpus, notes = look(machine)
    assert gpus == []
    assert "rocminfo calls it gfx1030, which it is not: the kernel says gfx1031" in notes


def test_counts_that_disagree_are_reported(tmp_path: Path) -> None:
    machine = recorded("rx9070xt", tmp_path)
    rewrite(tmp_path / "opt/rocm/bin/rocminfo", "Compute Unit:            64 ", "Compute Unit:            56 ")
    gpus, notes = look(machine)
    assert gpus[0].compute_units == 64
    assert "rocminfo counts 56 compute units, the kernel 64, which stands" in notes


def test_a_gpu_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a check that is given the answer: the tests may run as root, who may open everything."""
    machine = recorded("mi300x-spx", tmp_path)
    monkeypatch.setattr("farm.node.gpus.os.access", lambda path, mode: Path(path).name != "renderD129")
    gpus, notes = look(machine)
    assert [gpu.index for gpu in gpus] == [0]
    assert "GPU 1 (0000:85:00.0): this user may not open /dev/dri/renderD129" in notes
    assert "usermod -aG render,video" in notes
    (tmp_path / "dev/kfd").unlink()
    gpus, notes = look(machine)
    assert gpus == []
    assert "/dev/kfd is not there; start the container with --device /dev/kfd" in notes


def test_a_gpu_that_a_container_was_not_given_is_not_counted(tmp_path: Path) -> None:
    """KFD shows its node with nothing in it, and ROCr leaves it out when it counts."""
    machine = recorded("mi300x-spx", tmp_path)
    (tmp_path / KFD / "2/properties").write_text("")
    gpus, notes = look(machine)
    assert [(gpu.index, gpu.bdf) for gpu in gpus] == [(0, "0000:85:00.0")]
    assert "the kernel hides node 2 from this process" in notes


def test_amd_smi_is_read_past_the_warnings_of_its_own_python(tmp_path: Path) -> None:
    machine = recorded("rx7900xtx", tmp_path)
    (tmp_path / KFD).rename(tmp_path / "away")
    (tmp_path / "opt/rocm/bin/rocminfo").unlink()
    tool = tmp_path / "opt/rocm/bin/amd-smi"
    rewrite(
        tool, "printf '%s\\n' '", "printf '%s\\n' 'amdsmi_interface.py:3569: SyntaxWarning: return in a finally block\n"
    )
    assert [gpu.arch for gpu in look(machine)[0]] == ["gfx1100"]


ASKS = """
import sys
from pathlib import Path
from farm.node import gpus
gpus.PROGRAM_SECONDS, gpus.DYING_SECONDS = 5.0, 0.1
print(repr(gpus.Machine(Path(sys.argv[1])).ask(sys.argv[2])))
"""


def test_a_tool_that_cannot_be_killed_is_not_waited_for(tmp_path: Path) -> None:
    """As amd-smi after a reset of the GPU, which waits in the kernel; what it has said until then does not count."""
    tool, pid = tmp_path / "amd-smi", tmp_path / "pid"
    tool.write_text(f"#!/bin/sh\necho 1\necho $$ >{pid}.new\nmv {pid}.new {pid}\nexec sleep 600\n")
    tool.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", ASKS, str(tmp_path), str(tool)], stdout=subprocess.PIPE) as asking:
        wait_until(pid.exists)
        with undying(int(pid.read_text())):
            said, _ = asking.communicate(timeout=60)
    assert said == b"''\n"


def test_a_node_without_gpus_has_none(tmp_path: Path) -> None:
    assert look(recorded("cpu-only", tmp_path)) == ([], "")
    assert look(Machine(tmp_path / "nowhere", {})) == ([], "")


def test_profiles_of_partitions_are_equal_parts_of_their_card() -> None:
    """What KFD shows of them: a public recording of a MI300X in CPX has 38 units and 1 XCC for each partition."""
    parts = {name: profile for name, profile in profiles().items() if name.startswith("mi300")}
    assert {name: (part.device.compute_units, part.device.xcc, part.memory >> 30) for name, part in parts.items()} == {
        "mi300a": (228, 6, 128),
        "mi300a-tpx": (76, 2, 42),
        "mi300a-cpx": (38, 1, 21),
        "mi300x": (304, 8, 192),
        "mi300x-dpx": (152, 4, 96),
        "mi300x-qpx": (76, 2, 48),
        "mi300x-cpx": (38, 1, 24),
    }


# --- ROCm ------------------------------------------------------------------------------------------------------------


def test_which_rocm_is_used_and_why(tmp_path: Path) -> None:
    """ROCM_PATH, then rocm-sdk, then /opt/rocm/core*, then /opt/rocm."""
    machine = recorded("mi300x-spx", tmp_path)
    assert str(find_rocm(machine)) == "ROCm 7.2.4, MIOpen 3.5.1 at /opt/rocm (the usual place)"
    for version in ("7.9", "7.10"):
        info = tmp_path / f"opt/rocm/core-{version}/.info/version"
        info.parent.mkdir(parents=True)
        info.write_text(f"{version}.0-12\n")
    assert str(find_rocm(machine)) == "ROCm 7.10.0 at /opt/rocm/core-7.10 (the newest /opt/rocm/core*)"
    (tmp_path / "venv/lib/rocm").mkdir(parents=True)
    program(tmp_path / "venv/bin/rocm-sdk", str(tmp_path / "venv/lib/rocm"))
    found = find_rocm(machine, python="/venv/bin/python")
    assert found is not None
    assert (found.root, found.version) == ("/venv/lib/rocm", "")
    assert "rocm-sdk path --root names it" in found.because
    chosen = find_rocm(Machine(tmp_path, {"ROCM_PATH": "/opt/rocm"}), python="/venv/bin/python")
    assert chosen is not None
    assert (chosen.root, chosen.because) == ("/opt/rocm", "ROCM_PATH names it")
    assert find_rocm(Machine(tmp_path / "nowhere", {})) is None


# --- slots -----------------------------------------------------------------------------------------------------------

NEVER = threading.Event()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({})


def pools(gpus: list[Gpu]) -> list[Pool]:
    """A pool for each GPU model, and the CPU targets."""
    names = [Target("migraphx", "cpu"), Target("onnxruntime", "cpu")]
    on_cpu = [Pool(target, "t-00000000", Device("cpu"), recipe=1) for target in names]
    devices = {gpu.device: gpu for gpu in gpus}
    return on_cpu + [
        Pool(Target("migraphx", gpu.arch.partition(":")[0]), "t-00000000", device, MIGRAPHX.recipe)
        for device, gpu in devices.items()
    ]


def test_a_mixed_node_serves_each_model_and_its_cpu_targets(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    machine = recorded("mixed", tmp_path)
    gpus, _ = look(machine)
    kinds = share_out(pools(gpus), gpus, settings, machine)
    near, far = tuple(range(64)), tuple(range(64, 128))
    assert [(kind.name, [str(pool.target) for pool in kind.pools]) for kind in kinds] == [
        ("gfx90a-104cu", ["migraphx/gfx90a"]),
        ("gfx1100-96cu", ["migraphx/gfx1100"]),
        ("cpu", ["migraphx/cpu", "onnxruntime/cpu"]),
    ]
    assert kinds[0].slots == (Slot(gpus[0].uuid, gpus[0].uuid, near, gpus[0].bdf),)
    assert kinds[1].slots == (Slot(gpus[1].uuid, gpus[1].uuid, far, gpus[1].bdf),)
    assert kinds[2].slots == (Slot(cpus=near), Slot(cpus=far))
    assert {kind.threads for kind in kinds} == {128 // 4}


@pytest.mark.parametrize(
    ("node", "device"),
    [
        ("mi300x-spx", {"model": "AMD Instinct MI300X", "partition": "SPX", "driver": "6.12.12"}),
        ("rx7900xtx", {"model": "AMD Radeon RX 7900 XTX", "partition": None, "driver": "Linux 6.8.0-45"}),
        ("rx6900xt", {"model": "AMD Radeon RX 6900 XT", "partition": None, "driver": None}),
    ],
)
def test_a_slot_knows_what_sidecars_say_of_its_gpu(
    tmp_path: Path, settings: Settings, node: str, device: dict[str, Any]
) -> None:
    """Also after its way to the worker process; what nothing tells is null."""
    machine = recorded(node, tmp_path)
    gpus, _ = look(machine)
    kind, *_ = share_out(pools(gpus), gpus, settings, machine)
    told = json.dumps([asdict(slot) for slot in kind.slots])
    assert slots_of(json.loads(told))[0].device == {**device, "memory": gpus[0].memory}


def test_cpu_slots_are_spread_over_numa_nodes(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100)))
    machine = recorded("mi300x-spx", tmp_path)
    two = settings.model_copy(update={"cpu_slots": 3, "threads": 7})
    (kind,) = share_out(pools([]), [], two, machine)
    assert [len(slot.cpus) for slot in kind.slots] == [96, 96, 4]
    assert kind.threads == 7
    (kind,) = share_out(pools([]), [], two.model_copy(update={"cpu_slots": 1}), machine)
    assert [len(slot.cpus) for slot in kind.slots] == [100]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (kind,) = share_out(pools([]), [], settings, machine)
    assert (set(kind.slots), len(kind.slots), kind.threads) == ({Slot()}, 8, 1)


def test_two_attempts_never_hold_one_gpu(tmp_path: Path) -> None:
    slots = [Slot(f"GPU-{index}", f"GPU-{index}", (0, 1)) for index in range(2)]
    # Two workers of one node: each knows the GPUs, and only the lock files are between them.
    one, other = FreeSlots(slots, str(tmp_path)), FreeSlots(slots, str(tmp_path))
    with one.one(NEVER) as first, other.one(NEVER) as second:
        assert first
        assert second
        assert {first.gpu, second.gpu} == {"GPU-0", "GPU-1"}
        cancelled = threading.Event()
        cancelled.set()
        with one.one(cancelled) as third:
            assert third is None
    with other.one(NEVER) as again, other.one(NEVER) as last:
        assert again != last


def test_who_measures_waits_for_those_that_have_left_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those of other slots: an upload that storage holds up is one slot's trouble."""
    slot, other = Slot(), Slot()
    free, publishes, done = FreeSlots([slot]), threading.Event(), threading.Event()

    def publish() -> None:
        with free.left(slot):
            publishes.set()
            done.wait()

    with ThreadPoolExecutor(2) as threads:
        ended = threads.submit(publish)
        publishes.wait()
        assert [free.has_room(running) for running in (0, 1, 2)] == [True, True, False]
        waits = threads.submit(free.until_quiet, slot, NEVER)
        wait_until(lambda: free._change._waiters)  # type: ignore[attr-defined]
        assert not waits.done()
        done.set()
        assert waits.result(30)
        ended.result(30)
    assert [free.has_room(running) for running in (0, 1)] == [True, False]
    monkeypatch.setattr(free._change, "wait", lambda seconds: pytest.fail("it waits for another slot's upload"))
    with free.left(slot):
        assert free.until_quiet(other, NEVER)
        monkeypatch.setattr("farm.compiling.attempt.UPLOAD_SECONDS", 0.0)
        assert not free.until_quiet(slot, NEVER)


def test_a_gpu_is_lent_only_while_nobody_waits_for_it(tmp_path: Path) -> None:
    """A worker in another process looks for a free one now and then; it finds one that was lent before it is again."""
    slots = [Slot(f"GPU-{index}", f"GPU-{index}") for index in range(2)]
    one, other = FreeSlots(slots, str(tmp_path)), FreeSlots(slots, str(tmp_path))
    ended = threading.Event()

    def borrows() -> bool:
        with one.borrow(slots[1], ended) as borrowed:
            return borrowed

    with one.one(NEVER) as own, ThreadPoolExecutor(2) as threads:
        assert own
        assert one.others(own) == [slots[1]]
        with one.borrow(slots[1], ended) as borrowed:
            assert borrowed
            attempt = other.one(NEVER)
            came = threads.submit(attempt.__enter__)
        again = threads.submit(borrows)
        assert came.result(30) == slots[1]
        ended.set()
        assert again.result(30) is False


def test_a_cpu_slot_is_lent_only_where_it_has_cpus_of_its_own() -> None:
    """Two that time candidates on the same CPUs would measure each other."""
    near, far, anywhere = Slot(cpus=(0, 1)), Slot(cpus=(2, 3)), Slot()
    assert FreeSlots([near, near, far]).others(near) == [far]
    assert FreeSlots([anywhere] * 4).others(anywhere) == []
    free = FreeSlots([far, near, near])
    with free.one(NEVER) as own:
        assert own == far
        with free.one(NEVER) as other:
            assert other == near
            assert not free._is_spare(near), "the other one is in use"
        with free.borrow(near, NEVER) as borrowed:
            assert borrowed


def test_recorded_trees_are_what_their_readme_lists() -> None:
    readme = (NODES / "README.md").read_text()
    assert [path.stem for path in sorted(NODES.glob("*.txt")) if f"`{path.stem}`" not in readme] == []
    for path in NODES.glob("*.txt"):
        for part in path.read_text().split("\n=== ")[1:]:
            if part.startswith("opt/rocm/bin/amd-smi"):
                assert json.loads(part.partition("\n")[2])
