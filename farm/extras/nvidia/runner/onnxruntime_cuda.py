"""ONNX Runtime's CUDA provider: its libraries, its options, and the nodes that run on it.

The wheel `onnxruntime-gpu` has none of CUDA's libraries. They come from `nvidia-*` wheels in the same environment, or
from the loader's search path. A session without the provider is refused, so no program falls back to the CPU unseen.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.runner.onnx_models import nodes_of
from farm.runner.onnxruntime_compiler import DeviceLibraries, RuntimeDevice, SessionProgram, described
from farm.runner.onnxruntime_sessions import CUDA, ON_CARDS, Candidate, providers_of
from farm.runner.protocol import RequestFailed, blamed_on_compiler

if TYPE_CHECKING:
    from farm.runner.documents import Array, Arrays, Placement

_LIBRARIES = {
    "12": {"cuda": "libcudart.so.12", "cublas": "libcublas.so.12", "cufft": "libcufft.so.11"},
    "13": {"cuda": "libcudart.so.13", "cublas": "libcublas.so.13", "cufft": "libcufft.so.12"},
}
"""Libraries that the provider loads, by the major version of CUDA that ONNX Runtime was built with; all also need:"""
_ALWAYS = {"cudnn": "libcudnn.so.9", "curand": "libcurand.so.10"}
_LOWEST = {"12": 60, "13": 75}
"""Lowest compute capability by CUDA's major version: CUDA 13 dropped Maxwell, Pascal and Volta."""
FIX = "pip install 'migraphx-farm[cuda]', or name the libraries' folders in LD_LIBRARY_PATH"


def preload() -> None:
    """Load CUDA's libraries, which opens no card; templates ask for this by its name."""
    import onnxruntime

    onnxruntime.preload_dlls()


def libraries() -> DeviceLibraries:
    """Load the libraries that the provider needs, and return what was found."""
    from onnxruntime.capi import build_and_package_info

    preload()
    major = str(getattr(build_and_package_info, "cuda_version", "")).partition(".")[0]
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, file in {**_LIBRARIES.get(major, {}), **_ALWAYS}.items():
        try:
            library = ctypes.CDLL(file)
        except OSError as error:
            missing[name] = f"{file}: {error}"
            continue
        if name in _VERSIONS:
            versions[name] = _VERSIONS[name](library)
    return DeviceLibraries(versions, missing, _LOWEST.get(major, 0))


def _cuda(library: Any) -> str:
    number = ctypes.c_int()
    library.cudaRuntimeGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _cudnn(library: Any) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return spelt(library.cudnnGetVersion())


def spelt(number: int) -> str:
    """Return a version of cuDNN or TensorRT from its number: 101303 is 10.13.3."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cublas(library: Any) -> str:
    parts = []
    for part in range(3):
        number = ctypes.c_int()
        library.cublasGetProperty(part, ctypes.byref(number))
        parts.append(str(number.value))
    return ".".join(parts)


_VERSIONS = {"cuda": _cuda, "cudnn": _cudnn, "cublas": _cublas}

MOST_NAMES = 100  # Nodes of one operator that are named; `nodes` has their number.

SHAPES = frozenset(
    {"Shape", "Size", "Gather", "Concat", "Slice", "Unsqueeze", "Squeeze", "Cast", "Reshape", "Range", "Add", "Sub",
     "Mul", "Div", "Where", "Equal", "Greater", "Less", "Min", "Max", "ReduceProd", "Mod", "ConstantOfShape", "Expand",
     "Identity", "Constant", "Neg", "Floor", "Ceil", "And", "Or", "Not", "ScatterND", "Loop", "If", "GatherND"}
)  # fmt: skip
"""Operators that compute shapes: ONNX Runtime puts some of them on the CPU on purpose, though CUDA has kernels."""


def _floating(model: Any) -> set[str]:
    """Return the names of nodes that make floating-point tensors, as far as the model's types show."""
    import onnx

    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    known = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in known}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {node.name for node in nodes_of(model.graph) if any(types.get(name) in kinds for name in node.output)}


_SEARCHES = {"quick": ("EXHAUSTIVE", "HEURISTIC"), "exhaustive": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")}
_LEVELS = {"quick": ("all",), "exhaustive": ("basic", "extended", "all")}


class CardProgram(SessionProgram):
    """A program on a card: its inputs and outputs can stay there."""

    def run_on_device(self, prepared: Arrays) -> Callable[[], None] | None:
        """Return what runs with inputs and outputs that stay on the card; None for inputs that cannot."""
        import onnxruntime

        binding = self.session.io_binding()
        for value in self.session.get_inputs():
            if value.type.startswith("tensor(string") or not value.type.startswith("tensor("):
                return None
            if value.name in prepared:
                binding.bind_ortvalue_input(
                    value.name, onnxruntime.OrtValue.ortvalue_from_numpy(prepared[value.name], self.device.memory, 0)
                )
        for name in self.outputs:
            binding.bind_output(name, self.device.memory)

        def run() -> None:
            with blamed_on_compiler(f"ONNX Runtime failed while running, {self.device.where}"):
                self.session.run_with_iobinding(binding)
                binding.synchronize_outputs()

        return run


class GraphProgram(SessionProgram):
    """A program that is replayed as a CUDA graph, which reads and writes the same memory of the card at every run.

    Raises RequestFailed (`compiler_error`) if the size of an input or output is open.
    """

    def __init__(self, device: RuntimeDevice, path: str, how: Candidate, refusal: str, learnt: Path | None) -> None:
        super().__init__(device, path, how, refusal, learnt)
        self.binding = self.session.io_binding()
        self.inputs = {value.name: self._memory(value) for value in self.session.get_inputs()}
        self.results = [self._memory(value) for value in self.session.get_outputs()]
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in zip(self.outputs, self.results, strict=True):
            self.binding.bind_ortvalue_output(name, value)

    def _memory(self, value: Any) -> Any:
        import numpy as np
        import onnxruntime

        port = described(value)
        if port["strides"] is None:
            raise RequestFailed("compiler_error", f"`{port['name']}` has no fixed size, which a CUDA graph needs")
        with blamed_on_compiler(f"no memory on the card can be bound to `{port['name']}`"):
            kind = np.dtype(port["dtype"])
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(port["shape"], kind, self.device.memory, 0)

    def run(self, prepared: Arrays) -> list[Array]:
        """Run once, with copies."""
        with blamed_on_compiler(f"ONNX Runtime failed while running, {self.device.where}"):
            self.run_on_device(prepared)()
            return [value.numpy() for value in self.results]

    def run_on_device(self, prepared: Arrays) -> Callable[[], None]:
        """Copy the inputs to the card; return what runs with them. The first run captures the graph."""
        for name, value in self.inputs.items():
            value.update_inplace(prepared[name])

        def replay() -> None:
            self.session.run_with_iobinding(self.binding)
            self.binding.synchronize_outputs()

        return replay


class Cuda(RuntimeDevice):
    """A card, by the CUDA provider."""

    where = "on CUDA"
    memory = "cuda"
    name = "cuda"

    def find(self) -> DeviceLibraries:
        """Return the versions of CUDA's libraries. Raises RequestFailed."""
        import onnxruntime

        if CUDA not in onnxruntime.get_available_providers():
            fix = "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'migraphx-farm[cuda]'"
            raise RequestFailed("toolchain_mismatch", "the installed ONNX Runtime has no CUDA provider", fix)
        if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
            said = f"ONNX Runtime {onnxruntime.__version__} does not say which nodes run on the card; 1.24 and newer do"
            raise RequestFailed("toolchain_mismatch", said, "pip install -U 'migraphx-farm[cuda]'")
        found = libraries()
        if lacks := "; ".join(found.missing.values()):
            raise RequestFailed("toolchain_mismatch", f"the CUDA provider lacks {lacks}", FIX)
        return found

    def providers(self, found: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Return the providers of a session with their options, and load their libraries."""
        preload()
        precision, options = self.request.get("precision") or "", self.request.get("options") or {}
        (first, chosen), *others = providers_of(self.name, precision, options, found)
        # What only this process knows: folders, sizes, and that it binds memory.
        own = {name: value for name, value in found.items() if name.startswith("trt_") or name == "enable_cuda_graph"}
        return [(first, {**chosen, **own}), *others]

    def load(self, path: str, how: Candidate, refusal: str, learnt: Path | None = None) -> SessionProgram:
        """Load a model or program."""
        return (GraphProgram if how.graph else CardProgram)(self, path, how, refusal, learnt)

    def takes(self, how: Candidate, program: str) -> bool:
        """Whether a CUDA graph, if one is asked for, can be made: sizes are fixed, every node is here, and it runs."""
        import numpy as np

        if not how.graph:
            return True
        try:
            loaded = self.load(program, how, "the program cannot be a CUDA graph")
            ports = [described(value) for value in loaded.session.get_inputs()]
            feeds = {port["name"]: np.zeros([int(size) for size in port["shape"]], port["dtype"]) for port in ports}
            for _ in range(3):  # Run, capture, replay.
                loaded.run(feeds)
        except RequestFailed as failure:
            print(f"no CUDA graph: {failure.message}", flush=True)  # noqa: T201 (the log)
            return False
        return True

    def refuse_without(self, session: Any) -> None:
        """Refuse a session that was made without the provider: ONNX Runtime only prints that it could not load it.

        Raises RequestFailed (`gpu_library`), which names the missing libraries.
        """
        if ON_CARDS[self.name] not in session.get_providers():
            name, missing, fix = self.lacks()
            why = "; ".join(missing.values()) or "the log has its reason"
            raise RequestFailed("gpu_library", f"ONNX Runtime's {name} provider cannot be loaded: {why}", fix)

    def lacks(self) -> tuple[str, Mapping[str, str], str]:
        """Return the provider's name, the libraries that it lacks, and where to get them."""
        return "CUDA", libraries().missing, FIX

    def placement(self, session: Any, executed: Any, engine: Path | None) -> Placement:
        """Return which nodes run on which provider, and which elsewhere because the device's has no kernel for them.

        The types in `executed`, the optimised model, decide: ONNX Runtime moves nodes on shapes and other small
        integers to the CPU on purpose, but a node on floats only if the provider has no kernel for it. What TensorRT
        does not take and CUDA runs is named too, `on CUDA`.
        """
        floats = _floating(executed)
        nodes: dict[str, Counter[str]] = {}
        kinds: dict[str, dict[str, list[str]]] = {"on_purpose": {}, "fallback": {}}
        for part in session.get_provider_graph_assignment_info():
            for node in part.get_nodes():
                operator, domain = str(node.op_type), str(node.domain)
                label = operator if domain in ("", "ai.onnx") else f"{domain}.{operator}"
                nodes.setdefault(str(part.ep_name), Counter())[label] += 1
                if part.ep_name != ON_CARDS[self.name] and operator not in ("MemcpyToHost", "MemcpyFromHost"):
                    purpose = operator in SHAPES and str(node.name) not in floats
                    named = f"{label} on CUDA" if part.ep_name == CUDA else label
                    names = kinds["on_purpose" if purpose else "fallback"].setdefault(named, [])
                    names += [str(node.name)] if len(names) < MOST_NAMES else []
        return {
            "nodes": {provider: dict(sorted(found.items())) for provider, found in nodes.items()},
            "on_purpose": kinds["on_purpose"],
            "fallback": kinds["fallback"],
        }

    def candidates(self, mode: str) -> list[Candidate]:
        """Return what a tuning mode tries."""
        return [
            Candidate(level, self.threads, search=search, nhwc=nhwc, graph=graph)
            for level in _LEVELS[mode]
            for search in _SEARCHES[mode]
            for nhwc in (False, True)
            for graph in (False, True)
        ]

    def quantizer_options(self) -> dict[str, bool]:
        """Leave biases as they are: CUDA has no kernel that widens int32, so the CPU would compute them at every run.

        Those of convolutions ONNX Runtime quantizes all the same when it loads the program; `placement` names them.
        """
        return {"QuantizeBias": False}


DEVICE = Cuda
