"""ONNX Runtime as a compiler: converts an ONNX model to a precision, optimises it, saves it as ONNX.

`RuntimeDevice` is where it runs a program, and what is different there: the CPU itself; extensions derive others. An
extension names its module in `DeviceKind.module`; the module has the class under the name `DEVICE`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import onnxruntime

from . import onnx_models, onnxruntime_sessions
from .actions import find_module
from .measuring import Program
from .onnxruntime_sessions import CPU, Candidate, add_record, choose, time_candidates
from .protocol import RequestFailed, blamed_on_compiler, keep_text
from .samples import make_samples

if TYPE_CHECKING:
    from .documents import Answer, Array, Arrays, CompileAnswer, Placement, ProbeAnswer, ProgramPort, Request
    from .launcher import Messages

_SEVERITIES = {"trace": 0, "debug": 0, "info": 1, "warning": 2, "error": 3}
RECIPE = 1  # Number of this module: it goes up when its conversion or quantization changes what comes out.
QUIET = 3  # Log severity: errors only.


class DeviceLibraries(NamedTuple):
    """The libraries of a device on this machine: versions by name, why others are missing, and the lowest compute
    capability that they serve, times 10.
    """

    versions: dict[str, str]
    missing: dict[str, str]
    lowest: int


class RuntimeDevice:
    """The CPU."""

    where = ""  # The words by which failures on a card differ from those of the machine's, such as `on CUDA`.
    memory = ""  # ONNX Runtime's name of the device's own memory; empty: host and device are one.
    in_bf16 = False  # Whether a model computes in bf16, and has not only its weights in it.
    untuned = "all"  # The level at which an untuned program is run.

    def __init__(self, request: Request | None = None) -> None:
        self.request = request or cast("Request", {})
        self.threads = int(self.request.get("threads") or 1)

    @property
    def family(self) -> str:
        """The family of CPUs that programs may be tied to; empty on a card."""
        return "" if self.memory else cpu_family()

    def find(self) -> DeviceLibraries:
        """Return what is installed for the device, and is part of its toolchain. Raises RequestFailed."""
        return DeviceLibraries({}, {}, 0)

    def providers(self, found: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Return a session's providers with their options: those that tuning `found`, then the request's."""
        return [(CPU, {})]

    def session(self, path: str, options: Any, refusal: str, found: dict[str, str], *, fold: bool = True) -> Any:
        """Return a session on this device. What ONNX Runtime cannot load there fails, and runs nowhere else.

        What tuning `found` are options of the provider; without `fold` constants stay as they are.
        """
        if self.memory:  # Then it says which nodes run there.
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        with blamed_on_compiler(f"{refusal}, {self.where}" if self.where else refusal):
            providers, disabled = self.providers(found), None if fold else ["ConstantFolding"]
            session = onnxruntime.InferenceSession(
                path, options, providers=providers, disabled_optimizers=disabled, enable_fallback=0
            )
        self.refuse_without(session)
        return session

    def refuse_without(self, session: Any) -> None:
        """Refuse a session that was made without the device's provider. Raises RequestFailed."""

    def load(self, path: str, how: Candidate, refusal: str, learnt: Path | None = None) -> SessionProgram:
        """Load a model or program, which keeps what it learns in the folder `learnt`. Raises RequestFailed."""
        return SessionProgram(self, path, how, refusal, learnt)

    def takes(self, how: Candidate, program: str) -> bool:
        """Whether a program can be run so; the log says why not."""
        return True

    def placement(self, session: Any, executed: Any, engine: Path | None) -> Placement | None:
        """Return which nodes of the `executed` model run where; None if there is only one place.

        Raises RequestFailed if an `engine` was asked for, and does not hold all of them.
        """
        return None

    def candidates(self, mode: str) -> list[Candidate]:
        """Return what a tuning mode tries."""
        return onnxruntime_sessions.candidates(mode, self.threads)

    @property
    def default(self) -> Candidate:
        """How an untuned program is run."""
        return Candidate(self.untuned, self.threads)

    def building(self, engine: Path | None, database: Path | None) -> dict[str, str]:
        """Return the provider's options to build the file `engine`, and to learn into the folder `database`."""
        return {}

    def build(self, program: Path, stored: Any, engine: Path | None, how: Candidate) -> tuple[Any, Any] | None:
        """Return the session that built the `engine`, and the model that it runs; else None. Raises RequestFailed."""
        return None

    def to_bf16(self, model: Any) -> Any:
        """Return a model of fp32 in which all computes in bf16; None if only weights can be kept in it."""
        return None

    def quantizer_options(self) -> dict[str, bool] | None:
        """Return more options of ONNX Runtime's int8 quantizer."""
        return None


class SessionProgram(Program):
    """A model or program in an ONNX Runtime session."""

    def __init__(self, device: RuntimeDevice, path: str, how: Candidate, refusal: str, learnt: Path | None) -> None:
        """See `RuntimeDevice.load`."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = QUIET
        options.graph_optimization_level = getattr(
            onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{how.level.upper()}"
        )
        options.intra_op_num_threads = how.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(how.spinning)))
        self.device = device
        found = how.provider_options | (device.building(None, learnt) if learnt else {})
        self.session = device.session(path, options, refusal, found)
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, prepared: Arrays) -> list[Array]:
        """Run once."""
        with blamed_on_compiler(
            f"ONNX Runtime failed while running{f', {self.device.where}' * bool(self.device.where)}"
        ):
            return [np.asarray(value) for value in self.session.run(None, prepared)]


def device_of(request: Request | None) -> RuntimeDevice:
    """Return the device of a request; without one the CPU."""
    found = request and find_module("onnxruntime", request.get("device") or "")
    kind: type[RuntimeDevice] = found.DEVICE if found else RuntimeDevice
    return kind(request)


_SESSION_TYPES = {"float": "float32", "double": "float64"}


def described(value: Any) -> ProgramPort:
    """Return name, dtype, shape and strides (in elements) of a session's input or output."""
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    shape: list[Any] = ["?" if size is None else size for size in value.shape]
    is_fixed = all(isinstance(size, int) for size in shape)
    return {
        "name": value.name,
        "dtype": _SESSION_TYPES.get(dtype, dtype),
        "shape": shape,
        "strides": [math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)] if is_fixed else None,
    }


def cpu_family() -> str:
    """Return the family of CPUs that share ONNX Runtime's tuned layouts: x86-64-v4-vnni, aarch64, …"""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return machine
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    level = "v4" if {"avx512f", "avx512bw", "avx512vl"} <= flags else "v3" if {"avx2", "fma"} <= flags else "v2"
    return f"x86-64-{level}" + ("-vnni" if flags & {"avx512_vnni", "avx_vnni"} else "")


# --- what is installed -----------------------------------------------------------------------------------------


def probe(request: Request) -> ProbeAnswer:
    """Return which ONNX Runtime is installed, for CPUs or the request's device. Raises RequestFailed if none is."""
    import onnx  # Here and below: a cold child that only runs a program starts earlier without it.

    build = onnxruntime.get_build_info()
    commit = next((part.split("=")[1] for part in build.split(", ") if part.startswith("git-commit-id=")), build)
    parts = [["onnxruntime", onnxruntime.__version__], ["commit", commit], ["onnx", onnx.__version__]]
    label = f"onnxruntime{onnxruntime.__version__}"
    device = device_of(request)
    found = device.find()
    parts += map(list, found.versions.items())
    label += "".join(f"-{name}{found.versions[name]}" for name in ("tensorrt", "cuda") if name in found.versions)
    digest = hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:8]
    libraries = {}
    for name in ("ml_dtypes", "onnx_ir", "sympy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    return {
        "available": True,
        "version": onnxruntime.__version__,
        "label": label,
        "toolchain": f"{label}-{digest}",
        "libraries": {"onnx": onnx.__version__, **libraries},
        "features": [provider.removesuffix("ExecutionProvider") for provider in onnxruntime.get_available_providers()],
        "targets": [request["device"] if device.memory else "cpu"],
        "cpu_family": device.family,
        "lowest": found.lowest,
    }


# --- compile ---------------------------------------------------------------------------------------------------


def compile(request: Request, messages: Messages) -> CompileAnswer:
    """Convert to the precision, optimise to the level, and save; accept only a program that loads and is as asked."""
    import onnx

    from .precisions import CONVERSIONS

    level = (request.get("debug") or {}).get("log_level", "")
    onnxruntime.set_default_logger_severity(_SEVERITIES.get(level, QUIET))
    precision, program, scratch = request["precision"], Path(request["program"]), Path(tempfile.mkdtemp())
    device, cpu = device_of(request), RuntimeDevice(request)
    engine = program if request["options"].get("engine") else None  # Of a device whose session writes the program.
    if engine:
        program = scratch / "plain.onnx"
    choice = _choice(device)
    # For a card the model stays plain ONNX: its session rewrites the graph when it loads it.
    tuned = choice.level if choice and not device.memory else "basic"
    level = "all" if request["options"].get("level") == "tuned" else tuned
    messages.phase("quantizing" if precision in CONVERSIONS else "compiling", 0.0, "reading the model")
    quantized: dict[str, int] = {}
    convert = CONVERSIONS.get(precision)
    if convert:
        base = scratch / "base.onnx"
        symbolic = _optimise_original(cpu, scratch, base, "basic")
        messages.phase("quantizing", 0.1)
        converted = scratch / "converted.onnx"
        quantized = convert(base, converted, device, messages)
        messages.phase("compiling")
        if level != "basic":
            # Folding constants would turn half-size weights back into fp32; ONNX Runtime does it when loading.
            _optimise(cpu, converted, program, level, f"ONNX Runtime refuses its {precision} program", fold=False)
        else:
            converted.replace(program)
    else:
        messages.phase("compiling")
        symbolic = _optimise_original(cpu, scratch, program, level)
    result = _accept(device, program, quantized, scratch, engine, choice or device.default)
    result["symbolic_shapes"] = symbolic
    keep_text(request, "after", lambda: onnx.helper.printable_graph(onnx.load_model(program).graph))
    if choice and not device.takes(choice, request["program"]):
        # An engine is built already, at its level.
        choice = choice._replace(graph=False) if engine else _choice(device, graph=False)
    if choice:
        result["session"] = choice.session
    return result


def _choice(device: RuntimeDevice, *, graph: bool = True) -> Candidate | None:
    """Return how the tuning database says that this program is best run; None if it was not tuned."""
    slices = device.request["tuning"].get("slices")
    return choose(Path(device.request["database"]), slices, device.threads, graph=graph) if slices else None


def tune(request: Request, messages: Messages) -> Answer:
    """Time one slice under every candidate of the mode, and keep the figures in the database's folder."""
    program = Path(tempfile.mkdtemp()) / "slice.onnx"
    plain: Request = {**request, "tuning": {"mode": "off"}, "options": {"level": "standard"}, "program": str(program)}
    compile(plain, messages)
    feeds = make_samples(request["calibration"] or {}, request["inputs"], None, what="samples")[0]
    device, mode = device_of(request), request["tuning"]["mode"]

    def load(candidate: Candidate) -> Callable[[], Any] | None:
        if not device.takes(candidate, str(program)):
            return None
        loaded = device.load(str(program), candidate, "the slice does not load", Path(request["database"]))
        return lambda: loaded.run(feeds)

    seconds = time_candidates(mode, device.candidates(mode), load, messages)
    add_record(Path(request["database"]), request["key"], seconds)
    return {}


def _accept(
    device: RuntimeDevice, program: Path, quantized: dict[str, int], scratch: Path, engine: Path | None, how: Candidate
) -> CompileAnswer:
    """Load the program the way its users will, and return what is in it.

    A device that builds more than ONNX then writes its `engine`, if wanted, built `how` tuning found best.
    """
    import onnx

    precision = device.request["precision"]
    if program.stat().st_size > onnx_models.LARGEST_FILE:
        raise RequestFailed("compiler_error", "the program is larger than 2 GiB, which one ONNX file cannot be")
    refusal = f"ONNX Runtime refuses its own {precision} program"
    stored = onnx.load_model(program)
    if built := device.build(program, stored, engine, how):
        session, running = built
    else:
        executed = scratch / "executed.onnx"
        session = _optimise(device, program, executed, "all", refusal)
        running = onnx.load_model(executed)
    placement = device.placement(session, running, engine)
    if precision == "int8":
        quantized = _quantized_operators(stored)
    counted = precision in ("int8", "int4") or (precision == "bf16" and not device.in_bf16)
    if counted and not sum(quantized.values()):
        raise RequestFailed("nothing_quantized", f"{precision} left every operator of the model as it was")
    return {
        "inputs": [described(value) for value in session.get_inputs()],
        "outputs": [described(value) for value in session.get_outputs()],
        "weight_dtypes": _weight_dtypes(stored),
        "compute_dtypes": compute_dtypes(running),
        "quantized": quantized,
        "offload_copy": True,
        "output_parameters": [],
        "placement": placement,
    }


def _optimise(device: RuntimeDevice, source: Path, target: Path, level: str, refusal: str, *, fold: bool = True) -> Any:
    """Run ONNX Runtime's graph optimisation from one file into another, which is plain ONNX, and return the session.

    `basic` keeps to standard ONNX; `extended` uses ONNX Runtime's own operators, `all` also this CPU's layouts.
    """
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(target)
    options.intra_op_num_threads = device.threads
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    return device.session(str(source), options, refusal, {}, fold=fold)


def _optimise_original(cpu: RuntimeDevice, scratch: Path, target: Path, level: str) -> str:
    """Optimise the user's model with the request's shapes. An invalid model is the user's fault, not the compiler's.

    ONNX Runtime may refuse the shapes because of a branch that is never taken with them. It then gets the model with
    its own shapes; return the reason, or an empty text.
    """
    import onnx

    request, refusal = cpu.request, "ONNX Runtime refuses the model"
    try:
        _optimise(cpu, _prepared(request, scratch, fixed=True), target, level, refusal)
    except RequestFailed as failure:
        inputs = onnx.load_model(request["model"]["path"], load_external_data=False).graph.input
        sizes = [size for value in inputs for size in value.type.tensor_type.shape.dim]
        if any(not size.HasField("dim_value") or size.dim_value <= 0 for size in sizes):  # The model leaves some open.
            with suppress(RequestFailed):
                _optimise(cpu, _prepared(request, scratch, fixed=False), target, level, refusal)
                said = f"static shapes are refused, the program keeps the model's own: {failure.message}"
                print(said, flush=True)  # noqa: T201 (the log)
                return failure.message
        lacks_operator = "No Op registered for" in failure.detail
        if not lacks_operator and ("INVALID_GRAPH" in failure.detail or "INVALID_PROTOBUF" in failure.detail):
            raise RequestFailed("bad_model", failure.message, failure.detail) from None
        raise
    return ""


def _prepared(request: Request, scratch: Path, *, fixed: bool) -> Path:
    """Write the user's model the way it is optimised: `fixed` with the request's shapes, else with its own."""
    import onnx

    from .precisions import CONVERSIONS

    with blamed_on_compiler("the model cannot be read", "bad_model"):
        model = onnx.load_model(request["model"]["path"])
    onnx_models.drop_overridable_constants(model)
    if fixed:
        onnx_models.fix_shapes(model, request["inputs"])
    keep_text(request, "before", lambda: onnx.helper.printable_graph(model.graph))
    if request["precision"] in CONVERSIONS:
        model = onnx_models.at_least_opset(model, 13)
    return onnx_models.save(model, scratch / ("fixed.onnx" if fixed else "symbolic.onnx"))


# --- what a program is -----------------------------------------------------------------------------------------


def _quantized_operators(model: Any) -> dict[str, int]:
    """Count the operators that work on quantized data: fed by DequantizeLinear alone, or quantized themselves.

    What merely lies between quantized operators is fed that way too: but for dense ones, what they make must be
    quantized again.
    """
    from .precisions import DENSE

    counts: Counter[str] = Counter()
    for graph in onnx_models.graphs_of(model.graph):
        dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        requantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
        for node in graph.node:
            own = node.op_type.startswith(("QLinear", "QGemm", "MatMulInteger", "ConvInteger"))
            fed = len(node.input) > 1 and all(name in dequantized for name in node.input[:2])
            if own or (fed and (node.op_type in DENSE or node.output[0] in requantized)):
                counts[node.op_type] += 1
    return dict(sorted(counts.items()))


def _weight_dtypes(model: Any) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for graph in onnx_models.graphs_of(model.graph):
        tensors = [*graph.initializer]
        tensors += [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.HasField("t")]
        for tensor in tensors:
            dtype, bits = onnx_models.DTYPES[tensor.data_type]
            sizes[dtype] += (math.prod(tensor.dims) * bits + 7) // 8
    return dict(sizes.most_common())


_MOVERS = frozenset(
    {"Cast", "Constant", "QuantizeLinear", "DequantizeLinear", "Reshape", "Shape", "Gather", "Concat", "Unsqueeze",
     "Squeeze", "Transpose", "Slice", "Identity", "Flatten", "ReorderInput", "ReorderOutput"}
)  # fmt: skip
"""Operators that only move or convert data."""


def compute_dtypes(model: Any) -> dict[str, int]:
    """Count the nodes that compute, in the graph that ONNX Runtime executes, by the dtype that they make."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    known = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types |= {value.name: value.type.tensor_type.elem_type for value in known}
    counts: Counter[str] = Counter()
    for node in model.graph.node:
        # Not every type is in the file; what computes mostly makes what it is fed with.
        made = next((each.i for each in node.attribute if each.name == "to"), 0) or next(
            (types[name] for name in node.input if name in types), 0
        )
        for name in node.output:
            types.setdefault(name, made)
        if node.op_type not in _MOVERS and node.output and types[node.output[0]] in onnx_models.DTYPES:
            counts[onnx_models.DTYPES[types[node.output[0]]][0]] += 1
    return dict(counts.most_common())


# --- run -------------------------------------------------------------------------------------------------------


def load(request: Request) -> SessionProgram:
    """Load a compiled program, the way its tuning found best."""
    session, device = request.get("session"), device_of(request)
    how = Candidate.of_session(session) if session else device.default
    return device.load(request["program"], how, "the program does not load")


def load_reference(request: Request) -> SessionProgram:
    """Load the original model, unchanged; its own precision (fp32) is the reference."""
    refusal = "ONNX Runtime cannot run the original model for reference (give expected outputs, or another reference)"
    return RuntimeDevice().load(request["model"]["path"], device_of(request).default, refusal)
