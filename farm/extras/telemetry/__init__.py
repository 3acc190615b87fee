"""OpenTelemetry: sends each build that has ended as one trace, where `OTEL_EXPORTER_OTLP_ENDPOINT` says.

`farm submit` takes its context from `TRACEPARENT` (W3C Trace Context), so that a build is part of its pipeline's trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from farm.extension import Extension

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.results.report import Report

LABEL = "traceparent"  # The label by which a build names the span that it belongs to.
PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables of OpenTelemetry that say where spans go; its exporter reads them, and others such as headers."""


def labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the label of a build that belongs to a trace."""
    parent = environ.get("TRACEPARENT", "")
    return {LABEL: parent} if PARENT.fullmatch(parent) else {}


def _send(farm: Farm, report: Report) -> None:
    if any(os.environ.get(name) for name in ENDPOINTS):
        from farm.extras.telemetry import otlp

        otlp.send(otlp.of_build(report, otlp.jobs_of(farm.store, report)))


extension = Extension(name="telemetry", on_finished=_send)
