"""What the steps make of a work order."""

from __future__ import annotations

from typing import Any

import pytest

from farm.steps import reference_recipe


def order(reference: str, **options: Any) -> dict[str, Any]:
    verification = {"samples": {"generate": 2, "seed": 0, "ranges": {}}, "reference": reference}
    model = {"digest": "a" * 64, "format": "onnx"}
    return {"spec": {"model": model, "inputs": {}, "batch": None, "options": options, "verification": verification}}


@pytest.mark.parametrize("option", [{"nhwc": False}, {"max_loop_iterations": 3}, {"limit_max_iterations": 9}])
def test_a_reference_by_migraphx_is_of_the_model_as_it_was_read(option: dict[str, Any]) -> None:
    """ONNX Runtime knows no such options, so its reference is shared whatever they are."""
    assert reference_recipe(order("migraphx")) != reference_recipe(order("migraphx", **option))
    assert reference_recipe(order("onnxruntime")) == reference_recipe(order("onnxruntime", **option))


def test_a_reference_by_migraphx_is_shared_by_what_compiles_otherwise() -> None:
    assert reference_recipe(order("migraphx", fast_math=True)) == reference_recipe(order("migraphx", fast_math=False))
