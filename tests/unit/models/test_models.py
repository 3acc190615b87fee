"""Models: what a file is, and how a bad one is recognized."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import TypeAdapter

from farm.models.frozen import FrozenModel, UnreadableModel, lowered, read_model
from farm.spec import digest_of


def save_net(path: Path, dtype: int = TensorProto.FLOAT, *, external: str = "") -> Path:
    """A matrix product [batch, 4] x [4, 2] whose weights are in the file, or in `external` next to it."""
    weights = numpy_helper.from_array(np.ones((4, 2), dtype=helper.tensor_dtype_to_np_dtype(dtype)), "w")
    if external:
        weights.ClearField("raw_data")
        weights.data_location = TensorProto.EXTERNAL
        for key, value in (("location", external), ("offset", "0"), ("length", "32")):
            weights.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", dtype, ["batch", 4])],
        [helper.make_tensor_value_info("y", dtype, ["batch", 2])],
        [weights],
    )
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_a_model_is_read_and_hashed(tmp_path: Path) -> None:
    path = save_net(tmp_path / "net.onnx")
    model = read_model(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert model["digest"] == digest
    assert model["files"] == [{"path": "net.onnx", "digest": digest, "size": path.stat().st_size}]
    assert [tuple(tensor.values()) for tensor in model["inputs"]] == [("x", "float32", ["batch", 4])]
    assert [(tensor["name"], tensor["shape"]) for tensor in model["outputs"]] == [("y", ["batch", 2])]
    assert (model["opset"], dict(model["operators"]), lowered(model)) == (17, {"MatMul": 1}, "")


def test_a_model_survives_json(tmp_path: Path) -> None:
    model = read_model(save_net(tmp_path / "net.onnx"))
    document = json.loads(json.dumps(model))
    assert TypeAdapter(FrozenModel).validate_python({**document, "new": "field of a newer client"}) == document


def test_a_model_without_doubts_is_frozen_as_by_older_farms(tmp_path: Path) -> None:
    """Else what is pushed unchanged makes another version of a stored manifest."""
    assert "doubts" not in read_model(save_net(tmp_path / "net.onnx"))


def test_external_data_is_part_of_the_model(tmp_path: Path) -> None:
    path = save_net(tmp_path / "net.onnx", external="net.bin")
    (tmp_path / "net.bin").write_bytes(bytes(32))
    first = read_model(path)
    assert [file["path"] for file in first["files"]] == ["net.onnx", "net.bin"]
    assert first["size"] == path.stat().st_size + 32
    assert first["digest"] == digest_of(sorted([file["path"], file["digest"]] for file in first["files"]))
    (tmp_path / "net.bin").write_bytes(bytes(31) + b"\1")
    assert read_model(path)["digest"] != first["digest"]


def test_lower_precision_is_noticed(tmp_path: Path) -> None:
    assert lowered(read_model(save_net(tmp_path / "half.onnx", TensorProto.FLOAT16))) == "float16 weights"
    quantized = FrozenModel(
        digest="0", format="onnx", files=[], inputs=[], outputs=[], size=0, operators={"QuantizeLinear": 3, "Conv": 1}
    )
    assert lowered(quantized) == "QuantizeLinear nodes"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty (0 bytes)"),
        (b"This is a text that somebody called .onnx\n" * 10, "not an ONNX model"),
        (b"\x08\x09", "no graph"),
    ],
)
def test_what_is_no_model_says_what_it_is(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel) as caught:
        read_model(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert "export or download it again" in caught.value.hint
    assert caught.value.kind == "bad_model"


def test_a_model_that_was_cut_short(tmp_path: Path) -> None:
    path = save_net(tmp_path / "net.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableModel):
        read_model(path)


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match="No such file"):
        read_model(tmp_path / "net.onnx")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret", "link"])
def test_external_data_outside_the_folder_is_never_read(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(32))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UnreadableModel) as caught:
        read_model(save_net(folder / "net.onnx", external=location))
    assert "'w'" in caught.value.message
    assert "in its folder" in caught.value.hint


def test_external_data_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match=r"'net\.bin' is missing"):
        read_model(save_net(tmp_path / "net.onnx", external="net.bin"))


def test_a_file_that_is_no_frozen_graph(tmp_path: Path) -> None:
    path = tmp_path / "net.pb"
    path.write_text("text")
    with pytest.raises(UnreadableModel, match="TensorFlow"):
        read_model(path, "tf")
