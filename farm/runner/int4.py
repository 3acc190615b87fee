"""Weights as blocks of 4-bit integers in an ONNX model, each block with a scale of its own. For any compiler.

MIGraphX's Python module cannot quantize to int4, and its driver (`--int4-weights`) has one scale for a whole weight and
leaves the float weights in the program. What is written here is ONNX's own form, which MIGraphX parses to `unpack_int4`
and `dequantizelinear` and stores packed: a DequantizeLinear with `block_size` (opset 21) before each matrix product.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .onnx_models import drop_overridable_constants, graphs_of, save
from .protocol import RequestFailed, blamed_on_compiler

if TYPE_CHECKING:
    from .documents import PackAnswer, Request
    from .launcher import Messages


def pack_weights(request: Request, messages: Messages) -> PackAnswer:
    """Write the request's model with packed weights to `packed`; say how many operators have them.

    Raises RequestFailed `nothing_quantized` if no weight can be packed.
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
        needs = f"at least two blocks of {options['block_size']} inputs, and an even number of outputs"
        raise RequestFailed("nothing_quantized", f"int4 left every operator as it was: MatMul and Gemm need {needs}")
    model.ir_version = max(model.ir_version, 10)  # the first with 4-bit tensors
    save(model, Path(request["packed"]))
    return {"quantized": dict(counts)}


def _pack(graph: Any, block: int, symmetric: bool) -> Counter[str]:
    """Give every MatMul and Gemm with constant weights of this graph its packed ones; return their numbers."""
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    counts: Counter[str] = Counter()
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


def _can_be_packed(weight: Any, turned: bool, block: int) -> bool:
    """Whether MIGraphX takes a weight so: it refuses a single block, and an odd number of values in a row."""
    from onnx import TensorProto

    if len(weight.dims) != 2 or weight.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return False
    inputs, outputs = reversed(weight.dims) if turned else weight.dims
    return bool(inputs % block == 0 and inputs > block and outputs % 2 == 0)


def _add(graph: Any, name: str, array: Any, block: int, symmetric: bool) -> Any:
    """Add the packed tensors of a weight `[inputs, outputs]` to a graph; return the node that makes floats of them."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

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
    kind = TensorProto.INT4 if symmetric else TensorProto.UINT4
    graph.initializer.append(_packed(f"{name}.values", values, kind))
    graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
    inputs = [f"{name}.values", f"{name}.scale"]
    if not symmetric:
        graph.initializer.append(_packed(f"{name}.zero", zero, kind))
        inputs.append(f"{name}.zero")
    return helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=0, block_size=block)


def _packed(name: str, values: Any, kind: int) -> Any:
    """Return a tensor of 4-bit numbers, two in a byte, the first in its lower half."""
    import numpy as np
    from onnx import TensorProto

    flat = values.astype(np.int8).reshape(-1).view(np.uint8) & 0xF
    data = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8).tobytes()
    return TensorProto(name=name, data_type=kind, dims=values.shape, raw_data=data)
