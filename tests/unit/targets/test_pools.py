"""Which of several toolchains of one target is planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farm.spec import Device
from farm.targets.pools import Pool, Target, choose_pools, in_use, understand_target


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


def test_a_worker_with_the_gpu_goes_before_one_that_only_compiles_for_it() -> None:
    """Also while it is away: what it makes is tuned and verified."""
    device = Device("gfx942:sramecc+:xnack-", 304, 8)
    native = Pool(Target("migraphx", "gfx942"), "rocm7.2-migraphx2.17-aaaaaaaa", device, recipe=1)
    cross = Pool(native.target, "rocm7.2-migraphx2.17-cross-aaaaaaaa", device, recipe=1, untuned=True)
    assert in_use([(native, 0), (cross, 1)]) == [native]
    assert in_use([(cross, 1)]) == [cross]
    assert Pool.from_dict(cross.as_dict()) == cross


def test_a_release_reads_the_pools_of_the_next_one() -> None:
    """Control plane and workers are upgraded one after the other."""
    document = pool("onnxruntime1.31-bbbbbbbb").as_dict()
    assert Pool.from_dict({**document, "of_the_next_release": 1}) == pool("onnxruntime1.31-bbbbbbbb")


LIBRARIES = {"onnx": "1.23.2", "ml_dtypes": "0.6.0", "sympy": "1.14.0", "onnx_ir": "1.1.0"}
CPU = Pool(
    Target("onnxruntime", "cpu"), "onnxruntime1.31.1-1a2b3c4d", Device("cpu"), 1, LIBRARIES, cpu_family="x86-64-v4"
)
MI300X = Device("gfx942:sramecc+:xnack-", 304, 8)
GPU = Pool(Target("migraphx", "gfx942"), "rocm7.2-migraphx2.15-1a2b3c4d", MI300X, 1)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (GPU, "migraphx-gfx942-304cu.rocm7.2-migraphx2.15-1a2b3c4d"),
        (replace(GPU, libraries=LIBRARIES, features=("save_buffer",), memory=1, cpu_family="x86-64-v4"), GPU.name),
        (replace(GPU, recipe=2), f"{GPU.name}.recipe2"),
        (replace(GPU, device=replace(MI300X, arch="gfx942:sramecc+:xnack+")), f"{GPU.name}.sramecc-on.xnack-on"),
        (replace(GPU, device=replace(MI300X, arch="gfx942")), f"{GPU.name}.unknown-features"),
        (replace(GPU, device=replace(MI300X, xcc=None)), f"{GPU.name}.unknown-xcc"),
        (replace(CPU, libraries={"onnx": "1.23.2"}, cpu_family=""), "onnxruntime-cpu.onnxruntime1.31.1-1a2b3c4d"),
        (replace(CPU, libraries={}), "onnxruntime-cpu.onnxruntime1.31.1-1a2b3c4d.x86-64-v4"),
        (CPU, "onnxruntime-cpu.onnxruntime1.31.1-1a2b3c4d.libraries-52dc7aed.x86-64-v4"),
        (replace(CPU, libraries={**LIBRARIES, "onnx": "1.24.0"}), CPU.name),
    ],
)
def test_a_name_says_what_keys_of_the_target_use_and_no_more(changed: Pool, name: str) -> None:
    assert changed.name == name
    assert changed.name.startswith(changed.stem), "tuning databases are found by it"
    assert Pool.from_dict(changed.as_dict()) == changed


def test_a_pool_of_a_release_with_shorter_names_is_served_by_the_name_it_has() -> None:
    document = {**CPU.as_dict(), "name": CPU.stem}
    old = Pool.from_dict(document)
    assert (old.name, old.cpu_family, old.build) == (CPU.stem, "x86-64-v4", CPU.build)
    assert old.as_dict() == document
    choice = understand_target("onnxruntime/cpu")
    assert choose_pools(choice, "", in_use=[old], known=[], family_bound=True) == [old]
    assert choose_pools(choice, "", in_use=[old, CPU], known=[], family_bound=True) == [CPU]


@pytest.mark.parametrize(
    ("prefix", "begins"),
    [
        ("", True),
        ("onnxruntime1.31", True),
        ("onnxruntime1.3", False),
        (CPU.toolchain, True),
        (CPU.build, True),
        (f"{CPU.toolchain}.libraries-52dc7aed", True),
        (f"{CPU.toolchain}.x86-64-v4", False),
        (f"{CPU.build}-vnni", False),
    ],
)
def test_more_than_a_toolchains_id_chooses_among_its_pools(prefix: str, begins: bool) -> None:
    assert CPU.begins(prefix) is begins
