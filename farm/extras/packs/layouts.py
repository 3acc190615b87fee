"""Layouts: how a serving stack wants a program, which programs it can take, and what starts a pack. Pure.

That is a Python program for ONNX Runtime; a model's configuration and a start script for Triton. Also the wrapper: an
ONNX model whose only node, EPContext, names a compiled program in the same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

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


_HEAD = '''"""Opens {identifier} with ONNX Runtime: {how}.

Run it to see that it works here, or import `session` from it. It fails if a node would run on the CPU.
"""

import os
from pathlib import Path

import onnxruntime

HERE = Path(__file__).resolve().parent

options = onnxruntime.SessionOptions()
'''
_WHOLE = 'options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")\n'

_PLUGIN = """
PLUGIN = os.environ.get("MIGRAPHX_PLUGIN", "libonnxruntime_providers_amdgpu.so")
NAME = "MIGraphXExecutionProvider"
onnxruntime.register_execution_provider_library(NAME, PLUGIN)
cards = [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]
if not cards:
    raise SystemExit(f"{PLUGIN} has no card here")
options.add_provider_for_devices(cards[:1], {})
session = onnxruntime.InferenceSession(str(HERE / "model_ctx.onnx"), options)
"""

_CACHE = """
WANTED, VERSION = "{name}", "{version}"
CACHE = HERE / "cache"
if onnxruntime.__version__ != VERSION:
    raise SystemExit(f"this is ONNX Runtime {{onnxruntime.__version__}}: {{VERSION}} finds the program, so fetch again")
os.environ["ORT_MIGRAPHX_MODEL_CACHE_PATH"] = str(CACHE)  # It wins over the option.
provider = ("MIGraphXExecutionProvider", {{"migraphx_model_cache_dir": str(CACHE)}})
session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), options, providers=[provider])
if "MIGraphXExecutionProvider" not in session.get_providers():
    raise SystemExit("ONNX Runtime left the model to the CPU: it cannot use MIGraphX here")
if others := sorted(file.name for file in CACHE.iterdir() if file.name != WANTED):
    raise SystemExit(f"it compiled the model again and did not take {{WANTED}}: {{', '.join(others)}}")
"""

_OWN = """
{libraries}{tuned}# As it was verified and measured; without its options a card computes fp32 in TF32.
providers = {providers}
session = onnxruntime.InferenceSession(str(HERE / "{program}"), options, providers=providers)
if session.get_providers()[0] != providers[0][0]:
    raise SystemExit(f"ONNX Runtime has no {{providers[0][0]}} here")
"""

_LIBRARIES = """if hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()  # CUDA's libraries from the wheels nvidia-*, if they are installed.
"""

_TAIL = """
if __name__ == "__main__":
    print(onnxruntime.__version__, session.get_providers()[0], [tensor.name for tensor in session.get_inputs()])
"""

USE_SH = """#!/bin/sh
# Opens the program as `use.py` does; PYTHON names the interpreter that has ONNX Runtime.
exec "${PYTHON:-python3}" "$(dirname "$0")/use.py" "$@"
"""


def for_plugin(sidecar: Sidecar) -> str:
    """Return `use.py` for the wrapper."""
    how = "1.24 or newer, with the plug-in that MIGRAPHX_PLUGIN names"
    return _HEAD.format(identifier=sidecar["identifier"], how=how) + _WHOLE + _PLUGIN + _TAIL


def for_cache(sidecar: Sidecar, name: str, version: str) -> str:
    """Return `use.py` for a cache that holds the program under the `name` for which ONNX Runtime `version` looks."""
    how = f"{version}, with its built-in MIGraphX provider"
    head = _HEAD.format(identifier=sidecar["identifier"], how=how)
    return head + _WHOLE + _CACHE.format(name=name, version=version) + _TAIL


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
    libraries = _LIBRARIES if _on_nvidia(sidecar) else ""
    program = sidecar["blobs"]["program"]["path"]
    own = _OWN.format(program=program, providers=how.providers, tuned=tuned, libraries=libraries)
    return _HEAD.format(identifier=sidecar["identifier"], how=f"as {sidecar['toolchain']} made it") + own + _TAIL


# --- Triton -----------------------------------------------------------------------------------------------------------

_TRITON_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16",
}  # fmt: skip

_CONFIG = """\
# {identifier}
name: "{name}"
backend: "onnxruntime"
# The program takes these sizes and no others: a client sends whole batches.
max_batch_size: 0
input [{inputs}]
output [{outputs}]
instance_group [{{ kind: {kind}, count: 1 }}]
{session}"""

_ACCELERATOR = (
    'optimization { execution_accelerators { gpu_execution_accelerator: [{ name: "migraphx" }] } }\n'
)  # fmt: skip

_LEVELS = {"basic": -1, "extended": 1}
"""How Triton calls the levels of ONNX Runtime; it takes `all` if none is named. Whether threads spin,
it cannot be told."""

START_SH = """#!/bin/sh
# Starts Triton with this repository. One server a precision: the cache's variable holds for the whole process, and the
# provider does not tell precisions apart. Its ONNX Runtime must be {version}, which looks for the files in `cache`.
here=$(cd "$(dirname "$0")" && pwd)
export ORT_MIGRAPHX_MODEL_CACHE_PATH="$here/cache"
exec tritonserver --model-repository="$here/models" "$@"
"""

PLAIN_START_SH = """#!/bin/sh
# Starts Triton with this repository.
here=$(cd "$(dirname "$0")" && pwd)
{environment}exec tritonserver --model-repository="$here/models" "$@"
"""


def plain_start(sidecar: Sidecar) -> str:
    """Return what starts Triton with a program of ONNX Runtime's own."""
    without = _on_nvidia(sidecar) and sidecar["spec"].get("precision") != "tf32"
    said = "# Else NVIDIA's libraries compute fp32 in TF32.\nexport NVIDIA_TF32_OVERRIDE=0\n"
    return PLAIN_START_SH.format(environment=said if without else "")


def triton_config(sidecar: Sidecar, name: str) -> str:
    """Return `config.pbtxt` of a model. Raises UsageError for a type that Triton does not have."""
    on_amd = sidecar["spec"]["compiler"]["name"] == "migraphx"
    return _CONFIG.format(
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
        raise UsageError(
            f"Triton has no type {port['dtype']} ({port['name']})", hint="fetch with `--layout onnxruntime`"
        )
    sizes, scalar = _list(port["shape"] or [1]), "" if port["shape"] else " reshape: { shape: [] }"
    return (
        f"{{ name: {json.dumps(port['name'])} data_type: TYPE_{_TRITON_TYPES[port['dtype']]} dims: {sizes}{scalar} }}"
    )


def _list(sizes: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


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
