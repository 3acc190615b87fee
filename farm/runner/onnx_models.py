"""ONNX models: the check of a file before any compiler opens it, and what is done to a graph before a compiler sees it.

MIGraphX segfaults on an empty file, follows absolute and `../` external data, and does not compare the size of raw data
with the shape. So no compiler gets a file that breaks a rule; client and child run the same rules.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .protocol import RequestFailed, blamed_on_compiler

if TYPE_CHECKING:
    from .documents import CheckAnswer, InputSpec, TensorInfo

MAX_FILE_BYTES = 2**31  # Protobuf's own limit; a larger model keeps its weights in external data.
MAX_DEPTH = 24  # Subgraphs inside subgraphs, functions inside functions; protobuf itself reads no more than about 30.
MAX_NODES = 2_000_000  # Nodes of all graphs, with every call of a model's own functions counted as what it stands for.
MAX_ELEMENTS = 2**40  # Elements of one tensor, with every empty axis counted as one.
MAX_OPSET = 2**31 - 1  # The newest opset of a domain that ONNX's own functions take.

DTYPES: dict[int, tuple[str, int]] = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 0), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64), 12: ("uint32", 32),
    13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16), 17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8), 19: ("float8e5m2", 8), 20: ("float8e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4e2m1", 4), 24: ("float8e8m0", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""ONNX's numbers of element types: our name and the width in bits (0 = any)."""

DOMAINS = frozenset(
    {
        "", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.training",
        "com.microsoft", "com.microsoft.nchwc",
    }
)  # fmt: skip
"""Domains whose operators some compiler of the farm may know."""

_OLD_OPERATORS = frozenset(
    {"Affine", "Crop", "DynamicSlice", "GivenTensorFill", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"}
)
"""Experimental operators that ONNX has dropped and ONNX Runtime still runs."""

_CONTRIBUTED = frozenset(
    {
        "ATen", "BiasAdd", "BiasGelu", "BiasSplitGelu", "ConstantFill", "DynamicScale", "FastGelu", "GroupNorm",
        "GroupQueryAttention", "MXFixNeuron", "MXQuantizeDequantize", "MatMulBnb4", "MatMulIntegerToFloat",
        "MatMulNBits", "MultiHeadAttention", "NhwcConv", "QLinearAdd", "QLinearAveragePool", "QLinearConcat",
        "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QuickGelu",
        "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    }
)  # fmt: skip
"""Operators of other domains, which MIGraphX knows by their names alone, whatever domain and opset they name."""

_Key = tuple[str, str, str]  # Domain, name and overload of a function.

_ENTRY_ORDER = ("location", "offset", "length", "checksum")


class BadModel(RequestFailed):
    """The model cannot be used; the message names the place."""

    def __init__(self, message: str, kind: str = "bad_model") -> None:
        super().__init__(kind, message)


def check_onnx(path: str | os.PathLike[str], *, alone: bool = False) -> CheckAnswer:
    """Check an ONNX file and return what it is.

    Operators are counted also in subgraphs and functions. No external file is opened; sizes and kinds of files come
    from the folder. With `alone` they are not there yet: where they would be is checked, they themselves are not.

    Raises BadModel with one sentence that names the tensor or node; OSError if the file cannot be read.
    """
    path = Path(path)
    check_file(path, "; keep its weights in external data")
    return _Check(_parse(path), path.absolute().parent, alone).run()


def check_file(path: Path, way_out: str = "") -> None:
    """Refuse what is not a file, empty or too large; `way_out` is said about the last. Raises BadModel, OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadModel("the model is not a regular file")
    if status.st_size == 0:
        raise BadModel("the model file is empty (0 bytes)")
    if status.st_size > MAX_FILE_BYTES:
        raise BadModel(f"the model file is larger than 2 GiB{way_out}")


def _parse(path: Path) -> Any:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load_model(path, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise BadModel(f"the file is not an ONNX model, or is cut short: {_short(str(error))}") from None
    if not model.ir_version or not model.HasField("graph"):
        raise BadModel("the file is not an ONNX model: it has no graph")
    return model


class _Check:
    def __init__(self, model: Any, folder: Path, alone: bool) -> None:
        import onnx

        self.defs = onnx.defs
        self.model, self.folder, self.alone = model, folder, alone
        self.operators: Counter[str] = Counter()
        self.weights: Counter[str] = Counter()
        self.files: set[str] = set()
        self.doubts: dict[str, None] = {}
        self.functions = {(each.domain, each.name, each.overload): each for each in model.functions}
        self.expanded: dict[_Key, int] = {}
        self.nodes = 0

    def run(self) -> CheckAnswer:
        opsets = self.opsets(self.model.opset_import)
        if len(self.functions) < len(self.model.functions):
            raise BadModel("two functions of the model have one name")
        if self.model.training_info:
            raise BadModel("the model carries graphs for training, which no compiler reads; export it for inference")
        for key in self.functions:
            self.expansion(key, [])
        for function in self.model.functions:
            self.function(function)
        self.graph(self.model.graph, opsets, frozenset(), 0)
        graph = self.model.graph
        constants = {tensor.name for tensor in graph.initializer}
        constants |= {tensor.values.name for tensor in graph.sparse_initializer}
        if not graph.output:
            raise BadModel("the model has no outputs")
        return {
            "inputs": [self.value(info, "input") for info in graph.input if info.name not in constants],
            "outputs": [self.value(info, "output") for info in graph.output],
            "opset": opsets.get("", 0),
            "opsets": opsets,
            "doubts": list(self.doubts),
            "operators": dict(sorted(self.operators.items())),
            "weights": dict(self.weights.most_common()),
            "weight_dtypes": [dtype for dtype, _ in self.weights.most_common()],
            "external_files": sorted(self.files),
        }

    def opsets(self, imports: Iterable[Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry in imports:
            _require_text(entry.domain)
            domain = _domain(entry.domain)
            if domain in found and found[domain] != entry.version:
                raise BadModel(f"the model imports two opsets of domain {_name(domain)}")
            found[domain] = entry.version
        if not found:
            raise BadModel("the model names no opset")
        version, newest = found.get("", 1), self.defs.onnx_opset_version()
        if not 1 <= version <= newest:
            raise BadModel(f"opset {version} is not known (this farm knows 1 to {newest})")
        if beyond := [number for number in found.values() if abs(number) > MAX_OPSET]:
            raise BadModel(f"opset {beyond[0]} is not known")
        return found

    def function(self, function: Any) -> None:
        _require_text(function.name, function.domain, *function.input)
        where = f"function {_name(function.name)}"
        opsets = self.opsets(function.opset_import)
        self.body(function.node, opsets, set(function.input), where, 0)
        for attribute in function.attribute_proto:
            self.attribute(attribute, opsets, frozenset(), where, 0)

    def expansion(self, key: _Key, calls: list[_Key]) -> int:
        """Return how many nodes one call of a function stands for; a function must not call itself."""
        if key in calls or len(calls) > MAX_DEPTH:
            raise BadModel(f"function {_name(key[1])} calls itself, or functions nest deeper than {MAX_DEPTH}")
        if key not in self.expanded:
            total = 0
            for node in nodes_of(self.functions[key]):
                inner = _called(node)
                total += self.expansion(inner, [*calls, key]) if inner in self.functions else 1
                if total > MAX_NODES:
                    raise BadModel(f"function {_name(key[1])} stands for more than {MAX_NODES} nodes")
            self.expanded[key] = total
        return self.expanded[key]

    def graph(self, graph: Any, opsets: dict[str, int], outer: frozenset[str], depth: int) -> None:
        _require_text(graph.name, *(info.name for info in graph.input), *(info.name for info in graph.output))
        where = f"graph {_name(graph.name)}"
        if depth > MAX_DEPTH:
            raise BadModel(f"{where}: subgraphs nest deeper than {MAX_DEPTH}")
        names = set(_unique((info.name for info in graph.input), where, "input"))
        constants = [tensor.name for tensor in graph.initializer]
        constants += [tensor.values.name for tensor in graph.sparse_initializer]
        names.update(_unique(constants, where, "initializer"))
        _require_text(*constants)
        for tensor in graph.initializer:
            self.tensor(tensor, f"initializer {_name(tensor.name)}")
        for sparse in graph.sparse_initializer:
            self.sparse(sparse, f"sparse initializer {_name(sparse.values.name)}")
        produced = self.body(graph.node, opsets, names | outer, where, depth)
        for info in graph.output:
            if info.name not in produced and info.name not in names and info.name not in outer:
                raise BadModel(f"{where}: nothing makes output {_name(info.name)}")

    def body(
        self, nodes: Any, opsets: dict[str, int], known: set[str] | frozenset[str], where: str, depth: int
    ) -> set[str]:
        """Check the nodes of a graph or function, in any order, and return the names that they make."""
        produced: dict[str, int] = {}
        for index, node in enumerate(nodes):
            self.node(node, opsets)
            for output in filter(None, node.output):
                if output in produced:
                    raise BadModel(f"{where}: two nodes make {_name(output)}")
                produced[output] = index
        _check_order(nodes, produced, known, where)
        visible = frozenset(known) | frozenset(produced)
        for node in nodes:
            for attribute in node.attribute:
                self.attribute(attribute, opsets, visible, f"node {_node(node)}", depth)
        return set(produced)

    def node(self, node: Any, opsets: dict[str, int]) -> None:
        _require_text(node.op_type, node.domain, node.name, *node.input, *node.output)
        key = _called(node)
        self.nodes += self.expanded.get(key) or 1
        if self.nodes > MAX_NODES:
            raise BadModel(f"the model has more than {MAX_NODES} nodes")
        if not node.op_type:
            raise BadModel(f"node {_node(node)} has no operator")
        domain = _domain(node.domain)
        self.operators[f"{domain}.{node.op_type}" if domain else node.op_type] += 1
        if key in self.functions:
            return
        if domain not in DOMAINS:
            said = f"operator {_name(node.op_type)} is of unknown domain {_name(domain)}"
            raise BadModel(f"node {_node(node)}: {said}", kind="unsupported_operator")
        if domain not in opsets and domain == "com.microsoft":
            self.doubts[f"the model imports no opset of domain {_name(domain)}"] = None
            return
        if domain not in opsets:
            raise BadModel(f"node {_node(node)}: the model imports no opset of domain {_name(domain)}")
        if domain.startswith("com.microsoft") or node.op_type in _OLD_OPERATORS:
            return
        try:
            self.defs.get_schema(node.op_type, opsets[domain], domain)
        except self.defs.SchemaError:
            said = f"opset {opsets[domain]} has no operator {_name(node.op_type)}"
            if node.op_type not in _CONTRIBUTED and not self.defs.has(node.op_type, domain):
                raise BadModel(f"node {_node(node)}: {said}", kind="unsupported_operator") from None
            self.doubts[said] = None

    def attribute(
        self, attribute: Any, opsets: dict[str, int], visible: frozenset[str], where: str, depth: int
    ) -> None:
        _require_text(attribute.name)
        place = f"{where}, attribute {_name(attribute.name)}"
        for tensor in _held(attribute, "t", "tensors"):
            self.tensor(tensor, place)
        for sparse in _held(attribute, "sparse_tensor", "sparse_tensors"):
            self.sparse(sparse, place)
        for graph in _held(attribute, "g", "graphs"):
            self.graph(graph, opsets, visible, depth + 1)

    def sparse(self, sparse: Any, where: str) -> None:
        self.tensor(sparse.values, f"{where}, values")
        self.tensor(sparse.indices, f"{where}, indices")
        if any(dimension <= 0 for dimension in sparse.dims):
            raise BadModel(f"{where} has the shape {list(sparse.dims)}")

    def tensor(self, tensor: Any, where: str) -> None:
        if tensor.data_type not in DTYPES:
            raise BadModel(f"{where} has the unknown element type {tensor.data_type}")
        dtype, bits = DTYPES[tensor.data_type]
        if len(tensor.dims) > 64 or any(dimension < 0 for dimension in tensor.dims) or _is_huge(tensor.dims):
            raise BadModel(f"{where} has the shape {_short(str(list(tensor.dims)))}")
        if tensor.HasField("segment"):
            raise BadModel(f"{where} is stored in segments, which no compiler reads")
        count = math.prod(tensor.dims)
        size = (count * bits + 7) // 8
        if tensor.external_data or tensor.data_location == tensor.EXTERNAL:
            # MIGraphX reads external data wherever an entry names some, whatever the tensor says about its location.
            if tensor.data_location != tensor.EXTERNAL:
                raise BadModel(f"{where} names external data, and says that it has none")
            if dtype == "string":
                raise BadModel(f"{where}: text cannot be external data")
            self.external(tensor, size, where)
        elif dtype == "string":
            _expect(len(tensor.string_data), count, "texts", where)
        elif tensor.HasField("raw_data"):
            _expect(len(tensor.raw_data), size, "bytes of raw data", where)
        else:
            _expect(*_typed_counts(tensor, dtype, bits, count), "values", where)
        self.weights[dtype] += size

    def external(self, tensor: Any, size: int, where: str) -> None:
        _require_text(*(part for entry in tensor.external_data for part in (entry.key, entry.value)))
        keys = [entry.key for entry in tensor.external_data]
        # MIGraphX reads these entries by position: in another order, or with one left out, it would take an offset for
        # a file name, or a length for an offset.
        if not keys or keys != list(_ENTRY_ORDER[: len(keys)]):
            raise BadModel(f"{where}: external data must have location, offset and length once, in this order")
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries["location"]
        available = self.external_file(location, where)
        offset = _number(entries.get("offset", "0"), "offset", where)
        length = _number(entries.get("length", str(size)), "length", where)
        if length != size:
            raise BadModel(f"{where}: its shape needs {size} bytes of external data, its length is {length}")
        if offset + length > available:
            raise BadModel(f"{where}: external data ends at byte {offset + length} of a file of {available}")
        self.files.add(location)

    def external_file(self, location: str, where: str) -> int:
        """Return the size of an external file, after every way out of the model's folder is ruled out."""
        parts = location.split("/")
        bad = not location or "\0" in location or "\\" in location or location.startswith("/")
        if bad or len(location) > 1024 or any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
            raise BadModel(f"{where}: external data at {_name(location)} is outside the model's folder")
        if self.alone:
            return sys.maxsize
        place = self.folder
        for part in parts:
            place = place / part
            try:
                status = place.lstat()
            except (OSError, ValueError):
                raise BadModel(f"{where}: external data {_name(location)} is missing") from None
            if stat.S_ISLNK(status.st_mode):
                raise BadModel(f"{where}: external data {_name(location)} is or lies behind a symbolic link")
        if not stat.S_ISREG(status.st_mode):
            raise BadModel(f"{where}: external data {_name(location)} is not a regular file")
        if status.st_nlink != 1:
            raise BadModel(f"{where}: external data {_name(location)} has a second name (hard link)")
        return status.st_size

    def value(self, info: Any, what: str) -> TensorInfo:
        where = f"{what} {_name(info.name)}"
        if not info.name:
            raise BadModel(f"an {what} of the model has no name")
        if "\0" in info.name:
            raise BadModel(f"{where} has a zero byte in its name, which ends it in C and in files of samples")
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value") or "no type"
            said = f"{where} is not a tensor ({kind}), which no compiler of the farm takes"
            raise BadModel(said, "unsupported_operator")
        tensor = info.type.tensor_type
        if tensor.elem_type not in DTYPES:
            raise BadModel(f"{where} has the unknown element type {tensor.elem_type}")
        shape: list[int | str | None] | None = None
        if tensor.HasField("shape"):
            _require_text(*(dimension.dim_param for dimension in tensor.shape.dim))
            shape = [_dimension(dimension) for dimension in tensor.shape.dim]
            if len(shape) > 64 or _is_huge(dimension for dimension in shape if isinstance(dimension, int)):
                raise BadModel(f"{where} has the shape {_short(str(shape))}")
        return {"name": info.name, "dtype": DTYPES[tensor.elem_type][0], "shape": shape}


def _check_order(nodes: Any, produced: dict[str, int], known: set[str] | frozenset[str], where: str) -> None:
    """Check that every input comes from somewhere and that no node needs its own output.

    Nodes in any order are fine: ONNX Runtime takes them.
    """
    order: TopologicalSorter[int] = TopologicalSorter()
    for index, node in enumerate(nodes):
        makers = set()
        for name in sorted(reads(node)):
            if name in produced:
                makers.add(produced[name])
            elif name in node.input and name not in known:
                raise BadModel(f"{where}: nothing makes {_name(name)}, which node {_node(node)} needs")
        order.add(index, *makers)
    try:
        order.prepare()
    except CycleError as error:
        raise BadModel(f"{where}: node {_node(nodes[error.args[1][0]])} depends on its own output") from None


def _called(node: Any) -> _Key:
    return node.domain, node.op_type, node.overload


def _typed_counts(tensor: Any, dtype: str, bits: int, count: int) -> tuple[int, int]:
    """Return how many values a tensor without raw data holds, and how many its shape needs."""
    if dtype in ("float32", "complex64"):
        return len(tensor.float_data), count * (2 if dtype == "complex64" else 1)
    if dtype in ("float64", "complex128"):
        return len(tensor.double_data), count * (2 if dtype == "complex128" else 1)
    if dtype == "int64":
        return len(tensor.int64_data), count
    if dtype in ("uint32", "uint64"):
        return len(tensor.uint64_data), count
    # Values of less than a byte are packed, as raw data is; more of them MIGraphX would write past its buffer's end.
    return len(tensor.int32_data), (count * bits + 7) // 8 if bits < 8 else count


def _expect(found: int, wanted: int, what: str, where: str) -> None:
    if found != wanted:
        raise BadModel(f"{where}: its shape needs {wanted} {what}, it has {found}")


def _unique(names: Iterable[str], where: str, what: str) -> list[str]:
    found = list(names)
    for name, count in Counter(found).items():
        if count > 1:
            raise BadModel(f"{where}: two {what}s are named {_name(name)}")
    return found


def _number(text: str, what: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadModel(f"{where}: the {what} of its external data is {_name(text)}")
    return int(text)


def _is_huge(dimensions: Iterable[int]) -> bool:
    """Whether no array can have this shape: numpy and compilers multiply its sizes, whether or not one of them is 0."""
    return math.prod(max(dimension, 1) for dimension in dimensions) > MAX_ELEMENTS


def _dimension(dimension: Any) -> int | str | None:
    if dimension.HasField("dim_value"):
        # Exporters write -1 for a dimension that they do not know.
        return dimension.dim_value if dimension.dim_value >= 0 else None
    return dimension.dim_param or None


def _require_text(*texts: Any) -> None:
    """Refuse names that are not UTF-8, which protobuf hands out as bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise BadModel(f"the model has a name that is not text: {_short(repr(text))}")


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _node(node: Any) -> str:
    return _name(node.name or next(iter(node.output), "") or node.op_type)


def _name(text: str) -> str:
    return repr(_short(text))


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose results nobody can foresee: a seed gives other numbers in every implementation."""

LARGEST_FILE = 2**31 - 1  # Bytes of one ONNX file; the weights of a larger model are in a second one.


def drop_overridable_constants(model: Any) -> None:
    """Make initializers constants: old exporters list them as inputs too, which keeps them from being folded."""
    constants = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in constants]
    if len(kept) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = max(model.ir_version, 4)


def at_least_opset(model: Any, version: int) -> Any:
    """Return a model of this opset, or of a newer one. Raises RequestFailed."""
    import onnx
    from onnx import version_converter

    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), version)
    if opset >= version:
        return model
    with blamed_on_compiler(f"opset {opset} cannot be converted to {max(version, 17)}"):
        return version_converter.convert_version(model, min(max(version, 17), onnx.defs.onnx_opset_version()))


def save(model: Any, path: Path) -> Path:
    """Write a model, with its weights in a second file if one cannot hold all; return its path."""
    import onnx

    large = model.ByteSize() > LARGEST_FILE
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)
    return path


def fix_shapes(model: Any, inputs: Mapping[str, InputSpec]) -> None:
    """Write the static shapes into the model, and everywhere a dimension of that name occurs."""
    named: dict[str, int] = {}
    known = {value.name: value for value in model.graph.input}
    for name, spec in inputs.items():
        if name not in known:
            raise RequestFailed("bad_model", f"the model has no input '{name}'; it has {', '.join(known)}")
        shape = known[name].type.tensor_type.shape
        sizes = spec["shape"]
        if len(shape.dim) not in (0, len(sizes)):
            raise RequestFailed("bad_model", f"input '{name}' has {len(shape.dim)} dimensions, not {len(sizes)}")
        for index, size in enumerate(sizes):
            dimension = shape.dim[index] if index < len(shape.dim) else shape.dim.add()
            if not isinstance(size, int):
                continue  # stays dynamic
            if dimension.HasField("dim_value") and dimension.dim_value > 0 and dimension.dim_value != size:
                said = f"input '{name}' has {dimension.dim_value} on axis {index}, not {size}"
                raise RequestFailed("bad_model", said)
            if dimension.dim_param:
                named[dimension.dim_param] = size
            dimension.dim_value = size
    for value in (*model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in named:
                dimension.dim_value = named[dimension.dim_param]


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield a graph and every graph inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs_of(inner)


def subgraphs(node: Any) -> Iterator[Any]:
    """Yield the graphs right inside a node."""
    for attribute in node.attribute:
        yield from _held(attribute, "g", "graphs")


def _held(attribute: Any, single: str, several: str) -> list[Any]:
    """Return what an attribute holds in its field for one value and in that for many."""
    return [*([getattr(attribute, single)] if attribute.HasField(single) else []), *getattr(attribute, several)]


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of every graph inside them."""
    for inner in graphs_of(graph):
        yield from inner.node


def nodes_inside(node: Any) -> Iterator[Any]:
    """Yield the nodes of a node's subgraphs."""
    for graph in subgraphs(node):
        yield from nodes_of(graph)


def reads(node: Any) -> set[str]:
    """Return the names that a node takes from its graph, also those that graphs inside it capture."""
    names = set(filter(None, node.input))
    for graph in subgraphs(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        names |= {value.name for value in graph.output} - own
        names.update(*(reads(inner) - own for inner in graph.node))
    return names


def random_outputs(model: Any) -> dict[str, str]:
    """Return the outputs of a model that depend on a random operator, each with the operator's name."""

    return outputs_behind(
        model, lambda node: str(node.op_type) if node.op_type in RANDOM and node.domain in ("", "ai.onnx") else ""
    )


def outputs_behind(model: Any, why: Callable[[Any], str]) -> dict[str, str]:
    """Return the outputs of a model that depend on a node for which `why` says something, each with what it says.

    Of a function that the model brings its nodes are asked.
    """
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}

    def reasons(nodes: Any, above: frozenset[tuple[str, str, str]] = frozenset()) -> Iterator[str]:
        """Yield what is said of nodes, of those in their subgraphs and in the functions that they call."""
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key not in functions:
                yield why(node)
            elif key not in above:
                yield from reasons(functions[key].node, above | {key})
            yield from reasons(nodes_inside(node), above)

    tainted: dict[str, str] = {}
    found, waiting = True, list(model.graph.node)
    while found:  # nodes may be in any order
        found, rest = False, []
        for node in waiting:
            behind = (tainted[name] for name in sorted(reads(node)) if name in tainted)
            said = next(filter(None, reasons([node])), "") or next(behind, "")
            if said:
                tainted |= dict.fromkeys(filter(None, node.output), said)
                found = True
            else:
                rest.append(node)
        waiting = rest
    return {value.name: tainted[value.name] for value in model.graph.output if value.name in tainted}
