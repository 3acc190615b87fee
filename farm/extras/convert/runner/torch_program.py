"""PyTorch models as they are, to be measured against the programs that were made of them.

Loading such a model can run code in it, so it happens only in a sealed child, on the machine of the model's owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.runner.protocol import Program, RequestFailed, blamed_on_compiler
from farm.runner.samples import plain

if TYPE_CHECKING:
    from farm.runner.documents import Arrays, Request


def load(request: Request) -> TorchProgram:
    """Load the request's model, of the format `pt2` or `torchscript`, for the CPU.

    An archive of TorchScript takes its inputs in the order of `order`; a `.pt2` says it itself.
    """
    import torch

    torch.set_num_threads(int(request["threads"]))
    model = request["model"]
    if model["format"] == "torchscript":
        with blamed_on_compiler("torch cannot load the archive", "bad_model"):
            module = torch.jit.load(model["path"], map_location="cpu").eval()
        names = model["order"]
        return TorchProgram(module, lambda feeds: ([_tensor(feeds, name) for name in names], {}))
    with blamed_on_compiler("torch cannot load the program", "bad_model"):
        program = torch.export.load(model["path"])
        return TorchProgram(program.module(), lambda feeds: _arguments(program, feeds))


class TorchProgram(Program):
    """A model that PyTorch runs on the CPU; `arguments` puts arrays by input name into its call."""

    def __init__(self, module: Any, arguments: Callable[[Arrays], tuple[Any, Any]]) -> None:
        self._module = module
        self._arguments = arguments
        self.outputs: list[str] = []  # PyTorch does not name them

    def prepare(self, feeds: Arrays) -> Any:
        """Return the positional and the named arguments of the call."""
        return self._arguments(feeds)

    def run(self, prepared: Any) -> list[Any]:
        """Run once, without keeping what gradients need, and return the outputs in order."""
        import torch
        from torch.utils import _pytree

        positional, named = prepared
        with blamed_on_compiler("torch cannot run the model", "bad_model"), torch.inference_mode():
            return list(_pytree.tree_leaves(self._module(*positional, **named)))


def _arguments(program: Any, feeds: Arrays) -> tuple[Any, Any]:
    """Return what an exported program is called with: its flat inputs, put back into the form that it was traced with.

    An input that is not a tensor was traced as a constant, and is passed on as such.
    """
    from torch.export.graph_signature import ConstantArgument, InputKind
    from torch.utils import _pytree

    flat = [
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else _tensor(feeds, spec.arg.name)
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    positional, named = _pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return positional, named


def _tensor(feeds: Arrays, name: str) -> Any:
    import torch

    if name not in feeds:
        raise RequestFailed(
            "bad_model", f"the model has an input {name}; the program made of it has {', '.join(feeds)}"
        )
    array = feeds[name]
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(plain(array)).view(getattr(torch, str(array.dtype)))  # bfloat16 and the like, by their bits
