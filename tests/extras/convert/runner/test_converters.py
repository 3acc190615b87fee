"""PyTorch models and SavedModels become ONNX or frozen graphs that compute what the original computes.

The converters are large, so they may be in interpreters of their own: FARM_TORCH_PYTHON, FARM_TENSORFLOW_PYTHON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farm.cli import main
from farm.client.freezing import Frozen, freeze
from farm.errors import ManifestError, UsageError
from farm.extras.convert.conversion import libraries
from farm.settings import load_settings
from tests.support.compiling import Case, inputs_of

TORCH = """
import sys
import numpy as np, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(10, 4)
        self.dense = torch.nn.Linear(4, 3)

    def forward(self, ids, scale):
        return self.dense(self.words(ids)) * scale

torch.manual_seed(0)
net, folder = Net().eval(), sys.argv[1]
ids, scale = torch.arange(10).reshape(2, 5), torch.rand(2, 1, 1)
shapes = {name: {0: torch.export.Dim("batch")} for name in ("ids", "scale")}
torch.export.save(torch.export.export(net, (ids, scale), dynamic_shapes=shapes), f"{folder}/net.pt2")
torch.jit.script(net).save(f"{folder}/net.ts")
ids, scale = torch.randint(0, 10, (8, 5)), torch.rand(8, 1, 1)
np.savez(f"{folder}/samples.npz", ids=ids.numpy(), scale=scale.numpy(), y=net(ids, scale).detach().numpy())
"""

TENSORFLOW = """
import sys
import numpy as np, tensorflow as tf

class Net(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.random.stateless_normal((4, 3), (1, 2)))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def scores(self, x):
        return {"y": tf.nn.relu(x @ self.w)}

net, folder = Net(), sys.argv[1]
tf.saved_model.save(net, f"{folder}/net", signatures=net.scores)
x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
np.savez(f"{folder}/samples.npz", x=x, y=net.scores(tf.constant(x))["y"].numpy())
"""


def made(extra: str, script: str, folder: Path) -> Path:
    """Make models with the real library, or skip where no interpreter has it."""
    python = load_settings().converters[extra]
    try:
        libraries(extra, python)
    except UsageError as error:
        pytest.skip(error.message)
    (folder / "make.py").write_text(script)  # TorchScript reads its functions' source.
    subprocess.run([python or sys.executable, str(folder / "make.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def torch_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("torch", TORCH, tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def tensorflow_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("tensorflow", TENSORFLOW, tmp_path_factory.mktemp("tensorflow"))


def converted(folder: Path, cache: Path, source: str, *fields: str) -> Frozen:
    lines = ["version: 1", "name: n", "targets: [onnxruntime/cpu, migraphx/ref]", "models:", "  - name: net"]
    lines += [f"    {line}" for line in (f"source: {{path: {source}}}", *fields)]
    (cache / "farm.yaml").write_text("\n".join(lines).replace("path: ", f"path: {folder}/"))
    return freeze(cache / "farm.yaml", cache=cache, pythons=load_settings().converters)


def error_of(frozen: Frozen, folder: Path, samples: Path, batch: int, **shapes: list[int]) -> float:
    """Verify the converted model against what the original library computed."""
    model = frozen.files[frozen.submission["models"]["net"]["files"][0]["digest"]]
    case = Case(folder, model, inputs_of(model, **shapes), batch=batch)
    case.reference({"path": str(samples)})
    case.compile("fp32")
    return float(max(case.evaluate("fp32")["verification"]["errors"].values()))


def renamed(samples: Path, frozen: Frozen, folder: Path) -> Path:
    """Call the expected output as the converter called it."""
    import numpy as np

    output = frozen.submission["models"]["net"]["outputs"][0]["name"]
    with np.load(samples) as archive:
        arrays = {output if name == "y" else name: archive[name] for name in archive.files}
    np.savez(folder / "renamed.npz", **arrays)
    return folder / "renamed.npz"


INPUTS = "inputs: {ids: {shape: [batch, 5], range: [0, 9]}, scale: {shape: [batch, 1, 1]}}"


@pytest.mark.parametrize(
    ("source", "kind", "more"),
    [
        ("net.pt2", "pt2", ()),
        ("net.ts", "torchscript", ("conversion: {dtypes: {ids: int64}}",)),
    ],
)
def test_pytorch_becomes_onnx(
    torch_models: Path, tmp_path: Path, source: str, kind: str, more: tuple[str, ...]
) -> None:
    """The dimensions that the manifest names stay open, and the outputs are PyTorch's own."""
    frozen = converted(torch_models, tmp_path, source, "format: torch", INPUTS, "batches: [4]", *more)
    model = frozen.submission["models"]["net"]
    assert model["format"] == "onnx"
    assert [(tensor["name"], tensor["dtype"]) for tensor in model["inputs"]] == [("ids", "int64"), ("scale", "float32")]
    record: Mapping[str, Any] = model["conversion"]
    assert (record["kind"], record["converter"], record["name"]) == (kind, "torch", source)
    assert set(record["libraries"]) == {"torch", "onnx", "onnxscript"}
    samples = renamed(torch_models / "samples.npz", frozen, tmp_path)
    assert error_of(frozen, tmp_path, samples, 4, ids=[4, 5], scale=[4, 1, 1]) < 1e-5


def test_a_conversion_is_done_once_for_its_key(torch_models: Path, tmp_path: Path) -> None:
    """Another opset is another conversion; the same one is found again."""
    fields = ("format: torch", INPUTS, "batches: [4]")
    first = converted(torch_models, tmp_path, "net.pt2", *fields)
    file = next((tmp_path / "conversions").glob("*/model.onnx"))
    before = file.stat().st_mtime_ns
    again = converted(torch_models, tmp_path, "net.pt2", *fields)
    assert again.submission["models"] == first.submission["models"]
    assert file.stat().st_mtime_ns == before
    other = converted(torch_models, tmp_path, "net.pt2", *fields, "conversion: {opset: 20}")
    assert other.submission["models"]["net"]["conversion"]["key"] != file.parent.name
    assert [entry.name for entry in (tmp_path / "conversions").iterdir() if entry.suffix == ".part"] == []


def test_what_a_converter_refuses_is_reported_at_its_source(torch_models: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"farm.yaml:6:.*takes 2 inputs \(ids, scale\), 1 are given"):
        converted(torch_models, tmp_path, "net.ts", "format: torch", "inputs: {ids: {shape: [2, 5]}}")
    with pytest.raises(ManifestError, match="does not describe its inputs: list all, in order"):
        converted(torch_models, tmp_path, "net.ts", "format: torch")


def test_a_saved_model_becomes_onnx(tensorflow_models: Path, tmp_path: Path) -> None:
    fields = ("format: saved-model", "inputs: {x: {shape: [batch, 4]}}", "batches: [4]")
    frozen = converted(tensorflow_models, tmp_path, "net", *fields)
    model = frozen.submission["models"]["net"]
    assert (model["format"], model["outputs"][0]["name"]) == ("onnx", "y")
    assert error_of(frozen, tmp_path, tensorflow_models / "samples.npz", 4, x=[4, 4]) < 1e-5
    with pytest.raises(ManifestError, match="cannot convert the SavedModel"):
        converted(tensorflow_models, tmp_path, "net", *fields, "conversion: {signature: training}")


@pytest.mark.migraphx
def test_a_saved_model_is_frozen_for_migraphx(tensorflow_models: Path, tmp_path: Path) -> None:
    import migraphx

    fields = ("format: saved-model", "conversion: {to: tf}", "targets: [migraphx/ref]")
    frozen = converted(tensorflow_models, tmp_path, "net", *fields, "inputs: {x: {shape: [batch, 4]}}", "batches: [2]")
    model = frozen.submission["models"]["net"]
    assert (model["format"], model["conversion"]["options"]["to"]) == ("tf", "tf")
    samples = renamed(tensorflow_models / "samples.npz", frozen, tmp_path)
    case = Case(
        tmp_path,
        frozen.files[model["files"][0]["digest"]],
        {"x": {"dtype": "float32", "shape": [2, 4], "batch_axis": 0}},
        batch=2,
        compiler="migraphx",
        format="tf",
        search=[str(Path(migraphx.__file__).parent)],
    )
    case.reference({"path": str(samples)}, compiler="migraphx", search=case.search, device="ref")
    case.compile("fp32")
    assert max(case.evaluate("fp32")["verification"]["errors"].values()) < 1e-5


@pytest.mark.parametrize(
    ("models", "arguments"),
    [
        ("tensorflow_models", ["net", "--batch", "8"]),
        ("torch_models", ["net.pt2", "--batch", "2"]),
        ("torch_models", ["net.ts", "--input", "ids=batch,5:int64", "--input", "scale=batch,1,1", "--batch", "2"]),
    ],
)
def test_one_is_compiled_without_a_farm(
    models: str,
    arguments: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`farm optimize` converts, and says in the sidecar how."""
    folder = request.getfixturevalue(models)
    monkeypatch.setenv("HOME", str(tmp_path))  # where conversions are kept
    monkeypatch.setenv("FARM_MEASURE_SECONDS", "0.05")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["optimize", str(folder / arguments[0]), *arguments[1:], "-t", "onnxruntime/cpu"]) == 0
    assert "accuracy   ok" in capsys.readouterr().out
    sidecar = json.loads((tmp_path / "saved_models" / "net.onnx.artifact.json").read_text())
    assert f"{sidecar['conversion']['converter']}_models" == models


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("net.pt2", ()),
        ("net.ts", ("--input", "ids=batch,5:int64", "--input", "scale=batch,1,1")),
    ],
)
def test_a_program_is_measured_in_turns_with_the_pytorch_model(
    source: str,
    arguments: tuple[str, ...],
    torch_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARM_MEASURE_SECONDS", "0.05")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    model = str(torch_models / source)
    assert main(["optimize", model, *arguments, "--batch", "4", "-t", "onnxruntime/cpu"]) == 0
    capsys.readouterr()

    def bench(*more: str) -> tuple[int, str, str]:
        code = main(["bench", "saved_models/net.onnx", "--against", "torch", *more])
        return code, *capsys.readouterr()

    code, _, err = bench()
    assert (code, f"--model {source}" in err) == (2, True)
    code, _, err = bench("--model", str(torch_models / "samples.npz"))
    assert (code, "is not the PyTorch model that net.onnx was made from" in err) == (2, True)
    monkeypatch.setattr("farm.local.bench.MIN_ROUNDS", 1)  # torch takes seconds to import, in each round
    code, out, err = bench("--model", model, "--seconds", "0.1", "--json")
    assert code == 0, err
    [found] = json.loads(out)["artifacts"]
    other = found["against"]
    assert (other["target"], other["batch"]) == ("torch/cpu", 4)
    assert 0 < other["latency"]["minimum"] <= other["latency"]["p50"]
    assert len(other["first_runs"]) == 10
    assert other["comparison"]["ratio"] > 0
    monkeypatch.setenv("FARM_TORCH_PYTHON", str(tmp_path / "no-python"))
    code, _, err = bench("--model", model)
    assert (code, "cannot be started" in err) == (2, True)
