"""Foreign text on pages, as a browser reads them: it adds no element, no attribute and no script."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.inert import inert
from farm.pages import drawing, job_view, page_answers
from farm.pages.job_view import AttemptLine
from tests.support.places import ROOT

HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            ["<script>", "</script>", "<img src=x onerror=x>", '"', "'", " onload=x", "<", ">", "&lt;", "&", "{{7*7}}",
             "</code>", "</svg>", "-->", "<!--", "]]>", "`", "\n", "\r", "\x00", "\x1b[31m", "\x1b[0m", "\x1b[1;2;3m",
             "\x1b[", "\x1b]8;;http://e\x07", "\u202e", "\x9b", "error: x", "== compiling ==", "javascript:x"]
        ),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)  # fmt: skip


class Seen(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.elements.append(("a comment", ()))

    def handle_decl(self, decl: str) -> None:
        self.elements.append(("a declaration", ()))

    def handle_pi(self, data: str) -> None:
        self.elements.append(("an instruction", ()))


LOOKS = re.compile("|".join(("bold", "dim", "italic", "under", "c[0-7]")))


@settings(max_examples=80, deadline=None)
@given(log=st.lists(HOSTILE, min_size=1, max_size=6).map("\n".join), wanted=HOSTILE)
def test_a_log_has_colours_and_nothing_else(log: str, wanted: str) -> None:
    for page in (job_view.page(log), job_view.search([log], wanted)):
        for stage in job_view.stages(page):
            for line in stage.lines:
                seen = Seen(str(line.markup))
                for tag, attributes in seen.elements:
                    ((name, look),) = attributes
                    assert (tag, name) == ("span", "class")
                    assert all(LOOKS.fullmatch(each) for each in str(look).split())
                assert inert(seen.text) == seen.text


def test_a_log_of_nothing_but_colours_is_shown_plain_from_some_place_on() -> None:
    """Its page took nine seconds, in which the server did nothing else."""
    lines = ["x\x1b[1m" * 2000] * 400
    shown = job_view.page("\n".join(lines), start=1).lines
    assert sum(line.markup.count("<span") for line in shown) <= job_view.STYLED
    assert all(re.sub("<[^>]*>", "", line.markup).startswith("x" * 800) for line in shown)
    assert shown[-1].markup.count("<span") <= 2


@settings(max_examples=40, deadline=None)
@given(text=HOSTILE)
def test_drawings_and_notes_hold_no_foreign_markup(text: str) -> None:
    latency = {"minimum": 1e-3, "median": 2e-3, "p90": 3e-3, "p99": 4e-3}

    def shapes(label: str) -> list[object]:
        row: Any = {"number": 1, "started_at": 5.0, "end": "lost", "phases": {label or "x": 1.0, "compiling": 8.0}}
        axis = drawing.PlotAxis(label, lambda _: label)
        drawn = (
            drawing.timeline([AttemptLine(row, 9.0)]),
            drawing.spreads([(label, latency)]),  # type: ignore[list-item]
            drawing.plot(label, [drawing.PlotPoint("/", label, label or "x", 1, 1)], axis, axis),
            page_answers.macro("drawings", "share")([("failed", 3)], label),
        )
        texts = [ElementTree.fromstring(picture).itertext() for picture in drawn]
        assert all(inert(each) == each for words in texts for each in words)
        return [[(tag, [name for name, _ in attributes]) for tag, attributes in Seen(each).elements] for each in drawn]

    assert shapes(text) == shapes("x")

    def page(words: str) -> list[str]:
        given = dict.fromkeys(("title", "detail", "hint", "namespace", "who"), words or "x")
        rendered = page_answers.render(
            "problem", base="/ui", home="/ui/x", section="", signed_in=True, menu=(), **given
        )
        return [tag for tag, _ in Seen(rendered).elements if tag != "code"]

    assert page(text) == page("x")


TEMPLATES = sorted(
    path for folder in ("pages", "extras") for path in (ROOT / "farm" / folder).glob("**/templates/*.html")
)
LINKS = {
    "base", "home", "back", "here", "id", "news.href", "other", "raw", "href", "cell.expected_link", "entry.link",
    "table.before", "table.after", "table.head", "after",
}  # fmt: skip
"""What a link may begin with: paths of the farm's own, and links that their types bound to `http`."""


CHOICE = r"\{\{ '[^']*'(?: if [\w.()]+)?(?: else '[^']*')? \}\}"
"""Words of the template's own, one of which is taken."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_put_text_only_where_it_is_escaped(path: Path) -> None:
    """Between elements, or in quotes: nowhere else does the escaping of HTML hold."""
    source = path.read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|xmlattr", source)
    bare = re.sub(r"\{%.*?%\}|\{#.*?#\}", "", source, flags=re.DOTALL)
    marked = re.sub(r"\{\{.*?\}\}", "\ue000", re.sub(CHOICE, "", bare), flags=re.DOTALL)
    for element in re.findall(r"<(?:[^<>\"]|\"[^\"]*\")*>", marked):
        assert "\ue000" not in re.sub(r'"[^"]*"', "", element), element
    for tag, attributes in Seen(marked).elements:
        assert tag not in ("script", "style", "iframe", "object", "base") or "\ue000" not in str(attributes[1:])
        assert not [name for name, _ in attributes if name.startswith("on") or name in ("style", "srcdoc")]
    assert "\ue000" not in "".join(re.findall(r"<(?:script|style)\b[^>]*>(.*?)</", marked, re.DOTALL))
    for start in re.findall(r'\b(?:href|src|action|formaction)="\{\{\s*([\w.]+)', bare):
        assert start in LINKS, f"{path.name}: a link begins with {start}: is it a path of the farm's, or bound to http?"
