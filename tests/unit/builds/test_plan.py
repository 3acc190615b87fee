"""What a plan says about a miss: the parts of the cache key that changed, in words for people."""

from __future__ import annotations

from typing import Any

import pytest

from farm.builds.plan import is_measured, is_unfinished
from farm.spec import Device, changes


def spec(**changed: Any) -> Any:
    fields = {
        "model": {"digest": "a" * 64, "format": "onnx"},
        "compiler": {"name": "onnxruntime", "recipe": 1, "libraries": {}},
        "device": Device("cpu").as_dict(),
        "toolchain": "onnxruntime1.30-aaaaaaaa",
        "precision": "fp32",
        "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}},
        "options": {"level": "standard"},
        "verification": {"samples": {"generate": 8, "seed": 0, "ranges": {}}, "reference": "onnxruntime"},
    }
    return {**fields, **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"options": {"level": "tuned"}}, "options.level: standard -> tuned"),
        ({"toolchain": "onnxruntime1.31-bbbbbbbb"}, "toolchain: onnxruntime1.30-aaaaaaaa -> onnxruntime1.31-bbbbbbbb"),
        ({"salt": "again"}, "salt: none -> again"),
        ({"model": {"digest": "b" * 64, "format": "onnx"}}, "model.digest: aaaaaaaaaaaa… -> bbbbbbbbbbbb…"),
        ({"inputs": {"x": {"dtype": "float32", "shape": [8, 4]}}}, "inputs.x.shape: [1, 4] -> [8, 4]"),
        (
            {"verification": {"samples": {"digest": "c" * 64}, "reference": "onnxruntime"}},
            "verification.samples: generate 8, seed 0 -> digest cccccccccccc…",
        ),
        ({"verification": None}, "verification: samples generate 8, seed 0, reference onnxruntime -> none"),
    ],
)
def test_a_miss_names_what_changed(changed: dict[str, Any], said: str) -> None:
    assert changes(spec(), spec(**changed)) == [said]


def test_an_equal_spec_means_that_the_artifact_went() -> None:
    assert changes(spec(), spec()) == ["compiled again: the artifact is gone"]


AGAINST_PROD = {"against": "prod-key", "limit": 0.05}


@pytest.mark.parametrize(
    ("facts", "order", "measured"),
    [
        ({"against": None}, AGAINST_PROD, True),
        ({"against": {"key": "what prod named before"}}, AGAINST_PROD, True),
        ({"against": {"key": "prod-key"}}, AGAINST_PROD, False),
        ({"against": None}, {"against": "prod-key", "limit": None}, False),
        ({"against": None}, None, False),
        (None, AGAINST_PROD, False),
    ],
)
def test_a_hit_takes_turns_with_a_baseline_once(facts: Any, order: Any, measured: bool) -> None:
    """A build that is retried has no job for what an earlier one measured."""
    cell: Any = {"facts": facts, "order": order}
    assert is_measured(cell) is measured
    assert is_unfinished(cell) is (measured or facts is None)
