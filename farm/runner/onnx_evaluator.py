"""The `onnx` package's own evaluator: slow, and the definition of what every ONNX operator and type means.

It computes right outputs for models that ONNX Runtime does not take: in bfloat16 or float8, of newer operators. Some
attributes and inputs it ignores without a word; see `onnx_forms`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import onnx_graph
from .protocol import blamed_on_compiler

if TYPE_CHECKING:
    from .documents import Array, Arrays, Request


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
    import onnx

    with blamed_on_compiler("the model cannot be read", "bad_model"):
        model = onnx.load_model(request["model"]["path"], load_external_data=False)
    return onnx_graph.output_ranks(model)
