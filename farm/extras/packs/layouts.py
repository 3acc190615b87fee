"""Layouts: how a serving stack wants a program, which programs it can take, and what starts a pack. Pure.

That is a Python program for ONNX Runtime; a model's configuration and a start script for Triton. Also the wrapper: an
ONNX model whose only node, EPContext, names a compiled program in the same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, ValueInfoProto, helper

from farm.artifacts.sidecar import serving_of
from farm.client.fetching import RESERVED
from farm.client.packs import Layout
from farm.errors import ArtifactGone, FarmError, UsageError
from farm.runner.onnxruntime_sessions import CUDA
from farm.wire.program import Port, Sidecar

CACHED = frozenset({Layout.ONNXRUNTIME_CACHE, Layout.TRITON})  # Layouts for which the provider itself reads the model.

_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_WORDS = r"[A-Za-z0-9][A-Za-z0-9._/:+-]{0,999}"


def require_fit(layout: Layout, sidecar: Sidecar) -> None:
    """Refuse a layout that the program cannot have.

    Raises UsageError with every reason, ArtifactGone for names that no farm gives: they go into scripts and paths.
    """
    words = {sidecar["identifier"]: _WORDS, sidecar["toolchain"]: _WORDS, sidecar["device"]["arch"]: _WORDS}
    words[sidecar["blobs"]["program"]["path"]] = _FILE
    if odd := [word for word, pattern in words.items() if not re.fullmatch(pattern, word) or word in RESERVED]:
        raise ArtifactGone(f"the artifact has a name {odd[0]!r}, which no farm gives")
    reasons = list(_unfit(layout, sidecar))
    if reasons:
        hint = f"write `packs: [{layout}]` in the manifest: then the farm compiles a program for it"
        copies = sidecar["spec"]["compiler"]["name"] == "migraphx" and sidecar["offload_copy"]
        message = f"{sidecar['identifier']} cannot be packed for {layout}: {'; '.join(reasons)}"
        raise UsageError(message, hint=hint if copies else "fetch it with `--layout plain`")


def fits(layout: Layout, sidecar: Sidecar) -> bool:
    """Whether a program can have a layout."""
    try:
        require_fit(layout, sidecar)
    except FarmError:
        return False
    return True


def _unfit(layout: Layout, sidecar: Sidecar) -> Iterator[str]:
    ports = (*sidecar["inputs"], *sidecar["outputs"])
    open_ports = [port["name"] for port in ports if any(isinstance(size, str) for size in port["shape"])]
    if not sidecar["inputs"]:
        yield "its sidecar names no inputs"
    if open_ports:
        yield f"the sizes of {', '.join(open_ports[:5])} are not fixed"
    if sidecar["spec"]["compiler"]["name"] != "migraphx":
        if layout is Layout.ONNXRUNTIME_CACHE:
            yield "it is not a program of MIGraphX's"
        return
    if not sidecar["device"]["arch"].startswith("gfx"):
        yield f"it runs on {sidecar['device']['arch']}, and the provider only on AMD GPUs"
    if sidecar["offload_copy"] is not False:
        yield "it copies its inputs and outputs itself, and the provider hands in places in the GPU's memory"
    if not sidecar["blobs"]["program"]["path"].endswith(".mxr"):
        yield "the provider reads .mxr files only"
    if layout in CACHED and sidecar["spec"]["model"]["format"] != "onnx":
        yield "its model is not ONNX"


_TEXTS = Path(__file__).with_name("texts")


def text(file: str, **words: str) -> str:
    """Return a file of a pack, as `texts/` has it, with words in the places of their names in braces."""
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), (_TEXTS / file).read_text())


def for_own_program(sidecar: Sidecar) -> str:
    """Return `use.py` for a program of ONNX Runtime's own."""
    how = serving_of(sidecar)
    tuned = "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in how.environment.items())
    tuned += f"options.intra_op_num_threads = {how.threads}\n" if how.threads else ""
    if how.level != "all":
        level = f"ORT_ENABLE_{how.level.upper()}"
        tuned += f"options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}\n"
    if how.spinning is not None:
        spinning = f'"session.intra_op.allow_spinning", "{int(how.spinning)}"'
        tuned += f"options.add_session_config_entry({spinning})\n"
    return text(
        "use_own.py.txt",
        identifier=sidecar["identifier"],
        toolchain=sidecar["toolchain"],
        libraries=text("libraries.py.txt") if _on_nvidia(sidecar) else "",
        tuned=tuned,
        providers=str(how.providers),
        program=sidecar["blobs"]["program"]["path"],
    )


# --- Triton -----------------------------------------------------------------------------------------------------------

_TRITON_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16",
}  # fmt: skip

_ACCELERATOR = (
    'optimization { execution_accelerators { gpu_execution_accelerator: [{ name: "migraphx" }] } }\n'
)  # fmt: skip

_LEVELS = {"basic": -1, "extended": 1}
"""How Triton calls the levels of ONNX Runtime; it takes `all` if none is named. Whether threads spin,
it cannot be told."""


def plain_start(sidecar: Sidecar) -> str:
    """Return what starts Triton with a program of ONNX Runtime's own."""
    without = _on_nvidia(sidecar) and sidecar["spec"].get("precision") != "tf32"
    said = "# Else NVIDIA's libraries compute fp32 in TF32.\nexport NVIDIA_TF32_OVERRIDE=0\n"
    return text("start.sh", environment=said if without else "")


def triton_config(sidecar: Sidecar, name: str) -> str:
    """Return `config.pbtxt` of a model. Raises UsageError for a type that Triton does not have."""
    on_amd = sidecar["spec"]["compiler"]["name"] == "migraphx"
    return text(
        "config.pbtxt",
        identifier=sidecar["identifier"],
        name=name,
        inputs=", ".join(map(_tensor, sidecar["inputs"])),
        outputs=", ".join(map(_tensor, sidecar["outputs"])),
        kind="KIND_GPU" if on_amd or _on_nvidia(sidecar) else "KIND_CPU",
        session=_ACCELERATOR if on_amd else _session(sidecar),
    )


def _session(sidecar: Sidecar) -> str:
    """Return how Triton runs a program of ONNX Runtime's own, as far as it can be told."""
    how = serving_of(sidecar)
    level = f"graph {{ level: {_LEVELS[how.level]} }} " if how.level in _LEVELS else ""
    provider, options = how.providers[0]
    cards = ""
    if provider == CUDA:
        said = " ".join(
            f"parameters {{ key: {json.dumps(name)} value: {json.dumps(value)} }}" for name, value in options.items()
        )
        cards = f'execution_accelerators {{ gpu_execution_accelerator: [{{ name: "cuda" {said} }}] }} '
    session = f"optimization {{ {level}{cards}}}\n" if level or cards else ""
    if how.threads:
        session += f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{how.threads}" }} }}\n'
    return session


def _tensor(port: Port) -> str:
    if port["dtype"] not in _TRITON_TYPES:
        hint = "fetch with `--layout onnxruntime`"
        raise UsageError(f"Triton has no type {port['dtype']} ({port['name']})", hint=hint)
    sizes = f"[{', '.join(map(str, port['shape'] or [1]))}]"
    scalar = "" if port["shape"] else " reshape: { shape: [] }"
    return (
        f"{{ name: {json.dumps(port['name'])} data_type: TYPE_{_TRITON_TYPES[port['dtype']]} dims: {sizes}{scalar} }}"
    )


def _on_nvidia(sidecar: Sidecar) -> bool:
    return sidecar["device"]["arch"].startswith("sm_")


# --- the wrapper ------------------------------------------------------------------------------------------------------

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
