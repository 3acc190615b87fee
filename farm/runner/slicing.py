"""Slices: an ONNX model cut into small models, so that tuning is done, kept and shared piece by piece.

A slice is a run of nodes in the model's order around few convolutions or matrix products. It is a valid model with
static shapes of its own; together the slices have every tunable operation of the model exactly once. What depends on
constants alone (dequantized weights, shapes) travels with its users. Where a tensor has no known shape, no cut is
made. Slices that are the same but for names and weights are one slice, with a count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper, shape_inference
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data
from onnx.reference import ReferenceEvaluator

from .onnx_models import DTYPES, RANDOM, drop_overridable_constants, fix_shapes, nodes_inside, reads, save, subgraphs

if TYPE_CHECKING:
    from .documents import InputSpec, SliceAnswer, SlicedModel

TUNABLE = frozenset(
    {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "MatMul", "Gemm", "MatMulInteger",
     "QLinearMatMul", "MatMulNBits", "Einsum", "Attention", "MultiHeadAttention", "LSTM", "GRU", "RNN"}
)  # fmt: skip
"""Operators that become convolutions and dots."""
PER_SLICE = 4  # Tunable operations that a slice has at most, if it can be cut: a child that dies loses one slice.
MAX_FOLDED = 65_536  # Elements of a constant that are computed here, to learn shapes from; weights are left alone.
_ROUNDS = 20
_LEADING = frozenset({"DequantizeLinear", "Cast"})  # They belong to the operation behind them: compilers look there.
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Not computed in advance: that would undo the quantization."""

Type = tuple[int, tuple[int, ...]]  # ONNX element type and static shape of a tensor.


def write_slices(path: str, inputs: Mapping[str, InputSpec], folder: Path) -> SliceAnswer:
    """Cut the model and write the distinct slices into a folder; return them in the model's order."""
    distinct: dict[str, SlicedModel] = {}
    for model, piece in cut(path, inputs):
        if same := distinct.get(piece["signature"]):
            same["count"] += 1
            continue
        file = folder / f"slice-{len(distinct):04}.onnx"
        save(model, file)
        distinct[piece["signature"]] = {**piece, "path": str(file)}
    return {"slices": list(distinct.values())}


def cut(path: str, inputs: Mapping[str, InputSpec], per_slice: int = PER_SLICE) -> Iterator[tuple[Any, SlicedModel]]:
    """Yield the slices of the model in a file, at these input shapes, in its own order; each is not written yet."""
    model = onnx.load_model(path, load_external_data=False)
    if model.functions:
        model = inliner.inline_local_functions(model)
    drop_overridable_constants(model)
    fix_shapes(model, inputs)
    graph = _Graph(_with_shapes(model))
    for start, end in graph.ranges(per_slice):
        yield graph.slice(start, end, Path(path).parent)


# --- shapes ----------------------------------------------------------------------------------------------------


def _with_shapes(model: Any) -> Any:
    """Return the model with the types of its tensors, small constants computed; alternates until nothing is new."""
    for _ in range(_ROUNDS):
        model = shape_inference.infer_shapes(model, data_prop=True)
        if not _fold(model):
            break
    return model


def _fold(model: Any) -> bool:
    """Replace nodes that make small constants by their result; say whether there were any."""
    graph, types = model.graph, _types(model.graph)
    known = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_location == 0 and math.prod(tensor.dims) <= MAX_FOLDED
    }
    kept, folded = [], 0
    for node in graph.node:
        results = _result(node, known, types, model)
        if results is None:
            kept.append(node)
            continue
        folded += 1
        for name, tensor in results.items():
            tensor.name = name
            graph.initializer.append(tensor)
            if math.prod(tensor.dims) <= MAX_FOLDED:
                known[name] = numpy_helper.to_array(tensor)
    if folded:
        del graph.node[:]
        graph.node.extend(kept)
    return folded > 0


def _result(node: Any, known: Mapping[str, Any], types: Mapping[str, Type], model: Any) -> dict[str, Any] | None:
    """Return the tensors that a node makes of constants, or None if it has to be run."""
    if node.domain not in ("", "ai.onnx") or node.op_type in RANDOM | _QUANTIZED or list(subgraphs(node)):
        return None
    if node.op_type == "Constant" and node.attribute[0].HasField("t"):
        return {node.output[0]: onnx.TensorProto.FromString(node.attribute[0].t.SerializeToString())}
    made = [name for name in node.output if name]
    arguments = {name: known.get(name) for name in node.input if name}
    if node.op_type == "Shape" and node.input[0] in types:
        # The reference implementation wants the tensor; its shape is enough, as a view of one element.
        arguments = {node.input[0]: np.broadcast_to(np.zeros(1, bool), types[node.input[0]][1])}
    small = all(name in types and math.prod(types[name][1]) <= MAX_FOLDED for name in made)
    if any(value is None for value in arguments.values()) or not (small or node.op_type in ("Shape", "Constant")):
        return None
    alone = helper.make_graph(
        [node],
        "constant",
        [helper.make_tensor_value_info(name, 0, None) for name in arguments],
        [helper.make_tensor_value_info(name, 0, None) for name in made],
    )
    try:
        values = ReferenceEvaluator(helper.make_model(alone, opset_imports=model.opset_import)).run(None, arguments)
    except (NotImplementedError, TypeError, ValueError, RuntimeError, IndexError):
        return None  # What cannot be computed here stays a node, and costs cuts at most.
    return {name: numpy_helper.from_array(value) for name, value in zip(made, values, strict=True)}


def _types(graph: Any) -> dict[str, Type]:
    """Return the types of tensors whose every dimension is known."""
    types = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type and tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            types[value.name] = (tensor.elem_type, tuple(d.dim_value for d in tensor.shape.dim))
    return types


# --- cutting ---------------------------------------------------------------------------------------------------


class _Graph:
    """A model on its way into slices: constants and what is made of them on one side, the rest in order."""

    def __init__(self, model: Any) -> None:
        self.model, graph = model, model.graph
        self.types = _types(graph)
        self.constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        """Initializers and, of constant tensors that are computed, the nodes that do it; by name."""
        self.constants |= {sparse.values.name: sparse for sparse in graph.sparse_initializer}
        self.outputs = {value.name: value for value in graph.output}
        needed, kept = set(self.outputs), []
        for node in reversed(graph.node):
            if needed.intersection(node.output):
                kept.append(node)
                needed |= reads(node)
        self.nodes: list[Any] = []
        for node in reversed(kept):
            used = reads(node)
            if node.op_type not in RANDOM and all(name in self.constants for name in used):
                self.constants |= dict.fromkeys((name for name in node.output if name), node)
            else:
                self.nodes.append(node)
        self.made = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.last_use = {name: place for place, node in enumerate(self.nodes) for name in reads(node)}

    def ranges(self, per_slice: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of nodes that become slices; none for a model without tunable operations."""
        blocked = self._blocked()
        start = count = 0
        attention = False
        for place, node in enumerate(self.nodes):
            operations = _operations(node)
            if operations and count >= per_slice and not attention:
                cut = self._cut(start, place, blocked)
                if cut > start:
                    yield start, cut
                    start, count = cut, 0
            # Between softmax and the product behind it no cut is made: compilers fuse all of it.
            attention = node.op_type == "Softmax" or (attention and not operations)
            count += operations
        if count:
            yield start, len(self.nodes)

    def _blocked(self) -> list[bool]:
        """Say for every place whether a tensor without a known shape is in use across it."""
        edges = [0] * (len(self.nodes) + 2)
        for name, place in self.made.items():
            if name not in self.types and self.last_use.get(name, place) > place:
                edges[place + 1] += 1
                edges[self.last_use[name] + 1] -= 1
        return [depth > 0 for depth in accumulate(edges)]

    def _cut(self, start: int, place: int, blocked: list[bool]) -> int:
        """Return where to cut before an operation: in front of what leads to it; `start` where nowhere."""
        cut = place
        while cut - 1 > start and self.nodes[cut - 1].op_type in _LEADING and not blocked[cut - 1]:
            cut -= 1
        return start if blocked[cut] else cut

    def slice(self, start: int, end: int, folder: Path) -> tuple[Any, SlicedModel]:
        """Make a model of a run of nodes, with the weights that it uses, and describe it."""
        nodes = self.nodes[start:end]
        own = {name for node in nodes for name in node.output if name}
        taken = {name: None for node in nodes for name in sorted(reads(node)) if name not in own}
        made_constants, tensors = self._constants_for(taken)
        inputs = [name for name in taken if name not in self.constants]
        outputs = [
            name
            for node in nodes
            for name in node.output
            if name and (name in self.outputs or self.last_use.get(name, -1) >= end)
        ]
        weights = []
        for tensor in tensors:
            copy = type(tensor).FromString(tensor.SerializeToString())
            if isinstance(copy, onnx.TensorProto) and uses_external_data(copy):
                load_external_data_for_tensor(copy, str(folder))
            weights.append(copy)
        graph = helper.make_graph(
            [*made_constants, *nodes],
            "slice",
            [helper.make_tensor_value_info(name, *self.types[name]) for name in inputs],
            [
                helper.make_tensor_value_info(name, *self.types[name]) if name in self.types else self.outputs[name]
                for name in outputs
            ],
            [weight for weight in weights if isinstance(weight, onnx.TensorProto)],
            sparse_initializer=[weight for weight in weights if isinstance(weight, onnx.SparseTensorProto)],
        )
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        return model, {
            "path": "",
            "signature": _signature(model, self.types),
            "operations": sum(_operations(node) for node in nodes),
            "count": 1,
            "inputs": {
                name: {"dtype": DTYPES[self.types[name][0]][0], "shape": [*self.types[name][1]]} for name in inputs
            },
        }

    def _constants_for(self, names: Mapping[str, None]) -> tuple[list[Any], list[Any]]:
        """Return the nodes that make the constants among these names, in order, and the tensors behind them."""
        made: dict[str, Any] = {}
        tensors: dict[str, Any] = {}

        def add(name: str) -> None:
            found = self.constants.get(name)
            if found is None or name in made or name in tensors:
                return
            if not isinstance(found, onnx.NodeProto):
                tensors[name] = found
                return
            for read in sorted(reads(found)):
                add(read)
            made.update(dict.fromkeys((output for output in found.output if output), found))

        for name in names:
            add(name)
        return list({id(node): node for node in made.values()}.values()), list(tensors.values())


def _operations(node: Any) -> int:
    return sum(each.op_type in TUNABLE for each in (node, *nodes_inside(node)))


def _signature(model: Any, types: Mapping[str, Type]) -> str:
    """Return a digest of what decides how a model is tuned: operators, shapes and dtypes, not names and weights.

    Inner shapes too (`types`): the scales of a Resize are not whole numbers, and decide the shapes behind it.
    """
    graph = model.graph
    numbers: dict[str, int] = {"": -1}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    inputs = [
        [number(value.name), value.type.tensor_type.elem_type, [d.dim_value for d in value.type.tensor_type.shape.dim]]
        for value in graph.input
    ]
    nodes = [
        [
            node.domain,
            node.op_type,
            [number(name) for name in node.input],
            [[number(name), types.get(name)] for name in node.output],
            sorted(attribute.SerializeToString(deterministic=True).hex() for attribute in node.attribute),
        ]
        for node in graph.node
    ]
    constants = sorted(
        [
            number(tensor.name),
            tensor.data_type,
            [*tensor.dims],
            # Whole numbers are shapes, axes and indices; others are weights, whose values decide nothing.
            numpy_helper.to_array(tensor).tolist()
            if math.prod(tensor.dims) <= 64 and DTYPES[tensor.data_type][0].startswith(("int", "uint"))
            else None,
        ]
        for tensor in graph.initializer
    )
    opsets = sorted([entry.domain, entry.version] for entry in model.opset_import)
    text = json.dumps([opsets, inputs, nodes, constants, [number(value.name) for value in graph.output]])
    return hashlib.sha256(text.encode()).hexdigest()
