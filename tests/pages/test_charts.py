"""Drawings and switches of the pages in a real browser, at three widths, in light and dark."""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path

from playwright.sync_api import expect

from farm.app import Farm
from tests.pages.conftest import DESKTOP, PHONE, TABLET, NewPage, Shown
from tests.pages.test_in_a_browser import findings
from tests.support.shown import POOL, Cell, accept, claim, failed, passed, play, register

DRAWN = tuple(os.environ.get("DRAWN", "now build gains model sweep timeline cell artifact").split())
"""The pages with drawings."""
WIDTHS = {"desktop": DESKTOP, "tablet": TABLET, "phone": PHONE}


def test_drawings_can_be_read_by_everybody(new_page: NewPage, farm: Farm, shown: Shown) -> None:
    """No serious finding of axe, no page wider than the screen; with SCREENSHOTS=FOLDER a picture of each."""
    sought = {"metric": "throughput", "max_latency": 0.03}
    sweep = accept(farm, "sweep", [Cell("net", shape=f"b{batch}", sweep=sought) for batch in (1, 2, 4, 8, 16, 32)])
    for job, claimed in claim(farm, POOL):
        if claimed.order["identifier"].startswith("net/"):
            batch = claimed.order["spec"]["batch"]
            made = passed(farm, claimed.order, claimed.key, latency=0.001 * (1 + batch**1.2 / 4))
            farm.store.jobs.finish(job, claimed.token, made)
    more = {"gains": f"{shown.paths['build']}?by=x+fp32", "sweep": f"/ui/ns/main/builds/{sweep}"}
    wrong = []
    for (width, viewport), scheme in product(WIDTHS.items(), ("light", "dark")):
        page = new_page(viewport=viewport, color_scheme=scheme)
        for name, path in {**shown.paths, **more}.items():
            if name not in DRAWN:
                continue
            page.goto(path)
            if folder := os.environ.get("SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
            wrong += [f"{name}, {width}, {scheme}: {each}" for each in findings(page)]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{name}, {width}, {scheme}: wider than the screen")
        page.close()
    assert wrong == []


def test_a_single_drawing_stands_next_to_its_table_and_no_table_is_cut_at_900_points(
    new_page: NewPage, farm: Farm
) -> None:
    register(farm)
    labels = {"commit": "4c1d0e7a990f" * 3, "ci": "https://github.com/vision/models/actions/runs/1047"}
    build = accept(farm, "vision-nightly-of-the-team", [Cell("net", precision=each) for each in ("fp32", "fp16")])
    again = accept(farm, "vision-nightly-of-the-team", [Cell("net", salt="1"), Cell("other", salt="1")], labels=labels)
    messages = "the compiler died of signal 11 (SIGSEGV) in pass fuse_mlir"
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order, message=messages) if "other" in order["identifier"] else passed(farm, order, key)
        ),
    )
    farm.build_finisher.finish(again)
    page = new_page(f"/ui/ns/main/builds/{build}", viewport={"width": 1440, "height": 900})
    places = [page.locator(name).bounding_box() or {} for name in ("#cells", "#ship")]
    assert places[0]["y"] == places[1]["y"] and places[0]["x"] + 700 < places[1]["x"]
    page.set_viewport_size(PHONE)
    places = [page.locator(name).bounding_box() or {} for name in ("#cells", "#ship")]
    assert places[0]["y"] < places[1]["y"] and places[0]["x"] == places[1]["x"]
    page.set_viewport_size({"width": 900, "height": 1180})
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.ariaLabel)"
    for path in ("builds", f"builds/{again}/cells/other/onnxruntime-cpu/fp32/b1"):
        page.goto(f"/ui/ns/main/{path}")
        assert page.locator(".wide").evaluate_all(cut) == [], path


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


def test_a_switched_matrix_is_drawn_again_while_the_build_runs(new_page: NewPage, farm: Farm) -> None:
    """The metric stays, also in the address, and the focus stays on its cell."""
    register(farm)
    build_id = accept(farm, "nightly", [Cell("net", precision=each) for each in ("fp32", "fp16")])
    page = new_page(f"/ui/ns/main/builds/{build_id}")
    page.get_by_role("link", name="throughput").click()
    expect(page).to_have_url(re.compile(r"\?by=throughput#cells$"))
    expect(page.locator("#connection")).to_contain_text("Live")
    page.locator("#matrix td > a").last.focus()
    ((job, claimed),) = claim(farm, POOL, 1)
    farm.store.jobs.finish(job, claimed.token, passed(farm, claimed.order, claimed.key, latency=0.004))
    expect(page.locator("#matrix td.compiled")).to_have_text("✓ 250")
    expect(page.locator("#matrix td > a").last).to_be_focused()
    play(farm, lambda job, order, key, number: passed(farm, order, key, latency=0.002))
    expect(page.locator("#matrix td")).to_have_text(["", "✓ 250", "✓ 500"])
    expect(page.locator("#ship")).to_have_text("Which precision of net to ship")
    farm.build_finisher.finish(build_id)
    expect(page.locator("#connection")).to_have_count(0)
    expect(page.locator("#matrix td.compiled").last).to_have_text("✓ 500")


def test_a_timeline_goes_on_while_its_build_runs(new_page: NewPage, farm: Farm) -> None:
    register(farm)
    build_id = accept(farm, "nightly", [Cell("net"), Cell("other")])
    page = new_page(f"/ui/ns/main/builds/{build_id}/timeline")
    expect(page.locator("#connection")).to_contain_text("Live")
    ((job, claimed),) = claim(farm, POOL, 1)
    expect(page.locator("#timeline g title")).to_have_count(1)
    expect(page.locator("#longest + div")).to_contain_text("so far")
    farm.store.jobs.finish(job, claimed.token, failed(farm, claimed.order))
    expect(page.locator("#lost + div")).to_contain_text("✗ failed compiler_error")
    play(farm, lambda job, order, key, number: passed(farm, order, key))
    farm.build_finisher.finish(build_id)
    expect(page.locator("#connection")).to_have_count(0)
    expect(page.locator("#timeline g title")).to_have_count(2)


def test_a_table_is_sorted_by_a_click_and_its_address_shows_the_same(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"], java_script_enabled=False)
    page.get_by_role("link", name="list", exact=True).click()
    page.get_by_label("State").select_option("compiled")
    page.get_by_label("Target").select_option("migraphx/gfx942")
    page.get_by_role("button", name="Filter").click()
    medians = page.locator("#listed td:nth-child(3)")
    expect(medians).to_have_count(28)
    for order, text in (("ascending", "35.9 µs"), ("descending", "20 ms")):
        page.get_by_role("columnheader", name="Median").get_by_role("link").click()
        expect(page.locator(f"th[aria-sort={order}]")).to_contain_text("Median")
        expect(medians.first).to_have_text(text)
    expect(page.locator("#listed")).to_be_in_viewport()
    found = medians.all_inner_texts()
    page.reload()
    assert medians.all_inner_texts() == found
    page.goto(f"{shown.paths['history']}?days=30")
    page.locator("#past").get_by_role("link", name="Median").click()
    expect(page.locator("#past th[aria-sort=ascending]")).to_have_text("Median ↑")
    page.locator("select[name=days]").select_option("7")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#past th[aria-sort=ascending]")).to_have_text("Median ↑")
    page.goto(shown.paths["builds"])
    page.get_by_role("columnheader", name="Name").get_by_role("link").press("Enter")
    expect(page.locator("#main tbody tr").first).to_contain_text("audio-weekly")


def test_ids_and_commands_are_copied_and_rows_are_reached_by_keys(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"], permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name=f"Copy {shown.build}").press("Enter")
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_have_count(1)
    assert page.evaluate("navigator.clipboard.readText()") == shown.build
    page.get_by_role("button", name="Copy farm retry").press("Enter")
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('farm retry b-')")
    page.keyboard.press("/")
    expect(page.get_by_role("textbox", name="Cell")).to_be_focused()
    page.keyboard.type("/jk?")
    expect(page.get_by_role("textbox", name="Cell")).to_have_value("/jk?")
    page.get_by_role("textbox", name="Cell").blur()
    for keys, row in (("j", 0), ("j", 1), ("k", 0)):
        page.keyboard.press(keys)
        expect(page.locator("#matrix tbody tr").nth(row).get_by_role("link").first).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("previous row")
    assert findings(page) == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.goto(shown.paths["artifact"])
    expect(page.locator("#lineage + dl")).not_to_contain_text(shown.key)
    page.get_by_role("button", name=f"Copy {shown.key[:20]}").press("Enter")
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_have_count(1)
    assert page.evaluate("navigator.clipboard.readText()") == shown.key
