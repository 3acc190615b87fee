"""Where ONNX Runtime runs a program, and what is different there. The CPU is `RuntimeDevice` itself; extensions derive
others.

An extension names its module in `DeviceKind.module`; the module has the class under the name `DEVICE`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import added, onnxruntime_tuning
from .onnxruntime_providers import providers_of
from .protocol import blamed_on_compiler

if TYPE_CHECKING:
    from .documents import Array, Arrays, Placement, ProgramPort, Request
    from .onnxruntime_tuning import Candidate


QUIET = 3
"""Log severity: errors only."""


class DeviceLibraries(NamedTuple):
    """The libraries of a device on this machine: versions by name, why others are missing, and the lowest compute
    capability that they serve, times 10.
    """

    versions: dict[str, str]
    missing: dict[str, str]
    lowest: int


class LibraryMissing(Exception):
    """What the device needs is not installed: why, and what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class RuntimeDevice:
    """The CPU."""

    where = ""
    """The words by which failures on a card differ from those of the machine's, such as `on CUDA`."""
    memory = ""
    """ONNX Runtime's name of the device's own memory; empty: host and device are one."""
    in_bf16 = False
    """Whether a model computes in bf16, and has not only its weights in it."""

    def __init__(self, request: Request | None = None) -> None:
        self.request = request or cast("Request", {})

    def find(self) -> DeviceLibraries:
        """Return what is installed for the device, and is part of its toolchain. Raises LibraryMissing."""
        return DeviceLibraries({}, {}, 0)

    def label(self, versions: Mapping[str, str]) -> str:
        """Return the end of the toolchain's label, of these versions of libraries."""
        return ""

    def providers(self, found: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
        """Return the providers of a session with their options, and load their libraries.

        What tuning `found` best comes before the request's own options.
        """
        return providers_of("cpu", "", {}, {})

    def session(
        self,
        path: str,
        options: Any,
        refusal: str,
        disabled: list[str] | None = None,
        found: dict[str, str] | None = None,
    ) -> Any:
        """Return a session on this device. What ONNX Runtime cannot load there fails, and runs nowhere else.

        What tuning `found` best of the provider's options comes before the request's own.
        """
        import onnxruntime

        with blamed_on_compiler(f"{refusal}, {self.where}" if self.where else refusal):
            return onnxruntime.InferenceSession(
                path,
                options,
                providers=self.providers(found or {}),
                disabled_optimizers=disabled,
                enable_fallback=0,
            )

    def load(self, path: str, how: Candidate, refusal: str, learnt: Path | None = None) -> SessionProgram:
        """Load a model or program; `learnt` is the folder of a tuning database, if it is to keep there what it learns.

        Raises RequestFailed, which says what is refused.
        """
        return SessionProgram(self, path, how, refusal, learnt)

    def takes(self, how: Candidate, program: str) -> bool:
        """Whether a program can be run so; the log says why not."""
        return True

    def placement(self, session: Any, executed: Any, engine: Path | None) -> Placement | None:
        """Return which nodes of the `executed` model run where; None if there is only one place.

        Raises RequestFailed if an `engine` was asked for, and does not hold all of them.
        """
        return None

    def candidates(self, mode: str, threads: int) -> list[Candidate]:
        """Return what a tuning mode tries."""
        return onnxruntime_tuning.candidates(mode, threads)

    def default(self, threads: int) -> Candidate:
        """Return how an untuned program is run."""
        return onnxruntime_tuning.default(threads)

    def building(self, engine: Path | None, database: Path | None) -> dict[str, str]:
        """Return options of the provider for a session that builds what the device runs.

        It goes into the file `engine`; what was learnt meanwhile into the folder `database`.
        """
        return {}

    def writes(self) -> bool:
        """Whether the device's session writes the program itself, from a plain one."""
        return False

    def build(self, program: Path, stored: Any, engine: Path | None, how: Candidate) -> tuple[Any, Any] | None:
        """Return the session that built the `engine`, and the model that it runs; None if there is nothing to build.

        Raises RequestFailed.
        """
        return None

    def to_bf16(self, model: Any) -> Any:
        """Return a model of fp32 in which all computes in bf16; None if only weights can be kept in it."""
        return None

    def quantizer_options(self) -> dict[str, bool] | None:
        """Return more options of ONNX Runtime's int8 quantizer."""
        return None


class SessionProgram:
    """A model or program in an ONNX Runtime session."""

    def __init__(
        self, device: RuntimeDevice, path: str, how: Candidate, refusal: str, learnt: Path | None = None
    ) -> None:
        """See `RuntimeDevice.load`."""
        import onnxruntime

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
        self.session = device.session(path, options, refusal, found=found)
        self.outputs = [value.name for value in self.session.get_outputs()]

    def prepare(self, feeds: Arrays) -> Arrays:
        """Return the arrays themselves."""
        return feeds

    def run(self, prepared: Arrays) -> list[Array]:
        """Run once."""
        import numpy as np

        with blamed_on_compiler(
            f"ONNX Runtime failed while running{f', {self.device.where}' * bool(self.device.where)}"
        ):
            return [np.asarray(value) for value in self.session.run(None, prepared)]

    def run_on_device(self, prepared: Arrays) -> Callable[[], None] | None:
        """Return what runs with inputs and outputs that stay on the device; None: host and device are one."""
        return None


def device_of(request: Request | None) -> RuntimeDevice:
    """Return the device of a request; without one the CPU."""
    found = request and added.find("onnxruntime", request.get("device") or "")
    kind: type[RuntimeDevice] = found.DEVICE if found else RuntimeDevice
    return kind(request)


_SESSION_TYPES = {"float": "float32", "double": "float64"}


def described(value: Any) -> ProgramPort:
    """Return name, dtype, shape and strides (in elements) of a session's input or output."""
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    shape: list[Any] = ["?" if size is None else size for size in value.shape]
    return {
        "name": value.name,
        "dtype": _SESSION_TYPES.get(dtype, dtype),
        "shape": shape,
        "strides": _strides(shape) if all(isinstance(size, int) for size in shape) else None,
    }


def _strides(shape: list[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


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
