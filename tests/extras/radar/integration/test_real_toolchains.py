"""Several releases of a compiler on one machine: real regressions between them, found by the radar and bisected.

ONNX Runtimes need wheels of a registry, so their test runs with `make test-noise`, where they can be had. Two
MIGraphX have to be built: `OLDER_MIGRAPHX` names the folder of the older one's module. The figures are in
docs/guide/toolchains.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fastapi import FastAPI
from onnx import TensorProto, helper, numpy_helper
from pydantic import SecretStr

from farm.client.client import FarmClient
from farm.client.freezing import freeze
from farm.errors import GateFailed
from farm.extras.radar.toolchains_api import bisect
from farm.node import executor
from farm.results.speed import MIN_ROUNDS
from farm.settings import Settings
from farm.targets.pools import version_of
from farm.wire.asked import ChosenGates
from tests.support.real_worker import at_work, with_toolchains
from tests.support.side_toolchains import onnxruntime

VERSIONS = ("1.22.1", "1.23.2", "1.24.4", "1.25.1", "1.26.0", "1.27.0", "1.28.0", "1.29.0")

REMAINDER = "remainder/onnxruntime-cpu/native/static"
SCORES = "scores/onnxruntime-cpu/native/static"

MANIFEST = """\
version: 1
name: releases
targets: [onnxruntime/cpu]
precisions: [native]
toolchains: [onnxruntime1.24]
models:
  - {name: remainder, source: {path: remainder.onnx}}
  - {name: scores, source: {path: scores.onnx}, verify: {tolerance: {native: 10}}}
  - {name: plain, source: {path: plain.onnx}}
"""


@pytest.fixture
def interpreters() -> list[str]:
    try:
        return [str(onnxruntime(version)) for version in VERSIONS]
    except LookupError as error:
        pytest.skip(str(error))


def write_models(folder: Path) -> None:
    """Write a model that later releases refuse, one whose outputs changed, and one to which nothing happened."""
    tensor, number = helper.make_tensor_value_info, TensorProto.FLOAT
    x, y = (tensor(name, number, [4, 16]) for name in "xy")
    remainder = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT8),
        helper.make_node("Mod", ["i", "i"], ["r"], fmod=1),  # of zeros too
        helper.make_node("Cast", ["r"], ["y"], to=number),
    ]
    _save(folder / "remainder.onnx", remainder, [x], [y], 18)
    q, scores = tensor("q", number, [1, 2, 8, 16]), tensor("y", number, [1, 2, 8, 16])
    attention = helper.make_node("Attention", ["q", "q", "q"], ["y"], is_causal=1, softcap=2.0)
    _save(folder / "scores.onnx", [attention], [q], [scores], 23)
    _save(folder / "plain.onnx", [helper.make_node("Tanh", ["x"], ["y"])], [x], [y], 18)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    opset: int,
) -> None:
    graph = helper.make_graph(nodes, path.stem, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, path)


@pytest.mark.noise
def test_what_a_release_refuses_and_computes_otherwise_is_found_with_few_compiles(
    settings: Settings,
    api: tuple[FastAPI, str],
    interpreters: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MIN_PAIRS", "PAIRS", "PAIRS_AGAIN"):
        monkeypatch.setattr(executor, name, MIN_ROUNDS)
    farm, pools = with_toolchains(settings.model_copy(update={"api_token": SecretStr("t" * 16)}), interpreters)
    app, url = api
    app.state.farm = farm
    write_models(tmp_path)
    (tmp_path / "farm.yaml").write_text(MANIFEST)
    with FarmClient(url, "t" * 16) as client, at_work(farm, pools):
        build = client.submit(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
        ended(client, build["id"])
        client.refs.move("prod", build["id"])
        assert {cell["toolchain"][:16] for cell in client.ls("prod")} == {"onnxruntime1.24."}
        shadow = client.toolchains.shadow(toolchain="onnxruntime1.29")
        ended(client, shadow["id"])
        radar = {cell["identifier"]: cell for cell in client.toolchains.radar(shadow["id"])["cells"]}
        assert radar[REMAINDER]["effect"] == "breaks"
        assert "Integer modulo by zero" in radar[REMAINDER]["text"]
        before, now = radar[SCORES]["error_before"], radar[SCORES]["error"]
        assert before is not None and now is not None
        assert before > 0.05 > now, "the soft cap was applied behind the mask until 1.26"
        in_turns = [row for row in radar[SCORES]["compared"] if row["measure"] == "latency"]
        assert in_turns[0]["interval"], "each under its own toolchain, on this node"
        with pytest.raises(GateFailed, match="prod stays"):
            client.toolchains.promote(shadow["id"])
        (found,) = bisect(client, [REMAINDER], bad="onnxruntime1.29")
    assert found["first_bad"].startswith("onnxruntime1.25.1-")
    assert found["last_good"].startswith("onnxruntime1.24.4-")
    assert found["compiles"] <= 2, "of 1.25.1, 1.26.0, 1.27.0 and 1.28.0"


def ended(client: FarmClient, build_id: str) -> None:
    for _ in client.watch(build_id):
        pass


WRAPPED, CLIPPED, GROWN = (f"{model}/migraphx-ref/fp32/static" for model in ("wrapped", "clipped", "grown"))

ON_MIGRAPHX = """\
version: 1
name: releases
targets: [migraphx/ref]
precisions: [fp32]
toolchains: [TOOLCHAIN]
verify: {tolerance: {fp32: 10}}
models:
"""
OLDER = """\
  - {name: wrapped, source: {path: wrapped.onnx}, inputs: {x: {range: [-300, 300]}}, verify: {tolerance: {fp32: 0.01}}}
  - {name: clipped, source: {path: clipped.onnx}}
  - {name: plain, source: {path: plain.onnx}}
"""
NEWER = """\
  - {name: grown, source: {path: grown.onnx}}
"""


LOOSE: ChosenGates = {
    "baseline": "",
    "limits": dict.fromkeys(("latency", "size", "memory", "load", "compile_time"), 20.0),
    "budgets": {},
}
"""The builds differ in their compilers' flags, and the tiny models are all noise."""


def write_migraphx_models(folder: Path) -> None:
    """Write a model that MIGraphX 2.16 computes wrongly, one that 2.15 does, one that 2.15 refuses, and a plain one."""
    tensor, number = helper.make_tensor_value_info, TensorProto.FLOAT
    x, y = (tensor(name, number, [4, 16]) for name in "xy")
    wrapped = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT8),
        helper.make_node("Abs", ["i"], ["a"]),
        helper.make_node("Cast", ["a"], ["y"], to=number),
    ]
    _save(folder / "wrapped.onnx", wrapped, [tensor("x", TensorProto.INT32, [4, 16])], [y], 17)
    _save(folder / "clipped.onnx", [helper.make_node("Clip", ["x"], ["y"], min=0.5)], [x], [y], 10)
    grown = [
        _constant("w", np.ones((2, 1, 3, 3), np.float32)),
        helper.make_node("ConvTranspose", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2]),
    ]
    _save(folder / "grown.onnx", grown, [tensor("x", number, [1, 2, 4, 4])], [tensor("y", number, [1, 1, 8, 8])], 17)
    _save(folder / "plain.onnx", [helper.make_node("Tanh", ["x"], ["y"])], [x], [y], 17)


def _constant(name: str, value: np.ndarray[Any, Any]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


@pytest.mark.migraphx
def test_two_releases_of_migraphx_are_compared_promoted_and_bisected(
    settings: Settings, api: tuple[FastAPI, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (older := os.environ.get("OLDER_MIGRAPHX")):
        pytest.skip("needs a second, older MIGraphX: OLDER_MIGRAPHX names the folder of its module")
    import migraphx

    for name in ("MIN_PAIRS", "PAIRS", "PAIRS_AGAIN"):
        monkeypatch.setattr(executor, name, MIN_ROUNDS)
    module = str(Path(migraphx.__file__).parent)
    settings = settings.model_copy(update={"api_token": SecretStr("t" * 16), "migraphx_path": module})
    farm, pools = with_toolchains(settings, [f"{sys.executable}:{older}"])
    before, after = sorted({pool.toolchain for pool in pools if str(pool.target) == "migraphx/ref"}, key=version_of)
    app, url = api
    app.state.farm = farm
    write_migraphx_models(tmp_path)
    with FarmClient(url, "t" * 16) as client, at_work(farm, pools):

        def build(toolchain: str, models: str, ref: str) -> None:
            path = tmp_path / f"{ref}.yaml"
            path.write_text(ON_MIGRAPHX.replace("TOOLCHAIN", toolchain) + models)
            accepted = client.submit(freeze(path, cache=tmp_path / "cache"))
            ended(client, accepted["id"])
            client.refs.move(ref, accepted["id"])

        def radar(ref: str, toolchain: str) -> tuple[str, dict[str, Any]]:
            shadow = client.toolchains.shadow(ref, toolchain, gates=LOOSE)["id"]
            ended(client, shadow)
            return shadow, {cell["identifier"]: cell for cell in client.toolchains.radar(shadow)["cells"]}

        build(before, OLDER, "prod")
        build(after, NEWER, "next")
        shadow, found = radar("prod", after)
        assert found[WRAPPED]["effect"] == "breaks", "casts to int8 saturate"
        assert found[CLIPPED]["error_before"] > 0.05 > found[CLIPPED]["error"], "without a maximum it did nothing"
        in_turns = [row for row in found[CLIPPED]["compared"] if row["measure"] == "latency"]
        assert in_turns[0]["interval"], "each under its own MIGraphX, on this node"
        with pytest.raises(GateFailed, match="prod stays"):
            client.toolchains.promote(shadow)
        assert {cell["toolchain"] for cell in client.ls("prod")} == {before}

        client.toolchains.promote(shadow, force=True)
        given = {cell["identifier"]: cell["toolchain"] for cell in client.ls("prod") if not cell.get("superseded")}
        assert given[WRAPPED] == before
        assert given[CLIPPED] == after
        client.toolchains.roll_back("prod")
        given = {cell["identifier"]: cell["toolchain"] for cell in client.ls("prod") if not cell.get("superseded")}
        assert set(given.values()) == {before}

        (bisected,) = bisect(client, [WRAPPED])
        assert (bisected["last_good"], bisected["first_bad"]) == (before, after)
        _, back = radar("next", before)
        assert back[GROWN]["effect"] == "breaks"
        assert "auto padding not supported" in back[GROWN]["text"]
