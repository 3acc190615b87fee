"""How to use an artifact: what to type for each way of running it, with its own names filled in. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from farm.artifacts.sidecar import Port, Sidecar

_TRITON = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float64": "TYPE_FP64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
    "object": "TYPE_STRING",
}


class Way(NamedTuple):
    """One way to use it: a title, words about it, and what to type."""

    slug: str
    title: str
    words: str
    text: str


def ways(sidecar: Sidecar, url: str) -> list[Way]:
    """Return the ways that fit the artifact's kind of program; `url` is the farm's."""
    return list(_ways(sidecar, url.rstrip("/")))


def _ways(sidecar: Sidecar, url: str) -> Iterator[Way]:
    model, target, precision, *shape = sidecar.identifier.split("/")
    program = sidecar.blobs.program
    name = sidecar.spec.get("target") or target.replace("-", "/", 1)
    options = ["--target", name, "--precision", precision, *(["--shape", "/".join(shape)] if shape else [])]
    yield Way(
        "fetch",
        "farm fetch",
        "Checks every byte, and writes artifact.json beside the program. This names what latest has now; the key below "
        "names exactly this program.",
        f"{shlex.join(['farm', 'fetch', model, *options, '-o', 'model'])}\n"
        f"farm inspect model/{shlex.quote(program.path)}",
    )
    yield Way(
        "curl",
        "curl",
        "The farm answers with a link to object storage; compare the digest before you load the file.",
        f'curl --fail --location --header "Authorization: Bearer $FARM_API_TOKEN" \\\n'
        f"    --output {shlex.quote(program.path)} {shlex.quote(f'{url}/v1/blobs/{program.digest}')}\n"
        f"echo {shlex.quote(f'{program.digest}  {program.path}')} | sha256sum --check",
    )
    if program.path.endswith(".mxr"):
        yield from _migraphx(sidecar)
    else:
        yield from _onnxruntime(sidecar)


def _migraphx(sidecar: Sidecar) -> Iterator[Way]:
    path = sidecar.blobs.program.path
    yield Way(
        "python",
        "Python",
        f"With the build of MIGraphX that compiled it: {sidecar.toolchain}, on {sidecar.device.arch}.",
        "import migraphx\nimport numpy as np\n\n"
        f"program = migraphx.load({path!r})\n"
        f"{_arrays(sidecar.inputs)}"
        "results = program.run({name: migraphx.argument(array) for name, array in inputs.items()})\n"
        "print([np.array(result).shape for result in results])",
    )
    yield Way(
        "cpp",
        "C++",
        "Include migraphx/migraphx.hpp and link migraphx_c; the memory has to outlive the arguments.",
        f"migraphx::program program = migraphx::load({json.dumps(path)});\n"
        "auto shapes = program.get_parameter_shapes();\n"
        "migraphx::program_parameters inputs;\nstd::list<std::vector<char>> memory;\n"
        "for(const char* name : shapes.names())\n{\n"
        "    memory.emplace_back(shapes[name].bytes());\n"
        "    inputs.add(name, migraphx::argument(shapes[name], memory.back().data()));\n}\n"
        "auto outputs = program.eval(inputs);",
    )
    yield Way(
        "driver",
        "Driver",
        "MIGraphX's own command: it runs the program with random inputs and times each instruction.",
        f"migraphx-driver perf {shlex.quote(path)} --migraphx\nmigraphx-driver run {shlex.quote(path)} --migraphx",
    )
    yield Way(
        "triton",
        "Triton",
        "Triton has no backend that loads .mxr files: use its Python backend. model.py does what is shown for Python; "
        "this is its config.pbtxt.",
        _triton(sidecar, "python"),
    )
    yield Way(
        "onnxruntime",
        "ONNX Runtime",
        "ONNX Runtime's MIGraphX provider cannot load an .mxr file: its cache holds its own subgraphs. It compiles "
        "the model again.",
        "import onnxruntime\n\n"
        'session = onnxruntime.InferenceSession("model.onnx", providers=["MIGraphXExecutionProvider"])',
    )


def _onnxruntime(sidecar: Sidecar) -> Iterator[Way]:
    path = sidecar.blobs.program.path
    provider = "CPUExecutionProvider" if sidecar.device.arch == "cpu" else "CUDAExecutionProvider"
    session = sidecar.tuning.session or {}
    options = "".join(
        f"options.{name} = {value}\n"
        for name, value in (("intra_op_num_threads", session.get("threads")),)
        if isinstance(value, int)
    )
    yield Way(
        "python",
        "Python",
        f"ONNX Runtime in Python; compiled with {sidecar.toolchain}.",
        "import numpy as np\nimport onnxruntime\n\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL\n"
        f"{options}"
        f"session = onnxruntime.InferenceSession({path!r}, options, providers=[{provider!r}])\n"
        f"{_arrays(sidecar.inputs)}"
        "print([result.shape for result in session.run(None, inputs)])",
    )
    yield Way(
        "cpp",
        "C++",
        "ONNX Runtime in C++: include onnxruntime_cxx_api.h and link onnxruntime.",
        "Ort::Env env;\nOrt::SessionOptions options;\n"
        "options.SetGraphOptimizationLevel(GraphOptimizationLevel::ORT_DISABLE_ALL);\n"
        f"Ort::Session session(env, {json.dumps(path)}, options);",
    )
    yield Way(
        "triton",
        "Triton",
        f"Put the program into models/{sidecar.identifier.partition('/')[0]}/1/model.onnx, and this into config.pbtxt "
        "next to the folder 1.",
        _triton(sidecar, "onnxruntime"),
    )


def _arrays(ports: list[Port]) -> str:
    rows = "".join(f"    {port.name!r}: np.zeros({_sizes(port)}, {port.dtype!r}),\n" for port in ports)
    return f"inputs = {{\n{rows}}}\n" if rows else "inputs = {}  # by name, see artifact.json\n"


def _sizes(port: Port) -> str:
    return str(tuple(each if isinstance(each, int) else 1 for each in port.shape))


def _triton(sidecar: Sidecar, backend: str) -> str:
    def ports(kind: str, found: list[Port]) -> str:
        rows = [
            f"  {{ name: {json.dumps(port.name)}, data_type: {_TRITON.get(port.dtype, 'TYPE_INVALID')}, "
            f"dims: [ {', '.join(str(each) if isinstance(each, int) else '-1' for each in port.shape)} ] }}"
            for port in found
        ]
        return f"{kind} [\n" + ",\n".join(rows) + "\n]\n" if rows else ""

    name = json.dumps(sidecar.identifier.partition("/")[0])
    return (
        f"name: {name}\nbackend: {json.dumps(backend)}\nmax_batch_size: 0\n"
        f"{ports('input', sidecar.inputs)}{ports('output', sidecar.outputs)}"
    )
