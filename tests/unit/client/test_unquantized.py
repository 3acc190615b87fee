"""A model that was quantized elsewhere is compared with the one it was made from.

ONNX Runtime's own quantizer writes the QDQ nodes here; AMD Quark writes the same operators, and is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from farm.client import freezing
from farm.client.freezing import FrozenInputs, ManifestReader
from farm.errors import ManifestError
from farm.manifest.entries import Manifest
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import expand
from farm.matrix.combinations import combine
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.support.freezing import freeze

CPU = Pool(Target("onnxruntime", "cpu"), "onnxruntime1.31.1-1a2b3c4d", Device("cpu"), 1)
SAMPLES = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)


class Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        self.left = [{"x": SAMPLES[index : index + 1]} for index in range(len(SAMPLES))]

    def get_next(self) -> Any:
        return self.left.pop() if self.left else None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its quantized twin, and samples."""
    folder = tmp_path_factory.mktemp("quantized")
    weight = numpy_helper.from_array(np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32), "w")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 4), ("y", 3))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "float.onnx")
    quantize_static(str(folder / "float.onnx"), str(folder / "qdq.onnx"), Calibration(), QuantFormat.QDQ)
    np.savez(folder / "samples.npz", x=SAMPLES)
    np.savez(folder / "with.npz", x=SAMPLES, y=SAMPLES[:, :3])
    return folder


def manifest(fields: str = "reference: {model: float}, samples: {path: samples.npz}") -> Manifest:
    shape = "inputs: {x: {shape: [batch, 4]}}, batches: [2]"
    return parse_manifest(
        "version: 1\nname: quantized\ntargets: [onnxruntime/cpu]\nprecisions: [native]\nmodels:\n"
        f"  - {{name: quark, source: {{path: qdq.onnx}}, {shape}, {fields}}}\n"
        f"  - {{name: float, source: {{path: float.onnx}}, {shape}, precisions: [fp32]}}\n"
    )


def frozen(made: Path, cache: Path, text: Manifest) -> FrozenInputs:
    return freeze(combine(text), made, cache=cache)


def test_the_expected_outputs_are_the_unquantized_models(made: Path, tmp_path: Path) -> None:
    found = frozen(made, tmp_path, manifest())
    assert "QuantizeLinear" in found.models["quark"]["operators"]
    data = found.data["quark/samples"]
    assert set(data["arrays"]) == {"x", "y"}
    with np.load(found.files[data["digest"]]) as arrays:
        session = onnxruntime.InferenceSession(str(made / "float.onnx"), providers=["CPUExecutionProvider"])
        assert np.allclose(arrays["y"], session.run(None, {"x": SAMPLES})[0], rtol=1e-6)
        assert np.array_equal(arrays["x"], SAMPLES)
    cells = expand(combine(manifest()), found.models, found.data, [CPU])
    specs = {cell.model: cell.spec for cell in cells if cell.spec}
    verification = specs["quark"]["verification"]
    assert verification and verification["samples"] == {"digest": data["digest"]}
    assert frozen(made, tmp_path, manifest()).data["quark/samples"] == data, "the same again"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("reference: {model: flaot}, samples: {path: samples.npz}", "no other model is named `flaot`"),
        ("reference: {model: quark}, samples: {path: samples.npz}", "no other model is named `quark`"),
        ("reference: {model: float}, samples: {path: with.npz}", "bring the expected output `y` already"),
    ],
)
def test_what_cannot_be_compared_is_said_with_its_place(made: Path, tmp_path: Path, fields: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        frozen(made, tmp_path, manifest(fields))
    assert said in str(caught.value)
    assert ":6:" in str(caught.value)


@pytest.mark.parametrize("fields", ["reference: {model: float}", "reference: {model: float}, samples: {generate: 3}"])
def test_a_reference_needs_samples(fields: str) -> None:
    with pytest.raises(ManifestError, match="`reference` needs `samples`"):
        manifest(fields)


def test_a_quick_look_runs_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.client.made_data.ask_once", lambda *_, **__: pytest.fail("it ran"))
    assert ManifestReader(combine(manifest()), made, cache=tmp_path, quick=True).read().problems == []


def test_a_choice_of_cells_reads_the_files_of_their_models_and_what_these_refer_to(made: Path, tmp_path: Path) -> None:
    for name in ("qdq.onnx", "float.onnx", "samples.npz"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    text = manifest().written.text
    (tmp_path / "farm.yaml").write_text(text)
    chosen = freezing.freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache", only=["quark/*"])
    assert set(chosen.submission["models"]) == {"quark", "float"}, "its samples' outputs are those of its reference"
    last = text.splitlines()[-2].replace("name: quark", "name: last").replace("model: float", "model: quark")
    (tmp_path / "farm.yaml").write_text(f"{text.replace('samples.npz', 'absent.npz')}{last}\n")
    chosen = freezing.freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache", only=["last/*"])
    (tmp_path / "farm.yaml").write_text(text)
    assert set(chosen.submission["models"]) == {"last", "quark"}, "not the samples of a reference, nor its reference"
    (tmp_path / "qdq.onnx").unlink()
    chosen = freezing.freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache", only=["float/*"])
    assert set(chosen.submission["models"]) == {"float"}
    assert {path.name for path in chosen.files.values()} == {"float.onnx"}
    with pytest.raises(ManifestError, match=r"there is no file .*qdq\.onnx"):
        freezing.freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache")
