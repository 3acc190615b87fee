"""How ONNX Runtime's programs get their precision: an ONNX file in fp32 becomes one in fp16, bf16, int8 or int4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .onnx_models import LARGEST_FILE, graphs_of, nodes_of, save
from .protocol import blamed_on_compiler, first_line
from .samples import make_samples, points_of

if TYPE_CHECKING:
    from .documents import Arrays, Options
    from .launcher import Messages
    from .onnxruntime_compiler import RuntimeDevice

MIN_WEIGHT = 64
"""Smaller constants stay fp32 in bf16 programs: they are scales, shapes and bounds, not weights."""


def _to_fp16(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with blamed_on_compiler("conversion to fp16 failed"):
        save(convert_float_to_float16(onnx.load_model(base), keep_io_types=True), target)
    return {}


def _to_bf16(base: Path, target: Path, device: RuntimeDevice, messages: Messages) -> dict[str, int]:
    """Store weights as bf16 with a Cast behind each: ONNX Runtime's CPU has no bf16 activations."""
    import ml_dtypes
    import onnx
    from onnx import helper, numpy_helper

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
            name, tensor.name = tensor.name, f"{tensor.name}.bf16"
            casts.append(
                helper.make_node("Cast", [tensor.name], [name], name=f"{name}.cast", to=onnx.TensorProto.FLOAT)
            )
            tensor.CopyFrom(
                helper.make_tensor(
                    tensor.name,
                    onnx.TensorProto.BFLOAT16,
                    array.shape,
                    array.astype(ml_dtypes.bfloat16).tobytes(),
                    raw=True,
                )
            )
        count += len(casts)
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    save(model, target)
    return {"weights": count}


DENSE = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators in which the time goes, and which bear 8 bits well."""


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
    methods = {
        "minmax": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    with blamed_on_compiler("ONNX Runtime's int8 quantizer failed"):
        quantize_static(
            str(prepared),
            str(target),
            _reader(samples.runs, messages),
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

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands out one run after the other and says how far it is."""

        def __init__(self) -> None:
            self.next = 0

        def get_next(self) -> Arrays | None:
            if self.next == len(runs):
                return None
            messages.phase("quantizing", 0.1 + 0.8 * self.next / len(runs), "calibration")
            self.next += 1
            return runs[self.next - 1]

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
    import onnx
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
