"""A build's report as JUnit XML, Markdown, annotations and OpenMetrics, and a manifest's problems as SARIF.

In JUnit XML, as GitLab, Jenkins and action-junit-report read it, each cell is a test case: `<failure>` is the user's
(model, accuracy), `<error>` the farm's. Markdown is cut, and says so: GitHub drops a step's summary of more than 1 MiB
whole, and Buildkite an annotation.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from urllib.parse import quote

from farm import __version__
from farm.errors import Problem
from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import Fault, State
from farm.results.gates import OPEN, UNCHANGED, movements, sentence, sentences
from farm.results.report import BuildView, JudgedCell, Remark, Report
from farm.results.verdict import change_of, changes_of
from farm.units import alike, duration, error, grouped, named, size

_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; a compiler's log may well contain it."""


def junit_xml(report: Report, link: str = "") -> str:
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
            text = str(value).lower() if isinstance(value, bool) else str(value)
            ET.SubElement(properties, "property", name=name, value=text)


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


LIMIT = 1_000_000  # Bytes of a summary; GitHub and Buildkite take 1 MiB.
LISTED = 50  # Cells of each list; the table has all of them, while there is room.

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def markdown(report: Report, link: str = "", *, limit: int = LIMIT) -> str:
    """Return a build's report in at most `limit` bytes; `link` is where all of it can be read."""
    build, cells = report["build"], report["cells"]
    found = changes_of(cells)
    verdict = build["verdict"]
    code, text = (verdict["exit_code"], verdict["text"]) if verdict else (None, "not ended")
    name = _in_markdown(f"{build['name']} {build['id']}")
    lines = [
        f"## {'✅ passed' if code == 0 else '❌ failed'}: {f'[{name}]({link})' if link else name}",
        "",
        f"{_in_markdown(text)} (exit code {code})",
    ]
    around: list[Remark]
    around = [{"identifier": cell["identifier"], "text": text} for cell in cells for text in cell.get("around", ())]
    rows = _moved(cells, link)
    lines += _list("What else changed", around) or ["", UNCHANGED] * bool(rows)
    lines += rows
    lines += _list("New failures", found["new_failures"], by_text=False)
    lines += _list("Still failing", found["still_failing"], by_text=False)
    for title, remarks in (
        ("Not judged by gates", found["undecided"]),
        ("New to the baseline", found.get("new", [])),
        ("Fixed", found["fixed"]),
        ("No longer judged", found.get("unjudged", [])),
        ("Not in `latest`", found.get("held", [])),
        ("Better", found["improvements"]),
    ):
        lines += _list(title, remarks)
    recompiled = found["recompiled"]
    lines += ["", f"{len(found['hits'])} of {len(cells)} cells were hits."]
    lines += _list("Compiled again, because", recompiled)
    head = "\n".join(lines) + "\n"
    return _with_table(head, cells, link, limit)


def _moved(cells: Sequence[JudgedCell], link: str) -> list[str]:
    """Return a table of the numbers that are worse or better than a baseline's, or too close to tell, worst first."""
    rows = movements(cells)
    lines = [
        f"| {_linked(cell, link)} | {' | '.join(map(_in_markdown, said[:4]))} | {_in_markdown(said.verdict)} |"
        for cell, said in rows[:LISTED]
    ]
    names = ("cell", "number", "before: median (fastest to p90)", "after", "change (99 % interval)", "")
    head = ["", "### Before and after", "", f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    return [*head, *lines, *([f"\n_{len(rows) - LISTED} more._"] if len(rows) > LISTED else [])] if rows else []


def _with_table(head: str, cells: Sequence[JudgedCell], link: str, limit: int) -> str:
    names = ("cell", "state", "size", "latency", "error", "time", "sha256")
    title = f"\n### Cells\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    reserve = 200
    if len(head.encode()) + len(title.encode()) + reserve > limit:
        cut = head.encode()[: limit - reserve].decode(errors="ignore").rpartition("\n")[0]
        return f"{cut}\n\n_The rest of this summary and {len(cells)} rows are left out._\n"
    parts, room = [head, title], limit - len(head.encode()) - len(title.encode()) - reserve
    rows = sorted(cells, key=lambda cell: (cell["state"] == State.SUCCEEDED, bool(cell["hit"])))
    for number, cell in enumerate(rows):
        row = _row(cell, link)
        room -= len(row.encode())
        if room < 0:
            parts.append(f"\n_{len(rows) - number} rows are left out._\n")
            break
        parts.append(row)
    return "".join(parts)


def _row(cell: JudgedCell, link: str) -> str:
    facts = cell["facts"]
    errors = list(facts["errors"].values()) if facts else []
    state = f"{cell['state']} {cell['kind'] or ''}".rstrip()
    shared = " shared" if facts and facts["shared"] and facts["latency"] else ""
    columns = (
        _linked(cell["identifier"], link),
        _in_markdown(f"{state} as expected" if cell["as_expected"] else state),
        size(facts["program"]["size"]) if facts else "",
        duration(facts["latency"]) + shared if facts else "",
        error(max(errors, default=None)),
        "hit" if cell["hit"] else duration(cell["elapsed"]),
        f"`{facts['program']['digest'][:12]}`" if facts else "",
    )
    return f"| {' | '.join(columns)} |\n"


def _list(title: str, remarks: Sequence[Remark], *, by_text: bool = True) -> list[str]:
    """Return cells of which the same is said together; without `by_text`, also those whose numbers alone differ."""
    if not remarks:
        return []
    same = grouped(remarks, lambda remark: remark["text"]).values()
    groups = [*same] if by_text else alike(remarks, lambda remark: (remark["text"],))
    lines = []
    for group in groups[:LISTED]:
        first, names = group[0]["text"], named([each["identifier"] for each in group])
        others = " (others alike, but for numbers)" if any(each["text"] != first for each in group) else ""
        lines.append(f"- {_in_markdown(names)}: {_in_markdown(first)}{others}")
    more = [f"- and {sum(map(len, groups[LISTED:]))} more"] if len(groups) > LISTED else []
    return ["", f"### {title} ({len(remarks)})", "", *lines, *more]


def _linked(cell: str, link: str) -> str:
    return f"[{_in_markdown(cell)}]({link}/cells/{quote(cell)})" if link else _in_markdown(cell)


def _in_markdown(text: str) -> str:
    """Return text that Markdown shows as it stands, on one line: names and messages are untrusted."""
    words = "".join(character if character.isprintable() else " " for character in text).split()
    return _SPECIAL.sub(r"\\\1", " ".join(words)).replace("@", "@\u200b")


SHOWN = 10  # Errors and warnings of one step that GitHub shows, each; it drops the rest silently.
Commands = Mapping[str, Sequence[str]]  # Workflow commands of GitHub by their level, `error` or `warning`.


def github_commands(problems: Iterable[Problem]) -> list[str]:
    """Return a manifest's problems as GitHub's workflow commands, a line each."""
    found = [
        _command("error", "\n".join(filter(None, (each.message, each.hint))), each.file, each.line, col=each.column)
        for each in problems
    ]
    return bounded({"error": found}, "problems; `farm lint` lists them all")


def commands_of(cells: Sequence[JudgedCell], file: str = "") -> Commands:
    """Return what is said about a build's cells, the worst first: the farm's faults, failures, gates, then warnings.

    `file` is the manifest that they are of, as a path in the repository.
    """
    failed = _failed(cells)
    failed.sort(
        key=lambda cell: (cell["fault"] != Fault.FARM, bool(cell["facts"]), change_of(cell).effect == "still failing")
    )
    errors = [
        _of_cell("error", cell, "\n".join(filter(None, (f"{cell['kind']}: {cell['message']}", cell["advice"]))), file)
        for cell in failed
    ]
    warnings = [
        _of_cell("warning", cell, "; ".join(said), file)
        for cell in cells
        if cell["state"] == State.SUCCEEDED
        and (said := [*filter(None, [cell["warning"]]), *sentences(cell.get("compared") or [], *OPEN)])
    ]
    return {"error": errors, "warning": warnings}


def bounded(commands: Commands, rest: str) -> list[str]:
    """Return at most ten commands of each level; `rest` says where the others are."""
    lines: list[str] = []
    for level, found in commands.items():
        shown = found if len(found) <= SHOWN else found[: SHOWN - 1]
        lines += shown
        if len(found) > len(shown):
            lines.append(_command(level, f"and {len(found) - len(shown)} more {rest}"))
    return lines


def gitlab_links(build: BuildView, cells: Sequence[JudgedCell], link: str) -> Mapping[str, object]:
    """Return GitLab's annotations report: links on the job's page to the build and to its worst cells."""
    links = [(f"{build['name']} {build['id']}", link)]
    links += [
        (f"{cell['identifier']}: {cell['kind']}", f"{link}/cells/{cell['identifier']}")
        for cell in _failed(cells)[: SHOWN - 1]
    ]
    return {"farm": [{"external_link": {"label": label, "url": url}} for label, url in links]}


def _failed(cells: Sequence[JudgedCell]) -> list[JudgedCell]:
    return [cell for cell in cells if cell["state"] == State.FAILED and not cell["as_expected"]]


def _of_cell(level: str, cell: JudgedCell, message: str, file: str) -> str:
    line = int(cell.get("line") or 0) if file else 0
    return _command(level, f"{cell['identifier']}: {message}", file, line, title=cell["identifier"])


def _command(level: str, message: str, file: str = "", line: int = 0, **more: str | int) -> str:
    """Return a workflow command about a place (line and column count from 1), or about none."""
    place = {"file": file, "line": line, **more}
    properties = ",".join(f"{name}={_in_command(str(value), property=True)}" for name, value in place.items() if value)
    return f"::{level}{' ' * bool(properties)}{properties}::{_in_command(message)}"


def _in_command(text: str, *, property: bool = False) -> str:
    text = text.replace("\x1b", "").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text


_NUMBERS: Mapping[str, tuple[str, Callable[[ArtifactFacts], float | None]]] = {
    "farm_cell_latency_seconds": ("Median time of a run.", lambda facts: facts.get("latency")),
    "farm_cell_shared": (
        "1 if it was not measured alone: its time is rough.",
        lambda facts: float(facts["shared"]) if facts.get("latency") else None,
    ),
    "farm_cell_size_bytes": ("Size of the program.", lambda facts: facts["program"]["size"]),
    "farm_cell_error": (
        "Largest relative error of an output.",
        lambda facts: max((facts.get("errors") or {}).values(), default=None),
    ),
    "farm_cell_compile_seconds": ("Time of the compile.", lambda facts: facts.get("compile_seconds")),
}


def open_metrics(cells: Sequence[JudgedCell]) -> str:
    """Return the numbers of a build's cells that have a program, those that a gate refused first.

    They are for this report, not for scraping.
    """
    lines: list[str] = []
    found = [
        (cell["identifier"], cell["facts"])
        for cell in sorted(cells, key=lambda cell: cell["state"] == State.SUCCEEDED)
        if cell["facts"]
    ]
    for name, (what, number) in _NUMBERS.items():
        lines += [f"# TYPE {name} gauge", f"# HELP {name} {what}"]
        for identifier, facts in found:
            if (value := number(facts)) is not None:
                cell = re.sub(r"[^ -~]", "?", identifier).replace("\\", r"\\").replace('"', r"\"")
                lines.append(f'{name}{{cell="{cell}"}} {value:.9g}')
    return "\n".join([*lines, "# EOF"]) + "\n"


RULE = "manifest"
MOST = 5000  # Results of one run that GitHub shows.


def sarif(problems: Sequence[Problem], version: str = __version__) -> Mapping[str, object]:
    """Return the log of one run of `farm lint`; `version` is the farm's."""
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "farm lint",
                        "version": version,
                        "informationUri": "https://migraphx-farm.dev",
                        "rules": [{"id": RULE, "shortDescription": {"text": "The manifest cannot be built."}}],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(problem) for problem in problems[:MOST]],
            }
        ],
    }


def _result(problem: Problem) -> Mapping[str, object]:
    text = problem.message + (f"\n{problem.hint}" if problem.hint else "")
    text = text.replace("](", "] (")  # Else it would be a link.
    region = {"region": {"startLine": problem.line, "startColumn": max(1, problem.column)}} if problem.line else {}
    place = {"artifactLocation": {"uri": quote(PurePath(problem.file or "manifest").as_posix())}, **region}
    return {"ruleId": RULE, "level": "error", "message": {"text": text}, "locations": [{"physicalLocation": place}]}
