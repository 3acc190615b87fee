"""Check of a TensorFlow frozen graph (`.pb`) without TensorFlow: protobuf reads it, as it does for MIGraphX.

Only what the farm needs is read: node names, operators, inputs, and of attributes the dtype, shape and size of
constants. Field numbers are those of TensorFlow's graph.proto, node_def.proto, attr_value.proto, tensor.proto.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .onnx_models import MAX_ELEMENTS, MAX_NODES, BadModel, check_file

if TYPE_CHECKING:
    from .documents import CheckAnswer

DTYPES: dict[int, tuple[str, int]] = {
    1: ("float32", 4), 2: ("float64", 8), 3: ("int32", 4), 4: ("uint8", 1), 5: ("int16", 2), 6: ("int8", 1),
    7: ("string", 0), 9: ("int64", 8), 10: ("bool", 1), 14: ("bfloat16", 2), 17: ("uint16", 2), 19: ("float16", 2),
    22: ("uint32", 4), 23: ("uint64", 8),
}  # fmt: skip
"""TensorFlow's numbers of element types: our name and the size in bytes."""

_NO_OUTPUT = frozenset({"Const", "Placeholder", "NoOp", "Assert"})

_MESSAGES = {
    "Graph": "1 node Node*, 4 versions Versions",
    "Versions": "1 producer int32",
    "Node": "1 name string, 2 op string, 3 input string*, 5 attr Attribute*",
    "Attribute": "1 key string, 2 value Value",
    # Of these the last one that is there counts.
    "Value": "1 list bytes|, 2 s bytes|, 3 i int64|, 4 f float|, 5 b bool|, 6 type int32|, 7 shape Shape|, "
    "8 tensor Tensor|, 9 placeholder bytes|, 10 func bytes|",
    "Shape": "2 dim Size*, 3 unknown_rank bool",
    "Size": "1 size int64",
    "Tensor": "1 dtype int32, 2 tensor_shape Shape, 4 tensor_content bytes",
}
"""The fields that the farm reads: number, name and type; `*` is repeated, `|` excludes the others."""


@cache
def _graph_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

    file = descriptor_pb2.FileDescriptorProto(name="farm/graph.proto", package="farm", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        if "|" in fields:
            made.oneof_decl.add(name="value")
        for number, name, kind in map(str.split, fields.split(", ")):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=int(number), label=label)
            plain = kind.rstrip("*|")
            if plain in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".farm.{plain}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
            if kind.endswith("|"):
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("farm.Graph"))


def check_tf(path: str | os.PathLike[str], outputs: Sequence[str] = ()) -> CheckAnswer:
    """Check a frozen GraphDef and return what it is, in the form of `check_onnx`.

    Inputs are the placeholders; outputs are the nodes named in `outputs`, else those that no other node uses.
    `opset` is the graph's producer version. A 4-D input has the layout of the model (mostly NHWC).

    Raises BadModel with one sentence that names the node; OSError if the file cannot be read.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    path = Path(path)
    check_file(path)
    try:
        graph = _graph_class().FromString(path.read_bytes())
    except DecodeError:
        raise BadModel("the file is not a TensorFlow frozen graph, or is cut short") from None
    nodes = _nodes(graph)
    sinks = _sinks(nodes, outputs)
    weights: Counter[str] = Counter()
    for node in nodes.values():
        if node.op == "Const":
            dtype, size = _constant(node)
            weights[dtype] += size
    return {
        "inputs": [
            {"name": node.name, "dtype": _dtype(node), "shape": _shape(node.name, _attributes(node).get("shape"))}
            for node in nodes.values()
            if node.op == "Placeholder"
        ],
        "outputs": [{"name": node.name, "dtype": _dtype(node), "shape": None} for node in sinks],
        "opset": graph.versions.producer,
        "operators": dict(sorted(Counter(node.op for node in nodes.values()).items())),
        "weight_dtypes": [dtype for dtype, _ in weights.most_common()],
        "external_files": [],
    }


def _nodes(graph: Any) -> dict[str, Any]:
    if len(graph.node) > MAX_NODES:
        raise BadModel(f"the graph has more than {MAX_NODES} nodes")
    nodes: dict[str, Any] = {}
    for node in graph.node:
        if not node.name or not node.op:
            raise BadModel("a node of the graph has no name or no operator")
        if "\0" in node.name:
            raise BadModel(f"node {node.name!r} has a zero byte in its name, which ends it in C")
        if node.name in nodes:
            raise BadModel(f"two nodes are named {node.name!r}")
        nodes[node.name] = node
    if not nodes:
        raise BadModel("the file is not a TensorFlow frozen graph: it has no nodes")
    return nodes


def _sinks(nodes: dict[str, Any], outputs: Sequence[str]) -> list[Any]:
    used = set()
    for node in nodes.values():
        for name in node.input:
            source = name.removeprefix("^").partition(":")[0]
            if source not in nodes:
                raise BadModel(f"node {node.name!r} needs {source!r}, which no node makes")
            used.add(source)
    if variables := [node for node in nodes.values() if node.op in ("Variable", "VariableV2", "VarHandleOp")]:
        raise BadModel(f"the graph is not frozen: {variables[0].name!r} is a variable")
    sinks = [node for node in nodes.values() if node.name not in used and node.op not in _NO_OUTPUT]
    for name in outputs:
        if name not in nodes or nodes[name].op in _NO_OUTPUT:
            ends = ", ".join(node.name for node in sinks[:5])
            raise BadModel(f"the graph has no node {name!r} that could be an output; it ends in {ends}")
    sinks = [nodes[name] for name in outputs] or sinks
    if not sinks:
        raise BadModel("the graph has no outputs")
    return sinks


def _attributes(node: Any) -> dict[str, Any]:
    return {entry.key: entry.value for entry in node.attr}


def _dtype(node: Any) -> str:
    if node.op == "Const":
        return _constant(node)[0]
    attributes = _attributes(node)
    value = attributes.get("dtype") or attributes.get("T")
    return DTYPES.get(value.type, ("unknown", 0))[0] if value else "float32"


def _shape(name: str, value: Any) -> list[int | str | None] | None:
    """Return the shape in a node's attribute; None for none, and for an unknown rank."""
    if value is None or not value.HasField("shape") or value.shape.unknown_rank:
        return None
    return _sizes(name, value.shape)


def _sizes(name: str, shape: Any) -> list[int | str | None]:
    sizes = [size.size if size.size >= 0 else None for size in shape.dim]
    count = math.prod(size or 1 for size in sizes)
    if len(sizes) > 64 or count > MAX_ELEMENTS:
        raise BadModel(f"node {name!r} has a shape of {count} elements")
    return sizes


def _constant(node: Any) -> tuple[str, int]:
    """Return a constant's dtype and bytes; check that its content fits its shape, before a compiler finds out."""
    value = _attributes(node).get("value")
    if value is None:
        return "float32", 0
    if not value.HasField("tensor"):
        raise BadModel(f"constant {node.name!r} has no value")
    tensor = value.tensor
    dtype, size = DTYPES.get(tensor.dtype, ("unknown", 0))
    sizes = _sizes(node.name, tensor.tensor_shape)
    if tensor.tensor_shape.unknown_rank or None in sizes:
        raise BadModel(f"constant {node.name!r} has no static shape")
    needed, content = math.prod(int(each or 0) for each in sizes) * size, len(tensor.tensor_content)
    if content and size and content != needed:
        raise BadModel(f"constant {node.name!r}: its shape needs {needed} bytes, it has {content}")
    return dtype, needed
