"""What several modules do to an ONNX graph before a compiler sees it. Takes models as `onnx` loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .protocol import RequestFailed, blamed_on_compiler

if TYPE_CHECKING:
    from .documents import InputSpec

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose results nobody can foresee: a seed gives other numbers in every implementation."""

LARGEST_FILE = 2**31 - 1
"""Bytes of one ONNX file; the weights of a larger model are in a second one."""


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
                raise RequestFailed(
                    "bad_model", f"input '{name}' has {dimension.dim_value} on axis {index}, not {size}"
                )
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
        yield from (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)


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


def output_ranks(model: Any) -> dict[str, int | None]:
    """Return the ranks of a model's outputs by name, where known."""
    return {
        value.name: len(value.type.tensor_type.shape.dim) if value.type.tensor_type.HasField("shape") else None
        for value in model.graph.output
    }


def random_outputs(model: Any) -> dict[str, str]:
    """Return the outputs of a model that depend on a random operator, each with the operator's name."""

    def random(node: Any) -> str:
        return str(node.op_type) if node.op_type in RANDOM and node.domain in ("", "ai.onnx") else ""

    return outputs_behind(model, random)


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
