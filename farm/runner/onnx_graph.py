"""What several modules do to an ONNX graph before a compiler sees it. Takes models as `onnx` loads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .protocol import RequestFailed

if TYPE_CHECKING:
    from .documents import InputSpec


def drop_overridable_constants(model: Any) -> None:
    """Make initializers constants: old exporters list them as inputs too, which keeps them from being folded."""
    constants = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in constants]
    if len(kept) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = max(model.ir_version, 4)


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
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs_of(inner)


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of every graph inside them."""
    for inner in graphs_of(graph):
        yield from inner.node
