"""Data: read from what users have, frozen to the same bytes, and checked so that a message names what differs."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from farm.models.frozen import ArrayDocument, DataError, FrozenData, FrozenModel, check_data, freeze_data
from farm.models.shapes import Input
from tests.support.tensors import tensor

MODEL = FrozenModel(
    digest="0" * 64, format="onnx", files=[],
    inputs=[tensor("x", "float32", ("batch", 3)), tensor("scale", "float32", ())],
    outputs=[tensor("y", "float32", ("batch", 2))],
    size=0,
)  # fmt: skip
SYMBOLIC = {each["name"]: each for each in MODEL["inputs"]}
INPUTS = {"x": Input("x", "float32", (4, 3), 0), "scale": Input("scale", "float32", (), None)}


def arrays(count: int = 5) -> dict[str, Any]:
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    return {"x": x, "scale": np.ones(count, dtype=np.float32), "y": np.zeros((count, 2), dtype=np.float32)}


def freeze(path: Path, folder: Path) -> tuple[FrozenData, dict[str, Any]]:
    data, file = freeze_data(path, MODEL, SYMBOLIC, folder / "frozen")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == data["digest"]
    assert file.stat().st_size == data["size"]
    assert list(file.parent.glob("*.part")) == []
    with np.load(file, allow_pickle=False) as archive:
        return data, {name: archive[name] for name in archive.files}


def test_an_npz_keeps_its_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    data, read = freeze(tmp_path / "a.npz", tmp_path)
    assert data["arrays"]["x"] == {"dtype": "float32", "shape": [5, 3]}
    for name, array in arrays().items():
        np.testing.assert_array_equal(read[name], array)
    assert json.loads(json.dumps(data)) == data
    check_data(data, INPUTS, MODEL["outputs"])


def test_equal_arrays_are_equal_bytes_however_they_were_stored(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    other = dict(reversed(arrays().items()))
    other["x"] = np.asfortranarray(other["x"]).astype(">f4")
    np.savez_compressed(tmp_path / "b.npz", **other)
    assert freeze(tmp_path / "a.npz", tmp_path)[0] == freeze(tmp_path / "b.npz", tmp_path)[0]


def test_an_npy_is_the_only_input(tmp_path: Path) -> None:
    x = arrays()["x"]
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x)
    one = FrozenModel(**{**MODEL, "inputs": MODEL["inputs"][:1]})
    frozen = [freeze_data(tmp_path / name, one, SYMBOLIC, tmp_path / "frozen")[0] for name in ("x.npy", "x.npz")]
    assert frozen[0] == frozen[1]
    with pytest.raises(DataError, match="holds one array, the model has 2 inputs") as caught:
        freeze_data(tmp_path / "x.npy", MODEL, SYMBOLIC, tmp_path / "frozen")
    assert "one array for each of `x`, `scale`" in caught.value.hint
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        freeze_data(tmp_path / "objects.npy", one, SYMBOLIC, tmp_path / "frozen")


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from farm.models import frozen as data
from tests.unit.models.test_data import MODEL, SYMBOLIC

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data._BLOCK = 4 << 20
data.freeze_data(Path(sys.argv[1]), MODEL, SYMBOLIC, Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_data_set_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    x = np.zeros((8 << 20, 3), dtype=np.float32)
    np.savez(tmp_path / "a.npz", x=x, scale=np.ones(len(x), dtype=np.float32))
    del x
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "a.npz"), str(tmp_path / "frozen")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 90 << 10, "KiB, of 128 MiB"


def test_a_folder_of_npz_is_joined_on_the_batch_axis(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    whole = arrays(4)
    for index in range(4):
        one = {"x": whole["x"][index : index + 1], "scale": whole["scale"][index], "y": whole["y"][index : index + 1]}
        np.savez(folder / f"{index}.npz", **one)
    data, read = freeze(folder, tmp_path)
    np.testing.assert_array_equal(read["x"], whole["x"])
    assert read["scale"].shape == (4,)
    check_data(data, INPUTS, MODEL["outputs"])


def test_an_onnx_folder_is_read_in_the_models_order(tmp_path: Path) -> None:
    for index in range(3):
        folder = tmp_path / "set" / f"test_data_set_{index}"
        folder.mkdir(parents=True)
        for name, array in (
            ("input_0", np.full((1, 3), index, dtype=np.float32)),
            ("input_1", np.float32(index)),
            ("output_0", np.zeros((1, 2), dtype=np.float32)),
        ):
            (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(np.asarray(array)).SerializeToString())
    data, read = freeze(tmp_path / "set", tmp_path)
    assert sorted(read) == ["scale", "x", "y"]
    np.testing.assert_array_equal(read["x"][:, 0], [0, 1, 2])
    np.testing.assert_array_equal(read["scale"], [0, 1, 2])
    check_data(data, INPUTS, MODEL["outputs"])


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_parts_of_any_size_add_up(counts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for index, count in enumerate(counts):
        np.savez(folder / f"{index}.npz", **arrays(count))
    data, _ = freeze_data(folder, MODEL, SYMBOLIC, folder / "frozen")
    assert {name: array["shape"][0] for name, array in data["arrays"].items()} == dict.fromkeys(
        ("x", "scale", "y"), sum(counts)
    )


# --- what does not fit --------------------------------------------------------------------------------------------


def frozen(**described: tuple[str, list[int]]) -> FrozenData:
    found = {name: ArrayDocument(dtype=dtype, shape=shape) for name, (dtype, shape) in described.items()}
    return {"digest": "0" * 64, "size": 1, "arrays": found}


F, D = "float32", "float64"


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (frozen(scale=(F, [5])), "no array for input `x`", "scale"),
        (frozen(x=(D, [5, 3]), scale=(F, [5])), "array `x` is float64, the model wants float32", "astype('float32')"),
        (frozen(x=(F, [5, 4]), scale=(F, [5])), "[5, 4], N samples would be [N, 3]", "input `x` is [4, 3]"),
        (frozen(x=(F, [5, 1, 3]), scale=(F, [5])), "[5, 1, 3], N samples would be [N, 3]", ""),
        (frozen(x=(F, [5, 3]), scale=(F, [5, 1])), "[5, 1], N samples would be [N]", ""),
        (frozen(x=(F, [0, 3]), scale=(F, [1])), "holds no sample", "at least one"),
        (frozen(x=(F, [5, 3]), scale=(F, [4])), "different numbers of samples: `x` 5, `scale` 4", ""),
        (frozen(x=(F, [5, 3]), scale=(F, [5]), scales=(F, [5])), "`scales` is neither", "did you mean `scale`?"),
        (frozen(x=(F, [5, 3]), scale=(F, [5]), y=(F, [4, 2])), "expected output `y` has shape [4, 2], not 5", ""),
    ],
)
def test_what_differs_is_named(data: FrozenData, message: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        check_data(data, INPUTS, MODEL["outputs"])
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_one_sample_goes_with_all_and_may_come_as_it_is() -> None:
    check_data(frozen(x=(F, [5, 3]), scale=(F, [])), INPUTS, MODEL["outputs"])
    check_data(frozen(x=(F, [1, 3]), scale=(F, [5])), INPUTS, MODEL["outputs"])


def test_a_fixed_first_axis_of_one_is_explained() -> None:
    inputs = {"x": Input("x", "float32", (1, 3), None)}
    with pytest.raises(DataError) as caught:
        check_data(frozen(x=(F, [5, 3])), inputs, [])
    assert "shape: [batch, 3]" in caught.value.hint


# --- hostile archives ---------------------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def header(shape: str, dtype: str = "<f4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"x.npy": header("(1000000, 1000000)") + b"\0" * 8}, "its header declares"),
        ({"x.npy": header("(-1, 3)")}, "declares"),
        ({"x.npy": header("(2,)", "|O") + b"\0" * 16}, "not numbers"),
        ({"x.npy": header("(2,)", "<U4") + b"\0" * 32}, "not numbers"),
        ({"x.npy": b"garbage"}, "cannot be read"),
        ({"x.npy": b""}, "cannot be read"),
        ({"readme.txt": b"hello"}, "is not an array"),
        ({f"a{index}.npy": npy(np.zeros(1)) for index in range(1001)}, "more than 1000 arrays"),
    ],
)
def test_a_hostile_archive_is_refused_by_name(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        freeze_data(archive(tmp_path / "a.npz", members), MODEL, SYMBOLIC, tmp_path / "frozen")
    assert message in caught.value.message
    assert "a.npz" in caught.value.message


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.models.frozen.MAX_BYTES", 64 << 20)
    path = tmp_path / "bomb.npz"
    size = (64 << 20) // 4 + 1
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("x.npy", "w", force_zip64=True) as stream,
    ):
        stream.write(header(f"({size},)"))
        piece = bytes(1 << 24)
        for _ in range(size * 4 // len(piece)):
            stream.write(piece)
        stream.write(bytes(size * 4 % len(piece)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="bytes of arrays, more than"):
        freeze_data(path, MODEL, SYMBOLIC, tmp_path / "frozen")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "a.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="not numbers"):
        freeze_data(tmp_path / "a.npz", MODEL, SYMBOLIC, tmp_path / "frozen")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut short"])
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"not an \.npz file") as caught:
        freeze_data(tmp_path / "a.npz", MODEL, SYMBOLIC, tmp_path / "frozen")
    assert "numpy.savez" in caught.value.hint


def test_nan_in_an_input_is_refused_and_minus_infinity_is_not(tmp_path: Path) -> None:
    given = arrays()
    given["x"][0, 0], given["y"][0, 0] = -np.inf, np.nan
    np.savez(tmp_path / "a.npz", **given)
    freeze(tmp_path / "a.npz", tmp_path)
    given["x"][1, 1] = np.nan
    np.savez(tmp_path / "a.npz", **given)
    with pytest.raises(DataError, match="array `x` holds NaN"):
        freeze(tmp_path / "a.npz", tmp_path)


def test_a_folder_without_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no samples"):
        freeze_data(tmp_path, MODEL, SYMBOLIC, tmp_path / "frozen")


def test_samples_that_lack_an_array_or_differ_in_shape(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    np.savez(folder / "0.npz", **arrays(1))
    np.savez(folder / "1.npz", x=arrays(1)["x"])
    with pytest.raises(DataError, match=r"1\.npz: there is no array"):
        freeze_data(folder, MODEL, SYMBOLIC, tmp_path / "frozen")
    np.savez(folder / "1.npz", **{**arrays(1), "x": np.zeros((1, 4), dtype=np.float32)})
    with pytest.raises(DataError, match="different shapes"):
        freeze_data(folder, MODEL, SYMBOLIC, tmp_path / "frozen")


def test_an_onnx_tensor_never_leads_to_another_file(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="x", data_type=1, dims=[1, 3], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "input_0.pb").write_bytes(tensor.SerializeToString())
    with pytest.raises(DataError, match="in another file"):
        freeze_data(tmp_path, MODEL, SYMBOLIC, tmp_path / "frozen")
    (tmp_path / "input_0.pb").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="not an ONNX tensor"):
        freeze_data(tmp_path, MODEL, SYMBOLIC, tmp_path / "frozen")


def test_an_onnx_folder_for_another_model(tmp_path: Path) -> None:
    for name in ("input_0", "input_7"):
        (tmp_path / f"{name}.pb").write_bytes(numpy_helper.from_array(np.zeros(1)).SerializeToString())
    with pytest.raises(DataError, match="has only 2 inputs"):
        freeze_data(tmp_path, MODEL, SYMBOLIC, tmp_path / "frozen")
