"""A build's report as JUnit XML: `<failure>` is the user's (model, accuracy), `<error>` the farm's.

The format is the one that GitLab, Jenkins and action-junit-report read: one test case for every cell.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from farm.jobs.state import Fault, State
from farm.results.gates import sentence
from farm.results.report import JudgedCell, Report

_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; a compiler's log may well contain it."""


def render(report: Report, link: str = "") -> str:
    """Return the XML text for a build's report; `link` is the build's page."""
    build, cells = report["build"], report["cells"]
    suite = ET.Element("testsuite", name=f"{build['name']} {build['id']}", tests=str(len(cells)))
    of_build = [("build", build["id"]), ("url", link or None)]
    of_build += [(f"label.{name}", value) for name, value in (build.get("labels") or {}).items()]
    _add_properties(suite, of_build)
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for cell in cells:
        case = ET.SubElement(
            suite, "testcase", classname=cell["model"], name=cell["identifier"], time=f"{cell['elapsed'] or 0:.3f}"
        )
        _add_properties(case, [*_properties(cell), ("url", f"{link}/cells/{cell['identifier']}" if link else None)])
        outcome = _outcome(cell)
        if outcome:
            tag, counter, message = outcome
            counts[counter] += 1
            ET.SubElement(case, tag, message=message, type=cell["kind"] or cell["state"]).text = _body(cell)
    for name, number in counts.items():
        suite.set(name, str(number))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return _UNPRINTABLE.sub("?", ET.tostring(root, encoding="unicode", xml_declaration=True))


def _add_properties(element: ET.Element, found: Sequence[tuple[str, object]]) -> None:
    properties = ET.SubElement(element, "properties")
    for name, value in found:
        if value is not None:
            ET.SubElement(properties, "property", name=name, value=_text(value))


def _body(cell: JudgedCell) -> str:
    """Return what stands inside a failure: the compiler's last words, or the numbers that a gate judged."""
    facts, tolerance = cell["facts"], cell["gate"]["tolerance"]
    errors = [
        f"{name}: error {error:.3g}, tolerance {tolerance.get(name, tolerance.get('*'))}"
        for name, error in ((facts.get("errors") or {}) if facts else {}).items()
    ]
    compared = [sentence(row) for row in cell.get("compared") or []]
    advice = [f"try: {cell['advice']}"] if cell["advice"] else []
    return cell["detail"] or "\n".join([*errors, *compared, *advice])


def _properties(cell: JudgedCell) -> list[tuple[str, object]]:
    facts = cell["facts"]
    found: list[tuple[str, object]] = [("key", cell["key"]), ("hit", cell["hit"]), ("job", cell["job"])]
    found += [("attempts", cell["attempt"] or None), ("worker", cell["worker"]), ("reason", cell.get("reason") or None)]
    if facts:
        found += [
            ("program", facts["program"]["digest"]),
            ("latency", facts.get("latency")),
            ("shared", (facts["shared"] or None) if facts.get("latency") else None),
            ("weak", facts.get("weak")),
            ("unverified", facts.get("unverified") or None),
            ("toolchain", facts.get("toolchain")),
            ("node", facts.get("node") or None),
        ]
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _outcome(cell: JudgedCell) -> tuple[str, str, str] | None:
    message = f"{cell['kind']}: {cell['message']}"
    if cell["state"] == State.CANCELLED:
        return "skipped", "skipped", "cancelled"
    if cell["as_expected"]:
        return "skipped", "skipped", f"failed as expected ({cell['expected_reason']}): {message}"
    if cell["state"] == State.FAILED:
        return ("error", "errors", message) if cell["fault"] == Fault.FARM else ("failure", "failures", message)
    if cell["expected"]:
        return "failure", "failures", "succeeded, though the manifest expects it to fail: remove the `expected` entry"
    return None
