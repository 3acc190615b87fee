"""Weights as blocks of 4-bit integers in an ONNX model, each block with a scale of its own. For any compiler.

MIGraphX's Python module cannot quantize to int4, and its driver (`--int4-weights`) has one scale for a whole weight and
leaves the float weights in the program. What is written here is ONNX's own form, which MIGraphX parses to `unpack_int4`
and `dequantizelinear` and stores packed: a DequantizeLinear with `block_size` (opset 21) before each matrix product.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from .onnx_graph import drop_overridable_constants, graphs_of
from .protocol import Failure, Messages, Request, Result, blamed_on_compiler

_MAX_FILE_BYTES = 2**31 - 1


def pack_weights(request: Request, messages: Messages) -> Result:
    """Write the request's model with packed weights to `packed`; say how many operators have them.

    Raises Failure `nothing_quantized` where no weight can be packed.
    """
    import onnx

    messages.phase("quantizing", None, "int4 weights")
    with blamed_on_compiler("the model cannot be read", "bad_model"):
        model = onnx.load_model(request["model"]["path"])
    drop_overridable_constants(model)
    options = request["quantization"]
    counts: Counter[str] = Counter()
    for graph in graphs_of(model.graph):
        counts += _pack(graph, int(options["block_size"]), bool(options["symmetric"]))
    if not counts:
        needs = f"weights of two dimensions, the first a multiple of {options['block_size']}, the last even"
        raise Failure("nothing_quantized", f"int4 left every operator as it was: MatMul and Gemm need {needs}")
    model.ir_version = max(model.ir_version, 10)  # the first with 4-bit tensors
    path = Path(request["packed"])
    large = model.ByteSize() > _MAX_FILE_BYTES
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)
    return {"quantized": dict(counts)}


def _pack(graph: Any, block: int, symmetric: bool) -> Counter[str]:
    """Give every MatMul and Gemm with constant weights of this graph its packed ones; return their numbers."""
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    counts: Counter[str] = Counter()
    made: dict[tuple[str, int], str] = {}
    nodes = []
    for node in graph.node:
        weight = weights.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") and not node.domain else None
        axis = int(any(attribute.name == "transB" and attribute.i for attribute in node.attribute))
        if weight is not None and _can_be_packed(weight, axis, block):
            key = (weight.name, axis)
            if key not in made:
                made[key] = f"{weight.name}.int4.{axis}"
                array = numpy_helper.to_array(weight)
                nodes.append(_add(graph, made[key], array, axis, block, symmetric))
            node.input[1] = made[key]
            counts[node.op_type] += 1
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for inner in graphs_of(graph) for node in inner.node for name in node.input}
    used |= {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return counts


def _can_be_packed(weight: Any, axis: int, block: int) -> bool:
    from onnx import TensorProto

    sizes = list(weight.dims)
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    return len(sizes) == 2 and weight.data_type in floats and sizes[axis] % block == 0 and sizes[1] % 2 == 0


def _add(graph: Any, name: str, array: Any, axis: int, block: int, symmetric: bool) -> Any:
    """Add a weight's packed tensors to a graph; return the node that makes floats of them."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    # Rows are blocks: the axis that is summed over comes last, and is cut.
    rows = np.moveaxis(array, axis, -1).astype(np.float32)
    blocks = rows.reshape(rows.shape[0], -1, block)
    if symmetric:
        low, high, zero = -7, 7, np.zeros(blocks.shape[:2], np.float32)
        scale = np.abs(blocks).max(-1) / 7
    else:
        least, most = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        low, high, scale = 0, 15, (most - least) / 15
        zero = np.round(-least / np.where(scale, scale, 1))
    scale = np.where(scale, scale, 1).astype(array.dtype)
    steps = blocks / scale.astype(np.float32)[..., None] + zero[..., None]
    values = np.clip(np.round(steps), low, high).reshape(rows.shape)
    kind = TensorProto.INT4 if symmetric else TensorProto.UINT4
    graph.initializer.append(_packed(f"{name}.values", np.moveaxis(values, -1, axis), kind))
    graph.initializer.append(numpy_helper.from_array(np.moveaxis(scale, -1, axis).copy(), f"{name}.scale"))
    inputs = [f"{name}.values", f"{name}.scale"]
    if not symmetric:
        graph.initializer.append(_packed(f"{name}.zero", np.moveaxis(zero, -1, axis), kind))
        inputs.append(f"{name}.zero")
    return helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=axis, block_size=block)


def _packed(name: str, values: Any, kind: int) -> Any:
    """Return a tensor of 4-bit numbers, two in a byte, the first in its lower half."""
    import numpy as np
    from onnx import TensorProto

    flat = values.astype(np.int8).reshape(-1).view(np.uint8) & 0xF
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    data = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8).tobytes()
    return TensorProto(name=name, data_type=kind, dims=values.shape, raw_data=data)
