"""Which of several toolchains of one target is planned for."""

from __future__ import annotations

import pytest

from farm.spec import Device
from farm.targets.pools import Pool, Target, in_use


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
