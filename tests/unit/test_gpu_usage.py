"""What a GPU's use is read from: a recorded tree of amdgpu's files, no card."""

from __future__ import annotations

from pathlib import Path

from farm.nodes.gpus import Gpu
from farm.nodes.machine import Machine
from farm.nodes.usage import conditions, watch

GPU = Gpu(index=0, uuid="GPU-1", arch="gfx942", compute_units=304, bdf="0000:0c:00.0")


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
    assert (usage.busy, usage.memory) == (0.4, 4000)


def test_a_driver_that_does_not_say_and_no_gpu_leave_it_open(tmp_path: Path) -> None:
    for gpu in (GPU, None):
        with watch(gpu, Machine(tmp_path)) as usage:
            pass
        assert usage.as_dict() == {"busy": None, "memory": None}


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
    expected = {"clocks": {"sclk": 2100.0}, "temperatures": {"junction": 61.0}, "power_cap": 750.0, "throttled": True}
    assert conditions("0000:0c:00.1", Machine(tmp_path)) == expected
    (card / "gpu_metrics").write_bytes(header + bytes(20))
    cut = conditions("0000:0c:00.0", Machine(tmp_path))
    assert cut
    assert cut["throttled"] is None
    assert conditions("", Machine(tmp_path)) is conditions("0000:0d:00.0", Machine(tmp_path)) is None
