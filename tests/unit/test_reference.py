"""Documents: generated pages are what the code says now, links lead somewhere, and people write no more than agreed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import reference
from tests.support.places import ROOT

MOST_WORDS = 50_000
"""Words that people write in README, CONTRIBUTING, CHANGELOG and `docs/`. Who raises it says why in the commit."""

ELSEWHERE = {reference.DOCS / name for name in reference.ELSEWHERE}
DOCUMENTS = sorted({*ROOT.glob("*.md"), *reference.DOCS.rglob("*.md")} - ELSEWHERE)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "run: make docs"


def test_people_write_no_more_words_than_agreed() -> None:
    assert sum(reference.words().values()) <= MOST_WORDS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", document.read_text(), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = (document.parent / name).resolve() if name else document
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page.read_text())):
            broken.append(target)
    assert broken == []


def anchors(text: str) -> set[str]:
    """Return what the headings of a page are called in links to it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
