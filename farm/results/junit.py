"""A build's report as JUnit XML: `<failure>` is the user's (model, accuracy), `<error>` the farm's.

The format is the one that GitLab, Jenkins and action-junit-report read: one test case for every cell.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from farm.jobs.state import Fault, State
from farm.results.report import JudgedCell, Report

_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; a compiler's log may well contain it."""


def render(report: Report) -> str:
    """Return the XML text for a build's report."""
    build, cells = report["build"], report["cells"]
    suite = ET.Element("testsuite", name=f"{build['name']} {build['id']}", tests=str(len(cells)))
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for cell in cells:
        case = ET.SubElement(
            suite, "testcase", classname=cell["model"], name=cell["identifier"], time=f"{cell['elapsed'] or 0:.3f}"
        )
        properties = ET.SubElement(case, "properties")
        for name, value in _properties(cell):
            ET.SubElement(properties, "property", name=name, value=_UNPRINTABLE.sub("?", _text(value)))
        outcome = _outcome(cell)
        if outcome:
            tag, counter, message = outcome
            counts[counter] += 1
            element = ET.SubElement(
                case, tag, message=_UNPRINTABLE.sub("?", message), type=cell["kind"] or cell["state"]
            )
            element.text = _UNPRINTABLE.sub("?", cell["detail"])
    for name, number in counts.items():
        suite.set(name, str(number))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def _properties(cell: JudgedCell) -> list[tuple[str, object]]:
    facts = cell["facts"]
    found: list[tuple[str, object]] = [("key", cell["key"]), ("hit", cell["hit"]), ("job", cell["job"])]
    if facts:
        found += [
            ("program", facts["program"]["digest"]),
            ("latency", facts.get("latency")),
            ("weak", facts.get("weak")),
            ("unverified", facts.get("unverified") or None),
        ]
    return [(name, value) for name, value in found if value is not None]


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
