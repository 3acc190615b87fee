"""What CI servers get of a build: within their limits with a thousand cells, in their formats, and inert."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import JUnitXml
from markdown_it import MarkdownIt
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from farm.errors import Problem, UsageError
from farm.extras.ci import ci_formats, ci_servers
from farm.inert import inert
from farm.results.gates import UNCHANGED
from farm.results.report import BuildView
from farm.results.verdict import judge_cell, verdict_of
from farm.wire.asked import BUILD_ID
from farm.wire.checking import checked
from tests.unit.results.test_gates import against, facts, planned
from tests.unit.results.test_verdict import UNVERIFIED, expectation, failed, succeeded
from tests.unit.results.test_verdict import planned as planned_cell
from tests.unit.results.test_verdict import row as row_of

LINK = "https://farm.example/ui/ns/main/builds/b-1"
HOSTILE = "::error::x\n%0A</td><script>alert(1)</script> | @team [a](javascript:x) \x1b[31m \u202e ]]> " + "x" * 300


def cells(count: int) -> list[dict[str, Any]]:
    """Judged cells of every sort, with hostile messages and long names."""
    found = []
    for number in range(count):
        cell = {**planned(limits={"latency": 0.05}), "line": number + 1, "reason": "salt: none -> x"}
        cell["identifier"] = f"model-{number:04}-{'n' * 120}/onnxruntime-cpu/fp32/b1"
        row: dict[str, Any] = {"state": "succeeded", "facts": facts(**against(1.0, 0.99, 1.01)), "elapsed": 2.0}
        match number % 5:
            case 0:
                row = {"state": "failed", "kind": "compiler_error", "message": HOSTILE, "detail": HOSTILE, "job": "j"}
            case 1:
                row = {"state": "failed", "kind": "worker_lost", "message": "gone", "attempt": 3}
            case 2:
                row["facts"] = facts(**against(0.8, 0.79, 0.81))
            case 3:
                row |= {"hit": True, "facts": facts()}
        found.append(judge_cell(cell, row_of(**row)))
    return found


def build(found: list[dict[str, Any]]) -> dict[str, Any]:
    labels = {"commit": "abc", "team": HOSTILE}
    return {"id": "b-1", "name": "nightly", "labels": labels, "verdict": verdict_of(found)}


THOUSAND = cells(1000)


# --- GitHub and Buildkite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [ci_formats.LIMIT, 100_000, 5_000, 1_000])
def test_a_summary_stays_within_its_limit_and_says_what_is_left_out(limit: int) -> None:
    text = ci_formats.markdown({"build": build(THOUSAND), "cells": THOUSAND}, LINK, limit=limit)
    assert len(text.encode()) <= limit < 2**20
    assert re.search(r"\d+ rows are left out", text) or limit == ci_formats.LIMIT
    assert text.startswith(f"## ❌ failed: [nightly b-1]({LINK})")


def test_a_summary_of_a_thousand_cells_has_them_all_and_the_failures_first() -> None:
    text = ci_formats.markdown({"build": build(THOUSAND), "cells": THOUSAND}, LINK)
    assert all(cell["identifier"].replace("_", r"\_") in text for cell in THOUSAND)
    table = text[text.index("### Cells") :].splitlines()[4:]
    states = [line.split(" | ")[1].split()[0] for line in table]
    assert states == sorted(states)
    assert "### New failures (600)" in text
    assert text.count("\n- 200 cells (model-") == 4, "three ways to fail, and one to be better"
    own = [{**cell, "message": chr(0x4E00 + number)} for number, cell in enumerate(THOUSAND)]
    assert "- and 550 more\n" in ci_formats.markdown({"build": build(own), "cells": own}, LINK)


def test_a_summary_shows_failures_together_whose_numbers_alone_differ() -> None:
    slow = [{**THOUSAND[0], "identifier": name, "message": f"latency {name}5 ms is +3{name} %"} for name in "123"]
    text = ci_formats.markdown({"build": build(slow), "cells": slow}, LINK)
    assert "- 3 cells (1, 2, 3): " in text
    assert r"latency 15 ms is +31 % (others alike, but for numbers)" in text
    assert text.count("latency 15 ms") == 1


def test_a_summary_says_if_nothing_else_changed() -> None:
    asked = planned({"node": "n1", "latency": 0.0016, "range": [0.0015, 0.0019]}, limits={"latency": 0.05})
    found = [
        judge_cell(asked, row_of(state="succeeded", facts=facts(range=[0.0018, 0.0025], **against(0.8, 0.79, 0.81))))
    ]
    lines = ci_formats.markdown({"build": build(found), "cells": found}, LINK).splitlines()
    assert lines.index(UNCHANGED) < lines.index("### Before and after")


def test_a_summary_says_what_else_changed_and_then_what_was_before_and_is_now() -> None:
    before = {"node": "n0", "latency": 0.0016, "range": [0.0015, 0.0019], "cpu": "EPYC 9654"}
    asked = planned(before, limits={"latency": 0.05, "size": 0.05})
    measured = [against(0.8, 0.79, 0.81), against(0.95, 0.94, 0.96), against(1.2, 1.1, 1.3), against(1, 0.99, 1.01)]
    found = [
        judge_cell(asked, row_of(state="succeeded", facts=facts(range=[0.0018, 0.0025], cpu="EPYC 7763", **each)))
        for each in measured
    ]
    found = [{**cell, "identifier": name} for name, cell in zip("abcd", found, strict=True)]
    lines = ci_formats.markdown({"build": build(found), "cells": found}, LINK).splitlines()
    start = lines.index("### What else changed (8)")
    assert lines[start + 2 : start + 4] == [
        rf"- 4 cells (a, b, c, …): {each}" for each in (r"cpu EPYC 9654 -\> EPYC 7763", r"node n0 -\> n1")
    ]
    start = lines.index("### Before and after")
    assert start < lines.index("### New failures (1)")
    assert lines[start + 4 : start + 7] == [
        f"| [{name}]({LINK}/cells/{name}) | latency | 1.6 ms (1.5 ms to 1.9 ms) | 2 ms (1.8 ms to 2.5 ms) "
        f"| {said} prod's |"
        for name, said in (
            ("a", "+25.0% (+23.5% to +26.6%) | worse than"),
            ("b", "+5.3% (+4.2% to +6.4%) | too close to tell from"),
            ("c", "-16.7% (-23.1% to -9.1%) | better than"),
        )
    ]
    assert not lines[start + 7]


def test_a_summary_shows_foreign_text_as_it_stands() -> None:
    text = ci_formats.markdown({"build": build(THOUSAND), "cells": THOUSAND}, LINK)
    assert "<script>" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\<script\>" in text
    assert not re.search(r"(?<!\\)\[a\]\(", text)


def test_annotations_are_the_worst_ten_at_the_lines_of_the_manifest() -> None:
    lines = ci_formats.bounded(ci_formats.commands_of(THOUSAND, "sub/farm.yaml"), "in the summary")
    errors = [line for line in lines if line.startswith("::error")]
    warnings = [line for line in lines if line.startswith("::warning")]
    assert (len(errors), len(warnings)) == (10, 10)
    assert errors[0].startswith("::error file=sub/farm.yaml,line=2,title=model-0001-")
    assert "worker_lost" in errors[0], "the farm's own faults come first"
    assert errors[-1] == "::error::and 591 more in the summary"
    assert all("\n" not in line and "\r" not in line for line in lines)


def test_annotations_escape_what_github_reads() -> None:
    (line,) = ci_formats.github_commands([Problem("50%\nb", "a,b:c.yaml", 1)])
    assert line == "::error file=a%2Cb%3Ac.yaml,line=1::50%25%0Ab"


def test_a_speed_that_was_not_measured_alone_is_marked_in_every_format() -> None:
    for shared in (False, True):
        found = judge_cell(planned(), row_of("succeeded", facts=facts(shared=shared)))
        assert ("| 2 ms shared |" in ci_formats.markdown({"build": build([found]), "cells": [found]}, LINK)) is shared
        families = {each.name: each for each in text_string_to_metric_families(ci_formats.open_metrics([found]))}
        assert [sample.value for sample in families["farm_cell_shared"].samples] == [float(shared)]
        text = ci_formats.junit_xml({"build": {"name": "n", "id": "b-1"}, "cells": [found]})
        assert ('<property name="shared" value="true"' in text.lower()) is shared


# --- GitLab ------------------------------------------------------------------------------------------------------


def test_gitlab_gets_links_to_the_build_and_its_worst_cells() -> None:
    document: Any = ci_formats.gitlab_links(build(THOUSAND), THOUSAND, LINK)
    (links,) = document.values()
    assert len(links) == 10
    assert links[0] == {"external_link": {"label": "nightly b-1", "url": LINK}}
    assert all(set(each["external_link"]) == {"label", "url"} for each in links)


def test_metrics_are_openmetrics() -> None:
    """Each family's metadata before its samples, nothing after the end, no blank line."""
    *lines, end, last = ci_formats.open_metrics(THOUSAND).split("\n")
    assert (end, last) == ("# EOF", "")
    samples: dict[str, int] = {}
    name = ""
    for line in lines:
        if found := re.fullmatch(r"# TYPE ([a-z_]+) gauge", line):
            name = found[1]
            samples[name] = 0
        elif not line.startswith(f"# HELP {name} "):
            assert re.fullmatch(rf'{name}\{{cell="[ -!#-\[\]-~]+"\}} [0-9.e+-]+', line), line
            samples[name] += 1
    # Of every cell with a program, also of the 200 that a gate refused: those are looked at most.
    assert samples == {
        "farm_cell_latency_seconds": 600,
        "farm_cell_shared": 600,
        "farm_cell_size_bytes": 600,
        "farm_cell_error": 600,
        "farm_cell_compile_seconds": 600,
    }
    refused = {cell["identifier"] for cell in THOUSAND if cell["state"] == "failed"}
    assert {line.split('"')[1] for line in lines[2:202]} <= refused, "above all others"


# --- JUnit -------------------------------------------------------------------------------------------------------


def test_junit_of_a_thousand_cells_parses_and_counts() -> None:
    text = ci_formats.junit_xml({"build": build(THOUSAND), "cells": THOUSAND}, LINK)
    (suite,) = JUnitXml.fromstring(text.encode())
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (1000, 400, 200, 0)
    properties = {each.name: each.value for each in suite.properties()}
    assert (properties["build"], properties["label.commit"], properties["url"]) == ("b-1", "abc", LINK)


def test_junit_says_in_the_body_of_a_gate_what_was_measured() -> None:
    root = ET.fromstring(ci_formats.junit_xml({"build": build(THOUSAND), "cells": THOUSAND}, LINK))
    case = root.findall("./testsuite/testcase")[2]
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("type") == "regression"
    assert "latency is 25 % above prod's" in (failure.text or "")
    assert "y: error 0, tolerance 0.1" in (failure.text or "")
    properties = {each.get("name"): each.get("value") for each in case.findall("./properties/property")}
    assert properties["url"] == f"{LINK}/cells/{case.get('name')}"
    attempts = root.findall("./testsuite/testcase")[1].find("./properties/property[@name='attempts']")
    assert attempts is not None
    assert attempts.get("value") == "3"


def test_junit_splits_the_users_failures_from_the_farms_errors() -> None:
    cells = [
        judge_cell(planned_cell(), succeeded()),
        judge_cell(planned_cell(), failed("bad_model")),
        judge_cell(planned_cell(), failed("worker_lost")),
        judge_cell(planned_cell(expected=expectation("hang")), failed("hang")),
    ]
    text = ci_formats.junit_xml({"build": {"name": "n", "id": "b-1"}, "cells": cells})
    suite = next(iter(JUnitXml.fromstring(text.encode())))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 1)
    assert "\x1b" not in text
    assert [element.get("value") for element in ET.fromstring(text).iter("property") if element.get("name") == "key"]


def test_junit_says_what_was_not_verified() -> None:
    cell = judge_cell(planned_cell(), succeeded(UNVERIFIED))
    assert UNVERIFIED["unverified"] in ci_formats.junit_xml({"build": {"name": "n", "id": "b-1"}, "cells": [cell]})


def test_junit_has_the_elements_in_the_order_of_its_schema() -> None:
    root = ET.fromstring(ci_formats.junit_xml({"build": build(THOUSAND), "cells": THOUSAND}))
    (suite,) = root
    assert [suite[0].tag, {each.tag for each in suite[1:]}] == ["properties", {"testcase"}]
    order = ["properties", "skipped", "error", "failure"]
    for case in suite[1:]:
        tags = [order.index(each.tag) for each in case]
        assert tags == sorted(tags)
        assert len(tags) <= 2


JUNIT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"time", "skipped", "timestamp", "hostname", "id", "package", "file", "url"},
        {"testcase", "properties"},
    ),
    "testcase": ({"name"}, {"time", "classname"}, {"failure", "error", "skipped", "properties"}),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    **dict.fromkeys(("failure", "error", "skipped"), (set(), {"type", "message"}, set())),
}
"""The required attributes, further attributes and children of each element, as in `junit-10.xsd` of Jenkins' xUnit
plugin. The properties of test cases are of its JUnit plugin."""


def test_junit_of_a_thousand_cells_fits_its_schema() -> None:
    root = ET.fromstring(ci_formats.junit_xml({"build": build(THOUSAND), "cells": THOUSAND}, LINK))
    assert root.tag == "testsuites"
    for element in root.iter():
        required, further, children = JUNIT[element.tag]
        assert required <= element.attrib.keys() <= required | further, element.attrib
        assert {child.tag for child in element} <= children
        assert re.fullmatch(r"[0-9]+\.[0-9]{3}", element.get("time", "0.000"))


# --- SARIF -------------------------------------------------------------------------------------------------------


def test_sarif_has_a_file_and_a_region_for_each_problem() -> None:
    problems = [Problem(HOSTILE, "a b.yaml", 3, 7, "try"), Problem("no place", "b.yaml"), Problem("stdin", "-", 1, 0)]
    document: Any = json.loads(json.dumps(ci_formats.sarif(problems, "1.2.3")))
    (run,) = document["runs"]
    assert (document["version"], run["tool"]["driver"]["version"]) == ("2.1.0", "1.2.3")
    places = [each["locations"][0]["physicalLocation"] for each in run["results"]]
    assert places[0] == {
        "artifactLocation": {"uri": "a%20b.yaml"},
        "region": {"startLine": 3, "startColumn": 7},
    }
    assert "region" not in places[1]
    assert places[2]["region"] == {"startLine": 1, "startColumn": 1}
    assert {each["ruleId"] for each in run["results"]} == {run["tool"]["driver"]["rules"][0]["id"]}


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of an object that has nothing else, as almost every one of SARIF's is."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


ONE_OR_MORE, TEXT = {"type": "integer", "minimum": 1}, {"type": "string"}
MESSAGE = closed({"text": TEXT})
SARIF = closed(
    {"version": {"const": "2.1.0"}, "runs": {"type": "array", "items": closed(
        {"tool": closed({"driver": closed(
            {"name": TEXT},
            version=TEXT,
            informationUri={"type": "string", "format": "uri"},
            rules={"type": "array", "uniqueItems": True, "items": closed({"id": TEXT}, shortDescription=MESSAGE)},
        )})},
        columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        results={"type": "array", "items": closed(
            {"message": MESSAGE},
            ruleId=TEXT,
            level={"enum": ["none", "note", "warning", "error"]},
            locations={"type": "array", "items": closed({}, physicalLocation=closed(
                {"artifactLocation": closed({}, uri={"type": "string", "format": "uri-reference"})},
                region=closed({}, startLine=ONE_OR_MORE, startColumn=ONE_OR_MORE),
            ))},
        )},
    )}},
    **{"$schema": {"type": "string", "format": "uri"}},
)  # fmt: skip
"""What the schema of SARIF 2.1.0 says about the properties that the farm writes."""


def test_sarif_of_a_thousand_problems_fits_its_schema() -> None:
    places = [("a b.yaml", 3, 7), ("b.yaml", 0, 0), ("-", 1, 0), ("../é/c.yaml", 9, 1)]
    problems = [Problem(HOSTILE, *places[number % 4], "try" * (number % 2)) for number in range(1000)]
    document = json.loads(json.dumps(ci_formats.sarif(problems, "1.2.3")))
    jsonschema.validate(document, SARIF, format_checker=jsonschema.FormatChecker())
    assert len(document["runs"][0]["results"]) == 1000
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "runs": [{**document["runs"][0], "results": [{"ruleId": "x"}]}]}, SARIF)


def test_sarif_has_no_more_results_than_github_takes() -> None:
    document: Any = ci_formats.sarif([Problem("p", "f", 1, 1)] * 6000, "1")
    assert len(document["runs"][0]["results"]) == 5000


# --- all of them, with texts that want to be more ----------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from([HOSTILE, "[a](javascript:x)", "<img src=x>", "http://x.example", "]]>", "&a;", "| a | b |", "```",
                     'x"} 1\n# EOF\nfarm_x 1', "\\", "a\n\n# b", "![a](b)", "<https://x>", "www.x.example", "\x00",
                     "a\n::error::b", "x,line=9", "`x`", "%0A::error::x", "b-0123456789abcdef\nPATH=x", "a<<b"]),
    st.text(max_size=30),
)  # fmt: skip
CLOSED = ("id", "digest", "state", "measure")
"""Fields that the client takes only as the farm writes them, or looks up."""


def plain() -> dict[str, Any]:
    failed = judge_cell(
        {**planned(), "line": 1, "reason": "salt"},
        row_of(state="failed", kind="compiler_error", message="m", detail="d", job="j", worker="w"),
    )
    passed = judge_cell({**planned(), "line": 2, "reason": ""}, row_of(state="succeeded", facts=facts()))
    warned = judge_cell(
        {**planned(limits={"latency": 0.05}), "line": 3}, row_of("succeeded", facts=facts(**against(0.8, 0.79, 0.81)))
    )
    found = [failed, passed, warned]
    return {"build": {**build(found), "id": "b-0123456789abcdef"}, "cells": found}


def filled(document: Any, text: str, field: str = "") -> Any:
    """Return a document with this text as each of its texts, and as the name of each label and output."""
    if isinstance(document, str):
        return document if field in CLOSED else text
    if isinstance(document, list):
        return [filled(each, text, field) for each in document]
    if isinstance(document, dict):
        named = field in ("labels", "errors", "tolerance")
        return {text if named else name: filled(value, text, name) for name, value in document.items()}
    return document


COMMAND = re.compile(r"::(?:error|warning)(?: ((?:file|line|title)=[^:,]*(?:,(?:line|title)=[^:,]*)*))?::.*")
"""What GitHub reads as one command, with each property once."""


@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_no_text_of_a_report_is_more_than_text(text: str) -> None:
    report = filled(plain(), text)
    root = ET.fromstring(ci_formats.junit_xml(report, LINK))
    for element in root.iter():
        required, further, children = JUNIT[element.tag]
        assert element.attrib.keys() <= required | further and {child.tag for child in element} <= children
    assert len(list(root.iter("testcase"))) == 3

    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(ci_formats.markdown(report, LINK))
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in (*tokens, *inline)} & {"html_block", "html_inline", "image", "fence"} == set()
    links = [str(child.attrGet("href")) for child in inline if child.type == "link_open"]
    assert all(each == LINK or each.startswith(f"{LINK}/cells/") for each in links)
    assert sum(token.type == "tr_open" for token in tokens) == 4
    heads = [inside.content for head, inside in pairwise(tokens) if head.type == "heading_open"]
    assert all(each.startswith(("✅ passed: [", "❌ failed: [")) or " (" in each or each == "Cells" for each in heads)

    families = list(text_string_to_metric_families(ci_formats.open_metrics(report["cells"])))
    names = {sample.name for family in families for sample in family.samples}
    assert names <= set(ci_formats._NUMBERS) and all(len(family.samples) <= 2 for family in families)

    commands = ci_formats.bounded(ci_formats.commands_of(report["cells"], "farm.yaml"), "in the summary")
    assert len(commands) <= 3
    for line in commands:
        (shown,) = inert(line, command=True).splitlines()
        found = COMMAND.fullmatch(shown)
        assert found, shown
        assert "file=farm.yaml," in str(found[1])
    gitlab: Any = ci_formats.gitlab_links(report["build"], report["cells"], LINK)
    assert all(each["external_link"]["url"].startswith(LINK) for each in gitlab["farm"])


@settings(max_examples=40, deadline=None)
@given(message=TEXTS, hint=TEXTS, file=TEXTS)
def test_no_text_of_a_manifest_is_a_link_or_a_place_in_sarif(message: str, hint: str, file: str) -> None:
    document: Any = ci_formats.sarif([Problem(message, file, 1, 1, hint)], "1")
    jsonschema.validate(document, SARIF, format_checker=jsonschema.FormatChecker())
    (result,) = document["runs"][0]["results"]
    assert not re.search(r"\]\(", result["message"]["text"])
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == PurePath(file or "manifest").as_posix() and not urlsplit(uri).scheme


BUILT: dict[str, Any] = {
    "namespace": "main", "name": "n", "labels": {}, "state": "reported", "paused": None, "created_by": None,
    "created_at": 1.0, "ended_at": 2.0, "verdict": None, "follows": None, "followed_by": None, "retries": None,
    "counts": {}, "warnings": [],
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(TEXTS, st.from_regex(BUILD_ID), TEXTS.map("b-0123456789abcdef{}".format)))
def test_the_variables_of_a_pipeline_are_a_builds_id(text: str) -> None:
    """As GitHub, GitLab (dotenv) and a shell read them: one variable, or the farm's answer is refused."""
    try:
        id_ = checked({**BUILT, "id": text}, BuildView, "a farm")["id"]
    except UsageError:
        return
    report: Any = {**plain(), "build": {**plain()["build"], "id": id_}}
    with (
        TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        patch.chdir(folder)
        for server in ({"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": "out"}, {"GITLAB_CI": "true"}):
            ci_servers.publish(report, manifest=None, link=LINK, quiet=False, environ=server)
        for file, name in (("out", "build"), ("farm-report/build.env", "FARM_BUILD")):
            written = Path(file).read_text()
            assert written.splitlines() == written.split() == shlex.split(written) == [f"{name}={id_}"]
