"""How ONNX Runtime runs a published program as the farm verified and measured it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farm.runner.onnxruntime_providers import device_of, environment_of, providers_of
from farm.wire.program import Sidecar


class Serving(NamedTuple):
    """What a session is made with."""

    providers: list[tuple[str, dict[str, str]]]
    """In order, with their options. Without them a program in fp32 computes in TF32 on NVIDIA's cards."""
    environment: dict[str, str]
    """Of the whole process, before its first session."""
    level: str
    """Of the graph's optimisation: `basic`, `extended`, `all`."""
    threads: int | None
    spinning: bool | None


def serving_of(sidecar: Sidecar) -> Serving:
    """Return how to run a program of ONNX Runtime's."""
    found: Mapping[str, Any] = sidecar["tuning"]["session"] or {}
    precision, options = sidecar["spec"].get("precision", ""), sidecar["spec"].get("options", {})
    device = device_of(sidecar["device"]["arch"], sidecar["toolchain"])
    return Serving(
        providers_of(device, precision, options, found),
        environment_of(device, precision),
        str(found.get("level") or ("basic" if device == "tensorrt" else "all")),
        int(found["threads"]) if found.get("threads") else None,
        bool(found["spinning"]) if found.get("spinning") is not None else None,
    )
