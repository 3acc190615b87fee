"""A STAND-IN for MIGraphX's Python module on a node with GPUs. Nothing is compiled here, and no GPU is used.

It has the names and signatures that `farm/runner/migraphx_compiler.py` calls, for models that are one Relu of `x`. On
import it prints what its process was given: the environment, and the CPUs that it may run on. `standin.json` next to
it says which GPU it is to find (`arch`), whether `get_target` takes `gpu_arch`, which targets it `refuses`, and in
which folder (`gate`) each compile says that it has begun, and beats until a test lets it go on.
Programs have the form of real ones (`tests/support/gpu_programs.py`, copied next to it), with a genuine code object of
the arch that they were compiled for.
"""

import ctypes
import json
import os
import time
from pathlib import Path

import numpy as np
from gpu_programs import code_object, flagged, write_mxr
from gpu_programs import program as mxr_document

__version__ = "2.17.0.dev+stand-in"

HERE = Path(__file__).parent
NODE = json.loads((HERE / "standin.json").read_text())
_GIVEN = ("ROCR_VISIBLE_DEVICES", "MIGRAPHX_GPU_COMPILE_PARALLEL", "ROCM_PATH", "OMP_NUM_THREADS", "MIGRAPHX_NSTREAMS")

print("GIVEN", json.dumps({**{n: os.environ.get(n) for n in _GIVEN}, "cpus": sorted(os.sched_getaffinity(0))}))


class _Target:
    def __init__(self, name, **sizes):
        self.name, self.sizes = name, sizes


def get_target(name, **sizes):
    if sizes and not NODE["cross"]:
        raise TypeError("get_target(): incompatible function arguments.")
    print("TARGET", json.dumps({"name": name, **sizes}))
    return _Target(name, **sizes)


def op(name, **attributes):
    raise RuntimeError(f"src/include/migraphx/ranges.hpp:112: at: Operator not found: {name}")


class _Shape:
    def __init__(self, lens):
        self._lens = list(lens)

    def lens(self):
        return self._lens

    def strides(self):
        return [int(np.prod(self._lens[axis + 1 :])) for axis in range(len(self._lens))]

    def type_string(self):
        return "float_type"

    def dynamic(self):
        return False

    def bytes(self):
        return 4 * int(np.prod(self._lens))

    def __repr__(self):
        lens, strides = (", ".join(map(str, sizes)) for sizes in (self._lens, self.strides()))
        return f"float_type, {{{lens}}}, {{{strides}}}"


class argument:
    def __init__(self, array):
        self.array = array

    def get_shape(self):
        return _Shape(self.array.shape)

    def data_ptr(self):
        return self.array.ctypes.data

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array)


def argument_from_pointer(shape, address):
    data = ctypes.string_at(address, shape.bytes())
    return argument(np.frombuffer(data, np.float32).reshape(shape.lens()))


class program:
    def __init__(self, lens, arch=""):
        self.shape, self.arch = _Shape(lens), arch

    def compile(self, t, offload_copy=True, fast_math=True, exhaustive_tune=False):
        """compile(self: migraphx.program, t: migraphx.target, offload_copy: bool = True, fast_math: bool = True,
        exhaustive_tune: bool = False) -> None"""
        if t.name in NODE.get("refuses", ()):
            raise RuntimeError(f"the stand-in does not compile for {t.name}")
        if gate := NODE.get("gate"):
            with Path(gate, "begun").open("a+") as begun:
                begun.write("compile\n")
                begun.seek(0)
                number = len(begun.readlines())
            with Path(gate, "beats").open("ab", buffering=0) as beats:
                while not Path(gate, f"go-{number}").exists():
                    beats.write(b".")
                    time.sleep(0.01)
        if t.name == "gpu":
            self.arch = t.sizes.get("gpu_arch") or NODE["arch"]

    def get_parameter_shapes(self):
        return {"x": self.shape}

    def get_output_shapes(self):
        return [self.shape]

    def is_compiled(self):
        return bool(self.arch)

    def run(self, arguments):
        if os.environ.get("ROCR_VISIBLE_DEVICES") == "-1":
            raise RuntimeError("src/targets/gpu/device_name.cpp:45: get_device_id: No device")
        return [argument(np.maximum(arguments["x"].array, 0))]

    def __repr__(self):
        return f"x = @param:x -> {self.shape}\n@1 = relu(x) -> {self.shape}\n@2 = @return(@1)\n"


def parse_onnx(filename, map_input_dims=(), **options):
    """parse_onnx(filename: str, default_dim_value: int = 0, map_input_dims: dict = {}, max_loop_iterations: int = 10,
    limit_max_iterations: int = 65535) -> migraphx.program"""
    return program(dict(map_input_dims)["x"])


def quantize_fp16(prog, ins_names=("all",)):
    pass


def save(p, filename, format="msgpack"):
    # The last of the top keys, one that nobody knows: load finds it at the end of the file.
    code = flagged(0x36) if p.arch == "gfx1030" else code_object(p.arch)
    document = mxr_document(code, offload_copy=True)
    write_mxr(Path(filename), {**document, "standin": json.dumps({"lens": p.shape.lens()})})


def load(filename, format="msgpack"):
    data = Path(filename).read_bytes()
    return program(json.loads(data[data.rindex(b'{"lens"') :])["lens"], NODE["arch"])
