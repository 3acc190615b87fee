"""Nets of real size with seeded random weights, for configs/manifests/onnx-zoo.yaml.

    python configs/zoo_weights.py .farm/demo/zoo

The onnx package ships well-known vision nets whose weights are all one constant: right for a compiler's speed, but
every picture then gets the same answer. Here each weight gets values of the size that training starts from, so that
a check of accuracy means something; crops of a photograph are the samples. The same numpy makes the same files, about
180 MB. Needs the `demo` extra.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx
from demo_data import crops
from numpy.typing import NDArray
from onnx import numpy_helper

CLASSES = 1000
NETS = {"squeezenet": 2.0, "shufflenet": 0.005, "inception_v1": 1.0, "densenet121": 0.5, "resnet50": 0.015}
"""Every net with a factor on its last layer, found by trying: its classes then differ, and none takes all."""
SAMPLES = 12


def light_nets() -> Path:
    """Return the folder of nets in the onnx package."""
    spec = importlib.util.find_spec("onnx")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package onnx is not installed")
    return Path(spec.submodule_search_locations[0]) / "backend" / "test" / "data" / "light"


def weights_of(model: onnx.ModelProto, contrast: float, random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Return new values for every constant, by what the node that uses it does with it."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == 1}
    numbers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made = {node.output[0]: node for node in model.graph.node if node.op_type == "ConstantOfShape"}
    shapes |= {name: tuple(int(size) for size in numbers[node.input[0]]) for name, node in made.items()}
    # DenseNet scales by Mul and Add, through an Unsqueeze.
    origin = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Unsqueeze"}
    values: dict[str, NDArray[np.float32]] = {}
    for node in model.graph.node:
        for place, used in enumerate(node.input):
            name = origin.get(used, used)
            if name in shapes and name not in values and node.op_type != "Unsqueeze":
                values[name] = draw(node.op_type, place, shapes[name], contrast, random).astype(np.float32)
    return values


def draw(
    operator: str, place: int, shape: tuple[int, ...], contrast: float, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return values for one input of one operator."""
    match operator, place:
        case ("Conv" | "Gemm", 1):
            fan_in = int(np.prod(shape[1:]))
            gain = contrast if CLASSES in shape[:2] else 1.0
            return random.normal(0, gain * np.sqrt(2 / fan_in), shape)
        case ("BatchNormalization", 1 | 4) | ("Mul", _):
            return random.uniform(0.8, 1.2, shape)
        case _:
            return random.normal(0, 0.05, shape)


def write(folder: Path) -> list[Path]:
    """Write the nets and their samples into a folder, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, (net, contrast) in enumerate(NETS.items()):
        model = onnx.load(light_nets() / f"light_{net}.onnx")
        values = weights_of(model, contrast, np.random.default_rng([2026, number]))
        nodes = [node for node in model.graph.node if node.output[0] not in values]
        kept = [tensor for tensor in model.graph.initializer if tensor.name not in values]
        inputs = [value for value in model.graph.input if value.name not in {t.name for t in model.graph.initializer}]
        shape_inputs = {node.input[0] for node in model.graph.node if node.output[0] in values}
        for field, items in (
            (model.graph.node, nodes),
            (model.graph.input, inputs),
            (
                model.graph.initializer,
                [
                    *(tensor for tensor in kept if tensor.name not in shape_inputs),
                    *(numpy_helper.from_array(array, name) for name, array in values.items()),
                ],
            ),
        ):
            copies = [type(item).FromString(item.SerializeToString()) for item in items]
            del field[:]
            field.extend(copies)
        model.ir_version = max(model.ir_version, 4)
        path = folder / f"{net}.onnx"
        onnx.save(model, path)
        written.append(path)
        # Samples next to the net, under the name of its input.
        crop = crops(224, 1.4, SAMPLES, np.random.default_rng(2026)).transpose(0, 3, 1, 2)
        np.savez_compressed(folder / f"{net}-samples.npz", **{inputs[0].name: np.ascontiguousarray(crop)})
        written.append(folder / f"{net}-samples.npz")
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python configs/zoo_weights.py FOLDER")
    for path in write(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
