"""Drawings and switches of the pages in a real browser, at three widths, in light and dark."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

from playwright.sync_api import expect

from tests.pages.conftest import DESKTOP, PHONE, NewPage, Shown
from tests.pages.test_in_a_browser import findings

TABLET = {"width": 820, "height": 1180}
WIDTHS = {"desktop": DESKTOP, "tablet": TABLET, "phone": PHONE}


def test_drawings_can_be_read_by_everybody(new_page: NewPage, shown: Shown) -> None:
    """No serious finding of axe, no page wider than the screen; with SCREENSHOTS=FOLDER a picture of each."""
    wrong = []
    for (width, viewport), scheme in product(WIDTHS.items(), ("light", "dark")):
        page = new_page(viewport=viewport, color_scheme=scheme)
        for name in ("build", "model"):
            page.goto(shown.paths[name])
            if folder := os.environ.get("SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
            wrong += [f"{name}, {width}, {scheme}: {each}" for each in findings(page)]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{name}, {width}, {scheme}: wider than the screen")
        page.close()
    assert wrong == []


def test_a_point_is_reached_by_keyboard_and_leads_to_its_cell(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"], java_script_enabled=False)
    point = page.locator(".choices figure").nth(3).get_by_role("link", name="int8: ")
    expect(point.locator("title")).to_contain_text("on the Pareto front")
    point.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("resnet50/migraphx-gfx942/int8/b8")
    page.go_back()
    page.locator("#tradeoffs").get_by_role("link", name="yolo11n").click()
    expect(page.locator("#ship")).to_have_text("Which precision of yolo11n to ship")
    refused = page.locator(".choices figure").nth(2).get_by_role("link", name="refused")
    expect(refused.locator("text")).to_have_text("int8 ✗")
