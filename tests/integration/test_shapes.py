"""Shapes for real: a transformer block with a KV cache, in prefill (an empty past) and in decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiling import Case
from tests.kv_cache import HEAD, HEADS, HIDDEN, write_block

MIGRAPHX = pytest.mark.migraphx


def block_inputs(batch: int, seq: int, past: int) -> dict[str, Any]:
    cache = {"dtype": "float32", "shape": [batch, HEADS, past, HEAD], "batch_axis": 0}
    return {
        "x": {"dtype": "float32", "shape": [batch, seq, HIDDEN], "batch_axis": 0},
        "past_key_values.0.key": cache,
        "past_key_values.0.value": dict(cache),
        "attention_mask": {"dtype": "int64", "shape": [batch, past + seq], "batch_axis": 0},
    }


def module_folder(compiler: str) -> list[str]:
    if compiler == "onnxruntime":
        return []
    import migraphx

    return [str(Path(migraphx.__file__).parent)]


@pytest.mark.parametrize(("batch", "seq", "past"), [(1, 12, 0), (4, 1, 11)], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("compiler", "device", "precision"),
    [
        ("onnxruntime", "cpu", "fp32"),
        ("onnxruntime", "cpu", "int8"),
        pytest.param("migraphx", "cpu", "fp32", marks=MIGRAPHX),
        pytest.param("migraphx", "ref", "fp32", marks=MIGRAPHX),
        pytest.param("migraphx", "ref", "int8-fp16", marks=MIGRAPHX),
    ],
)
def test_a_block_with_a_cache_in_prefill_and_decode(
    tmp_path: Path, compiler: str, device: str, batch: int, seq: int, past: int, precision: str
) -> None:
    net = Case(
        tmp_path,
        write_block(tmp_path / "block.onnx"),
        block_inputs(batch, seq, past),
        batch=batch,
        ranges={"attention_mask": {"value": 1}},
        compiler=compiler,
        device=device,
        search=module_folder(compiler),
    )
    net.reference()
    compiled = net.compile(precision)
    shapes = {port["name"]: port["shape"] for port in (*compiled["inputs"], *compiled["outputs"])}
    assert shapes["past_key_values.0.key"] == [batch, HEADS, past, HEAD]
    assert shapes["present.0.value"] == [batch, HEADS, past + seq, HEAD]
    found = net.evaluate(precision)["verification"]
    assert set(found["errors"]) == {"y", "present.0.key", "present.0.value"}
    assert max(found["errors"].values()) < 1e-5 if precision == "fp32" else 0.1
    assert not found["nonfinite"]
    assert not found["weak"]
