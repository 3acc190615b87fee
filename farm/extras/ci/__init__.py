"""CI servers: builds as JUnit XML, Markdown, annotations and OpenMetrics, and manifests' problems as SARIF."""

from __future__ import annotations

from farm.extension import Extension

extension: Extension[object] = Extension(name="ci", routes=["farm.extras.ci.junit_route:router"])
