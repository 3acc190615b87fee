"""Check of a TensorFlow frozen graph (`.pb`) without TensorFlow: reads the protobuf by hand, bounded.

Only what the farm needs is read: node names, operators, inputs, and of attributes the dtype, shape and size of
constants. Field numbers are those of TensorFlow's graph.proto, node_def.proto, attr_value.proto, tensor.proto.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .onnx_check import MAX_ELEMENTS, MAX_NODES, BadModel, check_file
from .wire import MalformedMessage, as_bytes, fields, signed, text

if TYPE_CHECKING:
    from .documents import CheckAnswer

DTYPES: dict[int, tuple[str, int]] = {
    1: ("float32", 4),
    2: ("float64", 8),
    3: ("int32", 4),
    4: ("uint8", 1),
    5: ("int16", 2),
    6: ("int8", 1),
    7: ("string", 0),
    9: ("int64", 8),
    10: ("bool", 1),
    14: ("bfloat16", 2),
    17: ("uint16", 2),
    19: ("float16", 2),
    22: ("uint32", 4),
    23: ("uint64", 8),
}
"""TensorFlow's numbers of element types: our name and the size in bytes."""

_VALUES = range(5, 18)
"""The fields of a constant that are lists of numbers."""

_NO_OUTPUT = frozenset({"Const", "Placeholder", "NoOp", "Assert"})


def check_tf(path: str | os.PathLike[str], outputs: Sequence[str] = ()) -> CheckAnswer:
    """Check a frozen GraphDef and return what it is, in the form of `check_onnx`.

    Inputs are the placeholders; outputs are the nodes named in `outputs`, else those that no other node uses.
    `opset` is the graph's producer version. A 4-D input has the layout of the model (mostly NHWC).

    Raises BadModel with one sentence that names the node; OSError if the file cannot be read.
    """
    path = Path(path)
    check_file(path)
    try:
        return _graph(memoryview(path.read_bytes()), outputs)
    except (IndexError, UnicodeDecodeError, MalformedMessage):
        raise BadModel("the file is not a TensorFlow frozen graph, or is cut short") from None


def _graph(data: memoryview, outputs: Sequence[str]) -> CheckAnswer:
    nodes, version = _nodes(data)
    used = _used(nodes)
    variables = [node for node in nodes.values() if node.op in ("Variable", "VariableV2", "VarHandleOp")]
    if variables:
        raise BadModel(f"the graph is not frozen: {variables[0].name!r} is a variable")
    sinks = [node for node in nodes.values() if node.name not in used and node.op not in _NO_OUTPUT]
    for name in outputs:
        if name not in nodes or nodes[name].op in _NO_OUTPUT:
            ends = ", ".join(node.name for node in sinks[:5])
            raise BadModel(f"the graph has no node {name!r} that could be an output; it ends in {ends}")
    sinks = [nodes[name] for name in outputs] or sinks
    if not sinks:
        raise BadModel("the graph has no outputs")
    weights: Counter[str] = Counter()
    for node in nodes.values():
        if node.op == "Const":
            weights[node.dtype] += node.bytes
    return {
        "format": "tf",
        "inputs": [
            {"name": node.name, "dtype": node.dtype, "shape": node.shape}
            for node in nodes.values()
            if node.op == "Placeholder"
        ],
        "outputs": [{"name": node.name, "dtype": node.dtype, "shape": None} for node in sinks],
        "opset": version,
        "opsets": {"tensorflow": version},
        "operators": dict(sorted(Counter(node.op for node in nodes.values()).items())),
        "weight_dtypes": [dtype for dtype, _ in weights.most_common()],
        "external_files": [],
    }


def _nodes(data: memoryview) -> tuple[dict[str, _Node], int]:
    """Return the nodes by name, and the graph's producer version."""
    nodes: dict[str, _Node] = {}
    version = 0
    for field, value in fields(data):
        if field == 1:
            node = _Node(as_bytes(value))
            if not node.name or not node.op:
                raise BadModel("a node of the graph has no name or no operator")
            if "\0" in node.name:
                raise BadModel(f"node {node.name!r} has a zero byte in its name, which ends it in C")
            if node.name in nodes:
                raise BadModel(f"two nodes are named {node.name!r}")
            nodes[node.name] = node
            if len(nodes) > MAX_NODES:
                raise BadModel(f"the graph has more than {MAX_NODES} nodes")
        elif field == 4:
            version = signed(_once(value, "the graph's versions").get(1, version))
    if not nodes:
        raise BadModel("the file is not a TensorFlow frozen graph: it has no nodes")
    return nodes, version


def _used(nodes: dict[str, _Node]) -> set[str]:
    """Return the names of the nodes that some node reads."""
    used = set()
    for node in nodes.values():
        for name in node.inputs:
            source = name.removeprefix("^").partition(":")[0]
            if source not in nodes:
                raise BadModel(f"node {node.name!r} needs {source!r}, which no node makes")
            used.add(source)
    return used


def _once(data: Any, what: str, *, repeated: range = range(0)) -> dict[int, int | memoryview]:
    """Return the fields of a message by number, of `repeated` ones the last.

    No other may come twice: of numbers and bytes protobuf takes the last, and it joins messages. Raises BadModel.
    """
    found: dict[int, int | memoryview] = {}
    for field, value in fields(as_bytes(data)):
        if field in found and field not in repeated:
            raise BadModel(f"{what} has its field {field} twice")
        found[field] = value
    return found


class _Node:
    """One NodeDef: what the farm needs of it."""

    def __init__(self, data: memoryview) -> None:
        self.name = self.op = ""
        self.inputs: list[str] = []
        self.dtype = "float32"
        self.shape: list[int | str | None] | None = None
        self.bytes = 0
        attributes: dict[str, memoryview] = {}
        for field, value in fields(data):
            if field == 1:
                self.name = text(value)
            elif field == 2:
                self.op = text(value)
            elif field == 3:
                self.inputs.append(text(value))
            elif field == 5:
                entry = dict(fields(as_bytes(value)))
                attributes[text(entry.get(1, b""))] = as_bytes(entry.get(2, b""))
        for key in ("T", "dtype"):
            if key in attributes:
                number = self._attribute(attributes[key]).get(6, 0)
                self.dtype = DTYPES.get(int(number), ("unknown", 0))[0] if isinstance(number, int) else "unknown"
        if self.op == "Placeholder" and "shape" in attributes:
            self.shape = self._shape(self._attribute(attributes["shape"]).get(7))
        if self.op == "Const" and "value" in attributes:
            self._constant(self._attribute(attributes["value"]).get(8))

    def _attribute(self, data: memoryview) -> dict[int, int | memoryview]:
        return _once(data, f"an attribute of node {self.name!r}")

    def _shape(self, data: Any) -> list[int | str | None] | None:
        if data is None:
            return None
        sizes: list[int | str | None] = []
        count = 1
        for field, value in fields(as_bytes(data)):
            if field == 3 and value:
                return None  # unknown rank
            if field == 2:
                number = signed(dict(fields(as_bytes(value))).get(1, 0))
                sizes.append(number if number >= 0 else None)
                count *= max(number, 1)
        if len(sizes) > 64 or count > MAX_ELEMENTS:
            raise BadModel(f"node {self.name!r} has a shape of {count} elements")
        return sizes

    def _constant(self, data: Any) -> None:
        """Check that a constant's content fits its shape: no compiler should be the first to find out."""
        if data is None:
            raise BadModel(f"constant {self.name!r} has no value")
        tensor = _once(data, f"constant {self.name!r}", repeated=_VALUES)
        dtype, size = DTYPES.get(signed(tensor.get(1, 0)), ("unknown", 0))
        shape = self._shape(tensor.get(2, b""))
        if shape is None or None in shape:
            raise BadModel(f"constant {self.name!r} has no static shape")
        count = 1
        for dimension in shape:
            count *= int(dimension or 0)
        content = len(as_bytes(tensor[4])) if 4 in tensor else None
        if content and size and content != count * size:
            raise BadModel(f"constant {self.name!r}: its shape needs {count * size} bytes, it has {content}")
        self.dtype, self.bytes = dtype, count * size
