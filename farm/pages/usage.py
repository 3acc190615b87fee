"""How to use an artifact: what to type for each way of running it, with its own names filled in. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from farm.artifacts.serving import Serving, serving_of
from farm.artifacts.sidecar import Sidecar
from farm.wire.program import Port

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
        "Checks every byte, and writes the sidecar next to it. This names what latest has now; the key below "
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
        yield from _migraphx(sidecar, model, options)
    else:
        yield from _onnxruntime(sidecar)


def _migraphx(sidecar: Sidecar, model: str, options: list[str]) -> Iterator[Way]:
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
        "\n".join(
            shlex.join(["migraphx-driver", action, path, "--migraphx", *_driver_options(sidecar)])
            for action in ("perf", "run")
        ),
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
        "A pack has the program under the name for which ONNX Runtime's MIGraphX provider looks; the manifest asks for "
        "it with `packs`. docs/guide/packs.md has the other stacks.",
        f"{shlex.join(['farm', 'fetch', model, *options, '--layout', 'onnxruntime-cache', '-o', 'pack'])}\n"
        "PYTHON=python pack/use.sh",
    )


def _driver_options(sidecar: Sidecar) -> list[str]:
    """Return the options that the driver needs for a program: it does not look at the target of a compiled one."""
    arch = sidecar.device.arch
    if not arch.startswith("gfx"):
        return [f"--{arch}"]
    return ["--enable-offload-copy"] if sidecar.offload_copy else []


def _onnxruntime(sidecar: Sidecar) -> Iterator[Way]:
    path = sidecar.blobs.program.path
    how = serving_of(sidecar)
    level = f"ORT_ENABLE_{how.level.upper()}"
    environment = "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in how.environment.items())
    environment = f"import os\n\n{environment}" if environment else ""
    libraries = "onnxruntime.preload_dlls()\n" if how.providers[0][1] else ""
    threads = f"options.intra_op_num_threads = {how.threads}\n" if how.threads else ""
    yield Way(
        "python",
        "Python",
        f"ONNX Runtime in Python; compiled with {sidecar.toolchain}.",
        "import numpy as np\nimport onnxruntime\n\n"
        f"{environment}"
        f"{libraries}"
        "options = onnxruntime.SessionOptions()\n"
        f"options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}\n"
        f"{threads}"
        f"session = onnxruntime.InferenceSession({path!r}, options, providers={how.providers!r})\n"
        f"{_arrays(sidecar.inputs)}"
        "print([result.shape for result in session.run(None, inputs)])",
    )
    yield Way(
        "cpp",
        "C++",
        "ONNX Runtime in C++: include onnxruntime_cxx_api.h and link onnxruntime.",
        "Ort::Env env;\nOrt::SessionOptions options;\n"
        f"options.SetGraphOptimizationLevel(GraphOptimizationLevel::{level});\n"
        f"{_appended(how)}"
        f"Ort::Session session(env, {json.dumps(path)}, options);",
    )
    yield Way(
        "triton",
        "Triton",
        f"Put the program into models/{sidecar.identifier.partition('/')[0]}/1/model.onnx, and this into config.pbtxt "
        "next to the folder 1.",
        _triton(sidecar, "onnxruntime"),
    )


def _appended(how: Serving) -> str:
    """Return what puts a card's provider with its options into C++ session options; nothing for the CPU's."""
    chosen = how.providers[0][1]
    if not chosen:
        return ""
    keys, values = (", ".join(json.dumps(each) for each in part) for part in (chosen.keys(), chosen.values()))
    return (
        "OrtCUDAProviderOptionsV2* cuda;\nOrt::ThrowOnError(Ort::GetApi().CreateCUDAProviderOptions(&cuda));\n"
        f"const char *keys[] = {{{keys}}}, *values[] = {{{values}}};\n"
        f"Ort::ThrowOnError(Ort::GetApi().UpdateCUDAProviderOptions(cuda, keys, values, {len(chosen)}));\n"
        "options.AppendExecutionProvider_CUDA_V2(*cuda);\n"
    )


def _arrays(ports: list[Port]) -> str:
    rows = "".join(f"    {port['name']!r}: np.zeros({_sizes(port)}, {port['dtype']!r}),\n" for port in ports)
    return f"inputs = {{\n{rows}}}\n" if rows else "inputs = {}  # by name, see the sidecar\n"


def _sizes(port: Port) -> str:
    return str(tuple(each if isinstance(each, int) else 1 for each in port["shape"]))


def _triton(sidecar: Sidecar, backend: str) -> str:
    def ports(kind: str, found: list[Port]) -> str:
        rows = [
            f"  {{ name: {json.dumps(port['name'])}, data_type: {_TRITON.get(port['dtype'], 'TYPE_INVALID')}, "
            f"dims: [ {', '.join(str(each) if isinstance(each, int) else '-1' for each in port['shape'])} ] }}"
            for port in found
        ]
        return f"{kind} [\n" + ",\n".join(rows) + "\n]\n" if rows else ""

    name = json.dumps(sidecar.identifier.partition("/")[0])
    return (
        f"name: {name}\nbackend: {json.dumps(backend)}\nmax_batch_size: 0\n"
        f"{ports('input', sidecar.inputs)}{ports('output', sidecar.outputs)}"
    )
