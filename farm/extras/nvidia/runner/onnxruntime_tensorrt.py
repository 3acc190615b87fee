"""ONNX Runtime's TensorRT provider, written to its documents and to the names in the provider's library; never run.

TensorRT 11 has no precision flags, and the provider of ONNX Runtime 1.31 has no options for them: an engine computes in
the types that the ONNX model has. So the model is converted, and what came out is looked at.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.runner.onnx_models import at_least_opset, graphs_of
from farm.runner.onnxruntime_compiler import DeviceLibraries, compute_dtypes
from farm.runner.onnxruntime_sessions import TENSORRT, Candidate, environment_of
from farm.runner.protocol import RequestFailed, blamed_on_compiler

from .onnxruntime_cuda import Cuda, spelt

if TYPE_CHECKING:
    from farm.runner.documents import Placement

FIX = (
    "get TensorRT {major} for this CUDA from NVIDIA (no registry has it): the wheel tensorrt_libs next to ONNX Runtime,"
    " or its folder of libraries in LD_LIBRARY_PATH"
)
BF16_OPSET = 22  # Since this opset convolutions, and what else had been left out, take bfloat16.
_NEEDED = re.compile(rb"libnvinfer\.so\.([0-9]+)")
_COMPUTED = {"fp16": "float16", "bf16": "bfloat16"}  # The type in which a converted model computes.


def needed_major() -> str:
    """Return the major version of TensorRT that the provider was linked with; nothing if it is not there."""
    import onnxruntime

    provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"
    found = _NEEDED.search(provider.read_bytes()) if provider.is_file() else None
    return found[1].decode() if found else ""


def libraries() -> DeviceLibraries:
    """Load TensorRT's libraries of the major version that is needed, and return what was found.

    They come from the wheel `tensorrt_libs` if it is installed, or from the loader's search path.
    """
    major = needed_major()
    if not major:
        return DeviceLibraries({}, {"provider": "ONNX Runtime has no TensorRT provider"}, 0)
    found = DeviceLibraries({}, {}, 0)
    wheel = importlib.util.find_spec("tensorrt_libs")
    folders = [Path(place) for place in (wheel.submodule_search_locations or ())] if wheel else []
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        file = f"lib{name}.so.{major}"
        path = next((str(folder / file) for folder in folders if (folder / file).is_file()), file)
        try:
            library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError as error:
            found.missing[name] = f"{file}: {error}"
            continue
        if name == "nvinfer":
            found.versions["tensorrt"] = spelt(library.getInferLibVersion())
    return found


def settle_tf32(precision: str) -> None:
    """Let TensorRT use TF32 in this process only for the precision of that name.

    Raises RequestFailed (`internal`) if the process has another setting, which stays from the first session on.
    """
    wanted = environment_of("tensorrt", precision).get("NVIDIA_TF32_OVERRIDE", "")
    if _settled and wanted not in _settled:
        raise RequestFailed("internal", "one process cannot run TensorRT both with TF32 and without")
    _settled.add(wanted)
    os.environ.pop("NVIDIA_TF32_OVERRIDE", None)
    if wanted:
        os.environ["NVIDIA_TF32_OVERRIDE"] = wanted


_settled: set[str] = set()


def refuse_wider(precision: str, computed: Mapping[str, int]) -> None:
    """Refuse a converted model in which no operator computes in the type that was asked for.

    Raises RequestFailed (`nothing_quantized`).
    """
    wanted = _COMPUTED.get(precision)
    if wanted and not computed.get(wanted):
        raise RequestFailed("nothing_quantized", f"{precision} left every operator of the model as it was")


def _size(size: int | Mapping[str, Any], place: str) -> str:
    """Return a size in the provider's spelling: the least, the largest, or the one to be fast at."""
    if isinstance(size, int):
        return str(size)
    return str((size.get("optimals") or [size["max"]])[-1] if place == "opt" else size[place])


_BUILDERS = {"quick": (3, 4), "exhaustive": (2, 3, 4, 5)}


class Tensorrt(Cuda):
    """A card, by the TensorRT provider; what that does not take, CUDA runs."""

    where = "on TensorRT"
    name = "tensorrt"
    in_bf16 = True
    untuned = "basic"

    def find(self) -> DeviceLibraries:
        """Return the versions of TensorRT and of CUDA's libraries. Raises RequestFailed."""
        cuda, found = super().find(), libraries()
        if lacks := "; ".join(found.missing.values()):
            fix = FIX.format(major=needed_major())
            raise RequestFailed("toolchain_mismatch", f"the TensorRT provider lacks {lacks}", fix)
        return cuda._replace(versions={**cuda.versions, **found.versions})

    def providers(self, found: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Return the providers of a session with their options, and load their libraries."""
        settle_tf32(self.request.get("precision") or "")
        libraries()
        return super().providers(found)

    def lacks(self) -> tuple[str, Mapping[str, str], str]:
        """Return the provider's name, the libraries that it lacks, and where to get them."""
        cuda = super().lacks()
        return cuda if cuda[1] else ("TensorRT", libraries().missing, FIX.format(major=needed_major()))

    def placement(self, session: Any, executed: Any, engine: Path | None) -> Placement:
        """Return which nodes of the `executed` model run where. Raises RequestFailed if not all are in an `engine`."""
        found = super().placement(session, executed, engine)
        left = {name for provider, nodes in found["nodes"].items() if provider != TENSORRT for name in nodes}
        if engine and (left or not engine.is_file()):
            said = f"TensorRT does not take {', '.join(sorted(left))}" if left else "TensorRT wrote no engine"
            raise RequestFailed(
                "unsupported_operator", f"{said}; with `options: {{engine: false}}` CUDA and the CPU run the rest"
            )
        return found

    def candidates(self, mode: str) -> list[Candidate]:
        """Return what a tuning mode tries."""
        return [
            self.default._replace(builder=builder, graph=graph)
            for builder in _BUILDERS[mode]
            for graph in (False, True)
        ]

    def building(self, engine: Path | None, database: Path | None) -> dict[str, str]:
        """Return the provider's options for a session that builds an engine.

        It goes into `engine`, an ONNX file with one node that holds it; TensorRT's timing cache is in the `database`.
        Sizes that vary get a profile each.
        """
        chosen: dict[str, str] = {}
        if engine:
            chosen |= {
                "trt_dump_ep_context_model": "1",
                "trt_ep_context_file_path": str(engine),
                "trt_ep_context_embed_mode": "1",
            }
        if database:
            chosen |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(database)}
        inputs: Mapping[str, Any] = self.request["inputs"]
        if any(isinstance(size, dict) for described in inputs.values() for size in described["shape"]):
            for place in ("min", "opt", "max"):
                sizes = {
                    name: "x".join(_size(size, place) for size in inputs[name]["shape"]) for name in sorted(inputs)
                }
                chosen[f"trt_profile_{place}_shapes"] = ",".join(f"{name}:{shape}" for name, shape in sizes.items())
        return chosen

    def build(self, program: Path, stored: Any, engine: Path | None, how: Candidate) -> tuple[Any, Any]:
        """Return a session in which TensorRT has built its engines, and the model that it runs.

        A session with compiled nodes cannot write the graph that it executes; an engine has the model's own types.
        """
        import onnx
        import onnxruntime

        precision, running = self.request["precision"], onnx.shape_inference.infer_shapes(stored)
        refuse_wider(precision, compute_dtypes(running))
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        tuned = self.request["tuning"]["mode"] != "off" and self.request.get("database")
        chosen = {**how.provider_options, **self.building(engine, Path(self.request["database"]) if tuned else None)}
        refusal = f"ONNX Runtime refuses its own {precision} program"
        return self.session(str(program), options, refusal, chosen), running

    def to_bf16(self, model: Any) -> Any:
        """Return a model of fp32 in which all computes in bfloat16; inputs and outputs stay as they are."""
        import ml_dtypes
        import numpy as np
        import onnx
        from onnx import numpy_helper
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel

        kinds, model = onnx.TensorProto, at_least_opset(model, BF16_OPSET)
        weights = {
            tensor.name: numpy_helper.to_array(tensor)
            for graph in graphs_of(model.graph)
            for tensor in graph.initializer
            if tensor.data_type == kinds.FLOAT
        }
        with blamed_on_compiler("conversion to bf16 failed"):
            # The casts are in the same places as for fp16.
            model = convert_float_to_float16(model, keep_io_types=True)
        for graph in graphs_of(model.graph):
            constants = [each.t for node in graph.node for each in node.attribute if each.HasField("t")]
            for tensor in (*graph.initializer, *constants):
                if tensor.data_type == kinds.FLOAT16:
                    array = weights.get(tensor.name)
                    array = numpy_helper.to_array(tensor) if array is None else array
                    raw = np.asarray(array, np.float32).astype(ml_dtypes.bfloat16).tobytes()
                    name, shape = tensor.name, list(tensor.dims)
                    tensor.CopyFrom(onnx.helper.make_tensor(name, kinds.BFLOAT16, shape, raw, raw=True))
            for value in (*graph.value_info, *graph.input, *graph.output):
                if value.type.tensor_type.elem_type == kinds.FLOAT16:
                    value.type.tensor_type.elem_type = kinds.BFLOAT16
            for node in graph.node:
                for attribute in node.attribute:
                    if attribute.name in ("to", "dtype") and attribute.i == kinds.FLOAT16:
                        attribute.i = kinds.BFLOAT16
        OnnxModel(model).topological_sort()  # The converter puts its casts at the end.
        return model

    def quantizer_options(self) -> dict[str, bool]:
        """TensorRT takes scales without a zero point alone."""
        return {**super().quantizer_options(), "ActivationSymmetric": True, "WeightSymmetric": True}


DEVICE = Tensorrt
