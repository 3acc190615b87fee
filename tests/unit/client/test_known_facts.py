"""What models and data hold is known by their bytes: it is not read again, and never taken for something else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from farm.client.freezing import KnownFacts
from farm.models.frozen import FrozenData, FrozenModel, UnreadableModel, freeze_data, read_model


def save_net(path: Path, operator: str = "Relu", *, external: int = 0) -> Path:
    """One operator, and with `external` weights of so many bytes in `net.bin`."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    weights = []
    if external:
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[external // 4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "net.bin"), ("offset", "0"), ("length", str(external))):
            tensor.external_data.add(key=key, value=value)
        weights.append(tensor)
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "net", ports[:1], ports[1:], weights)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture
def facts(tmp_path: Path) -> KnownFacts:
    return KnownFacts(tmp_path / "facts")


def read(facts: KnownFacts, path: Path) -> FrozenModel:
    check, hashed = facts.model(path, "onnx", ())
    return read_model(path, "onnx", (), check=check, hashed=hashed)


def never(*_: object) -> None:
    raise AssertionError("it was known")


def test_a_known_model_is_not_read_again(facts: KnownFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_net(tmp_path / "net.onnx")
    first = read(facts, path)
    monkeypatch.setattr("farm.client.freezing.check_here", never)
    assert read(facts, path) == first
    other = path.rename(tmp_path / "other.onnx")
    assert read(facts, other)["files"] == [{**first["files"][0], "path": "other.onnx"}]


def test_other_bytes_are_another_model(facts: KnownFacts, tmp_path: Path) -> None:
    path = save_net(tmp_path / "net.onnx")
    assert dict(read(facts, path)["operators"]) == {"Relu": 1}
    assert dict(read(facts, save_net(path, "Abs"))["operators"]) == {"Abs": 1}


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    facts: KnownFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farm.models.frozen import check_here

    path = save_net(tmp_path / "net.onnx")
    before = path.read_bytes()

    def changed(*asked: object) -> object:
        save_net(path, "Sigmoid")
        return check_here(path, "onnx", ())

    with monkeypatch.context() as patch:
        patch.setattr("farm.client.freezing.check_here", changed)
        read(facts, path)
    path.write_bytes(before)
    assert dict(read(facts, path)["operators"]) == {"Relu": 1}


def test_external_data_is_looked_at_each_time(facts: KnownFacts, tmp_path: Path) -> None:
    path, weights = save_net(tmp_path / "net.onnx", external=64), tmp_path / "net.bin"
    weights.write_bytes(bytes(64))
    first = read(facts, path)
    weights.write_bytes(bytes(63) + b"\1")
    assert read(facts, path)["digest"] != first["digest"]
    weights.write_bytes(bytes(60))
    with pytest.raises(UnreadableModel, match="ends at byte 64 of a file of 60"):
        read(facts, path)
    weights.unlink()
    with pytest.raises(UnreadableModel, match="is missing"):
        read(facts, path)
    (tmp_path / "elsewhere.bin").write_bytes(bytes(64))
    weights.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(UnreadableModel, match="symbolic link"):
        read(facts, path)


def test_a_bad_model_is_refused_each_time(facts: KnownFacts, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"no model")
    for _ in range(2):
        with pytest.raises(UnreadableModel, match="not an ONNX model"):
            read(facts, path)


def test_facts_of_older_code_and_damaged_ones_do_not_count(
    facts: KnownFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_net(tmp_path / "net.onnx")
    first = read(facts, path)
    with monkeypatch.context() as patch:
        patch.setattr("farm.client.freezing._rules", lambda _: "newer")
        patch.setattr("farm.client.freezing.check_here", lambda *_: {**found(first), "opset": 99})
        assert read(facts, path)["opset"] == 99
    for file in (tmp_path / "facts").iterdir():
        file.write_text("{")
    assert read(facts, path) == first


def found(model: FrozenModel) -> dict[str, object]:
    document: dict[str, object] = {**model}
    return {name: document[name] for name in ("inputs", "outputs", "opset", "operators", "weight_dtypes")}


def test_without_a_place_for_facts_everything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known = KnownFacts(tmp_path / "file")
    assert read(known, save_net(tmp_path / "net.onnx")) == read(known, tmp_path / "net.onnx")


def test_known_data_is_not_read_again_unless_its_canonical_file_is_gone(facts: KnownFacts, tmp_path: Path) -> None:
    model = read(facts, save_net(tmp_path / "net.onnx"))
    path, kept = tmp_path / "samples.npz", tmp_path / "data"
    np.savez(path, x=np.ones((3, 4), np.float32))
    symbolic = {tensor["name"]: tensor for tensor in model["inputs"]}
    times = 0

    def freeze() -> tuple[FrozenData, Path]:
        nonlocal times
        times += 1
        return freeze_data(path, model, symbolic, kept)

    first = facts.data(path, kept, "x", freeze)
    assert facts.data(path, kept, "x", freeze) == first
    assert facts.data(path, None, "x", freeze)[0] == first[0]
    assert times == 1
    facts.data(path, kept, "another model's ports", freeze)
    os.truncate(first[1], 3)
    facts.data(path, kept, "x", freeze)
    np.savez(path, x=np.zeros((3, 4), np.float32))
    assert facts.data(path, kept, "x", freeze)[0]["digest"] != first[0]["digest"]
    assert times == 4
