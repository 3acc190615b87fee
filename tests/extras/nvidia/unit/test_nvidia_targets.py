"""Targets on NVIDIA's cards: what a manifest may write, which pools serve it, and what is in keys and names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farm.spec import Device
from farm.targets.compilers import compilers
from farm.targets.pools import NoPool, Pool, Target, choose_pools, profiles, understand_target

H200 = Pool(
    Target("onnxruntime", "cuda"),
    "onnxruntime1.31.1-cuda13.0-1a2b3c4d",
    Device("sm_90:h200", 132),
    1,
    {"onnx": "1.23.1"},
)
H100 = replace(H200, device=Device("sm_90:h100-80gb-hbm3", 132))
SLICE = replace(H200, device=Device("sm_90:h200-mig-1g.18gb", 16))

ONNXRUNTIME = compilers()["onnxruntime"]


@pytest.mark.parametrize(
    ("text", "slug", "served"),
    [
        ("onnxruntime/cuda", "onnxruntime-cuda", [H200, H100, SLICE]),
        ("onnxruntime/cuda:sm_90", "onnxruntime-cuda-sm_90", [H200, H100, SLICE]),
        ("onnxruntime/cuda:h200", "onnxruntime-cuda-h200", [H200]),
        ("h200", "onnxruntime-cuda-h200", [H200]),
        ("h100", "onnxruntime-cuda-h100", [H100]),
        ("onnxruntime/cuda:h200-mig-1g.18gb", "onnxruntime-cuda-h200-mig-1g.18gb", [SLICE]),
        ("onnxruntime/cuda:sm_80", "onnxruntime-cuda-sm_80", []),
    ],
)
def test_what_a_target_means(text: str, slug: str, served: list[Pool]) -> None:
    choice = understand_target(text)
    assert (choice.slug, str(choice.served)) == (slug, "onnxruntime/cuda")
    assert [pool for pool in (H200, H100, SLICE) if choice.serves(pool)] == served


def test_a_key_has_the_card_as_it_is_and_no_cpu() -> None:
    for text in ("onnxruntime/cuda", "onnxruntime/cuda:h200"):
        assert understand_target(text).device(H200, family_bound=False) == Device("sm_90:h200", 132)
    assert understand_target("h200").device(H200, family_bound=False) == profiles()["h200"].device


def test_pools_of_cards_that_differ_have_different_queues() -> None:
    assert H200.name.startswith("onnxruntime-cuda-132cu.onnxruntime1.31.1-cuda13.0-1a2b3c4d.sm_90-h200")
    assert len({pool.name for pool in (H200, H100, SLICE)}) == 3


def test_a_card_that_is_not_known_or_not_named_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown card `h2000`: .*onnxruntime/cuda:h200.*`cuda:sm_90`"):
        understand_target("onnxruntime/cuda:h2000")
    with pytest.raises(NoPool, match="several pools serve `onnxruntime/cuda`") as raised:
        choose_pools(understand_target("onnxruntime/cuda"), "", in_use=[H200, H100], known=[H200, H100])
    assert "onnxruntime/cuda:h200" in raised.value.hint


def test_options_belong_to_devices_and_leave_the_keys_of_others_as_they_were() -> None:
    assert ONNXRUNTIME.resolved("native", {}, "cuda")[0] == {}
    assert ONNXRUNTIME.resolved("native", {}, "cpu")[0] == {"level": "standard"}
    assert ONNXRUNTIME.resolved("native", {"gpu_mem_limit": 1 << 30}, "cuda")[0] == {"gpu_mem_limit": 1 << 30}
    assert "gpu_mem_limit" not in ONNXRUNTIME.options_of("cpu")
    assert set(ONNXRUNTIME.device("cuda").precisions) - set(ONNXRUNTIME.device("cpu").precisions) == {"tf32"}


def test_tensorrt_is_a_device_of_its_own_with_its_own_options() -> None:
    tensorrt = replace(H200, target=Target("onnxruntime", "tensorrt"), toolchain="onnxruntime1.31.1-tensorrt10.13.3-aa")
    choice = understand_target("onnxruntime/tensorrt:h200")
    assert choice.serves(tensorrt) and not choice.serves(H200)
    assert not understand_target("onnxruntime/cuda:h200").serves(tensorrt)
    assert tensorrt.name != H200.name
    assert ONNXRUNTIME.resolved("native", {}, "tensorrt")[0] == {}, "defaults stay out of keys"
    asked = {"engine": False, "trt_max_workspace_size": 1 << 30, "gpu_mem_limit": 1 << 31}
    assert ONNXRUNTIME.resolved("native", asked, "tensorrt")[0] == asked
    assert "prefer_nhwc" not in ONNXRUNTIME.options_of("tensorrt")
    with pytest.raises(ValueError, match=r"`trt_builder_optimization_level` must be one of 0, 1, 2, 3, 4, 5, not 9"):
        ONNXRUNTIME.resolved("native", {"trt_builder_optimization_level": 9}, "tensorrt")[0]


def test_tensorrt_quantizes_without_zero_points() -> None:
    assert ONNXRUNTIME.resolved("int8", {}, "tensorrt")[1]["activations"] == "int8"
    assert ONNXRUNTIME.resolved("int8", {}, "cuda")[1]["activations"] == "uint8"
    with pytest.raises(ValueError, match="`activations` must be one of int8, not 'uint8'"):
        ONNXRUNTIME.resolved("int8", {"activations": "uint8"}, "tensorrt")[1]


@pytest.mark.parametrize(
    ("device", "arch", "precision", "said"),
    [
        ("tensorrt", "sm_75:t4", "bf16", "bf16 needs compute capability 8.0, and this card has 7.5"),
        ("cuda", "sm_75:t4", "tf32", "tf32 needs compute capability 8.0, and this card has 7.5"),
        ("cuda", "sm_75:t4", "bf16", ""),
        ("tensorrt", "sm_90:h200", "bf16", ""),
        ("cpu", "cpu", "bf16", ""),
    ],
)
def test_a_card_too_old_for_a_precision_is_known_at_plan_time(
    device: str, arch: str, precision: str, said: str
) -> None:
    assert ONNXRUNTIME.too_old(device, arch, precision) == said


def test_a_tuned_program_for_a_card_is_of_no_cpu_family() -> None:
    tuned, untuned = (understand_target("onnxruntime/cuda").device(H200, family_bound=bound) for bound in (True, False))
    assert tuned == untuned
    assert tuned.cpu_family is None
    assert set(ONNXRUNTIME.device("cuda").tuning) == {"quick", "exhaustive"}
