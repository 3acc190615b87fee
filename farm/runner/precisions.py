"""How ONNX models get their precision: for ONNX Runtime's programs fp16, bf16, int8 or int4, for MIGraphX's int4.

MIGraphX's Python module cannot quantize to int4, and its driver (`--int4-weights`) has one scale for a whole weight and
leaves the float weights in the program. `pack_weights` writes ONNX's own form, each block of weights with a scale of
its own, which MIGraphX parses to `unpack_int4` and `dequantizelinear` and stores packed: a DequantizeLinear with
`block_size` (opset 21) before each matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .onnx_models import LARGEST_FILE, drop_overridable_constants, graphs_of, nodes_of, save
from .protocol import RequestFailed, blamed_on_compiler, first_line
from .samples import make_samples, points_of

if TYPE_CHECKING:
    from .documents import Arrays, Options, Request
    from .launcher import Messages
    from .onnxruntime_compiler import RuntimeDevice

MIN_WEIGHT = 64  # Smaller constants stay fp32 in bf16 programs: they are scales, shapes and bounds, not weights.


def _to_fp16(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with blamed_on_compiler("conversion to fp16 failed"):
        save(convert_float_to_float16(onnx.load_model(base), keep_io_types=True), target)
    return {}


def _to_bf16(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    """Store weights as bf16 with a Cast behind each: ONNX Runtime's CPU has no bf16 activations."""
    import ml_dtypes

    model = onnx.load_model(base)
    if device.in_bf16:
        save(device.to_bf16(model), target)
        return {}
    count = 0
    for graph in graphs_of(model.graph):
        casts = []
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor) if tensor.data_type == onnx.TensorProto.FLOAT else None
            if array is None or array.size < MIN_WEIGHT:
                continue
            name, stored = tensor.name, f"{tensor.name}.bf16"
            casts.append(helper.make_node("Cast", [stored], [name], name=f"{name}.cast", to=onnx.TensorProto.FLOAT))
            # As bytes: the onnx of another toolchain may make no tensor of ml_dtypes (1.18).
            raw = array.astype(ml_dtypes.bfloat16).tobytes()
            tensor.CopyFrom(helper.make_tensor(stored, onnx.TensorProto.BFLOAT16, array.shape, raw, raw=True))
        count += len(casts)
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    save(model, target)
    return {"weights": count}


DENSE = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # Operators in which the time goes, and which bear 8 bits well.


def _to_int8(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    request = device.request
    options = request["quantization"]
    # Of dynamic sizes the largest.
    inputs, batch = points_of(request["inputs"], request.get("batch"))[-1]
    samples = make_samples(request["calibration"] or {}, inputs, batch, what="calibration data")
    prepared = _preprocessed(base)
    if sums_saturate(options, device):
        print(SATURATING, flush=True)  # noqa: T201 (the log)
    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
    methods = {method.name.lower(): method for method in CalibrationMethod}
    with blamed_on_compiler("ONNX Runtime's int8 quantizer failed"):
        quantize_static(
            str(prepared),
            str(target),
            _reader(samples, messages),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(DENSE) if options["operators"] == "dense" else None,
            per_channel=options["per_channel"],
            activation_type=types[options["activations"]],
            weight_type=types[options["weights"]],
            calibrate_method=methods[options["method"]],
            reduce_range=options["reduce_range"],
            extra_options=device.quantizer_options(),
            use_external_data_format=prepared.stat().st_size > LARGEST_FILE // 2,
        )
    return {}


SATURATING = (
    "this CPU has no VNNI: its sums of 8-bit products saturate, and the program may be far off; "
    "`options: {weights: uint8}` or `{reduce_range: true}` avoid it"
)


def sums_saturate(options: Options, device: RuntimeDevice) -> bool:
    """Whether sums of int8 products may saturate here: unsigned times signed ones do, on x86 CPUs without VNNI.

    https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html ("when to try U8U8")
    """
    mixed = (options["activations"], options["weights"]) == ("uint8", "int8") and not options["reduce_range"]
    return mixed and device.family.startswith("x86") and not device.family.endswith("-vnni")


def _reader(runs: Sequence[Arrays], messages: Messages) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    left = enumerate(runs)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands out one run after the other and says how far it is."""

        def get_next(self) -> Arrays | None:
            for index, run in left:
                messages.phase("quantizing", 0.1 + 0.8 * index / len(runs), "calibration")
                return run
            return None

    return Reader()


def _preprocessed(base: Path) -> Path:
    """Return the model with shapes inferred; symbolic inference fails on some models, so go without it there."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    target = base.with_name("prepared.onnx")
    try:
        quant_pre_process(str(base), str(target))
    except Exception as error:
        print(f"without symbolic shapes: {first_line(str(error))}", flush=True)  # noqa: T201 (the log)
        with blamed_on_compiler("preparing the model for int8 failed"):
            quant_pre_process(str(base), str(target), skip_symbolic_shape=True)
    return target


def _to_int4(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    options = device.request["quantization"]
    with blamed_on_compiler("ONNX Runtime's int4 quantizer failed"):
        quantizer = MatMulNBitsQuantizer(
            onnx.load_model(base), block_size=options["block_size"], is_symmetric=options["symmetric"]
        )
        quantizer.process()
    model = quantizer.model.model
    count = sum(node.op_type == "MatMulNBits" for node in nodes_of(model.graph))
    save(model, target)
    return {"MatMul": count}


CONVERSIONS: dict[str, Callable[[Path, Path, RuntimeDevice, Messages], dict[str, int]]] = {
    "fp16": _to_fp16,
    "bf16": _to_bf16,
    "int8": _to_int8,
    "int4": _to_int4,
}


def pack_weights(request: Request, messages: Messages) -> None:
    """Write the request's model with packed weights to `packed`. Raises RequestFailed if no weight can be packed."""
    messages.phase("quantizing", None, "int4 weights")
    with blamed_on_compiler("the model cannot be read", "bad_model"):
        model = onnx.load_model(request["model"]["path"])
    drop_overridable_constants(model)
    options = request["quantization"]
    block, symmetric = int(options["block_size"]), bool(options["symmetric"])
    if not sum([_pack(graph, block, symmetric) for graph in graphs_of(model.graph)]):
        needs = f"at least two blocks of {options['block_size']} inputs, and an even number of outputs"
        raise RequestFailed("nothing_quantized", f"int4 left every operator as it was: MatMul and Gemm need {needs}")
    model.ir_version = max(model.ir_version, 10)  # the first with 4-bit tensors
    save(model, Path(request["packed"]))


def _pack(graph: Any, block: int, symmetric: bool) -> int:
    """Give every MatMul and Gemm with constant weights of this graph its packed ones; return how many have them."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    count = 0
    made: set[str] = set()
    nodes = []
    for node in graph.node:
        weight = weights.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") and not node.domain else None
        turned = [attribute for attribute in node.attribute if attribute.name == "transB" and attribute.i]
        if weight is not None and _can_be_packed(weight, bool(turned), block):
            name = f"{weight.name}.int4{'.turned' if turned else ''}"
            if name not in made:
                made.add(name)
                array = numpy_helper.to_array(weight)
                nodes.append(_add(graph, name, array.T if turned else array, block, symmetric))
            for attribute in turned:
                attribute.i = 0
            node.input[1] = name
            count += 1
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for inner in graphs_of(graph) for node in inner.node for name in node.input}
    used |= {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return count


def _can_be_packed(weight: Any, turned: bool, block: int) -> bool:
    """Whether MIGraphX takes a weight so: it refuses a single block, and an odd number of values in a row."""
    if len(weight.dims) != 2 or weight.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
        return False
    inputs, outputs = reversed(weight.dims) if turned else weight.dims
    return bool(inputs % block == 0 and inputs > block and outputs % 2 == 0)


def _add(graph: Any, name: str, array: Any, block: int, symmetric: bool) -> Any:
    """Add the packed tensors of a weight `[inputs, outputs]` to a graph; return the node that makes floats of them."""
    import ml_dtypes

    blocks = array.astype(np.float32).reshape(-1, block, array.shape[1])
    if symmetric:
        low, high, scale = -7, 7, np.abs(blocks).max(1) / 7
        zero = np.zeros_like(scale)
    else:
        least, most = np.minimum(blocks.min(1), 0), np.maximum(blocks.max(1), 0)
        low, high, scale = 0, 15, (most - least) / 15
        zero = np.round(-least / np.where(scale, scale, 1))
    scale = np.where(scale, scale, 1).astype(array.dtype)
    steps = blocks / scale.astype(np.float32)[:, None] + zero[:, None]
    values = np.clip(np.round(steps), low, high).reshape(array.shape)
    kind = ml_dtypes.int4 if symmetric else ml_dtypes.uint4
    graph.initializer.append(numpy_helper.from_array(values.astype(kind), f"{name}.values"))
    graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
    inputs = [f"{name}.values", f"{name}.scale"]
    if not symmetric:
        graph.initializer.append(numpy_helper.from_array(zero.astype(kind), f"{name}.zero"))
        inputs.append(f"{name}.zero")
    return helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=0, block_size=block)
