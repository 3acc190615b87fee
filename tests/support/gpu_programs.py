"""GPU programs made up for tests around genuine code objects: no MIGraphX for a GPU wrote these files.

Their form is that of `amd/cnn_gfx1100.mxr`, which MIGraphX 2.14 compiled for its `gpu` target (a small net, without a
GPU): code objects and MIOpen's solutions are arrays of numbers there. The code objects in `amd/` are LLVM's
(`amd_code_objects.py`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

SHAPE = {"sub_shapes": [], "dynamic_dimensions": []}


def shape(*lens: int, dtype: str = "float_type") -> dict[str, Any]:
    strides = [1] * len(lens)
    for axis in reversed(range(len(lens) - 1)):
        strides[axis] = strides[axis + 1] * lens[axis + 1]
    return {"type": dtype, "lens": list(lens), "strides": strides, **SHAPE}


CODE_OBJECTS = Path(__file__).with_name("amd")


def code_object(arch: str) -> bytes:
    """A genuine code object for an architecture with its feature bits: `gfx942:sramecc+:xnack-`."""
    return (CODE_OBJECTS / f"{arch.replace(':', '.')}.co").read_bytes()


def flagged(flags: int) -> bytes:
    """A genuine code object with other `e_flags`: for architectures that no compiler here knows."""
    code = bytearray(code_object("gfx942"))
    struct.pack_into("<I", code, 48, flags)
    return bytes(code)


def bundle(*targets: str) -> bytes:
    """An offload bundle: magic, count, then offset, size, length of id and id of each entry."""
    entries = [struct.pack("<QQQ", 4096, 64, len(name)) + name.encode() for name in targets]
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)) + b"".join(entries) + b"\xcc" * 5000


GFX942 = code_object("gfx942:sramecc+:xnack-")


def node(
    output: str, name: str, operator: Any, lens: tuple[int, ...], inputs: tuple[str, ...] = (), **more: Any
) -> Any:
    kind = {"output": output, "name": name, "shape": shape(*lens), "normalized": False, "operator": operator}
    return {**kind, "inputs": list(inputs), **more}


def program(
    code: bytes = GFX942, *, offload_copy: bool = False, left_over: bool = False, lens: tuple[int, ...] = (1, 3)
) -> dict[str, Any]:
    """A convolution by MIOpen, a product by hipBLASLt and a kernel of MIGraphX's own; all shapes are `lens`."""
    weights = {"shape": shape(*lens), "data": bytes(12)}
    solved = {"solution_object": list(b"s" * 400), "algo": 1, "solution_id": 85}
    kernel = {"code_object": list(code), "symbol_name": "add_kernel", "global": 64, "local": 64, "output_arg": -1}
    kernel |= {"expected_inputs": [shape(*lens)], "output": shape(*lens)}
    convolution = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1], "group": 1, "padding_mode": 0}
    product = {"alpha": 1.0, "beta": 0.0, "trans_batch": 0, "solution_idx": 7}
    nodes = [
        node("x", "@param", {"parameter": "x"}, lens),
        node("@1", "hip::hip_copy_literal", {"literal": weights, "id": "main:@literal:0"}, lens),
        node("@2", "gpu::convolution", {"op": convolution, **solved}, lens, ("x", "@1")),
        node("@3", "gpu::hip_gemm", product, lens, ("@2", "@1")),
    ]
    out = node("main:#output_0", "@param", {"parameter": "main:#output_0"}, lens)
    if offload_copy:
        nodes[0]["output"], copied = "@0", node("x", "hip::copy_to_gpu", [], lens, ("@0",))
        nodes.insert(1, copied)
        out = node("@9", "hip::hip_allocate_memory", {"shape": shape(*lens), "id": "scratch"}, lens)
    nodes += [out, node("@4", "gpu::code_object", kernel, lens, ("@3", out["output"]))]
    if left_over:
        nodes.append(node("@5", "gpu::precompile_op", {"op": {"name": "gpu::mlir_op"}}, lens, ("@4",)))
    if offload_copy:
        nodes.append(node("@6", "hip::copy_from_gpu", [], lens, ("@4",)))
    nodes.append(node("@7", "@return", [], lens, (nodes[-1]["output"],)))
    return {
        "version": 7,
        "migraphx_version": "2.15.0",
        "targets": [{"name": "gpu"}],
        "contexts": [{"events": 0, "streams": 1}],
        "modules": {"main": {"name": "main", "nodes": nodes}},
    }


def pack(value: Any) -> bytes:
    """msgpack the way MIGraphX writes it: binary values are lists of chunks."""
    match value:
        case None | True | False:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            if 0 <= value < 256:
                return bytes([value]) if value < 128 else bytes([0xCC, value])
            return b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xd9" + bytes([len(value)]) + value.encode()
        case bytes():
            half = len(value) // 2
            parts = [value[:half], value[half:]] if half else [value]
            return bytes([0x90 + len(parts)]) + b"".join(b"\xc6" + struct.pack(">I", len(one)) + one for one in parts)
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
        case dict():
            return (
                b"\xde"
                + struct.pack(">H", len(value))
                + b"".join(pack(part) for item in value.items() for part in item)
            )
    raise TypeError(value)


def as_json(value: Any) -> bytes:
    """JSON the way MIGraphX writes it: keys sorted, binary values as numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=lambda data: {"bytes": list(data)}).encode()


def write_mxr(path: Path, document: dict[str, Any] | None = None) -> Path:
    content = program() if document is None else document
    path.write_bytes(as_json(content) if path.suffix == ".json" else pack(content))
    return path


def sidecar_of(path: Path) -> dict[str, Any]:
    """The sidecar that describes `program()` in that file."""
    blob = {"path": path.name, "digest": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size}
    port = {"dtype": "float32", "shape": [1, 3]}
    return {
        "schema": 1,
        "key": "0" * 64,
        "namespace": "main",
        "created": "2026-11-22T00:00:00+00:00",
        "identifier": "net/migraphx-gfx942/fp32/static",
        "spec": {"model": {}, "compiler": {"name": "migraphx"}, "precision": "fp32"},
        "blobs": {"program": blob},
        "toolchain": "rocm7.2-migraphx2.15-01234567",
        "device": {"arch": "gfx942:sramecc+:xnack-"},
        "inputs": [{"name": "x", **port}],
        "outputs": [{"name": "y", **port}],
        "offload_copy": False,
    }
