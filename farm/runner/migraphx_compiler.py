"""MIGraphX as a compiler: parses, quantizes, compiles and saves; loads and runs what was saved.

What is called here, and why so, is described by the documented behaviour of MIGraphX 2.6 to 2.16: features are
found by asking the module, never by its version. The module never releases the interpreter, keeps no reference to
arrays that it was given, and reads its environment once.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import mxr
from .measuring import Program
from .migraphx_module import migraphx_module, probe, takes
from .mxr import dtype_name
from .protocol import CannotRun, RequestFailed, blamed_on_compiler, keep_text
from .samples import Held, Samples, aligned, make_samples, numpy_dtype, points_of, static_shape

if TYPE_CHECKING:
    from . import documents
    from .launcher import Messages


__all__ = ["compile", "load", "load_reference", "probe", "tune"]

RECIPE = 1  # Number of this module: it goes up when its conversion or quantization changes what comes out.

_EIGHT_BIT = ("int8", "fp8")
_HALF = ("fp16", "bf16")


# --- compile ---------------------------------------------------------------------------------------------------


def compile(request: documents.Request, messages: Messages) -> documents.CompileAnswer:
    """Parse, quantize, compile and save."""
    migraphx = migraphx_module()
    options, precision = request["options"], request["precision"].split("-")
    gpu = request["device"].startswith("gfx")
    program, quantized = _compiled(migraphx, request, messages)
    keep_text(request, "after", partial(_text, program))
    instructions = list(_instructions(program))
    if not gpu and "fp8" in precision and not any("fp8" in instruction.type for instruction in instructions):
        # `cpu` computes all in float32, and drops a conversion and its way back as if they did not round.
        said = f"MIGraphX for {request['device']} computes fp8 in float32 without rounding"
        raise RequestFailed("nothing_quantized", said)
    messages.phase("compiling", None, "saving")
    with blamed_on_compiler("MIGraphX cannot save the program"):
        migraphx.save(program, request["program"], format=options.get("format", "msgpack"))
    _refuse_broken(request)
    inputs, outputs = program.get_parameter_shapes(), program.get_output_shapes()
    names = _output_names(request, len(outputs))
    # The buffers for the outputs, which the caller passes if it also copies.
    buffers = sorted((name for name in inputs if "#output_" in name), key=lambda name: int(name.rpartition("_")[2]))
    computed = [dtype_name(each.type) for each in instructions if not _MOVERS.match(each.operator)]
    result: documents.CompileAnswer = {
        "inputs": [_described(name, inputs[name]) for name in request["inputs"] if name in inputs],
        "outputs": [_described(name, shape) for name, shape in zip(names, outputs, strict=True)],
        "output_parameters": buffers,
        "weight_dtypes": _weight_dtypes(instructions),
        "compute_dtypes": dict(Counter(computed).most_common()),
        "quantized": quantized,
        "offload_copy": options["offload_copy"],
    }
    # The problem cache is written when the program's context goes.
    del program
    gc.collect()
    return result


def _text(program: Any) -> str:
    """Return a program for people: its parameters and outputs with their shapes, then every instruction."""
    parameters = [f"parameter {name}: {shape}" for name, shape in program.get_parameter_shapes().items()]
    outputs = [f"output {index}: {shape}" for index, shape in enumerate(program.get_output_shapes())]
    return "\n".join([*parameters, *outputs, "", str(program)])


def _refuse_broken(request: documents.Request) -> None:
    """Read the finished program back, and refuse a program that MIGraphX saved but the key's card cannot run."""
    expected = request.get("expected")
    try:
        found = mxr.read(request["program"])
    except mxr.ProgramTooLarge:
        return  # Verification finds out whether it runs; with msgpack this is known before.
    except mxr.MalformedProgram as error:
        raise RequestFailed("compiler_error", f"the program that MIGraphX saved cannot be read: {error}") from None
    if found["left_over"]:
        said = f"the tuning database has an undecided solution: {mxr.LEFT_OVER} is left over"
        raise RequestFailed("compiler_error", said)
    _refuse_foreign(found, (expected["arch"] if expected else "") or request["device"])


def _refuse_foreign(found: mxr.ProgramContent, device: str) -> None:
    if foreign := mxr.foreign_arches(found["code_objects"], device):
        raise RequestFailed("toolchain_mismatch", f"the program has kernels for {', '.join(foreign)}, not for {device}")


def tune(request: documents.Request, messages: Messages) -> documents.Answer:
    """Compile one slice for what that leaves in the databases that the environment names; nothing is saved."""
    program, _ = _compiled(migraphx_module(), request, messages)
    # The problem cache is written when the program's context goes.
    del program
    gc.collect()
    return {}


def _compiled(migraphx: Any, request: documents.Request, messages: Messages) -> tuple[Any, dict[str, int]]:
    """Parse, quantize and compile; return the program and the operators that work on 8 bits."""
    options, device, cross = request["options"], request["device"], request.get("cross")
    target = _target(migraphx, device, cross)
    messages.phase("compiling", None, "parsing")
    program = _parse(migraphx, request)
    if options["autocast_fp8"]:
        with blamed_on_compiler("MIGraphX cannot turn fp8 inputs and outputs to float32"):
            migraphx.autocast_fp8(program)
    # Calibration runs the model, which takes a device that is here: every build has `ref`, and every machine runs it.
    runs = _target(migraphx, "ref") if cross else target
    quantized = _quantize(migraphx, program, runs, request, messages)
    keep_text(request, "before", partial(_text, program))
    messages.phase("compiling")
    # A search times kernels. On a CPU there is none.
    searches = device.startswith("gfx") and not cross and request["tuning"].get("mode", "off") != "off"
    quiet = messages.alone() if searches else nullcontext()
    with quiet, blamed_on_compiler(f"MIGraphX cannot compile the model for {device}"):
        program.compile(
            target,
            offload_copy=options["offload_copy"],
            fast_math=options["fast_math"],
            exhaustive_tune=bool(request["tuning"].get("exhaustive_tune")),
        )
    return program, quantized


def _target(migraphx: Any, device: str, cross: documents.DeviceDocument | None = None) -> Any:
    """Return a target; `cross` is a GPU that is not here, for which MIGraphX has a default of what is not given."""
    if not cross:
        with blamed_on_compiler(f"MIGraphX has no target for {device}"):
            return migraphx.get_target("gpu" if device.startswith("gfx") else device)
    arch, _, _ = cross["arch"].partition(":")
    sizes = {"gpu_num_cu": cross["compute_units"], "gpu_num_chiplets": cross["xcc"]}
    with blamed_on_compiler(f"MIGraphX has no target for {arch}"):
        return migraphx.get_target("gpu", gpu_arch=arch, **{name: size for name, size in sizes.items() if size})


def _parse(migraphx: Any, request: documents.Request) -> Any:
    """Parse the model with the request's shapes, and check that MIGraphX took them."""
    model, options, inputs = request["model"], request["options"], request["inputs"]
    with blamed_on_compiler("MIGraphX cannot parse the model"):
        if model["format"] == "tf":
            program = migraphx.parse_tf(
                model["path"],
                is_nhwc=options["nhwc"],
                batch_size=request.get("batch") or 1,
                map_input_dims={name: _program_shape(spec, request) for name, spec in inputs.items()},
                output_names=_model_outputs(request),
            )
        else:
            program = migraphx.parse_onnx(model["path"], **_onnx_arguments(migraphx, options, inputs))
    unknown = sorted(set(re.findall(r"\bunknown:(\w+)", repr(program))))
    if unknown:
        raise RequestFailed("unsupported_operator", f"the compiler does not have operator {', '.join(unknown)}")
    shapes, sizes = program.get_parameter_shapes(), points_of(inputs, None)
    for name, spec in inputs.items():
        if name not in shapes:
            # MIGraphX would ignore a misspelt name silently.
            raise RequestFailed("bad_model", f"the model has no input '{name}'; it has {', '.join(shapes)}")
        smallest, largest = (
            _program_shape(point[name], request) or [1]  # MIGraphX has no scalars
            for point, _ in (sizes[0], sizes[-1])
        )
        if _bounds(shapes[name]) != (smallest, largest):
            said = f"MIGraphX gives input '{name}' the shape {shapes[name]}, not {spec['shape']}"
            raise RequestFailed("compiler_error", said)
    missing = [name for name in shapes if name not in inputs]
    if missing:
        raise RequestFailed("bad_model", f"no shape was given for input '{missing[0]}'")
    return program


def _onnx_arguments(
    migraphx: Any, options: documents.Options, inputs: Mapping[str, documents.InputSpec]
) -> dict[str, object]:
    # What a release lacks was not asked of it (the plan says so), or is its default.
    arguments: dict[str, object] = {
        name: options[name]
        for name in ("max_loop_iterations", "limit_max_iterations", "use_debug_symbols")
        if name in options and takes(migraphx, "parse_onnx", name)
    }
    if any(isinstance(size, Mapping) for spec in inputs.values() for size in spec["shape"]):
        if "map_dyn_input_dims" not in str(migraphx.parse_onnx.__doc__):
            raise RequestFailed("toolchain_mismatch", "this MIGraphX has no dynamic dimensions (map_dyn_input_dims)")
        dimension = migraphx.shape.dynamic_dimension
        arguments["map_dyn_input_dims"] = {
            name: [
                dimension(size["min"], size["max"], set(size.get("optimals") or ()))
                if isinstance(size, Mapping)
                else dimension(size, size)
                for size in spec["shape"]
            ]
            for name, spec in inputs.items()
        }
    else:
        arguments["map_input_dims"] = {name: list(spec["shape"]) for name, spec in inputs.items()}
    return arguments


def _quantize(
    migraphx: Any, program: Any, target: Any, request: documents.Request, messages: Messages
) -> dict[str, int]:
    """Quantize in place and return the operators that work on 8 bits, or how many weights have 4.

    8-bit first: after bf16 the 8-bit quantizers silently do nothing. Weights of 4 bits came with the model.
    """
    options, precision = request["quantization"], request["precision"].split("-")
    eight = [part for part in precision if part in _EIGHT_BIT]
    half = [part for part in precision if part in _HALF]
    for part in (*eight, *half):
        if not hasattr(migraphx, f"quantize_{part}"):
            raise RequestFailed("toolchain_mismatch", f"this MIGraphX has no quantize_{part}")
    if eight:
        messages.phase("quantizing", 0.0, "calibration")
        # Of dynamic sizes the largest.
        inputs, batch = points_of(request["inputs"], request.get("batch"))[-1]
        samples = make_samples(request["calibration"] or {}, inputs, batch, what="calibration data")
        calibration, held = _calibration(migraphx, program, samples, request)
        arguments: list[Any] = [{"dot", "convolution"}] if eight == ["int8"] else []
        with blamed_on_compiler(f"MIGraphX cannot quantize the model to {eight[0]}"):
            getattr(migraphx, f"quantize_{eight[0]}")(program, target, calibration, *arguments)
        del calibration, held
    counts = _quantized_operators(program)
    if eight and not counts:
        raise RequestFailed("nothing_quantized", f"{eight[0]} left every operator of the model as it was")
    if "int4" in precision:
        instructions = list(_instructions(program))
        unpacked = {each.name for each in instructions if each.operator == "unpack_int4"}
        # Zero points are unpacked, too, and are not weights.
        weights = (each.arguments[0] in unpacked for each in instructions if each.operator == "dequantizelinear")
        counts = {"weights": sum(weights)}
        if not counts["weights"]:
            raise RequestFailed("nothing_quantized", "MIGraphX has no weight of the model in int4")
    for part in half:
        messages.phase("quantizing", None, part)
        before = _of_type(program, part)
        with blamed_on_compiler(f"MIGraphX cannot convert the model to {part}"):
            getattr(migraphx, f"quantize_{part}")(program, list(options[f"{part}_operators"]))
        if _of_type(program, part) == before:
            raise RequestFailed("nothing_quantized", f"{part} left every operator of the model as it was")
    if eight and not any(each.operator == "quantizelinear" for each in _instructions(program)):
        raise RequestFailed("nothing_quantized", f"{half[0]} undid the quantization to {eight[0]}")
    return counts


def _of_type(program: Any, precision: str) -> int:
    wanted = {"fp16": "half_type", "bf16": "bf16_type"}[precision]
    return sum(instruction.type == wanted for instruction in _instructions(program))


def _calibration(
    migraphx: Any, program: Any, samples: Samples, request: documents.Request
) -> tuple[list[dict[str, object]], Held]:
    """Return calibration arguments and what they point into, which must live as long.

    MIGraphX fills a missing input with whatever memory holds, and takes an empty list for a fixed scale.
    """
    shapes = program.get_parameter_shapes()
    if not samples:
        raise RequestFailed("bad_calibration", "the calibration data is empty")
    held = Held(len(samples) * sum(aligned(shape.bytes()) for shape in shapes.values()))
    calibration = []
    for run in samples:
        arguments = {}
        for name, shape in shapes.items():
            array = _program_array(run[name], shape, request)
            found, wanted = f"{array.dtype} {list(array.shape)}", f"{_dtype(shape)} {_bounds(shape)[1]}"
            if found != wanted:
                said = f"calibration for '{name}' is {found}, the program wants {wanted}"
                raise RequestFailed("bad_calibration", said)
            arguments[name] = _argument(migraphx, held.keep(array), shape)
        calibration.append(arguments)
    return calibration, held


def _bounds(shape: Any) -> tuple[list[int], list[int]]:
    if not shape.dynamic():
        return list(shape.lens()), list(shape.lens())
    return [dimension.min for dimension in shape.dyn_dims()], [dimension.max for dimension in shape.dyn_dims()]


# --- layouts: a TensorFlow model's 4-D inputs are NHWC, the program's NCHW ----------------------------------------


def _is_nhwc(request: documents.Request) -> bool:
    model = request.get("model")
    return model is not None and model["format"] == "tf" and bool(request["options"].get("nhwc", True))


def _program_shape(spec: documents.InputSpec, request: documents.Request) -> list[int]:
    shape = list(static_shape(spec))
    return [shape[0], shape[3], shape[1], shape[2]] if len(shape) == 4 and _is_nhwc(request) else shape


def _program_array(array: Any, shape: Any, request: documents.Request) -> Any:
    """Return an input the way the program wants it: contiguous, in its layout, a scalar as one element."""
    moved = _in_layout(array, (0, 3, 1, 2), request)
    _, lens = _bounds(shape)
    # What is mapped from an archive may lie at any byte, where MIGraphX does not take it.
    return np.require(moved, requirements=("C", "A")).reshape(lens if moved.ndim == 0 else moved.shape)


def _in_layout(array: Any, axes: tuple[int, ...], request: documents.Request) -> Any:
    return array.transpose(*axes) if array.ndim == 4 and _is_nhwc(request) else array


# --- what a program is -----------------------------------------------------------------------------------------


class _Instruction(NamedTuple):
    name: str
    operator: str
    arguments: tuple[str, ...]
    type: str
    elements: int


_LINE = re.compile(
    r"^(?P<name>\S+) = (?P<operator>[\w:@]+)[^\n]*?(?:\((?P<arguments>[^()]*)\))?(?:, \[.*\])? -> "
    r"(?P<type>\w+_type), \{(?P<lens>[\d, ]*)\}(?:, \{(?P<strides>[\d, ]*)\})?",
    re.MULTILINE,
)


def _instructions(program: Any) -> Iterator[_Instruction]:
    """Yield the instructions of a program's listing; those of tuple type are left out."""
    for found in _LINE.finditer(repr(program)):
        lens = [int(size) for size in re.findall(r"\d+", found["lens"])]
        strides = [int(size) for size in re.findall(r"\d+", found["strides"] or "")] or [1] * len(lens)
        # A stride of 0 repeats.
        elements = math.prod(size for size, stride in zip(lens, strides, strict=False) if stride)
        arguments = tuple(re.split(r",\s*", found["arguments"])) if found["arguments"] else ()
        yield _Instruction(found["name"], found["operator"], arguments, found["type"], elements)


def _quantized_operators(program: Any) -> dict[str, int]:
    instructions = list(_instructions(program))
    dequantized = {each.name for each in instructions if each.operator == "dequantizelinear"}
    dense = (each for each in instructions if each.operator in ("dot", "convolution"))
    return dict(Counter(each.operator for each in dense if dequantized.issuperset(each.arguments)))


def _weight_dtypes(instructions: list[_Instruction]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for instruction in instructions:
        if instruction.operator.endswith("literal"):
            dtype = dtype_name(instruction.type)
            width = 1 if "8" in dtype and "int" not in dtype else numpy_dtype(dtype).itemsize
            sizes[dtype] += instruction.elements * width
    return dict(sizes.most_common())


_MOVERS = re.compile(
    r"^@|^(cpu|gpu|hip)::(literal|preallocate|hip_|allocate|copy|contiguous|convert)|^hip::|^check_context"
    r"|^(load|transpose|reshape\w*|multibroadcast|broadcast\w*|slice|squeeze|unsqueeze|concat|contiguous|convert"
    r"|flatten|identity|gather|allocate|dequantizelinear|quantizelinear)$"
)
"""Operators that only move or convert data."""


def _model_outputs(request: documents.Request) -> list[str]:
    """Return the names of the model's outputs in order; MIGraphX does not report them."""
    return list(request.get("outputs") or request["model"]["names"])


def _output_names(request: documents.Request, count: int) -> list[str]:
    names = _model_outputs(request)
    if len(names) != count:
        raise RequestFailed("compiler_error", f"the program has {count} outputs, the model {len(names)}")
    return names


def _described(name: str, shape: Any) -> documents.ProgramPort:
    if shape.dynamic():
        sizes = [f"{size.min}..{size.max}" if size.min < size.max else size.min for size in shape.dyn_dims()]
        return {"name": name, "dtype": _dtype(shape), "shape": sizes, "strides": None}
    lens, strides = [*map(int, shape.lens())], [*map(int, shape.strides())]
    return {"name": name, "dtype": _dtype(shape), "shape": lens, "strides": strides}


def _dtype(shape: Any) -> str:
    return dtype_name(str(shape.type_string()))


# --- run -------------------------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    arguments: dict[str, object]  # MIGraphX's own, by name.
    arrays: list[documents.Array]  # What the arguments point into.


class _MigraphxProgram(Program):
    def __init__(self, migraphx: Any, program: Any, request: documents.Request) -> None:
        self.migraphx, self.program, self.request = migraphx, program, request
        self.shapes = program.get_parameter_shapes()
        self.buffers = [name for name in self.shapes if "#output_" in name]
        self.copies = request["device"].startswith("gfx") and not request["options"].get("offload_copy", True)
        self.outputs = _output_names(request, len(program.get_output_shapes()))

    def prepare(self, feeds: documents.Arrays) -> _Prepared:
        """Return MIGraphX arguments, with the arrays that they point into."""
        arguments, arrays = {}, []
        for name, shape in self.shapes.items():
            if name in self.buffers:
                arguments[name] = self.migraphx.allocate_gpu(shape)
                continue
            array = _program_array(feeds[name], shape, self.request)
            arrays.append(array)
            arguments[name] = _argument(self.migraphx, array, shape)
        return _Prepared(arguments, arrays)

    def run(self, prepared: _Prepared) -> list[documents.Array]:
        """Run once, with the copies from and to the host."""
        with blamed_on_compiler("MIGraphX failed while running"):
            arguments = prepared.arguments
            if self.copies:
                arguments = self._on_device(arguments)
            results = self.program.run(arguments)
            if self.copies:
                self.migraphx.gpu_sync()
                results = [self.migraphx.from_gpu(result) for result in results]
            return [_in_layout(_array(result), (0, 2, 3, 1), self.request) for result in results]

    def run_on_device(self, prepared: _Prepared) -> Callable[[], None] | None:
        """Return what runs once on arguments that are on the GPU already; None if the program copies."""
        if not self.copies:
            return None
        arguments = self._on_device(prepared.arguments)

        def run() -> None:
            self.program.run(arguments)
            self.migraphx.gpu_sync()

        return run

    def _on_device(self, arguments: Mapping[str, object]) -> dict[str, object]:
        return {
            name: argument if name in self.buffers else self.migraphx.to_gpu(argument)
            for name, argument in arguments.items()
        }


def load(request: documents.Request) -> _MigraphxProgram:
    """Load a compiled program from its file, which is read here first: MIGraphX's own reader trusts what it reads."""
    try:
        _refuse_foreign(mxr.read(request["program"]), request["device"])
    except mxr.ProgramTooLarge:
        pass  # MIGraphX's own reader has to check it; it can only harm this process.
    except mxr.MalformedProgram as error:
        raise RequestFailed("bad_model", f"the program is damaged: {error}") from None
    migraphx = migraphx_module()
    _target(migraphx, request["device"])
    with blamed_on_compiler("the program does not load"):
        program = migraphx.load(request["program"], format=request["options"].get("format", "msgpack"))
        return _MigraphxProgram(migraphx, program, request)


def load_reference(request: documents.Request) -> _MigraphxProgram:
    """Compile the original model for `ref`, in its own precision."""
    migraphx = migraphx_module()
    program = _parse(migraphx, request)
    with blamed_on_compiler("MIGraphX ref cannot run the original model for reference"):
        program.compile(_target(migraphx, "ref"), fast_math=False)
    return _MigraphxProgram(migraphx, program, request)


def _argument(migraphx: Any, array: Any, shape: Any) -> Any:
    """Return an argument that points into an array; the caller keeps the array."""
    if str(array.dtype) != str(numpy_dtype(_dtype(shape))):
        raise RequestFailed("compiler_error", f"the program wants {_dtype(shape)}, the model has {array.dtype}")
    if array.dtype.isbuiltin != 1:
        # Arguments reach a program as Python buffers, which have no format for bfloat16 and float8.
        raise CannotRun("unsupported_operator", f"MIGraphX's Python module takes no inputs of {array.dtype}")
    # A scalar has the strides {0}, which no array of one element has.
    if array.size > 1:
        return migraphx.argument(array)
    if shape.dynamic():
        shape = migraphx.shape(type=shape.type_string(), lens=list(array.shape))
    return migraphx.argument_from_pointer(shape, array.ctypes.data)


def _array(result: Any) -> Any:
    dtype = numpy_dtype(_dtype(result.get_shape()))
    if dtype.isbuiltin == 1:
        return np.array(result)
    # bfloat16 and float8 have no buffer format: copy the bytes.
    shape = result.get_shape()
    return np.frombuffer(ctypes.string_at(result.data_ptr(), shape.bytes()), dtype).reshape(shape.lens())
