"""Where ONNX Runtime runs a program, and what is different there. The CPU is `RuntimeDevice` itself; extensions derive
others.

An extension names its module in `DeviceKind.module`; the module has the class under the name `DEVICE`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import added, onnxruntime_tuning
from .onnxruntime_providers import providers_of

if TYPE_CHECKING:
    from .documents import Placement, Request
    from .onnxruntime_tuning import Candidate


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

    def __init__(self, request: Request | None) -> None:
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

    def refuse_without(self, session: Any) -> None:
        """Refuse a session that was made without the device's provider. Raises RequestFailed."""

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


def device_of(request: Request | None) -> RuntimeDevice:
    """Return the device of a request; without one the CPU."""
    found = request and added.find("onnxruntime", request.get("device") or "")
    kind: type[RuntimeDevice] = found.DEVICE if found else RuntimeDevice
    return kind(request)


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
