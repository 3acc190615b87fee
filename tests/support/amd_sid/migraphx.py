"""A binding of MIGraphX's Python module over its C API, for tests: Debian packages the libraries without the module.

It has the names and signatures that `farm/runner/migraphx_*.py` call, so the farm's own worker uses a genuine compiler.
Before the libraries are loaded it loads the stand-in for the HIP runtime, which lies next to it.

What the C API lacks is not here: `get_onnx_operators`, `autocast_fp8`, `is_compiled`, `save_buffer`, operators,
instructions, the bounds of dynamic dimensions; `to_gpu` and its like do nothing on the stand-in. A program's text is
what the library prints to standard output.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_HERE = Path(__file__).parent
ctypes.CDLL(str(_HERE / "libhip_standin.so"), ctypes.RTLD_GLOBAL)
_C = ctypes.CDLL("libmigraphx_c.so.3", ctypes.RTLD_GLOBAL)

__version__ = "2.14.0"

_TYPES = (
    "tuple", "fp4x2", "bool", "half", "float", "double", "uint8", "int8", "uint16", "int16", "int32", "int64", "uint32",
    "uint64", "fp8e4m3fnuz", "fp8e4m3fn", "fp8e5m2", "bf16", "fp8e5m2fnuz",
)  # fmt: skip
"""By their numbers in `migraphx.h`."""


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C API. Raises RuntimeError, as the Python module does, with what it writes to fd 2."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 2)
            status = getattr(_C, f"migraphx_{name}")(*arguments)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        said = file.read()
    os.write(2, said)
    if status:
        error = re.search(rf"migraphx_{name}: Error: (.*)", said.decode(errors="replace"))
        raise RuntimeError(error[1] if error else f"migraphx_{name} ended with status {status}")


def _get(name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> Any:
    """Return what a function of the C API writes to its first argument."""
    found = kind()
    _call(name, ctypes.byref(found), *arguments)
    return found.value if hasattr(found, "value") else found


def _array(sizes: Sequence[int]) -> tuple[Any, ctypes.c_size_t]:
    return (ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes))


def _pointer(value: int | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


class _DynamicDimension:
    def __init__(self, min: int, max: int) -> None:
        made = _get("dynamic_dimension_create_min_max", ctypes.c_size_t(min), ctypes.c_size_t(max))
        self.handle = _pointer(made)


class shape:
    """A shape; it is read at once, since it belongs to what it was taken from."""

    dynamic_dimension = _DynamicDimension

    def __init__(self, handle: ctypes.c_void_p | None = None, *, type: str = "", lens: Sequence[int] = ()) -> None:
        """Read the shape behind a handle, or make one."""
        if handle is None:
            kind = _TYPES.index(type.removesuffix("_type"))
            handle = _pointer(_get("shape_create", kind, *_array(lens)))
        self._type = _get("shape_type", handle, kind=ctypes.c_int)
        self._dynamic = _get("shape_dynamic", handle, kind=ctypes.c_bool)
        self._lens, self._strides = (
            ([], []) if self._dynamic else (self._sizes(handle, n) for n in ("lengths", "strides"))
        )
        self._bytes = 0 if self._dynamic else _get("shape_bytes", handle, kind=ctypes.c_size_t)

    @staticmethod
    def _sizes(handle: ctypes.c_void_p, which: str) -> list[int]:
        values, count = ctypes.POINTER(ctypes.c_size_t)(), ctypes.c_size_t()
        _call(f"shape_{which}", ctypes.byref(values), ctypes.byref(count), handle)
        return [int(values[index]) for index in range(count.value)]

    def lens(self) -> list[int]:
        """Return the dimensions."""
        return self._lens

    def strides(self) -> list[int]:
        """Return the strides, in elements."""
        return self._strides

    def type_string(self) -> str:
        """Return the type: `float_type`."""
        return f"{_TYPES[self._type]}_type"

    def dynamic(self) -> bool:
        """Whether some dimension is a range."""
        return bool(self._dynamic)

    def bytes(self) -> int:
        """Return the size."""
        return int(self._bytes)

    def __repr__(self) -> str:
        """As MIGraphX prints it."""
        lens, strides = (", ".join(map(str, sizes)) for sizes in (self._lens, self._strides))
        return f"{self.type_string()}, {{{lens}}}, {{{strides}}}"


class argument:
    """An argument that points into an array of the caller's, or a result."""

    def __init__(self, array: Any, handle: int | None = None) -> None:
        """Point into an array; with `handle` it is a result of the library's."""
        if handle is None:
            made = _get("shape_create", _TYPES.index(_NUMPY[str(array.dtype)]), *_array(array.shape))
            handle = _get("argument_create", _pointer(made), _pointer(array.ctypes.data))
        self.array, self.handle = array, _pointer(handle)

    def get_shape(self) -> shape:
        """Return its shape."""
        return shape(_pointer(_get("argument_shape", self.handle)))

    def data_ptr(self) -> int:
        """Return where its data lies."""
        return int(_get("argument_buffer", self.handle))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a copy of the data."""
        mine = self.get_shape()
        data = ctypes.string_at(self.data_ptr(), mine.bytes())
        names = {theirs: ours for ours, theirs in _NUMPY.items()}
        return np.frombuffer(data, names[_TYPES[mine._type]]).reshape(mine.lens()).copy()


_NUMPY = {"float32": "float", "float64": "double", "float16": "half", "bool": "bool"} | {
    name: name for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}


def argument_from_pointer(shape: shape, address: int) -> argument:
    """Return an argument that points to an address."""
    made = _get("shape_create", shape._type, *_array(shape.lens()))
    return argument(None, _get("argument_create", _pointer(made), _pointer(address)))


class _Target:
    def __init__(self, name: str) -> None:
        self.handle = _pointer(_get("target_create", name.encode()))


def get_target(name: str) -> _Target:
    """get_target(name: str) -> migraphx.target"""
    return _Target(name)


def op(name: str, **attributes: Any) -> Any:
    """Make no operator: whoever asks what there is takes none for there."""
    raise RuntimeError(f"the C API makes no operators: {name}")


class program:
    """A program; the library's goes when this one does."""

    def __init__(self, handle: int) -> None:
        """Take a program of the library's."""
        self.handle = _pointer(handle)

    def __del__(self) -> None:
        """Give it back: the library then closes its databases."""
        _C.migraphx_program_destroy(self.handle)

    def compile(
        self, t: _Target, offload_copy: bool = True, fast_math: bool = True, exhaustive_tune: bool = False
    ) -> None:
        """compile(self: migraphx.program, t: migraphx.target, offload_copy: bool = True, fast_math: bool = True,
        exhaustive_tune: bool = False) -> None"""
        options = _pointer(_get("compile_options_create"))
        _call("compile_options_set_offload_copy", options, ctypes.c_bool(offload_copy))
        _call("compile_options_set_fast_math", options, ctypes.c_bool(fast_math))
        _call("compile_options_set_exhaustive_tune_flag", options, ctypes.c_bool(exhaustive_tune))
        _call("program_compile", self.handle, t.handle, options)

    def get_parameter_shapes(self) -> dict[str, shape]:
        """Return the inputs, and buffers for outputs, by name."""
        shapes = _pointer(_get("program_get_parameter_shapes", self.handle))
        names = (ctypes.c_char_p * _get("program_parameter_shapes_size", shapes, kind=ctypes.c_size_t))()
        _call("program_parameter_shapes_names", names, shapes)
        return {
            name.decode(): shape(_pointer(_get("program_parameter_shapes_get", shapes, name)))
            for name in sorted(name for name in names if name)
        }

    def get_output_shapes(self) -> list[shape]:
        """Return the outputs in order."""
        shapes = _pointer(_get("program_get_output_shapes", self.handle))
        count = _get("shapes_size", shapes, kind=ctypes.c_size_t)
        return [shape(_pointer(_get("shapes_get", shapes, ctypes.c_size_t(index)))) for index in range(count)]

    def run(self, arguments: Mapping[str, argument]) -> list[argument]:
        """Run once; on the stand-in nothing is computed."""
        given = _pointer(_get("program_parameters_create"))
        for name, value in arguments.items():
            _call("program_parameters_add", given, name.encode(), value.handle)
        results = _pointer(_get("program_run", self.handle, given))
        count = _get("arguments_size", results, kind=ctypes.c_size_t)
        return [argument(None, _get("arguments_get", results, ctypes.c_size_t(index))) for index in range(count)]

    def __repr__(self) -> str:
        """The text that the library prints."""
        kept = os.dup(1)
        with tempfile.TemporaryFile() as file:
            try:
                os.dup2(file.fileno(), 1)
                _call("program_print", self.handle)
                ctypes.CDLL(None).fflush(None)
            finally:
                os.dup2(kept, 1)
                os.close(kept)
            file.seek(0)
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))


def parse_onnx(
    filename: str,
    default_dim_value: int = 0,
    map_input_dims: Mapping[str, Sequence[int]] = {},
    max_loop_iterations: int = 10,
    limit_max_iterations: int = 65535,
    default_dyn_dim_value: _DynamicDimension | None = None,
) -> program:
    """parse_onnx(filename: str, default_dim_value: int = 0, map_input_dims: dict = {}, max_loop_iterations: int = 10,
    limit_max_iterations: int = 65535) -> migraphx.program"""
    options = _pointer(_get("onnx_options_create"))
    if default_dyn_dim_value:
        _call("onnx_options_set_default_dyn_dim_value", options, default_dyn_dim_value.handle)
    if default_dim_value:
        _call("onnx_options_set_default_dim_value", options, ctypes.c_size_t(default_dim_value))
    for name, sizes in map_input_dims.items():
        _call("onnx_options_set_input_parameter_shape", options, name.encode(), *_array(sizes))
    _call("onnx_options_set_default_loop_iterations", options, ctypes.c_int64(max_loop_iterations))
    _call("onnx_options_set_limit_loop_iterations", options, ctypes.c_int64(limit_max_iterations))
    return program(_get("parse_onnx", filename.encode(), options))


def parse_tf(
    filename: str,
    is_nhwc: bool = True,
    batch_size: int = 1,
    map_input_dims: Mapping[str, Sequence[int]] = {},
    output_names: Sequence[str] = (),
) -> program:
    """parse_tf(filename: str, is_nhwc: bool = True, batch_size: int = 1, map_input_dims: dict = {},
    output_names: list = []) -> migraphx.program"""
    options = _pointer(_get("tf_options_create"))
    _call("tf_options_set_nhwc", options, ctypes.c_bool(is_nhwc))
    _call("tf_options_set_default_dim_value", options, ctypes.c_size_t(batch_size))
    for name, sizes in map_input_dims.items():
        _call("tf_options_set_input_parameter_shape", options, name.encode(), *_array(sizes))
    names = (ctypes.c_char_p * len(output_names))(*(name.encode() for name in output_names))
    _call("tf_options_set_output_names", options, names, ctypes.c_size_t(len(output_names)))
    return program(_get("parse_tf", filename.encode(), options))


def quantize_fp16(prog: program, ins_names: Sequence[str] = ("all",)) -> None:
    """Convert the operators of these names to half precision."""
    _with_names("quantize_fp16_with_op_names", prog, ins_names)


def quantize_bf16(prog: program, ins_names: Sequence[str] = ("all",)) -> None:
    """Convert the operators of these names to bfloat16."""
    _with_names("quantize_bf16_with_op_names", prog, ins_names)


def _with_names(function: str, prog: program, names: Sequence[str]) -> None:
    operators = _pointer(_get("quantize_op_names_create"))
    for name in names:
        _call("quantize_op_names_add", operators, name.encode())
    _call(function, prog.handle, operators)


def quantize_int8(
    prog: program,
    t: _Target,
    calibration: Sequence[Mapping[str, argument]] = (),
    ins_names: Sequence[str] = ("dot", "convolution"),
) -> None:
    """Quantize these operators, by the ranges that the calibration data give; it runs the model."""
    options = _pointer(_get("quantize_int8_options_create"))
    for name in ins_names:
        _call("quantize_int8_options_add_op_name", options, name.encode())
    _quantize("quantize_int8", prog, t, options, calibration)


def quantize_fp8(prog: program, t: _Target, calibration: Sequence[Mapping[str, argument]] = ()) -> None:
    """Quantize to fp8 what can be, by the ranges that the calibration data give; it runs the model."""
    _quantize("quantize_fp8", prog, t, _pointer(_get("quantize_fp8_options_create")), calibration)


def _quantize(
    function: str, prog: program, t: _Target, options: ctypes.c_void_p, calibration: Sequence[Mapping[str, argument]]
) -> None:
    for sample in calibration:
        given = _pointer(_get("program_parameters_create"))
        for name, value in sample.items():
            _call("program_parameters_add", given, name.encode(), value.handle)
        _call(f"{function}_options_add_calibration_data", options, given)
    _call(function, prog.handle, t.handle, options)


def save(p: program, filename: str, format: str = "msgpack") -> None:
    """Write a program to a file."""
    _call("save", p.handle, filename.encode(), _file_options(format))


def load(filename: str, format: str = "msgpack") -> program:
    """Read a program from a file."""
    return program(_get("load", filename.encode(), _file_options(format)))


def _file_options(kind: str) -> ctypes.c_void_p:
    options = _pointer(_get("file_options_create"))
    _call("file_options_set_file_format", options, kind.encode())
    return options


# --- the stand-in's GPU has its memory in this process, so arrays of the host are on the GPU already ---------------


def allocate_gpu(s: shape) -> argument:
    """Return memory for a result."""
    names = {theirs: ours for ours, theirs in _NUMPY.items()}
    return argument(np.zeros(s.lens(), names[_TYPES[s._type]]))


def to_gpu(arg: argument) -> argument:
    """Return the argument as it is."""
    return arg


def from_gpu(arg: argument) -> argument:
    """Return the argument as it is."""
    return arg


def gpu_sync() -> None:
    """Nothing runs."""
