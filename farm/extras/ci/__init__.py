"""CI servers: builds as JUnit XML, Markdown, annotations and OpenMetrics, and manifests' problems as SARIF."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.extension import Extension

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.results.report import Report


def _keep_junit(farm: Farm, report: Report) -> None:
    """Keep a build's report as JUnit XML next to it."""
    from farm.artifacts.storage import build_key
    from farm.extras.ci.ci_formats import junit_xml

    build = report["build"]
    farm.artifacts.put_object(build_key(build["namespace"], build["id"], "junit.xml"), junit_xml(report).encode())


extension = Extension(name="ci", routes=["farm.extras.ci.junit_route:router"], on_finished=_keep_junit)
