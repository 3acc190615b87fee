"""Models of a Hugging Face hub, from a stand-in for it: pinned, kept, and checked each time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.client.freezing import FrozenInputs, ManifestReader, refused
from farm.errors import ManifestError
from farm.manifest.entries import Manifest
from farm.manifest.parsing import parse_manifest
from farm.matrix.combinations import combine
from tests.support.freezing import freeze
from tests.support.stand_in_hub import StandInHub, stand_in_hub

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"{{hf: org/net, revision: {COMMIT}, file: onnx/model.onnx}}"


def manifest(source: str = SOURCE) -> Manifest:
    models = f"models: [{{name: net, source: {source}}}]"
    return parse_manifest(f"version: 1\nname: hub\ntargets: [onnxruntime/cpu]\n{models}\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model that keeps its weights next to it."""
    folder = tmp_path_factory.mktemp("model")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in "xy"]
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    return {f"org/net@{COMMIT}/onnx/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub(files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def frozen(cache: Path, source: str = SOURCE) -> FrozenInputs:
    return freeze(combine(manifest(source)), cache, cache=cache)


def problem(cache: Path, source: str) -> str:
    with pytest.raises(ManifestError) as caught:
        frozen(cache, source)
    (found,) = caught.value.problems
    assert "\n" not in found.message
    return found.message


def test_a_model_comes_with_its_external_data_and_is_kept(hub: StandInHub, tmp_path: Path) -> None:
    found = frozen(tmp_path)
    model = found.models["net"]
    assert [file["path"] for file in model["files"]] == ["model.onnx", "model.onnx_data"]
    wanted = [hashlib.sha256(content).hexdigest() for _, content in sorted(hub.files.items())]
    assert [file["digest"] for file in model["files"]] == wanted
    hub.asked.clear()
    assert frozen(tmp_path).models["net"]["digest"] == model["digest"]
    assert (
        ManifestReader(combine(manifest()), tmp_path, cache=tmp_path, quick=True).read().models["net"]["digest"]
        == model["digest"]
    )
    assert hub.asked == [], "what is here needs no hub"


def test_what_changed_in_the_cache_comes_again(hub: StandInHub, tmp_path: Path) -> None:
    before = frozen(tmp_path).models["net"]["digest"]
    (data,) = tmp_path.glob("hub/*/onnx/model.onnx_data")
    data.write_bytes(b"\0" * data.stat().st_size)
    assert frozen(tmp_path).models["net"]["digest"] == before


def test_what_cannot_be_had_is_one_line(hub: StandInHub, tmp_path: Path) -> None:
    (content,) = (content for name, content in hub.files.items() if name.endswith(".onnx"))
    pinned = SOURCE.replace("}", f", sha256: {hashlib.sha256(content).hexdigest()}}}")
    assert frozen(tmp_path, pinned).models
    assert "has the SHA-256" in problem(tmp_path, SOURCE.replace("}", f", sha256: {'0' * 64}}}"))
    assert "org/net@0123456789ab other.onnx cannot be had" in problem(tmp_path, SOURCE.replace("onnx/model", "other"))
    assert (
        ManifestReader(combine(manifest(SOURCE.replace("onnx/model", "new"))), tmp_path, cache=tmp_path, quick=True)
        .read()
        .models
        == {}
    )


def test_a_hub_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    assert "cannot be had" in problem(tmp_path, SOURCE)


@pytest.mark.parametrize(
    "source",
    [
        "{hf: org/net, file: model.onnx}",
        f"{{hf: org/net, revision: {COMMIT}}}",
        "{hf: org/net, revision: main, file: model.onnx, path: x}",
        "{hf: org/net, revision: main, file: model.onnx}",
        f"{{hf: org/net, revision: {COMMIT}, file: ../model.onnx}}",
        f"{{hf: org/net, revision: {COMMIT}, file: /model.onnx}}",
        f"{{hf: net, revision: {COMMIT}, file: model.onnx}}",
        f"{{path: net.onnx, revision: {COMMIT}}}",
    ],
)
def test_only_a_commit_and_a_file_inside_are_taken(source: str) -> None:
    with pytest.raises(ManifestError):
        manifest(source)


def test_a_stranger_reads_nothing_with_my_rights(tmp_path: Path) -> None:
    (found,) = refused(manifest(), tmp_path)
    assert "hub with your rights" in found.message
