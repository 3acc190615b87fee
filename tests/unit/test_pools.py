"""Which of several toolchains of one target is planned for, and who takes which GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from farm.gpus import Gpus, NoSuchGpu, slots_for
from farm.nodes import Gpu
from farm.pools import Pool, Target, in_use
from farm.spec import Device


def pool(toolchain: str, device: str = "cpu", compiler: str = "onnxruntime") -> Pool:
    return Pool(Target(compiler, device), toolchain, Device(arch=device), recipe=1)


OLD, NEW = pool("onnxruntime1.30-aaaaaaaa"), pool("onnxruntime1.31-bbbbbbbb")


@pytest.mark.parametrize(
    ("live", "preferred", "chosen"),
    [
        ((0, 1), (), [NEW]),
        ((1, 0), (), [OLD]),
        ((0, 0), (), [OLD, NEW]),
        ((1, 1), (), [OLD, NEW]),
        ((0, 1), ("onnxruntime1.30",), [OLD]),
        ((1, 1), ("rocm7",), [OLD, NEW]),
    ],
)
def test_after_an_upgrade_the_toolchain_that_lives_is_planned_for(
    live: tuple[int, int], preferred: tuple[str, ...], chosen: list[Pool]
) -> None:
    assert in_use(zip((OLD, NEW), live, strict=True), preferred) == chosen


def test_other_targets_do_not_compete() -> None:
    other = pool("migraphx2.16-cccccccc", compiler="migraphx")
    assert in_use([(NEW, 1), (other, 0)]) == [NEW, other]


GPUS = [Gpu(index, f"GPU-{index}", "gfx942:sramecc+:xnack-", 304, 8) for index in range(2)]
MI300X = {"arch": "gfx942:sramecc+:xnack-", "compute_units": 304, "xcc": 8, "cpu_family": None}


def test_two_attempts_never_hold_one_gpu(tmp_path: Path) -> None:
    never = threading.Event()
    # Two workers of one node: each knows the GPUs, and only the lock files are between them.
    one, other = Gpus(lambda: GPUS, tmp_path), Gpus(lambda: GPUS, tmp_path)
    with one.one(MI300X, never) as first, other.one(MI300X, never) as second:
        assert {first, second} == {"GPU-0", "GPU-1"}
        cancelled = threading.Event()
        cancelled.set()
        with one.one(MI300X, cancelled) as third:
            assert third == ""
    with one.one(MI300X, never) as again:
        assert again == "GPU-0"


def test_a_card_of_another_kind_is_not_taken(tmp_path: Path) -> None:
    with (
        pytest.raises(NoSuchGpu, match="gfx90a"),
        Gpus(lambda: GPUS, tmp_path).one({**MI300X, "arch": "gfx90a:any"}, threading.Event()),
    ):
        pass
    with Gpus(lambda: GPUS, tmp_path).one(
        {**MI300X, "arch": "gfx942:any", "compute_units": None}, threading.Event()
    ) as gpu:
        assert gpu == "GPU-0"


def test_a_cpu_target_needs_no_gpu(tmp_path: Path) -> None:
    with Gpus(lambda: [], tmp_path).one({"arch": "cpu"}, threading.Event()) as gpu:
        assert gpu == ""


def test_a_node_with_gpus_has_a_slot_for_each() -> None:
    on_gpu, on_cpu = pool("rocm7", "gfx942", "migraphx"), pool("onnxruntime1.31-bbbbbbbb")
    assert slots_for([on_gpu, on_cpu], GPUS, 4) == ([on_gpu], 2)
    assert slots_for([on_gpu, on_cpu], [], 4) == ([on_cpu], 4)
