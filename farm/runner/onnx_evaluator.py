"""The `onnx` package's own evaluator: slow, and the definition of what every ONNX operator and type means.

It computes right outputs for models that ONNX Runtime does not take: in bfloat16 or float8, of newer operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .onnx_graph import nodes_of
from .protocol import blamed_on_compiler

if TYPE_CHECKING:
    from .documents import Array, Arrays, Request

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose results nobody can foresee: a seed gives other numbers in every implementation."""


class _Evaluated:
    """An original model, run operator by operator."""

    def __init__(self, path: str) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        with blamed_on_compiler(_REFUSAL):
            self.evaluator = ReferenceEvaluator(onnx.load_model(path))
        self.outputs = [str(name) for name in self.evaluator.output_names]

    def prepare(self, feeds: Arrays) -> Arrays:
        """Return the arrays themselves."""
        return feeds

    def run(self, prepared: Arrays) -> list[Array]:
        """Run once."""
        import numpy as np

        with blamed_on_compiler(_REFUSAL):
            return [np.asarray(value) for value in self.evaluator.run(None, prepared)]

    def run_on_device(self, prepared: Arrays) -> None:
        """Host and device are one."""


_REFUSAL = "the onnx package's evaluator cannot run the model"


def load_reference(request: Request) -> _Evaluated:
    """Load the original model, unchanged."""
    return _Evaluated(request["model"]["path"])


def output_ranks(request: Request) -> dict[str, int | None]:
    """Return the ranks of the original model's outputs by name, where known."""
    return {
        value.name: len(value.type.tensor_type.shape.dim) if value.type.tensor_type.HasField("shape") else None
        for value in _model(request).graph.output
    }


def random_outputs(request: Request) -> dict[str, str]:
    """Return the outputs of the original model that depend on a random operator, each with the operator's name."""
    model = _model(request)
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}

    def operators(nodes: Any, above: frozenset[tuple[str, str, str]] = frozenset()) -> Iterator[str]:
        """Yield the random operators among nodes, in their subgraphs and in the functions that they call."""
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in functions and key not in above:
                yield from operators(functions[key].node, above | {key})
            elif node.op_type in RANDOM and node.domain in ("", "ai.onnx"):
                yield node.op_type
            yield from operators(_inner(node), above)

    tainted: dict[str, str] = {}
    found, waiting = True, list(model.graph.node)
    while found:  # nodes may be in any order
        found, rest = False, []
        for node in waiting:
            read = [*node.input, *(name for inner in _inner(node) for name in inner.input)]
            random = next(operators([node]), "") or next((tainted[name] for name in read if name in tainted), "")
            if random:
                tainted |= dict.fromkeys(filter(None, node.output), random)
                found = True
            else:
                rest.append(node)
        waiting = rest
    return {value.name: tainted[value.name] for value in model.graph.output if value.name in tainted}


def _inner(node: Any) -> Iterator[Any]:
    """Yield the nodes of a node's subgraphs."""
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from nodes_of(graph)


def _model(request: Request) -> Any:
    import onnx

    with blamed_on_compiler("the model cannot be read", "bad_model"):
        return onnx.load_model(request["model"]["path"], load_external_data=False)
