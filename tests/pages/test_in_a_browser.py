"""The pages in a real browser: they can be read, reached by keyboard, printed, and go on by themselves."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from farm.app import Farm
from farm.pages import build_pages
from tests.chaos.proxy import Proxy
from tests.pages.conftest import DESKTOP, PHONE, TABLET, NewPage, Shown
from tests.support.shown import (
    GPU,
    POOL,
    Cell,
    accept,
    claim,
    failed,
    matrix_of,
    only_recorded,
    passed,
    play,
    register,
)

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")

LOOKS = {
    "desktop-light": {"viewport": DESKTOP, "color_scheme": "light"},
    "desktop-dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "tablet-dark": {"viewport": TABLET, "color_scheme": "dark"},
    "phone-light": {"viewport": PHONE, "color_scheme": "light"},
    "phone-dark": {"viewport": PHONE, "color_scheme": "dark"},
}


def findings(page: Page) -> list[str]:
    """What axe finds that is serious, each with the places."""
    page.evaluate(AXE)
    found: dict[str, Any] = page.evaluate("axe.run()")
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_can_be_read_by_everybody(new_page: NewPage, shown: Shown, look: str) -> None:
    """No serious finding of axe, no page wider than the screen, and on a desktop no table that is cut.

    With SCREENSHOTS=FOLDER there is a picture of each.
    """
    page = new_page(**LOOKS[look])
    folder = os.environ.get("SCREENSHOTS")
    wrong = []
    for name, path in {**shown.paths, "sign-in": "/ui/sign-in", "not-found": "/ui/ns/main/nothing"}.items():
        answer = page.goto(path)
        if not answer or answer.status >= (405 if name == "not-found" else 400):
            wrong.append(f"{name}: {answer and answer.status}")
        if folder:
            page.screenshot(path=Path(folder) / f"{name}-{look}.png", full_page=name not in ("log",))
            if name == "history":
                page.screenshot(path=Path(folder) / f"{name}-top-{look}.png")
        wrong += [f"{name}: {each}" for each in findings(page)]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"{name}: wider than the screen")
        if page.locator("tr > button").count():
            wrong.append(f"{name}: a button stands between two cells")
        if "phone" in look:
            lists = (
                "all => all.filter(each => each.querySelector('table.list') && each.scrollWidth > each.clientWidth + 1)"
            )
            wrong += [
                f"{name}: {each}" for each in page.locator(".wide").evaluate_all(f"{lists}.map(each => each.ariaLabel)")
            ]
        if look == "desktop-light":
            tables = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.ariaLabel)"
            wrong += [f"{name}: {each} is cut" for each in page.locator(".wide").evaluate_all(tables)]
    if page.viewport_size == TABLET:
        page.goto(shown.paths["compare"])
        cut = page.get_by_role("region", name="slower", exact=True).evaluate(
            "each => each.scrollWidth > each.clientWidth + 1"
        )
        assert not cut, "what changed is on the screen"
    if page.viewport_size == PHONE:
        page.goto(shown.paths["now"])
        newest = page.get_by_role("region", name="Newest builds")
        expect(newest.get_by_role("link", name=re.compile("^b-")).first).to_be_in_viewport(ratio=1, timeout=5000)
        expect(newest.get_by_text("58 of 60 cells succeeded")).to_be_in_viewport(ratio=1, timeout=5000)
        titles = newest.locator("td").evaluate_all("all => all.map(each => getComputedStyle(each, '::before').content)")
        assert titles[:3] == ['"State "', '"Build "', '"Verdict "']
    assert wrong == []


MANY = ["bert-base", "clip-vit", "convnext", "deeplab", "detr", "efficientnet", "gpt2", "llama-decode", "llama-prefill"]


def test_counts_of_a_large_build_can_be_read_by_everybody(
    new_page: NewPage, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a build of more than 1,000 cells is shown: counted by model and target, which lead to the cells."""
    for where, name, number in (
        (build_pages.build_view, "PAGE", 60),
        (build_pages, "GROUPED", 20),
        (build_pages, "MODELS", 6),
    ):
        monkeypatch.setattr(where, name, number)
    register(farm)
    build = accept(farm, "everything-nightly", matrix_of(MANY))
    for pool in (POOL, GPU):
        for number, (job, claimed) in enumerate(claim(farm, pool, 40)):
            fails = number % 17 == 3
            made = failed(farm, claimed.order) if fails else only_recorded(claimed.order, claimed.key)
            if number < 36:
                farm.store.jobs.finish(job, claimed.token, made)
    wrong = []
    for look, options in LOOKS.items():
        page = new_page(f"/ui/ns/main/builds/{build}", **options)
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"large-{look}.png", full_page=True)
        wrong += [f"{look}: {each}" for each in findings(page)]
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"{look}: wider than the screen")
    assert wrong == []
    page.get_by_role("region", name="Cells by model and target").get_by_role("link", name="✗ 1").first.click()
    expect(page.get_by_role("region", name="Matrix").locator("td.failed")).to_have_count(1)


def test_signing_in_leads_to_the_page_that_was_asked_for(new_page: NewPage, farm: Farm, shown: Shown) -> None:
    page = new_page()
    page.context.clear_cookies()
    page.goto(shown.paths["workers"])
    expect(page).to_have_url(re.compile(r"/ui/sign-in\?next="))
    page.get_by_role("textbox", name="Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("does not know this token")
    page.get_by_role("textbox", name="Token").fill(farm.settings.api_token.get_secret_value())
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Workers and pools")
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


def test_everything_is_reached_by_keyboard(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"])
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    controls = page.locator("main").locator("a[href], input, select, button, summary")
    wanted = controls.filter(visible=True).count()
    reached: set[str] = set()
    for _ in range(2 * wanted + 60):
        page.keyboard.press("Tab")
        place = page.evaluate(
            """() => { const all = [...document.querySelectorAll("main a[href], main input, main select, main button,"
                 + " main summary")]; const place = all.indexOf(document.activeElement);
               return place < 0 ? "" : place + getComputedStyle(document.activeElement).outlineStyle }"""
        )
        if place:
            assert not place.endswith("none"), "the focus is seen"
            reached.add(place)
        if len(reached) >= wanted:
            break
    assert len(reached) >= wanted


def test_filters_are_in_the_url(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"])
    page.get_by_label("State").select_option("failed")
    page.get_by_label("Target").select_option("migraphx/gfx942")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile(r"look=failed.*target=migraphx%2Fgfx942"))
    expect(page.locator("#matrix td > a")).to_have_count(2)
    page.reload()
    expect(page.locator("#matrix td > a")).to_have_count(2)
    page.get_by_role("link", name="Clear").click()
    expect(page.locator("#matrix td > a")).to_have_count(60)


def test_the_log_opens_at_the_first_error(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["job"])
    page.get_by_role("link", name="Log, at the first error").click()
    expect(page).to_have_url(re.compile(r"/log#error$"))
    line = page.locator("li.wrong")
    expect(line).to_contain_text("unsupported layout")
    expect(line).to_be_in_viewport()


def test_a_line_of_any_log_of_a_build_is_found_and_leads_to_its_place(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"], java_script_enabled=False)
    page.get_by_role("link", name="search its logs").click()
    page.get_by_label("Text").fill("unsupported LAYOUT")
    page.get_by_role("textbox", name="Cell").fill("whisper-tiny")
    page.keyboard.press("Enter")
    expect(page.locator("h2 a")).to_have_text(["whisper-tiny/migraphx-gfx942/int8/b8"] * 2)
    page.get_by_role("region", name=re.compile("attempt 2")).get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"attempt=2.*#L\d+$"))
    expect(page.locator("li:target")).to_contain_text("unsupported layout")
    expect(page.locator("li:target")).to_be_in_viewport()


def test_the_ways_to_use_an_artifact_open_without_a_script(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["artifact"], java_script_enabled=False)
    expect(page.get_by_text("farm fetch resnet50 --target migraphx/gfx942").first).to_be_visible()
    for title, text in {
        "Python": "migraphx.load",
        "C++": "migraphx::load",
        "Driver": "perf",
        "Triton": "TYPE_FP32",
    }.items():
        page.locator("summary", has_text=title).first.click()
        expect(page.locator("details[open] code").filter(has_text=text)).to_be_visible()
    page.locator("summary", has_text="C++").click()
    page.get_by_role("link", name="Link to this").click()
    expect(page.locator("details[open] code")).to_contain_text("migraphx::load")


def test_pages_print_without_their_controls(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"])
    page.emulate_media(media="print")
    expect(page.locator("header")).to_be_hidden()
    expect(page.locator("form.filters").first).to_be_hidden()
    expect(page.locator("#matrix")).to_be_visible()


def test_a_year_of_a_cell_is_a_drawing_and_a_week_may_be_drawn_alone(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["history"], java_script_enabled=False)
    expect(page.locator("#chart svg .newest")).to_contain_text("ms")
    marks = ["rocm7.1 → rocm7.2", "driver 6.12.12 → 6.14.0", "+11 %"]
    expect(page.locator("#chart svg .mark")).to_have_text(marks)
    assert page.locator("#chart svg .point").count() > 100
    page.locator("select[name=days]").select_option("7 days")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("h1 + p")).to_contain_text("history of 7 days until")
    assert 1 < page.locator("#chart svg .point").count() < 10
    expect(page.locator("#chart svg .band"), "what was measured before is known").to_be_visible()


def test_a_history_prints_in_ink(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["history"])
    page.emulate_media(media="print", color_scheme="dark")
    expect(page.locator("#chart .drawing")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.verdict')).backgroundColor") == "rgb(230, 243, 233)"


def test_a_failure_is_acknowledged_by_keyboard(new_page: NewPage, shown: Shown) -> None:
    page = new_page(shown.paths["build"])
    page.get_by_role("link", name="I know this failure").press("Enter")
    page.get_by_label("What is known").fill("quantized too coarsely, bug 12")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/known#"))
    expect(page.locator("main")).to_contain_text("bug 12")
    page.get_by_role("button", name=re.compile("Forget yolo11n")).click()
    expect(page.locator("main")).not_to_contain_text("bug 12")


# --- live -----------------------------------------------------------------------------------------------------------


def test_an_open_build_goes_on_by_itself_to_its_verdict(new_page: NewPage, farm: Farm) -> None:
    register(farm)
    build_id = accept(farm, "nightly", [Cell(f"net-{number}") for number in range(6)])
    page = new_page(f"/ui/ns/main/builds/{build_id}")
    expect(page.locator("#matrix td.queued")).to_have_count(6)
    expect(page.locator("#connection")).to_contain_text("Live")
    page.evaluate(
        """() => { window.bare = 0; const rows = document.getElementById("running-now");
             new MutationObserver(() => { bare += rows.querySelectorAll("td:not([data-title])").length })
               .observe(rows, {childList: true}) }"""
    )
    (job, claimed), (other, more) = claim(farm, POOL, 2)
    farm.store.jobs.renew(claimed.token, job, phase="compiling")
    expect(page.locator("#running-now tr")).to_have_count(2)
    expect(page.locator("#running-now")).to_contain_text("compiling")
    expect(page.locator("#running-now td[data-title=Phase]")).to_have_count(2)
    assert page.evaluate("bare") == 0, "a phone shows titles in place of columns"
    for each, token in ((job, claimed), (other, more)):
        farm.store.jobs.finish(each, token.token, passed(farm, token.order, token.key))
    expect(page.locator("#matrix td.compiled")).to_have_count(2)
    expect(page.locator('[data-look="compiled"]')).to_have_text("2")
    expect(page.locator("#headline")).to_contain_text("2 of 6 cells are done")
    play(farm, lambda job, order, key, number: passed(farm, order, key))
    farm.build_finisher.finish(build_id)
    expect(page.locator("#verdict")).to_contain_text("6 of 6 cells succeeded")
    expect(page.locator("#connection")).to_have_count(0)


def test_a_cell_is_followed_to_its_end(new_page: NewPage, farm: Farm) -> None:
    register(farm)
    build_id = accept(farm, "nightly", [Cell("net"), Cell("other")])
    (job, claimed), (other, more) = claim(farm, POOL, 2)
    identifier = claimed.order["identifier"]
    page = new_page(f"/ui/ns/main/builds/{build_id}/cells/{identifier}")
    expect(page.locator("#connection")).to_contain_text("Live")
    farm.store.jobs.renew(claimed.token, job, phase="compiling")
    expect(page.locator(".verdict")).to_contain_text("compiling")
    farm.store.jobs.finish(other, more.token, passed(farm, more.order, more.key))
    farm.store.jobs.finish(job, claimed.token, passed(farm, claimed.order, claimed.key))
    expect(page.locator(".verdict.compiled")).to_have_count(1)
    expect(page.locator("#speed")).to_have_count(1)
    expect(page.locator("#connection")).to_have_count(0)


def test_a_page_misses_nothing_and_repeats_nothing_when_its_proxy_dies(new_page: NewPage, farm: Farm, url: str) -> None:
    """The connection is reset ten times, each time while something happens."""
    register(farm)
    names = [f"net-{number:02}" for number in range(10)]
    build_id = accept(farm, "nightly", [Cell(name) for name in names])
    address = httpx.URL(url)
    with Proxy(address.host, address.port or 0) as proxy:
        page = new_page(base_url=f"http://127.0.0.1:{proxy.port}")
        page.add_init_script(
            """window.seen = []; const real = EventSource.prototype.addEventListener;
               EventSource.prototype.addEventListener = function (kind, heard) {
                 real.call(this, kind, (event) => {
                   if (kind === "news") seen.push([event.lastEventId, Object.keys(JSON.parse(event.data).cells)]);
                   heard(event); }); };"""
        )
        page.goto(f"/ui/ns/main/builds/{build_id}")
        expect(page.locator("#connection")).to_contain_text("Live")
        for number in range(10):
            ((job, claimed),) = claim(farm, POOL, 1)
            proxy.drop()
            farm.store.jobs.finish(job, claimed.token, passed(farm, claimed.order, claimed.key))
            expect(page.locator("#matrix td.compiled")).to_have_count(number + 1)
        seen = page.evaluate("seen")
        farm.build_finisher.finish(build_id)
        expect(page.locator("#verdict")).to_contain_text("10 of 10 cells succeeded")
    ids = [position for position, _ in seen]
    assert len(ids) == len(set(ids)), "no message twice"
    assert {name.partition("/")[0] for _, cells in seen for name in cells} == set(names)


def test_without_a_script_a_reload_shows_the_news(new_page: NewPage, farm: Farm) -> None:
    register(farm)
    build_id = accept(farm, "nightly", [Cell("net")])
    page = new_page(f"/ui/ns/main/builds/{build_id}", java_script_enabled=False)
    expect(page.locator("#connection")).to_contain_text("Reload this page")
    play(farm, lambda job, order, key, number: passed(farm, order, key))
    page.reload()
    expect(page.locator("#matrix td.compiled")).to_have_count(1)
