"""PyTorch models and SavedModels, turned into what compilers read, and PyTorch models as they are, to be measured.

Loading a TorchScript archive, a `.pt2` or a SavedModel can run code in it. So it happens only here, in a sealed child
without credentials, on the machine of the submitter.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farm.runner.measuring import Program
from farm.runner.protocol import RequestFailed, blamed_on_compiler
from farm.runner.samples import plain

if TYPE_CHECKING:
    from farm.extras.convert.conversion import ConvertRequest, LibrariesAnswer
    from farm.runner.documents import Arrays, ChildRequest, ConvertedInput, Request
    from farm.runner.launcher import Messages

_LIBRARIES = {"torch": ("torch", "onnx", "onnxscript"), "tensorflow": ("tensorflow", "tf2onnx")}
"""What a conversion depends on, by the extra of the farm that installs it."""
_FORMATS = {"torch": "PyTorch models", "tensorflow": "SavedModels"}
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow_cpu", "tensorflow-rocm")}


def libraries(request: ChildRequest, messages: Messages) -> LibrariesAnswer:
    """Return the versions of the libraries that a converter uses, without loading them.

    Raises RequestFailed (`toolchain_mismatch`) that names what is missing and what installs it.
    """
    extra = request["extension"]
    found = {name: _version(name) for name in _LIBRARIES[extra]}
    missing = [name for name, version in found.items() if not version]
    if missing:
        raise RequestFailed(
            "toolchain_mismatch",
            f"{sys.executable} has no {' and no '.join(missing)}, which {_FORMATS[extra]} need: "
            f"pip install 'migraphx-farm[{extra}]', or name an interpreter that has it in FARM_{extra.upper()}_PYTHON",
        )
    return {"libraries": found}


def _version(name: str) -> str:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def convert(request: ConvertRequest, messages: Messages) -> LibrariesAnswer:
    """Convert the model `source` of the kind `kind` (`pt2`, `torchscript`, `saved-model`) and write it to `output`."""
    answer = libraries(request, messages)
    options, source, output = request["options"], request["source"], request["output"]
    messages.phase("compiling", None, f"converting {request['kind']}")
    match request["kind"]:
        case "pt2":
            _from_pt2(source, output, options)
        case "torchscript":
            _from_torchscript(source, output, options, request["inputs"])
        case "saved-model" if options["to"] == "tf":
            _frozen(source, output, options)
        case "saved-model":
            _from_saved_model(source, output, options)
    return answer


def _from_pt2(source: str, output: str, options: Mapping[str, Any]) -> None:
    import torch

    with blamed_on_compiler("torch cannot load the program", "bad_model"):
        program = torch.export.load(source)
    with blamed_on_compiler("torch cannot export the program to ONNX"):
        exported = torch.onnx.export(program, dynamo=True, opset_version=options["opset"], verbose=False)
        exported.save(output)


def _from_torchscript(source: str, output: str, options: Mapping[str, Any], inputs: Sequence[ConvertedInput]) -> None:
    """Export a TorchScript archive: it does not say what its inputs are, so the manifest does, in their order."""
    import torch

    with blamed_on_compiler("torch cannot load the archive", "bad_model"):
        module = torch.jit.load(source, map_location="cpu").eval()
    known = [value.debugName().partition(".")[0] for value in list(module.graph.inputs())[1:]]
    if len(known) != len(inputs):
        raise RequestFailed(
            "bad_model", f"the model takes {len(known)} inputs ({', '.join(known)}), {len(inputs)} are given"
        )
    examples = tuple(torch.zeros(value["sizes"], dtype=getattr(torch, value["dtype"])) for value in inputs)
    with blamed_on_compiler("torch cannot export the archive to ONNX"):
        torch.onnx.export(
            module,
            examples,
            output,
            dynamo=False,
            opset_version=options["opset"],
            input_names=[value["name"] for value in inputs],
            dynamic_axes={value["name"]: {int(axis): name for axis, name in value["axes"].items()} for value in inputs},
        )


def _from_saved_model(source: str, output: str, options: Mapping[str, Any]) -> None:
    from tf2onnx import convert as tf2onnx

    sys.argv = [
        "tf2onnx", "--saved-model", source, "--tag", "serve", "--signature_def", options["signature"],
        "--opset", str(options["opset"]), "--output", output,
    ]  # fmt: skip
    with blamed_on_compiler("tf2onnx cannot convert the SavedModel"):
        tf2onnx.main()


def _frozen(source: str, output: str, options: Mapping[str, Any]) -> None:
    import tensorflow
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    with blamed_on_compiler("TensorFlow cannot load the SavedModel", "bad_model"):
        # Its functions do not keep its variables alive.
        model = tensorflow.saved_model.load(source)
    if options["signature"] not in model.signatures:
        there = ", ".join(model.signatures) or "none"
        raise RequestFailed("bad_model", f"the SavedModel has no signature {options['signature']}; it has {there}")
    with blamed_on_compiler("TensorFlow cannot freeze the SavedModel"):
        graph = convert_variables_to_constants_v2(model.signatures[options["signature"]]).graph.as_graph_def()
    with open(output, "wb") as file:  # noqa: PTH123
        file.write(graph.SerializeToString(deterministic=True))


def load_reference(request: Request) -> TorchProgram:
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
