"""The wrapper: an ONNX model whose only node, EPContext, names a compiled program in the same folder."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, ValueInfoProto, helper

from farm.errors import UsageError
from farm.wire.program import Port, Sidecar

MODEL = "model_ctx.onnx"
PROVIDER = "MIGraphXExecutionProvider"
SDK = "2.16.0"
"""What the provider calls `ep_sdk_version`. It compares the first number only: a MIGraphX that cannot read the program
says so itself."""

_TYPES = {"float32": "FLOAT", "float64": "DOUBLE", "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}
"""ONNX's names of types, if they are not numpy's in capitals."""


def wrapper(sidecar: Sidecar) -> bytes:
    """Return the wrapper of a program, as bytes.

    The same sidecar gives the same bytes. Raises UsageError for a type that ONNX does not have.
    """
    any_device = str(sidecar["spec"]["device"].get("arch", "")).endswith(":any")
    node = helper.make_node(
        "EPContext",
        [port["name"] for port in sidecar["inputs"]],
        [port["name"] for port in sidecar["outputs"]],
        name="program",
        domain="com.microsoft",
        main_context=1,
        embed_mode=0,
        ep_cache_context=sidecar["blobs"]["program"]["path"],
        ep_sdk_version=SDK,
        source=PROVIDER,
        # Compared for equality; the provider skips the comparison if it is empty.
        hardware_architecture="" if any_device else sidecar["device"]["arch"],
        partition_name="program",
        onnx_model_filename="",
    )
    graph = helper.make_graph([node], "program", _values(sidecar["inputs"]), _values(sidecar["outputs"]))
    operators = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=operators, ir_version=8, producer_name="migraphx-farm")
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString(deterministic=True))


def _values(ports: Sequence[Port]) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(port["name"], _type(port["dtype"]), port["shape"]) for port in ports]


def _type(dtype: str) -> int:
    name = _TYPES.get(dtype, dtype.upper())
    try:
        return int(TensorProto.DataType.Value(name))
    except ValueError:
        raise UsageError(f"ONNX has no type {dtype}") from None
