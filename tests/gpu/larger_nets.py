"""Three nets of usual size with seeded random weights, so that no output is near a constant and evidence is strong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class _Net:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def weight(self, *shape: int, fan: int) -> str:
        return self.constant((self.random.standard_normal(shape) * np.sqrt(2 / fan)).astype(np.float32))

    def constant(self, value: np.ndarray) -> str:  # type: ignore[type-arg]
        self.tensors.append(numpy_helper.from_array(np.asarray(value), f"w{len(self.tensors)}"))
        return self.tensors[-1].name

    def conv(self, x: str, inside: int, outside: int, *, size: int = 3, stride: int = 1) -> str:
        weight = self.weight(outside, inside, size, size, fan=inside * size * size)
        bias = self.constant(np.zeros(outside, np.float32))
        return self.op("Conv", x, weight, bias, kernel_shape=[size, size], strides=[stride] * 2, pads=[size // 2] * 4)

    def save(self, path: Path, output: str, inputs: list[int], shape: list[int]) -> Path:
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="out"))
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            self.tensors,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save_model(model, path)
        return path


def residual(path: Path, seed: int = 0, batch: int = 8) -> Path:
    """A convolutional classifier with residual blocks, as ResNet-18 has them; images of 128 x 128."""
    net = _Net(seed)
    x, width = net.op("Relu", net.conv("x", 3, 64, size=7, stride=2)), 64
    for outside in (64, 128, 256, 512):
        for first in (True, False):
            stride = 2 if first and outside != 64 else 1
            inner = net.op("Relu", net.conv(x, width, outside, stride=stride))
            inner = net.conv(inner, outside, outside)
            skip = net.conv(x, width, outside, size=1, stride=stride) if first else x
            x, width = net.op("Relu", net.op("Mul", net.op("Add", inner, skip), net.constant(np.float32(0.5)))), outside
    flat = net.op("Flatten", net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    return net.save(path, net.op("MatMul", flat, net.weight(8192, 100, fan=8192)), [batch, 3, 128, 128], [batch, 100])


def encoder(path: Path, seed: int = 1, batch: int = 4) -> Path:
    """A transformer encoder of 6 layers, width 512, on sequences of 128."""
    net, width, length, heads = _Net(seed), 512, 128, 8

    def linear(x: str, inside: int, outside: int) -> str:
        return net.op("MatMul", x, net.weight(inside, outside, fan=2 * inside))

    def split(x: str) -> str:
        shape = net.constant(np.array([batch, length, heads, width // heads], np.int64))
        return net.op("Transpose", net.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def norm(x: str) -> str:
        ones, zeros = net.constant(np.ones(width, np.float32)), net.constant(np.zeros(width, np.float32))
        return net.op("LayerNormalization", x, ones, zeros, axis=-1)

    x = "x"
    for _ in range(6):
        query, key, value = (split(linear(x, width, width)) for _ in range(3))
        scores = net.op("MatMul", query, net.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = net.op("Softmax", net.op("Mul", scores, net.constant(np.float32(0.125))), axis=-1)
        mixed = net.op("Transpose", net.op("MatMul", scores, value), perm=[0, 2, 1, 3])
        mixed = net.op("Reshape", mixed, net.constant(np.array([batch, length, width], np.int64)))
        x = norm(net.op("Add", x, linear(mixed, width, width)))
        x = norm(net.op("Add", x, linear(net.op("Relu", linear(x, width, 2048)), 2048, width)))
    return net.save(path, x, [batch, length, width], [batch, length, width])


def segmenter(path: Path, seed: int = 2, batch: int = 4) -> Path:
    """A small U-Net on images of 128 x 128."""
    net = _Net(seed)
    x, width, kept = "x", 3, []
    for outside in (32, 64, 128):
        x = net.op("Relu", net.conv(net.op("Relu", net.conv(x, width, outside)), outside, outside))
        kept.append((x, outside))
        x, width = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), outside
    x, width = net.op("Relu", net.conv(x, 128, 256)), 256
    for skip, outside in reversed(kept):
        weight = net.weight(width, outside, 2, 2, fan=width)
        x = net.op("ConvTranspose", x, weight, kernel_shape=[2, 2], strides=[2, 2])
        x = net.op("Relu", net.conv(net.op("Concat", x, skip, axis=1), 2 * outside, outside))
        width = outside
    return net.save(path, net.conv(x, width, 4, size=1), [batch, 3, 128, 128], [batch, 4, 128, 128])


def left_out(path: Path, seed: int = 3) -> Path:
    """A net with an operator for which CUDA has no kernel (Det), after some for which it has."""
    net = _Net(seed)
    x = net.op("MatMul", "x", net.weight(8, 8, fan=8))
    return net.save(path, net.op("Det", x), [64, 8, 8], [64])


def small(path: Path, seed: int = 4, batch: int = 1) -> Path:
    """A convolution, and no more: for rehearsals, where MIOpen compiles each of its kernels on a CPU."""
    net = _Net(seed)
    return net.save(path, net.op("Relu", net.conv("x", 3, 16)), [batch, 3, 128, 128], [batch, 16, 128, 128])


LARGER = ("residual", "encoder", "segmenter")
NETS = {"residual": residual, "encoder": encoder, "segmenter": segmenter, "small": small}
