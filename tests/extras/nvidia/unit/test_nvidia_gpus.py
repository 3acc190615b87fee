"""NVIDIA's GPUs as the survey finds them. The answers of NVML are recorded on two H200, or changed as the test says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from farm.compiling.attempt import Slot, slots_of
from farm.compiling.child_process import child_environment
from farm.extras.nvidia.driver import find, model_slug
from farm.node import survey as node_survey
from farm.node.gpus import Machine, conditions, watch
from farm.node.survey import share_out
from farm.runner.documents import ChildRequest, ProbeAnswer
from farm.settings import Settings, load_settings
from farm.spec import Device
from farm.targets.pools import Pool, Target, profiles
from tests.gpu.card_sampler import NvmlSampler
from tests.support.helpers import wait_until
from tests.support.recorded_nvml import RecordedMachine

FIRST, SECOND = "GPU-2d70c2d2-6b17-db57-003a-3d13949e1b2a", "GPU-a206ff02-7a3b-e748-1ea4-8c11839c5912"


def test_cards_are_what_their_profile_says_and_are_pinned_by_uuid(tmp_path: Path) -> None:
    gpus, notes = find(RecordedMachine(tmp_path, "h200-x2", 2))
    assert notes == []
    assert [gpu.pin for gpu in gpus] == [gpu.lock for gpu in gpus] == [FIRST, SECOND]
    assert {gpu.device for gpu in gpus} == {profiles()["h200"].device} == {Device("sm_90:h200", 132)}
    assert all(gpu.memory and abs(gpu.memory / profiles()["h200"].memory - 1) < 0.01 for gpu in gpus)
    assert {(gpu.model, gpu.driver, gpu.partition, gpu.maker) for gpu in gpus} == {
        ("NVIDIA H200", "580.159.04", "", "nvidia")
    }
    assert all(gpu.bdf and str(gpu).startswith("NVIDIA H200 sm_90:h200, 132 SMs, 140 GiB") for gpu in gpus)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g.18gb"),
    ],
)
def test_a_models_name_in_keys_and_targets(name: str, slug: str) -> None:
    assert model_slug(name) == slug


def test_the_worker_keeps_to_the_cards_that_it_was_left(tmp_path: Path) -> None:
    gpus, [note] = find(RecordedMachine(tmp_path, "h200-x2", 2, CUDA_VISIBLE_DEVICES=SECOND[:12]))
    assert ([gpu.pin for gpu in gpus], note.broken) == ([SECOND], False)
    assert str(note) == f"NVIDIA GPUs: CUDA_VISIBLE_DEVICES={SECOND[:12]} leaves 1 of 2 to this worker"
    for choice, count in (("0", 1), ("", 0), ("0,1", 2)):
        found, _ = find(RecordedMachine(tmp_path, "h200-x2", 2, CUDA_VISIBLE_DEVICES=choice))
        assert len(found) == count


def test_the_processes_on_cards_are_watched(tmp_path: Path) -> None:
    """As `make gpu-test` does on real ones: its report counts them."""
    machine = RecordedMachine(tmp_path, "h200-x2", 2)
    machine.binding.calls["DeviceGetComputeRunningProcesses(handle-1)"] = [
        {"fields": {"pid": 7, "usedGpuMemory": 0}}, {"fields": {"pid": 5, "usedGpuMemory": None}}
    ]  # fmt: skip
    sampler = NvmlSampler(machine)
    wait_until(lambda: sampler.most(0) == 2)
    sampler.stop()
    assert [(card, pids) for _, card, pids in sampler.changes] == [(1, (5, 7))]
    assert len(sampler.memory()) == 2


def test_each_card_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    machine = RecordedMachine(tmp_path, "h200-x2", 1)
    calls = machine.binding.calls
    gpus, [note] = find(machine)
    assert ([gpu.pin for gpu in gpus], str(note).partition(";")[0]) == (
        [FIRST],
        "NVIDIA GPU 1: /dev/nvidia1 is not there",
    )
    calls["DeviceGetHandleByIndex(1)"] = {"error": 15}
    _, [note] = find(machine)
    assert "it fell off the bus" in str(note)
    calls["DeviceGetComputeMode(handle-0)"] = 2
    assert "its compute mode is Prohibited" in str(find(machine)[1][0])
    calls["DeviceGetComputeMode(handle-0)"] = 0
    del calls["DeviceGetCudaComputeCapability(handle-0)"]
    assert "does not tell its compute capability" in str(find(machine)[1][0])
    (tmp_path / "dev" / "nvidia-uvm").unlink()
    assert "/dev/nvidia-uvm is not there; nvidia-modprobe -u -c=0" in str(find(machine)[1][0])


def test_slices_of_a_card_are_found_as_they_are(tmp_path: Path) -> None:
    """Written, not recorded: no card at hand may be split."""
    machine = RecordedMachine(tmp_path, "h200-x2", 1)
    machine.binding.calls |= {
        "DeviceGetMigMode(handle-0)": [1, 1],
        "DeviceGetMaxMigDeviceCount(handle-0)": 7,
        "DeviceGetMigDeviceHandleByIndex(handle-0, 0)": "slice",
        "DeviceGetName(slice)": "NVIDIA H200 MIG 1g.18gb",
        "DeviceGetUUID(slice)": "MIG-1f0b",
        "DeviceGetMemoryInfo(slice)": {"fields": {"total": 17 << 30, "used": 0}},
        "DeviceGetAttributes_v2(slice)": {"fields": {"multiprocessorCount": 16}},
    }
    [gpu], _ = find(machine)
    assert (gpu.pin, gpu.device, gpu.partition) == ("MIG-1f0b", Device("sm_90:h200-mig-1g.18gb", 16), "1g.18gb")
    del machine.binding.calls["DeviceGetMigDeviceHandleByIndex(handle-0, 0)"]
    gpus, notes = find(machine)
    assert gpus == [] and "MIG is on, and no slice is made" in str(notes[0])


def test_without_a_driver_nothing_of_nvidia_is_imported(tmp_path: Path) -> None:
    assert find(Machine(tmp_path)) == ([], [])
    for name, text in (("vendor", "0x10de"), ("class", "0x030200")):
        file = tmp_path / "sys/bus/pci/devices/0000:05:00.0" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    _, [note] = find(Machine(tmp_path))
    assert "0000:05:00.0: the NVIDIA driver is not loaded" in str(note)
    code = (
        "import sys; from pathlib import Path; from farm.node.gpus import Machine\n"
        "from farm.extras.nvidia.driver import find; import farm.cli, farm.node.survey\n"
        f"find(Machine(Path({str(tmp_path)!r}))); assert 'pynvml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_driver_without_its_binding_or_its_library_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = RecordedMachine(tmp_path, "h200-x2", 2)

    def fail() -> None:
        raise machine.binding.NVMLError(12)

    monkeypatch.setattr(machine.binding, "nvmlInit", fail, raising=False)
    assert "the driver's library does not open: NVML error 12" in str(find(machine)[1][0])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    plain = Machine(tmp_path, {})
    assert "nvidia-ml-py, which asks it, is missing; pip install 'migraphx-farm[cuda]'" in str(find(plain)[1][0])


def test_conditions_tell_errors_reasons_and_others_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.node.gpus.RELEASE_SECONDS", 0.0)
    machine = RecordedMachine(tmp_path, "h200-x2", 2)
    slot = Slot(FIRST, maker="nvidia")
    assert conditions(slot, machine) == {
        "clocks": {"sm": 345.0, "mem": 3201.0},
        "temperatures": {"gpu": 37.0},
        "power_cap": 700.0,
        "throttled": False,
        "clock_reasons": ["gpu_idle"],
        "ecc_errors": 0,
        "xids": [],
        "processes": {"count": 0, "memory": 0},
    }
    machine.binding.calls |= {
        "DeviceGetCurrentClocksEventReasons(handle-0)": 0x24,
        "DeviceGetComputeRunningProcesses(handle-0)": [{"fields": {"pid": 7, "usedGpuMemory": 5 << 20}}],
    }
    found = conditions(slot, machine)
    assert found and found["throttled"] and found["clock_reasons"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert found["processes"] == {"count": 1, "memory": 5 << 20}
    assert conditions(Slot("GPU-gone", maker="nvidia"), machine) is None


def test_a_gpu_is_watched_by_its_maker(tmp_path: Path) -> None:
    machine = RecordedMachine(tmp_path, "h200-x2", 2)
    machine.binding.calls["DeviceGetUtilizationRates(handle-0)"] = {"fields": {"gpu": 40, "memory": 3}}
    with watch(Slot(FIRST, maker="nvidia"), machine) as usage:
        pass
    assert (usage["busy"], usage["memory"]) == (0.4, 0)


def test_both_makers_cards_are_slots_alike_and_children_see_one_card(tmp_path: Path) -> None:
    gpus, _ = find(RecordedMachine(tmp_path, "h200-x2", 2))
    pool = Pool(Target("onnxruntime", "cuda"), "onnxruntime1.31.1-cuda13.0-1a2b3c4d", gpus[0].device, 1)
    [kind] = share_out([pool], gpus, load_settings({}), Machine(tmp_path))
    assert kind.name == "sm_90-h200-132cu"
    assert [(slot.gpu, slot.lock, slot.maker) for slot in kind.slots] == [
        (FIRST, FIRST, "nvidia"),
        (SECOND, SECOND, "nvidia"),
    ]
    assert slots_of(json.loads(json.dumps([asdict(slot) for slot in kind.slots]))) == list(kind.slots)
    cards: tuple[ChildRequest, ...] = (
        {"action": "probe", "gpu": FIRST, "maker": "nvidia"},
        {"action": "probe", "gpu": FIRST, "maker": "amd"},
    )
    sees = {request["maker"]: child_environment(tmp_path, request, {}) for request in cards}
    assert (sees["nvidia"]["CUDA_VISIBLE_DEVICES"], sees["nvidia"]["ROCR_VISIBLE_DEVICES"]) == (FIRST, "-1")
    assert (sees["amd"]["CUDA_VISIBLE_DEVICES"], sees["amd"]["ROCR_VISIBLE_DEVICES"]) == ("-1", FIRST)
    assert sees["nvidia"]["CUDA_CACHE_PATH"].startswith(str(tmp_path))


@pytest.mark.parametrize("there", [True, False])
def test_each_device_of_onnx_runtime_has_its_pools_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """TensorRT is nobody's duty to have: without its libraries the node is as good, and says what is missing."""

    def answer(name: str, settings: Settings, *, device: str = "", **_: object) -> ProbeAnswer:
        if name != "onnxruntime" or (device == "tensorrt" and not there):
            missing = "the TensorRT provider lacks libnvinfer.so.10: cannot open shared object file"
            return {"available": False, "reason": missing, "fix": "get TensorRT 10"}
        label = {"": "", "cuda": "-cuda13.0", "tensorrt": "-tensorrt10.13.3-cuda13.0"}[device]
        return {
            "available": True,
            "reason": "",
            "version": "1.31.1",
            "label": f"onnxruntime1.31.1{label}",
            "toolchain": f"onnxruntime1.31.1{label}-1a2b3c4d",
            "libraries": {},
            "features": [],
            "targets": [device or "cpu"],
            "cpu_family": "",
            "lowest": 75 if device else 0,
        }

    monkeypatch.setattr(node_survey, "probe", answer)
    found = node_survey.survey(load_settings(), RecordedMachine(tmp_path, "h200-x2", 2))
    pools = {str(pool.target): pool.toolchain for pool in found.pools}
    assert pools["onnxruntime/cuda"] == "onnxruntime1.31.1-cuda13.0-1a2b3c4d"
    assert ("onnxruntime/tensorrt" in pools) == there
    notes = [note for note in found.notes if note.subject == "onnxruntime/tensorrt"]
    assert [(note.broken, "libnvinfer.so.10" in note.text) for note in notes] == ([] if there else [(False, True)])
