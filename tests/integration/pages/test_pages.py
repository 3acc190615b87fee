"""The pages, over a real server, store and object storage: what they show, to whom, and how little they trust."""

from __future__ import annotations

import asyncio
import hashlib
import html
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

import anyio
import httpx
import pytest

from farm.api.build_routes import WATCHERS
from farm.app import Farm
from farm.artifacts.refs import Cells, Refs
from farm.artifacts.s3_bucket import Bucket
from farm.artifacts.sidecar import facts, validate
from farm.artifacts.storage import build_key
from farm.artifacts.tokens import LINK_SECONDS, Role, Tokens, link_code
from farm.builds import reading
from farm.builds.known_failures import today
from farm.builds.reading import JobLog
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.errors import NotFound, StoreUnavailable
from farm.extras.webhooks.hooks import Webhooks
from farm.jobs.state import FailureKind, Outcome
from farm.pages import build_pages, job_pages, job_view, page_reading
from farm.pages.page_reading import BuildPages, EventHub
from farm.pages.quantities import size
from farm.results.gates import UNCHANGED
from farm.results.verdict import CellLine
from farm.serving.server import create_app
from farm.settings import Settings
from tests.support import shown
from tests.support.api_farm import POOL, finished, serving
from tests.support.helpers import wait_until
from tests.support.shown import Cell, accept, failed, matrix_of, only_recorded, passed, play, register


@pytest.fixture
def browser(farm: Farm, url: str) -> Iterator[httpx.Client]:
    """Somebody who has signed in."""
    with httpx.Client(base_url=url, timeout=60, follow_redirects=True, headers={"Accept": "text/html"}) as client:
        register(farm)
        token = farm.settings.api_token.get_secret_value()
        answer = client.post("/ui/sign-in", data={"token": token, "next": "/ui/"}, headers={"Origin": url})
        assert answer.status_code == 200, answer.text
        yield client


def build_page(browser: httpx.Client, build_id: str, query: str = "") -> str:
    answer = browser.get(f"/ui/ns/main/builds/{build_id}{query}")
    assert answer.status_code == 200, answer.text
    return answer.text


def words(page: str) -> str:
    """What a page says, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def everything_passes(farm: Farm) -> shown.Decide:
    return lambda job, order, key, number: passed(farm, order, key, job=job)


# --- who may look ---------------------------------------------------------------------------------------------------

PAGES = [
    "/ui/",
    "/ui/ns/main",
    "/ui/ns/main/builds",
    "/ui/ns/main/builds/b-0123456789abcdef",
    "/ui/ns/main/builds/b-0123456789abcdef/events",
    "/ui/ns/main/builds/b-0123456789abcdef/log?q=error",
    "/ui/ns/main/builds/b-0123456789abcdef/cells/net/onnxruntime-cpu/fp32/b1",
    "/ui/ns/main/compare/b-0123456789abcdef/b-0123456789abcdef",
    "/ui/ns/main/jobs/j-1",
    "/ui/ns/main/jobs/j-1/log",
    "/ui/ns/main/jobs/j-1/log/raw",
    f"/ui/ns/main/artifacts/{'ab' * 32}",
    f"/ui/ns/main/artifacts/{'ab' * 32}/log",
    "/ui/ns/main/history/net/onnxruntime-cpu/fp32/b1",
    "/ui/ns/main/across?name=nightly",
    "/ui/ns/main/known",
    "/ui/ns/main/automation",
    "/ui/ns/main/workers",
    "/ui/ns/main/models",
    "/ui/ns/main/storage",
]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_a_token(url: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "farm=wrong"}):
        assert httpx.get(url + path, headers=headers, timeout=60).status_code == 401
    asked = httpx.get(url + path, headers={"Accept": "text/html"}, timeout=60)
    assert asked.status_code == 303
    assert asked.headers["location"].startswith("/ui/sign-in?next=/ui/")


def test_the_front_door_leads_to_the_pages(url: str) -> None:
    assert httpx.get(url, timeout=60).headers["location"] == "/ui/"


def test_signing_in_sets_a_cookie_that_scripts_and_other_sites_do_not_get(farm: Farm, url: str) -> None:
    token = farm.settings.api_token.get_secret_value()
    form = {"token": token, "next": "/ui/ns/main/workers"}
    answer = httpx.post(f"{url}/ui/sign-in", data=form, headers={"Origin": url}, timeout=60)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/ns/main/workers")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and "path=/" in cookie
    assert "secure" not in cookie, "loopback has no TLS"
    elsewhere = {"Host": "farm.example", "Origin": "https://farm.example"}
    behind_proxy = httpx.post(f"{url}/ui/sign-in", data=form, headers=elsewhere, timeout=60)
    assert behind_proxy.headers["set-cookie"].startswith("__Host-farm=")
    assert "; Secure" in behind_proxy.headers["set-cookie"]


def test_a_link_signs_in_once_and_on_this_machine_alone(farm: Farm, url: str) -> None:
    def follow(code: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{url}/ui/sign-in", params={"once": code, "next": "/ui/"}, headers=headers, timeout=60)

    secret = farm.settings.api_token.get_secret_value()
    assert not farm.tokens.remembers(secret), "`farm up` asks with its token before it shows a link"
    code = link_code(secret)
    assert secret not in code
    elsewhere = follow(code, Host="farm.example")
    assert "set-cookie" not in elsewhere.headers
    assert "works only in a browser on the farm's own machine" in html.unescape(elsewhere.text)
    looked_at = httpx.head(f"{url}/ui/sign-in", params={"once": code, "next": "/ui/"}, timeout=60)
    assert (looked_at.status_code, "set-cookie" in looked_at.headers) == (200, False), "a look spends nothing"
    assert httpx.get(f"{url}/ui/", cookies=follow(code).cookies, timeout=60).headers["location"] == "/ui/ns/main"
    now = int(time.time())
    restarted = Tokens(farm.artifacts)
    assert not restarted.spend(link_code(secret, now + LINK_SECONDS - 2), secret), "who knows if it was used before?"
    assert restarted.spend(link_code(secret, now + LINK_SECONDS), secret)
    for refused in (
        code,
        link_code("guessed"),
        link_code(secret, now - 1),
        link_code(secret, now + 3600),
        "x",
        "²" * 74,
    ):
        answer = follow(refused)
        assert (answer.status_code, "set-cookie" in answer.headers) == (200, False), refused
        assert "This link was used, or is older than ten minutes." in answer.text


@pytest.mark.parametrize(
    "after",
    ["https://evil.example/", "//evil.example", "/ui/\\evil", "/ui//evil.example", "javascript:1", "/v1/builds"],
)
def test_signing_in_leads_to_no_other_site(farm: Farm, url: str, after: str) -> None:
    form = {"token": farm.settings.api_token.get_secret_value(), "next": after}
    answer = httpx.post(f"{url}/ui/sign-in", data=form, headers={"Origin": url}, timeout=60)
    assert answer.headers["location"] == "/ui/"


def test_a_wrong_token_is_refused_and_not_shown(url: str) -> None:
    answer = httpx.post(f"{url}/ui/sign-in", data={"token": "open-sesame"}, headers={"Origin": url}, timeout=60)
    assert answer.status_code == 401
    assert "does not know this token" in answer.text
    assert "open-sesame" not in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("path", ["/ui/sign-in", "/ui/sign-out"])
@pytest.mark.parametrize("headers", [{}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
def test_a_form_of_another_site_is_refused(farm: Farm, url: str, path: str, headers: dict[str, str]) -> None:
    form = {"token": farm.settings.api_token.get_secret_value()}
    answer = httpx.post(url + path, data=form, headers=headers, timeout=60)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_signing_out_forgets_the_token(url: str, browser: httpx.Client) -> None:
    assert browser.get("/ui/ns/main/builds").url.path == "/ui/ns/main/builds"
    browser.post("/ui/sign-out", headers={"Origin": url})
    assert browser.get("/ui/ns/main/builds").url.path == "/ui/sign-in"


def test_a_revoked_token_opens_no_page(farm: Farm, url: str) -> None:
    secret = farm.tokens.create("guest", Role.READER, "main")
    cookie = {"Cookie": f"farm={secret}"}
    assert httpx.get(f"{url}/ui/ns/main/builds", headers=cookie, timeout=60).status_code == 200
    farm.tokens.revoke("guest")
    assert httpx.get(f"{url}/ui/ns/main/builds", headers=cookie, timeout=60).status_code == 401


def test_namespaces_are_kept_apart(farm: Farm, url: str, browser: httpx.Client) -> None:
    build_id = accept(farm, "secret-plan", [Cell("net")])
    secret = farm.tokens.create("fork", Role.READER, "fork")
    with httpx.Client(base_url=url, headers={"Cookie": f"farm={secret}"}, timeout=60) as other:
        assert other.get("/ui/ns/main/builds").status_code == 403
        assert other.get(f"/ui/ns/main/builds/{build_id}").status_code == 403
        for path in (f"/ui/ns/fork/builds/{build_id}", f"/ui/ns/fork/builds/{build_id}/events"):
            assert other.get(path).status_code == 404
        assert "secret-plan" not in other.get("/ui/ns/fork/builds").text
        (job,) = farm.store.jobs.hand_out(shown.POOL.name, 1)
        assert other.get(f"/ui/ns/fork/jobs/{job[0]}/log").status_code == 404
    assert "secret-plan" in browser.get("/ui/ns/main/builds").text


def test_the_administrator_looks_at_every_namespace(farm: Farm, browser: httpx.Client) -> None:
    assert "namespace fork" in words(browser.get("/ui/ns/fork/builds").text)


def test_only_administrators_see_tokens_and_garbage(farm: Farm, url: str, browser: httpx.Client) -> None:
    secret = farm.tokens.create("guest", Role.READER, "main")
    seen = httpx.get(f"{url}/ui/ns/main/storage?garbage=yes", headers={"Cookie": f"farm={secret}"}, timeout=60).text
    assert "guest" not in seen.partition("<main")[2] and "is named by" not in words(seen)
    assert "guest" in browser.get("/ui/ns/main/storage").text
    counted = words(browser.get("/ui/ns/main/storage?garbage=yes").text)
    assert "to be freed nothing: each blob is named by a document, or less than a day old" in counted
    accept(farm, "nightly", [Cell("net"), Cell("other")])
    assert "main 0 2 –" in words(browser.get("/ui/ns/main/storage").text) and "Changes today" not in seen


def test_readers_change_nothing_of_what_is_known(farm: Farm, url: str, browser: httpx.Client) -> None:
    form = {"cell": "net/x/fp32/b1", "kind": "compiler_error", "reason": "a bug", "until": str(today()), "link": ""}
    for role, status in ((Role.READER, 403), (Role.SUBMITTER, 303)):
        headers = {"Cookie": f"farm={farm.tokens.create(role.name.lower(), role, 'main')}", "Origin": url}
        for path in ("known", "known/forget"):
            answer = httpx.post(f"{url}/ui/ns/main/{path}", data=form, headers=headers, timeout=60)
            assert answer.status_code == status, (role, path)
            known = [entry["by"] for entry in farm.failures.acknowledged("main")]
            assert known == (["submitter"] if (path, status) == ("known", 303) else [])


def test_what_programs_take_is_counted_on_demand_and_a_shared_one_once(farm: Farm, browser: httpx.Client) -> None:
    accept(farm, "nightly", [Cell("net"), Cell("other")])
    play(farm, lambda job, order, key, number: passed(farm, order, key))
    facts = farm.store.index.get_many("main", sorted(farm.store.index.keys("main")))
    first, other = facts.values()
    farm.store.index.put("main", "ab" * 32, {**first, "key": "ab" * 32})
    both = size(first["program"]["size"] + other["program"]["size"])
    assert "3 programs in the index unfinished" in words(browser.get("/ui/ns/main/storage").text)
    counted = words(browser.get("/ui/ns/main/storage?garbage=yes").text)
    assert f"3 programs in the index: {both} unfinished" in counted
    assert f"main 3 {both} 0 –" in counted


def test_a_speed_that_was_not_measured_alone_is_marked_wherever_it_is_shown(farm: Farm, browser: httpx.Client) -> None:
    def crowded(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        sidecar = shown.sidecar_of(farm, order, key, job=job, latency=0.002)
        sidecar["measurements"]["shared"] = True
        farm.artifacts.publish("main", sidecar)
        farm.store.index.put("main", key, facts(validate(sidecar)))
        return Outcome.success(facts(validate(sidecar)))

    build_id = accept(farm, "nightly", [Cell("net")])
    play(farm, crowded)
    farm.build_finisher.finish(build_id)
    (cell,) = farm.build_reader.report("main", build_id)["cells"]
    assert "≈2.00" in words(build_page(browser, build_id))
    for place in (
        f"builds/{build_id}/cells/{cell['identifier']}",
        f"artifacts/{cell['key']}",
        f"history/{cell['identifier']}",
        "models/net",
    ):
        assert "≈2 ms" in words(browser.get(f"/ui/ns/main/{place}").text), place


# --- what pages are made of -----------------------------------------------------------------------------------------


def test_the_page_of_automation_shows_triggers_and_sends_a_message_again(
    farm: Farm, url: str, browser: httpx.Client
) -> None:
    message = shown.automate(farm, "nightly", "b-0123456789abcdef", error=HOSTILE)
    page, path = browser.get("/ui/ns/main/automation"), "/ui/ns/main/automation/replay"
    said = words(page.text)
    assert (
        "✗ The last runs of 2 triggers: 1 made no build." in said
        and "schedule 17 3 * * 1-5 Europe/Berlin" in said
        and "b-01234567 of version 2" in said
    )
    assert "no build: <script>" in said and "<script>alert" not in page.text
    assert "✗ failed build.finished" in said and "it answered 500" in said

    turned = words(browser.get("/ui/ns/main/automation?sort.triggers=-When&sort.deliveries=Made").text)
    assert turned.index("toolchain onnxruntime/cpu") < turned.index("schedule 17 3"), "sorted by its address"

    form = {"webhook": "ci", "message": message}
    reader = {"Cookie": f"farm={farm.tokens.create('guest', Role.READER, 'main')}"}
    unseen = words(httpx.get(f"{url}/ui/ns/main/automation", headers=reader, timeout=60).text)
    assert "Administrators see them." in unseen and "ci.example" not in unseen and "17 3 * * 1-5" in unseen
    for headers in ({}, {"Origin": "https://evil.example"}, {"Origin": url, **reader}):
        with_cookie = {} if "Cookie" in headers else {"Cookie": f"farm={browser.cookies.get('farm')}"}
        answer = httpx.post(url + path, data=form, headers={**with_cookie, **headers}, timeout=60)
        assert answer.status_code == 403, headers
    assert Webhooks(farm).delivery("main", "ci", message)["state"] == "failed"
    answer = browser.post(path, data=form, headers={"Origin": url})
    assert str(answer.url) == f"{url}/ui/ns/main/automation?webhook=ci#{message}"
    assert "· waiting build.finished" in words(answer.text)
    assert browser.get("/ui/ns/main/automation?webhook=gone").status_code == 404


def test_no_page_has_anything_inline_or_from_elsewhere(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net"), Cell("other")])
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order) if "other" in order["identifier"] else passed(farm, order, key)
        ),
    )
    job = farm.build_reader.cells("main", build_id)[1]["job"]
    key = farm.build_reader.cells("main", build_id)[0]["facts"]["key"]
    for path in [
        "builds", f"builds/{build_id}", f"builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1", f"jobs/{job}",
        f"jobs/{job}/log", f"artifacts/{key}", "workers", "models", "storage", "history/net/onnxruntime-cpu/fp32/b1",
        "across?name=nightly", "known", "automation", "",
    ]:  # fmt: skip
        answer = browser.get(f"/ui/ns/main/{path}")
        assert answer.status_code == 200, (path, answer.text)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?! src=)|javascript:", answer.text), path
        assert not re.search(r"""(src|href|action)=["'](https?:)?//""", answer.text), path


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*7}}\u202e\x1b[31m"


def test_hostile_text_stays_text_on_every_page(farm: Farm, browser: httpx.Client) -> None:
    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        log = f"{HOSTILE}\nerror: {HOSTILE}\n".encode()
        return failed(farm, order, message=HOSTILE, detail=HOSTILE, log=log)

    labels = {"team": HOSTILE, HOSTILE[:40]: "x"}
    build_id = accept(farm, HOSTILE, [Cell("net")], labels=labels, created_by=HOSTILE, warnings=[HOSTILE])
    play(farm, ends)
    farm.build_finisher.finish(build_id)
    job = farm.build_reader.cells("main", build_id)[0]["job"]
    for path in (
        "builds", f"builds/{build_id}", f"builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1", f"jobs/{job}",
        f"jobs/{job}/log", f"builds?name={quote(HOSTILE)}", "builds?label=<script>",
        f"builds/{build_id}?text=%3Cscript%3E&model=%22%3E%3Cscript%3E", f"jobs/{job}/log?q=%3Cscript%3E",
        f"builds/{build_id}/log?q=%3Cscript%3E",
        "builds/%3Cscript%3E", "models?ref=%3Cscript%3Ealert", "compare/b-0/%3Cscript%3E",
    ):  # fmt: skip
        page = browser.get(f"/ui/ns/main/{path}").text
        assert "<script>" not in page and "<img" not in page, path
        assert "\u202e" not in page and "\x1b" not in page, path
        assert "49" not in re.findall(r">(\d+)[\u202e<]", page), path


def test_a_raw_log_is_text_in_every_browser(farm: Farm, browser: httpx.Client) -> None:
    accept(farm, "nightly", [Cell("net")])
    play(farm, lambda job, order, key, number: failed(farm, order, log=b"<script>alert(1)</script>"))
    job = farm.build_reader.cells("main", "@latest")[0]["job"]
    answer = browser.get(f"/ui/ns/main/jobs/{job}/log/raw")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_menu_says_to_which_of_its_entries_a_page_belongs(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    pages = {"": "Now", "known": "Now", "builds": "Builds", f"builds/{build_id}": "Builds", "models": "Models"}
    for path, name in {**pages, "workers": "Workers", "storage": "Storage"}.items():
        page = browser.get(f"/ui/ns/main/{path}").text
        assert re.findall(r'aria-current="page">([^<]+)<', page) == [name], path
    assert "aria-current" not in browser.get("/ui/sign-in").text


def test_static_files_are_kept_by_browsers_under_their_version(url: str, browser: httpx.Client) -> None:
    page = browser.get("/ui/ns/main/builds").text
    (path,) = re.findall(r'href="(/ui/static/farm\.css\?v=\w+)"', page)
    answer = httpx.get(url + path, timeout=60)
    assert answer.headers["content-type"].startswith("text/css") and "immutable" in answer.headers["cache-control"]
    assert httpx.get(f"{url}/ui/static/..%2fparts.html", timeout=60).status_code == 404


@pytest.mark.parametrize(
    "path", ["ns/main/nothing", "ns/main/builds/b-0", "ns/UPPER/builds", "nothing", "ns/main/jobs/J"]
)
def test_what_is_not_there_is_a_page_that_says_so(browser: httpx.Client, path: str) -> None:
    answer = browser.get(f"/ui/{path}")
    assert answer.status_code == 404
    assert "<h1>Not" in answer.text


def test_the_history_of_a_cell_has_a_page(farm: Farm, browser: httpx.Client) -> None:
    for number, seconds in enumerate((0.002, 0.00201, 0.003)):
        build_id = accept(farm, "nightly", [Cell("net", salt=str(number))])
        play(farm, lambda job, order, key, number, seconds=seconds: passed(farm, order, key, latency=seconds))
        farm.build_finisher.finish(build_id)
    cell = browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1").text
    (path,) = re.findall(r'href="(/ui/ns/main/history/[^"]+)"', cell)
    page = browser.get(path).text
    assert "slower than the noise of those before explains" in words(page)
    assert page.count("<circle") == 3 and "<polyline" in page and "1.8 ms to 2.2 ms" in page
    for script in re.findall(r'src="(/ui/static/[^"]+)"', page):
        assert browser.get(script).headers["content-type"].startswith("text/javascript")
    before = (today() - timedelta(days=1)).isoformat()
    assert "No build of this time had this cell" in browser.get(path, params={"until": before}).text
    assert "No build of this time had this cell" in browser.get("/ui/ns/main/history/other/x").text


def test_what_matters_most_is_on_one_page(farm: Farm, browser: httpx.Client) -> None:
    assert "Nothing has been built yet" in words(browser.get("/ui/").text)
    for broken in (False, True):
        build_id = accept(farm, "nightly", [Cell("net", salt=str(broken)), Cell("other")])
        play(
            farm,
            lambda job, order, key, number, broken=broken: (
                failed(farm, order) if broken and "net" in order["identifier"] else passed(farm, order, key)
            ),
        )
        farm.build_finisher.finish(build_id)
    accept(farm, "weekly", [Cell("later")])
    page = browser.get("/ui/")
    said = words(page.text)
    assert page.url.path == "/ui/ns/main"
    assert "✗ nightly: 1 of 2 cells succeeded, 1 failed. Look at it" in said
    assert f"nightly ✗ failed {build_id[:10]} just now 1 of 2 cells succeeded, 1 failed 1 newly failed" in said
    assert "weekly" in said and "0 of 1 cell done, 1 waiting" in said and "1 job for 6 slots of onnxruntime-cpu" in said


def test_the_first_page_says_what_the_farm_saved(farm: Farm, browser: httpx.Client) -> None:
    assert "What the farm saved" not in words(browser.get("/ui/ns/main").text)
    ids = []
    for number in range(3):
        ids.append(accept(farm, "nightly", [Cell("net"), Cell("other", salt=str(number == 2))]))
        play(farm, everything_passes(farm))
        farm.build_finisher.finish(ids[-1])
    accept(farm, "weekly", [Cell("later")])
    page = browser.get("/ui/ns/main").text
    slots = sum(worker["slots"] for worker in farm.store.workers.list(""))
    assert "50 % of 6 cells were hits, which saved 24.3 s of compiling." in words(page)
    assert f"Now 1 job waits for {slots} slots of {len(farm.store.workers.list(''))} workers." in words(page)
    assert re.findall('class="dot-link good" href="/ui/ns/main/builds/([^"]+)"', page) == ids, "the oldest first"
    assert "by day" not in page, "one day is not a trend"
    report = farm.build_reader.report("main", ids[0])
    earlier = {**report["build"], "id": "b-" + "0" * 16, "ended_at": report["build"]["ended_at"] - 5 * 86_400}
    farm.build_index.add({**report, "build": earlier})
    page = browser.get("/ui/ns/main").text
    assert 'aria-label="hit rate by day"' in page and page.count("<circle") == 4
    assert f"{today() - timedelta(days=5):%m-%d}: 0 %, 2 cells</title>" in page
    assert "not read yet" not in page
    farm.artifacts.put_object(build_key("main", "b-" + "1" * 16, "report.json"), b"{}")
    farm.build_index._unread.clear()
    assert "which saved 24.3 s of compiling (1 build not read yet)." in words(browser.get("/ui/ns/main").text)


def test_builds_stand_next_to_each_other(farm: Farm, browser: httpx.Client) -> None:
    ids = []
    for number, seconds in enumerate((0.002, 0.00202, 0.003)):
        cells = [Cell(name, salt=str(number)) for name in ("moves", "stays")] + [Cell("breaks", salt=str(number))]
        ids.append(accept(farm, "nightly", [*cells, Cell("new")] if number else cells))
        play(
            farm,
            lambda job, order, key, number, seconds=seconds, build=number: (
                failed(farm, order)
                if "breaks" in order["identifier"] and build == 2
                else passed(farm, order, key, latency=seconds if "moves" in order["identifier"] else 0.002)
            ),
        )
        farm.build_finisher.finish(ids[-1])
    page = browser.get("/ui/ns/main/across?name=nightly").text
    assert ['id="across"' in page, page.count('scope="row"')] == [True, 2], "what is the same is left out"
    said = words(page)
    assert "2 cells are worse in the last build" in said and "▲ +49 %" in said
    assert "Left out: 1 cell that is the same in all builds, 1 cell that only some builds have." in said
    (everything,) = re.findall(r'href="([^"]+)">Show all cells', page)
    assert browser.get(f"/ui/ns/main/across{html.unescape(everything)}").text.count('scope="row"') == 4
    third = browser.get("/ui/ns/main/compare", params={"left": ids[1], "right": ids[2], "third": ids[0]})
    assert third.url.path == "/ui/ns/main/across" and re.findall(r"b-[0-9a-f]{8}(?=<)", third.text) == [
        each[:10] for each in ids
    ]
    ids.append(accept(farm, "nightly", [Cell("stays", salt="cancelled"), Cell("new")]))
    farm.builds.cancel("main", ids[-1])
    farm.build_finisher.finish(ids[-1])
    said = words(browser.get(f"/ui/ns/main/across?build={ids[-2]}&build={ids[-1]}").text)
    assert "1 cell that passed in the build before did not end in the last one; nothing else is worse." in said
    assert browser.get("/ui/ns/main/across?name=nothing").status_code == 404
    assert browser.get("/ui/ns/main/across?build=b-zz").status_code == 404


def test_earlier_attempts_have_their_logs(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        kind = FailureKind.COMPILER_CRASH
        return failed(farm, order, kind=kind, log=f"== compiling ==\nerror: try {number}\n".encode())

    play(farm, ends)
    job = farm.build_reader.cells("main", build_id)[0]["job"]
    attempts = farm.jobs.get("main", str(job))["attempts"]
    assert len(attempts) > 1
    page = browser.get(f"/ui/ns/main/jobs/{job}").text
    for one in attempts:
        (path,) = re.findall(rf'href="([^"#]+attempt={one["number"]})#error"', page)
        assert f"error: try {one['number']}" in browser.get(path).text
        assert browser.get(path.replace("/log?", "/log/raw?")).text.endswith(f"try {one['number']}\n")
    assert f"error: try {attempts[-1]['number']}" in browser.get(f"/ui/ns/main/jobs/{job}/log").text
    assert browser.get(f"/ui/ns/main/jobs/{job}/log?attempt=9").status_code == 404


# --- builds ---------------------------------------------------------------------------------------------------------


def test_the_list_is_filtered_by_its_url_and_paged(farm: Farm, browser: httpx.Client) -> None:
    ids = [accept(farm, "nightly", [Cell("net")], labels={"team": "vision"}) for _ in range(55)]
    other = accept(farm, "weekly", [Cell("other")], created_by="ann")
    page = browser.get("/ui/ns/main/builds")
    assert page.text.count('class="id"') == 50
    (older,) = re.findall(r'rel="next" href="([^"]+)"', page.text)
    rest = browser.get(f"/ui/ns/main/builds{html.unescape(older)}").text
    shown_ids = re.findall(r'title="(b-[0-9a-f]{16})">(b-[0-9a-f]{8})</a>', page.text + rest)
    assert sorted(shown_ids) == sorted((each, each[:10]) for each in [*ids, other])
    for query in ("name=week", "by=ann", "state=open&name=weekly"):
        assert re.findall(r'title="(b-\w+)">', browser.get(f"/ui/ns/main/builds?{query}").text) == [other], query
    assert other not in browser.get("/ui/ns/main/builds?label=team=vision").text
    assert "No build fits" in browser.get("/ui/ns/main/builds?label=team=audio").text


def test_tables_are_sorted_and_paged_by_the_address(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names by the numbers in them, what was not measured last either way; filters, order and place stay together."""
    monkeypatch.setattr(build_pages, "LISTED", 2)
    latencies = {"net2": 0.004, "net10": 0.001, "net1": 0.009}
    models = [*latencies, "other"]
    build_id = accept(farm, "nightly10", [Cell(model) for model in models])
    accept(farm, "nightly2", [Cell("more", "migraphx/gfx942")])

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        latency = latencies.get(order["identifier"].partition("/")[0])
        return passed(farm, order, key, latency=latency) if latency else failed(farm, order)

    shown._play(farm, POOL, ends)

    def names(path: str) -> list[str]:
        return re.findall(r"<a [^>]+>(\w+)/onnx[^<]+</a></td><td><span", browser.get(f"/ui/ns/main/{path}").text)

    cells = f"builds/{build_id}?by=list"
    assert names(cells) == models[:2]
    for order, wanted in {
        "Cell": ["net1", "net2", "net10", "other"],
        "Median": ["net10", "net2", "net1", "other"],
        "-Median": ["net1", "net2", "net10", "other"],
        "Nothing": models,
    }.items():
        assert names(f"{cells}&sort.cells={order}") == wanted[:2], order
        assert names(f"{cells}&sort.cells={order}&first.cells=3") == wanted[2:], order
    page = browser.get(f"/ui/ns/main/{cells}&text=net&sort.cells=Median").text
    (after,) = re.findall(r'rel="next" href="([^"]+)"', page)
    assert names(f"builds/{build_id}{html.unescape(after)}") == ["net1"]
    (turned,) = re.findall(r'aria-sort="ascending"><a href="([^"]+)"', page)
    assert names(f"builds/{build_id}{html.unescape(turned)}") == ["net1", "net2"]
    assert '<input type="hidden" name="sort.cells" value="Median">' in page, "a filter keeps the order"
    for place in ("0", "9", "-1", "x", "9" * 30):
        assert browser.get(f"/ui/ns/main/{cells}&first.cells={place}").status_code == 200, place
    listed = browser.get("/ui/ns/main/builds?sort=-Name").text
    assert re.findall(r'class="prose">(nightly\d+)', listed) == ["nightly10", "nightly2"]
    pools = browser.get("/ui/ns/main/workers?sort.pools=-Slots&sort.workers=-Worker").text
    assert re.findall(r'scope="row"[^>]*>([^<]+)', pools) == [shown.GPU.name, POOL.name, "w1", "n2-gpu", "n1-cpu"]
    assert "n1-cpu" not in words(browser.get("/ui/ns/main/workers?text=gfx942").text)


def test_every_page_with_a_table_sorts_it_by_its_address(farm: Farm, browser: httpx.Client) -> None:
    builds = []
    for number, latencies in enumerate([(0.001, 0.002), (0.004, 0.003), (0.006, 0.008)]):
        speeds = dict(zip(("net10", "net2"), latencies, strict=True))
        builds.append(accept(farm, "nightly", [Cell(model, salt=str(number)) for model in speeds]))
        play(
            farm,
            lambda _, order, key, __, s=speeds: passed(farm, order, key, latency=s[order["identifier"].split("/")[0]]),
        )
        farm.build_finisher.finish(builds[-1])
    for tag in ("v10", "v2"):
        Refs(farm.artifacts).move("main", tag, lambda cells: cells)
    for day, cell in enumerate(("net10/a/fp32/b1", "net2/a/fp32/b1")):
        known = {
            "cell": cell,
            "kind": "accuracy",
            "reason": "a bug",
            "until": str(today() + timedelta(days=day + 1)),
            "link": "",
        }
        farm.failures.acknowledge("main", {**known, "by": "ann", "at": 1.0})

    def found(path: str, pattern: str) -> list[str]:
        return re.findall(pattern, browser.get(f"/ui/ns/main/{path}").text)

    nets, compare, across = r">(net\d+)/[^<]*</a>", f"compare/{builds[0]}/{builds[2]}?", "across?name=nightly&all=yes"
    past = "history/net10/onnxruntime-cpu/fp32/b1?days=30&sort.past"
    for path, pattern, wanted in (
        (f"{compare}sort.slower=Cell", nets, ["net2", "net10"]),
        (f"{compare}sort.slower=-Change (99 %25)", nets, ["net10", "net2"]),
        (f"{across}&sort=Cell", nets, ["net2", "net10"]),
        (f"{across}&sort={builds[1]}", nets, ["net2", "net10"]),
        (f"{across}&sort=-{builds[1]}", nets, ["net10", "net2"]),
        ("known?sort=Cell", nets, ["net2", "net10"]),
        ("known?sort=-Until", nets, ["net2", "net10"]),
        ("known?sort=Until", nets, ["net10", "net2"]),
        ("storage?sort.refs=Ref", r'ref=(v\d+)"', ["v2", "v10"]),
        ("storage?sort.refs=-Ref", r'ref=(v\d+)"', ["v10", "v2"]),
        (f"{past}=Median", r'n">([\d.]+) ms</td>\n<td', ["1", "4", "6"]),
        (f"{past}=-Median", r'n">([\d.]+) ms</td>\n<td', ["6", "4", "1"]),
        ("known?text=net2&sort=Cell", r'hidden" name="sort" value="(\w+)"', ["Cell"]),
        (f"{past}=Node", r'hidden" name="sort.past" value="(\w+)"', ["Node"]),
        (f"{across}&sort=Cell", r'hidden" name="sort" value="(\w+)"', ["Cell"]),
        ("known?text=net2", nets, ["net2"]),
        ("models", "aria-sort", []),
    ):  # fmt: skip
        assert found(path, pattern) == wanted, path
    assert set(found("storage", r'"\?sort\.(\w+)=')) >= {"refs", "namespaces"}
    assert "days=30&amp;sort.past=Median#past" in browser.get(f"/ui/ns/main/{past}=Node").text, "the time stays"


def test_what_only_uploads_is_shown_apart_from_what_runs(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", matrix_of(["net"], targets=["onnxruntime/cpu"], shapes=["b1", "b8"])[:2])
    (_, _), (job, first) = shown.claim(farm, POOL, 2)
    alone = '<li class="quiet" hidden>of those that run <b data-look="uploading">0</b>'
    assert alone in build_page(browser, build_id)
    assert farm.store.jobs.renew(first.token, job, phase="uploading", left=True) == "ok"
    page = words(browser.get("/ui/ns/main/workers").text)
    assert "1 running, 1 uploading, 0 waiting" in page
    (pool,) = [each for each in farm.store.workers.pools() if each["name"] == POOL.name]
    assert f"{POOL.name} {pool['live_workers']} {pool['slots']} 1 , 1 uploading 0" in page
    # A busy server shows for a moment what it has read before.
    wait_until(lambda: "of those that run 1 only upload" in words(build_page(browser, build_id)))
    assert "0 of 2 cells done, 0 waiting" in words(browser.get("/ui/ns/main").text), "and says of none that it runs"


def test_a_build_that_failed_as_expected_is_not_red_in_the_list(farm: Farm, browser: httpx.Client) -> None:
    known = {"kind": "compiler_error", "reason": "a bug", "until": None}
    build_id = accept(farm, "nightly", [Cell("net", expected=known), Cell("other", "migraphx/gfx942")])
    shown._play(farm, POOL, lambda job, order, key, number: failed(farm, order))
    for ends in (False, True):
        if ends:
            play(farm, everything_passes(farm))
            farm.build_finisher.finish(build_id)
        page = browser.get("/ui/ns/main/builds").text
        assert '<td class="n">1</td>' in page and "n bad" not in page
        (failures,), (expected,) = (
            re.findall(rf'<rect class="{look}"[^>]* width="([0-9.]+)%?"', page) for look in ("failed", "expected")
        )
        assert (float(failures), float(expected)) == (0, 50)


def test_a_build_is_compared_with_one_whose_plan_is_gone(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = accept(farm, "nightly", [Cell("breaks")])
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(before)
    read = farm.build_reader.read_plan

    def gone(namespace: str, build_id: str) -> Any:
        if build_id == before:
            raise NotFound("its plan is gone")
        return read(namespace, build_id)

    monkeypatch.setattr(farm.build_reader, "read_plan", gone)
    after = accept(farm, "nightly", [Cell("breaks", salt="new")])
    play(farm, lambda job, order, key, number: failed(farm, order))
    farm.build_finisher.finish(after)
    assert f"Since {before[:10]}" in words(build_page(browser, after))


@pytest.mark.parametrize("partial", [{"only": ["breaks/*"]}, {"retries": "b-0123456789abcdef"}])
def test_a_build_is_compared_with_the_newest_whole_one(
    farm: Farm, browser: httpx.Client, partial: dict[str, Any]
) -> None:
    cells = [Cell("breaks"), Cell("stays")]
    whole = accept(farm, "nightly", cells)
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(whole)
    part = accept(farm, "nightly", [Cell("stays", salt="part")], **partial)
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(part)
    after = accept(farm, "nightly", [cell._replace(salt="new") for cell in cells])
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order) if "breaks" in order["identifier"] else passed(farm, order, key)
        ),
    )
    farm.build_finisher.finish(after)
    said = words(build_page(browser, after))
    assert f"Since {whole[:10]}" in said
    assert "1 newly failed breaks/onnxruntime-cpu/fp32/b1" in said


def test_a_build_says_what_got_worse_first(farm: Farm, browser: httpx.Client) -> None:
    cells = [Cell(name) for name in ("breaks", "slows", "mends", "quickens", "stays")]
    before = accept(farm, "nightly", cells, labels={"commit": "4c1d0e7a990f"})
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order)
            if "mends" in order["identifier"]
            else passed(farm, order, key, latency=0.004 if "quickens" in order["identifier"] else 0.002, driver="6.12")
        ),
    )
    farm.build_finisher.finish(before)
    after = accept(farm, "nightly", [cell._replace(salt="new") for cell in cells])
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order)
            if "breaks" in order["identifier"]
            else passed(farm, order, key, latency=0.003 if "slows" in order["identifier"] else 0.00201, driver="6.14")
        ),
    )
    farm.build_finisher.finish(after)
    page = build_page(browser, after)
    said = words(page)
    assert "4 of 5 cells succeeded, 1 failed" in said
    assert "1 newly failed breaks/onnxruntime-cpu/fp32/b1 compiler_error" in said
    assert "1 slower slows/onnxruntime-cpu/fp32/b1 2 ms → 3 ms, +50 %" in said
    assert "1 fixed mends/" in said and "1 faster quickens/" in said
    assert page.index("newly failed") < page.index('id="matrix"')
    assert re.search(r"Compare with the build of \w+ \d+ \w+ \d+:\d+ \(4c1d0e7\) UTC", said), (
        "builds of one minute differ"
    )
    assert "▲ +50 %" in said, "the matrix marks it too"
    assert f'href="/ui/ns/main/compare/{before}/{after}#slower"' in browser.get("/ui/ns/main").text
    compared = words(browser.get(f"/ui/ns/main/compare/{before}/{after}").text)
    assert "1 cell that passed before fails now, 1 got slower" in compared
    spread = "2 ms (1.88 ms to 2.24 ms) 3 ms (2.82 ms to 3.36 ms)"
    assert f"slows/onnxruntime-cpu/fp32/b1 ▲ +50.0% {spread} History of slows" in compared
    other = "driver 6.12 -> 6.14: 2 cells (slows/onnxruntime-cpu/fp32/b1, quickens/onnxruntime-cpu/fp32/b1)"
    assert f"1 faster. What else changed {other} 1 newly failed" in compared
    assert "1 cell with the same program, or within 10 %" in compared
    chosen = browser.get("/ui/ns/main/compare", params={"left": before, "right": after})
    assert chosen.url.path == f"/ui/ns/main/compare/{before}/{after}"
    again = accept(farm, "nightly", [cell._replace(salt="new") for cell in cells])
    play(farm, lambda job, order, key, number: failed(farm, order))
    farm.build_finisher.finish(again)
    said = words(build_page(browser, again))
    assert (
        f"Since {after[:10]} : nothing got worse, nothing was mended 0 newly failed 0 slower 0 fixed 0 faster" in said
    )
    assert "4 of 5 cells succeeded, 1 failed no change" in words(browser.get("/ui/ns/main").text)


def test_a_cancelled_build_is_not_said_to_be_no_worse(farm: Farm, browser: httpx.Client) -> None:
    before, after = [accept(farm, "nightly", [Cell("net", salt=str(number))]) for number in range(2)]
    farm.builds.cancel("main", after)
    play(farm, everything_passes(farm))
    for build_id in (before, after):
        farm.build_finisher.finish(build_id)
    said = words(browser.get(f"/ui/ns/main/compare/{before}/{after}").text)
    assert "Nothing can be compared. Left out 1 cell: cancelled or open in either." in said
    assert "1 cancelled nothing to compare" in words(browser.get("/ui/ns/main").text)


def test_cells_that_passed_in_both_builds_are_no_worse_although_their_speeds_are_not_compared(
    farm: Farm, browser: httpx.Client
) -> None:
    builds = []
    for number in range(2):
        builds.append(accept(farm, "nightly", [Cell("net", salt=str(number))]))
        play(farm, lambda job, order, key, number: passed(farm, order, key, shared=True))
        farm.build_finisher.finish(builds[-1])
    said = words(browser.get(f"/ui/ns/main/compare/{'/'.join(builds)}").text)
    assert "Nothing got worse. Left out 1 cell: not measured alone." in said
    assert "succeeded no change" in words(browser.get("/ui/ns/main").text)


def test_a_cell_says_how_it_compares_with_its_baseline(farm: Farm, browser: httpx.Client) -> None:
    before = {"size": 10, "driver": "6.12", "cpu": "EPYC 9654"}
    build_id = accept(farm, "nightly", [Cell("net", before=before), Cell("other")])
    play(farm, lambda job, order, key, number: passed(farm, order, key, driver="6.14"))
    for _ in range(2):  # As judged now, and as its report is indexed.
        pages = [
            browser.get(f"/ui/ns/main/builds/{build_id}/cells/{name}/onnxruntime-cpu/fp32/b1").text
            for name in ("net", "other")
        ]
        said = words(pages[0])
        assert "Since the baseline Also changed: driver 6.12 -> 6.14. Before (fastest to p90) Now Change (99 %)" in said
        assert re.search(r"size 10 B \S+ k?B \+[\d.]+% worse than prod", said)
        assert 'href="/ui/ns/main/models/net?ref=prod"' in pages[0]
        assert "Since the baseline" not in pages[1]
        farm.build_finisher.finish(build_id)


def test_a_cell_draws_its_latencies_next_to_those_of_the_program_that_it_took_turns_with(
    farm: Farm, browser: httpx.Client
) -> None:
    keys: list[str] = []

    def slower(job: str, order: dict[str, Any], key: str, number: int) -> Outcome:
        keys.append(key)
        turns = {"key": keys[0], "ratio": 0.67, "interval": [0.66, 0.68], "verdict": "slower"}
        against, latency = (turns, 0.003) if len(keys) > 1 else (None, 0.002)
        return passed(farm, order, key, latency=latency, against=against)

    for salt in "ab":
        before = {"size": 10, "driver": "6.12"} if salt == "b" else None
        build_id = accept(farm, "nightly", [Cell("net", salt=salt, before=before)])
        play(farm, slower)
        farm.build_finisher.finish(build_id)
    page = browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1").text
    drawn = page[page.index('aria-label="Distribution of latencies"') :]
    names = re.findall('class="name"[^>]*>([^<]+)<', drawn[: drawn.index("</svg>")])
    assert names == ["whole run", "whole run before"]
    assert f"Since the baseline {UNCHANGED}" in words(page)


def test_which_precision_to_ship_is_drawn_for_a_build_and_a_model(farm: Farm, browser: httpx.Client) -> None:
    cells = [Cell("net", precision=each) for each in ("fp32", "fp16", "int8")]
    build_id = accept(farm, "nightly", [*cells, Cell("other"), Cell("pair"), Cell("pair", precision="fp16")])
    page = build_page(browser, build_id)
    assert 'id="ship"' not in page and 'id="tradeoffs" data-live' in page, "it comes when something was measured"

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        speed, error = {"fp32": (0.004, 1e-7), "fp16": (0.002, 1e-3), "int8": (0, 0)}[order["spec"]["precision"]]
        return passed(farm, order, key, latency=speed, error=error) if speed else failed(farm, order)

    play(farm, ends)
    farm.build_finisher.finish(build_id)
    page = build_page(browser, build_id)
    said = words(page)
    assert "Which precision of net to ship net pair Up and to the right" in said
    assert "Ship fp16: 2.00 times fp32’s speed, error 1.0e-03, 10 kB; the fastest of those that passed." in said
    assert "Not drawn: int8 failed: compiler_error ." in said and "The tolerance is 5.0e-02." in said
    assert page.count(f'<a href="/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp16/b1"><title>') == 1
    assert "Which precision of pair to ship" in words(build_page(browser, build_id, "?model=pair"))
    assert 'id="ship"' not in build_page(browser, build_id, "?model=other")
    key = next(each["key"] for each in farm.build_reader.cells("main", build_id) if "pair/" in each["identifier"])
    page = browser.get("/ui/ns/main/models/pair").text
    assert "Ship fp16: 2.00 times" in words(page) and page.count(f'<a href="/ui/ns/main/artifacts/{key}"><title>') == 1
    assert "The tolerance is 5.0e-02." in words(page), "what its newest build asked"
    assert 'id="ship"' not in browser.get("/ui/ns/main/models/other").text


def test_the_matrix_shows_the_metric_of_the_address(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net", precision=each) for each in ("fp32", "fp16")])
    play(farm, lambda job, order, key, number: passed(farm, order, key, latency=0.004 / (1 + ("fp16" in str(order)))))
    page = build_page(browser, build_id)
    assert "✓ 4.00 ✓ 2.00" in words(page) and 'id="matrix">' in page
    (path,) = re.findall(r'href="([^"]+)#cells">x fp32<', page)
    page = build_page(browser, build_id, html.unescape(path))
    said = words(page)
    assert "✓ 1.00x ✓ 2.00x" in said and "≈ was not measured alone; ! had a p99 of more than twice the median." in said
    assert 'aria-current="true">x fp32<' in page and 'id="matrix" data-live>' in page, "the server draws it again"
    assert 'type="hidden" name="by" value="x fp32"' in page and 'href="?look=hit&amp;by=x%20fp32#cells"' in page
    assert "✓ 1.00x" in words(build_page(browser, build_id, "?by=x+fp32&precision=fp32")), "fp32 need not be shown"
    assert "✓ 2.00x" in words(build_page(browser, build_id, "?by=x+fp32&precision=fp16"))
    assert "✓ 4.00" in words(build_page(browser, build_id, "?by=nothing"))


def test_a_sweep_is_drawn_also_while_it_runs_and_from_the_index(farm: Farm, browser: httpx.Client) -> None:
    sought = {"metric": "throughput", "max_latency": None}
    build_id = accept(farm, "sweep", [Cell("net", shape=f"b{batch}", sweep=sought) for batch in (1, 4, 16)])
    assert "Sweep of" not in words(build_page(browser, build_id))
    speeds = {"b1": 0.001, "b4": 0.002, "b16": 0.02}
    play(
        farm,
        lambda job, order, key, number: passed(farm, order, key, latency=speeds[order["identifier"][-3:].strip("/")]),
    )
    for _ in range(2):
        page = build_page(browser, build_id)
        assert "Sweep of net onnxruntime/cpu fp32 Best throughput: batch 4." in words(page)
        point = f'<a href="/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b16"><title>batch 16: 20 ms'
        assert page.count(point) == 2 and "800 samples a second" in page
        farm.build_finisher.finish(build_id)


def test_a_failure_shows_whose_fault_it_is_and_the_ways_on(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    play(farm, lambda job, order, key, number: failed(farm, order))
    farm.build_finisher.finish(build_id)
    job = farm.build_reader.cells("main", build_id)[0]["job"]
    page = build_page(browser, build_id)
    assert "yours to fix" in page and "no kernel for this convolution" in page
    assert f"/ui/ns/main/jobs/{job}/log#error" in page and f"farm reproduce {job}" in page


def test_cells_that_failed_alike_but_for_numbers_are_one_failure(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell(f"net{number}") for number in range(1, 15)] + [Cell("other")])

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        model = order["identifier"].partition("/")[0]
        message = "no such layout" if model == "other" else f"no memory for {model.removeprefix('net')} GB of {model}"
        return failed(farm, order, message=message)

    play(farm, ends)
    page = build_page(browser, build_id)
    failures = page[page.index('id="failures"') : page.index('id="cells"')]
    assert failures.count("<article") == 2 and failures.count("Try: ") == 2
    said = words(failures)
    assert "net1/onnxruntime-cpu/fp32/b1 and 13 more ✗" in said
    assert "net2/onnxruntime-cpu/fp32/b1 no memory for 2 GB" in said and "and 3 more" in said
    assert "net11/" in said and "net12/" not in said


def test_a_build_says_why_it_waits(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net", "migraphx/gfx942"), Cell("other", "migraphx/gfx942")])
    farm.store.workers.leave("n2-gpu")
    said = words(build_page(browser, build_id))
    assert f"2 cells: no live worker serves {shown.GPU.name}" in said
    workers = words(browser.get("/ui/ns/main/workers").text)
    assert f"2 jobs of {shown.GPU.name} wait: no live worker serves it" in workers
    assert "nobody serves it" in workers
    assert f"No worker takes jobs of {shown.GPU.name}" in words(browser.get("/ui/ns/main/builds").text)
    farm.store.workers.heartbeat("n1-cpu", warning="its disk is slow")
    for page in ("", "/workers"):
        assert "n1: its disk is slow" in words(browser.get(f"/ui/ns/main{page}").text)


def test_a_thousand_cells_are_one_small_page(farm: Farm, browser: httpx.Client) -> None:
    cells = matrix_of([f"model-{number:02}" for number in range(42)], shapes=["b1", "b8", "b16", "b32"])[:1000]
    build_id = accept(farm, "large", cells)
    play(farm, lambda job, order, key, number: only_recorded(order, key))
    farm.build_finisher.finish(build_id)
    page = build_page(browser, build_id)
    assert page.count("/cells/") >= 1000
    listed = build_page(browser, build_id, "?by=list&sort.cells=-Cell")
    assert "1 to 250 of 1,000" in words(listed)
    assert max(len(each.encode()) for each in (page, listed)) < 200 * 1024
    few = build_page(browser, build_id, "?look=compiled&model=model-07&precision=fp16&target=migraphx/gfx942")
    assert len(re.findall(r"model-07/migraphx-gfx942/fp16/\w+", few)) == 4


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that show few cells and few models, and builds that are large soon."""
    for where, name, number in (
        (build_pages.build_view, "PAGE", 20),
        (build_pages, "MODELS", 4),
        (build_pages, "GROUPED", 10),
        (page_reading, "SMALL", 4),
    ):
        monkeypatch.setattr(where, name, number)


@pytest.mark.usefixtures("narrow")
def test_more_cells_than_a_page_has_are_counted_by_model_and_target(farm: Farm, browser: httpx.Client) -> None:
    models = [f"model-{number}" for number in range(6)]
    build_id = accept(farm, "larger", matrix_of(models, shapes=["b1", "b8", "b16", "b32"]))
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order)
            if order["identifier"] == "model-5/migraphx-gfx942/int8/b8"
            else only_recorded(order, key)
        ),
    )
    page = build_page(browser, build_id)
    assert "1 to 4 of 6 Next" in words(page) and "/cells/model-0" not in page
    assert re.findall(r'scope="row"><a href="[?]model=([^"#&]+)', page) == ["model-5", "model-0", "model-1", "model-2"]
    assert "✗ 1 ✓ 11" in words(page)
    (after,) = re.findall(r'rel="next" href="([^"]+)#models"', page)
    assert "model=model-4&amp;target=" in build_page(browser, build_id, html.unescape(after))
    (failing,) = re.findall(r'class="failed"><a href="([^"#]+)#cells">✗ 1 ✓', page)
    assert (
        build_page(browser, build_id, html.unescape(failing)).count('href="' + build_id + "/cells/model-5/migr") == 12
    )
    assert "Previous 21 to 24 of 24" in words(build_page(browser, build_id, "?model=model-0&first.cells=21"))
    fp16 = build_page(browser, build_id, "?precision=fp16")
    assert "?model=model-0&amp;precision=fp16#cells" in fp16 and "✓ 4" in words(fp16) and "✓ 12" not in words(fp16)


def lines_of(farm: Farm, build_id: str) -> list[CellLine]:
    return [CellLine.of(cell) for cell in farm.build_reader.report("main", build_id)["cells"]]


def test_a_build_in_short_says_what_its_report_says(farm: Farm) -> None:
    register(farm)
    accept(farm, "before", [Cell("net-0")])
    play(farm, everything_passes(farm))
    build_id = accept(farm, "large", [Cell(f"net-{number}") for number in range(8)])
    ends = [
        lambda order, key: passed(farm, order, key, error=0.5),
        lambda order, key: failed(farm, order),
        only_recorded,
    ]
    for end, (job, claimed) in zip(ends, shown.claim(farm, shown.POOL, 4), strict=False):
        farm.store.jobs.finish(job, claimed.token, end(claimed.order, claimed.key))

    def timeless(cells: list[CellLine]) -> list[CellLine]:
        return [cell._replace(elapsed=None) for cell in cells]

    build, cells = farm.build_reader.lines("main", build_id)
    assert timeless(cells) == timeless(lines_of(farm, build_id))
    assert {cell.look for cell in cells} == {"hit", "failed", "compiled", "running", "queued"}
    assert {cell.kind for cell in cells} == {"", "accuracy", "compiler_error"}
    outlook = farm.build_reader.report("main", build_id)["build"]["outlook"]
    assert {**build["outlook"], "spent_seconds": 0} == {**outlook, "spent_seconds": 0}
    farm.builds.cancel("main", build_id)
    farm.build_finisher.finish(build_id)
    ended = farm.build_reader.lines("main", build_id)
    assert ended.cells == lines_of(farm, build_id) and ended.build["state"] == "reported"
    (farm.settings.data_dir / "builds.sqlite3").write_bytes(b"damaged" * 1000)
    assert farm.build_reader.lines("main", build_id) == ended == farm.build_index.cells("main", build_id, CellLine)


def test_builds_next_to_each_other_are_read_from_the_index(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve builds of 50,000 cells have some gigabytes of reports."""
    monkeypatch.setattr(build_pages.build_view, "PAGE", 4)
    builds = []
    for number in range(2):
        builds.append(accept(farm, "large", [Cell(f"net-{name}", salt=f"{number}") for name in range(5)]))
        play(farm, lambda job, order, key, attempt, build=number: only_recorded(order, key, latency=1e-3 * (1 + build)))
        farm.build_finisher.finish(builds[-1])
    for name in ("report", "lines"):
        monkeypatch.setattr(farm.build_reader, name, lambda *_, name=name: pytest.fail(f"reads the {name}"))
    page = browser.get("/ui/ns/main/across?name=large").text
    assert re.findall(r'scope="row"><a href="[^"]+">(net-[0-9])', page) == ["net-0", "net-1"], "no page is large"
    assert "5 cells are worse" in words(page) and "▲ +100 %" in words(page) and "1 to 2 of 5 Next" in words(page)
    assert "net-4" in browser.get("/ui/ns/main/across?name=large&text=net-4").text


@pytest.mark.usefixtures("narrow")
def test_a_large_open_build_is_shown_before_its_cells_are_judged(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = accept(farm, "large", [Cell(f"net-{number}") for number in range(5)])
    (job, claimed), *_ = shown.claim(farm, shown.POOL, 2)
    farm.store.jobs.finish(job, claimed.token, passed(farm, claimed.order, claimed.key, error=0.5))
    monkeypatch.setattr(page_reading, "IMPATIENCE", 0.1)
    lines, go_on = farm.build_reader.lines, threading.Event()
    monkeypatch.setattr(farm.build_reader, "lines", lambda *which: (go_on.wait(60), lines(*which))[1])
    page = build_page(browser, build_id)
    assert 'data-position="reading"' in page and "are still being read" in page
    assert "✓ 1 compiled" in words(page) and "▸ 1 running" in words(page) and "· 3 queued" in words(page)
    assert browser.get(f"/ui/ns/main/builds/{build_id}/cells/net-0/onnxruntime-cpu/fp32/b1").status_code == 200
    go_on.set()
    with browser.stream("GET", f"/ui/ns/main/builds/{build_id}/events?after=reading") as stream:
        assert "event: reset" in stream.iter_lines()
    page = build_page(browser, build_id)
    assert "are still being read" not in page and "✗ 1 failed" in words(page)


# --- jobs, logs, artifacts ------------------------------------------------------------------------------------------


def test_a_job_shows_attempts_ingredients_and_how_to_run_it_alone(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net", reason="toolchain: rocm7.1 -> rocm7.2")])
    kind = FailureKind.COMPILER_CRASH
    play(
        farm,
        lambda job, order, key, number: (
            failed(farm, order, kind=kind, message="it died") if number == 1 else passed(farm, order, key, job=job)
        ),
    )
    said = words(browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1").text)
    assert "2 attempts" in said and "compiler_crash: it died" in said
    assert "compiling 5.6 s" in said and "measuring 3.2 s" in said
    assert "Compiled because: toolchain: rocm7.1 → rocm7.2" in said
    assert "options.level standard" in said and "inputs.data.shape 1, 3, 224, 224" in said
    assert "Fastest Median p90 p99 Repeats whole run 1.88 ms 2 ms 2.24 ms 2.8 ms 400" in said
    assert "logits 3.0e-04 1.0e-04" in said
    job = farm.build_reader.cells("main", build_id)[0]["job"]
    page = browser.get(f"/ui/ns/main/jobs/{job}").text
    assert f"farm reproduce {job} -o again" in page and page.count("<rect") >= 7
    assert f"net/onnxruntime-cpu/fp32/b1 of {build_id[:10]}" in words(page)


def test_a_cell_that_waits_says_why(farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EXPLAINED", 1)
    build_id = accept(farm, "nightly", [Cell("net"), Cell("last")])
    page = browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/onnxruntime-cpu/fp32/b1")
    assert page.status_code == 200 and "· queued" in words(page.text)
    page = browser.get(f"/ui/ns/main/builds/{build_id}/cells/last/onnxruntime-cpu/fp32/b1")
    assert "1 job ahead for 6 slots of onnxruntime-cpu" in words(page.text), (
        "also what the page of the build does not explain"
    )
    ((job, claimed),) = shown.claim(farm, shown.POOL, 1)
    farm.store.jobs.renew(claimed.token, job, phase="compiling")
    page = browser.get(f"/ui/ns/main/jobs/{job}")
    assert re.search(r"▸ running for [\d.]+ m?s on n1-cpu, now compiling", words(page.text))
    farm.store.jobs.finish(job, claimed.token, failed(farm, claimed.order))
    assert "now compiling" not in words(browser.get(f"/ui/ns/main/jobs/{job}").text), "it has ended"
    assert browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/nowhere").status_code == 404


def test_a_cell_shows_its_phases_next_to_those_of_earlier_builds(farm: Farm, browser: httpx.Client) -> None:
    ids = []
    for number in range(3):
        ids.append(accept(farm, "nightly", [Cell("net", salt=str(min(number, 1)))]))
        play(farm, everything_passes(farm))
        farm.build_finisher.finish(ids[-1])
    page = browser.get(f"/ui/ns/main/builds/{ids[1]}/cells/net/onnxruntime-cpu/fp32/b1").text
    assert (
        f"12 s fetching 400 ms compiling 8.1 s verifying 1.3 s measuring 3.2 s uploading 300 ms in {ids[0][:10]}"
        in words(page)
    )
    drawn = page[page.index("<svg") : page.index("</svg>")]
    assert re.findall('class="name"[^>]*>([^<]+)<', drawn) == ["attempt 1", ids[0][:10]]
    assert words(page).count(" before n1-cpu ") == 1, "neither a hit nor a later build"
    assert "before" not in words(browser.get(f"/ui/ns/main/builds/{ids[0]}/cells/net/onnxruntime-cpu/fp32/b1").text)


def test_builds_that_differ_in_nothing_else_say_so(farm: Farm, browser: httpx.Client) -> None:
    commit, builds = "4c1d0e7a990f" * 3, []
    for latency in (0.002, 0.003):
        builds.append(accept(farm, "nightly", [Cell("net", salt=str(latency))], labels={"commit": commit}))
        play(farm, lambda job, order, key, number, latency=latency: passed(farm, order, key, latency=latency))
        farm.build_finisher.finish(builds[-1])
    compared = words(browser.get(f"/ui/ns/main/compare/{'/'.join(builds)}").text)
    assert f"{UNCHANGED} 1 slower" in compared
    across = words(browser.get("/ui/ns/main/across?name=nightly").text)
    assert "Left out" not in compared + across, "nothing is"
    assert f'title="{commit}">commit={commit[:10]}<' in browser.get("/ui/ns/main/builds").text


def test_a_timeline_says_what_failed_and_what_waited(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = accept(farm, "nightly", [Cell("net"), Cell("other")])
    path = f"/ui/ns/main/builds/{build_id}/timeline"
    page = browser.get(path).text
    assert f'data-events="/ui/ns/main/builds/{build_id}/events" data-position="' in page and 'id="connection"' in page

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        crashed = FailureKind.COMPILER_CRASH if number == 1 and "net" in order["identifier"] else None
        return failed(farm, order, kind=crashed, message=HOSTILE) if crashed else passed(farm, order, key)

    play(farm, ends)
    farm.build_finisher.finish(build_id)
    page = browser.get(path).text
    said = words(page)
    assert "3 attempts on" in said and ", 1 failed or lost" in said and "data-events" not in page
    lost = said[said.index("Failed and lost attempts") : said.index("The longest attempts")]
    assert "net/onnxruntime-cpu/fp32/b1 ✗ failed compiler_crash <script>" in lost and "other" not in lost
    assert page.count("<g><title>") == 3 and "; it waited" in page
    drawn = page[page.index("<svg") : page.index("</svg>")]
    assert re.findall(r'x="-84"[^>]*>([^<]+)<', drawn)[1:3] == ["n1-cpu", "slot 1"], "a name is not cut"
    monkeypatch.setattr(job_pages, "DETAILED", 2)
    monkeypatch.setattr(job_pages, "WAITED", 0.0)
    page = browser.get(path).text
    waits = words(page[page.index("The longest waits") :])
    assert waits.count("n1-cpu") == 3 and "net/onnxruntime-cpu/fp32/b1 attempt 2" in waits
    assert "<g>" not in page and "Drawn without phases." in page

    def job(name: str, started_at: float, ended_at: float, **phases: float) -> Any:
        attempt = {"number": 1, "worker": "w", "end": "succeeded", "kind": None, "message": "", "phases": phases}
        attempt |= {"started_at": started_at, "ended_at": ended_at}
        return {"id": name, "order": {"identifier": name}, "created_at": 1.0, "state": "", "attempts": [attempt]}

    jobs = [job("j-b", 4.6, 10.0, compiling=5.4), job("j-a", 1.0, 10.0, compiling=3.0, uploading=0.5)]
    monkeypatch.setattr(job_pages, "_timeline", lambda *_: (job_view.timeline(jobs, 99.0), 0))
    page = browser.get(path).text
    longest = words(page[page.index("The longest attempts") : page.index("The longest waits")])
    first = "j-a w 0 s 9 s compiling 3 s uploading 500 ms rest 5.5 s j-b"
    assert first in longest, "what it took is all that its phases took, also after the next one had its slot"


def test_a_log_opens_at_its_first_error_with_its_colours(farm: Farm, browser: httpx.Client) -> None:
    accept(farm, "nightly", [Cell("net")])
    play(farm, lambda job, order, key, number: failed(farm, order))
    job = farm.build_reader.cells("main", "@latest")[0]["job"]
    page = browser.get(f"/ui/ns/main/jobs/{job}/log").text
    (number,) = re.findall(r'<li id="L(\d+)" class="wrong"><a id="error">', page)
    assert number == "50"
    assert '<span class="c1">error: unsupported layout' in page and '<span class="c2">parsed</span>' in page
    found = browser.get(f"/ui/ns/main/jobs/{job}/log?q=NODE_12").text
    assert re.findall(r'<li id="L(\d+)"', found) == ["22"]


class Part(str):
    """A part of a log: unlike other texts it can be seen to be forgotten."""


def test_a_long_log_is_read_in_parts_and_searched_once_at_a_time(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile compiler may print a gigabyte: no page holds it, and a search holds a part of it."""
    monkeypatch.setattr(reading, "PART", 1000)
    text = "".join(f"line {number}\n" for number in range(1, 1001))
    accept(farm, "nightly", [Cell("net")])
    play(farm, lambda job, order, key, number: failed(farm, order, log=text.encode()))
    log = f"/ui/ns/main/jobs/{farm.build_reader.cells('main', '@latest')[0]['job']}/log"
    asked, held, again = list[int](), list[int](), list[int]()
    read, part, parts = Bucket.read_range, JobLog.part, WeakSet[Part]()

    def noting(bucket: Bucket, digest: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        if search_again and not again:
            again.append(0)
            again[0] = browser.get(f"{log}?q=line").status_code
        return read(bucket, digest, start, end)

    def kept(log: JobLog, number: int) -> Part:
        parts.add(made := Part(part(log, number)))
        held.append(len(parts))
        return made

    search_again = False
    monkeypatch.setattr(Bucket, "read_range", noting)
    monkeypatch.setattr(JobLog, "part", kept)
    monkeypatch.setattr(reading, "LONGEST_LINE", 100)
    page = browser.get(log).text
    assert "Part 9 of 9" in page and "line 1000<" in page and "line 500<" not in page
    assert len(asked) == 1 and asked[0] <= 1101
    (earlier,) = re.findall(r'href="([^"]+)">Earlier part', page)
    assert "Part 8 of 9" in browser.get(html.unescape(earlier)).text
    found = browser.get(f"{log}?q=LINE 50").text
    (place,) = re.findall(r'href="([^"]+)">\d+</a><code>line 500<', found)
    assert "line 500<" in browser.get(html.unescape(place)).text
    search_again = True
    assert browser.get(f"{log}?q=line 1000").status_code == 200
    assert again == [429]
    assert max(asked) <= 1101 and max(held) <= 2


def test_a_search_whose_time_is_over_goes_on_in_the_middle_of_a_log(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PART", 1000)
    text = "".join(f"line {number}\n" for number in range(1, 1001))
    build_id = accept(farm, "nightly", [Cell("net")])
    play(farm, lambda job, order, key, number: failed(farm, order, number=number, log=text.encode()))
    job = farm.build_reader.cells("main", "@latest")[0]["job"]
    monkeypatch.setattr(job_pages, "SEARCHED", 5)
    monkeypatch.setattr(job_pages, "time", SimpleNamespace(monotonic=count().__next__))
    for address in (f"jobs/{job}/log", f"builds/{build_id}/log"):
        found, following, pages = list[str](), f"/ui/ns/main/{address}?q=77", 0
        while following:
            page = browser.get(following).text
            found += re.findall(r"<code>line (\d+)<", page)
            nexts = re.findall(r'rel="next" href="([^"]+)"', page)
            following = f"/ui/ns/main/{address}{html.unescape(nexts[0])}" if nexts else ""
            pages += 1
        assert pages > 2
        assert [int(each) for each in found] == [number for number in range(1, 1001) if "77" in str(number)]


def test_a_search_goes_through_the_logs_of_all_attempts_and_goes_on_where_it_ended(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(farm, "before", [Cell("net10")])
    play(farm, everything_passes(farm))
    build_id = accept(farm, "nightly", [Cell("net10"), Cell("net2"), Cell("net1")])

    def ends(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        if "net1/" in order["identifier"]:
            return passed(farm, order, key)
        return failed(
            farm, order, number=number, kind=FailureKind.COMPILER_CRASH, log=b"one\nNode_7 <of> two\nnode_7\n"
        )

    play(farm, ends)
    job = farm.build_reader.cells("main", build_id)[1]["job"]

    def found(query: str) -> list[tuple[str, str]]:
        page = browser.get(f"/ui/ns/main/builds/{build_id}/log?{query}").text
        return re.findall(r'<h2><a href="/ui/ns/main/(\w+)/[^>]+>(\w+)/', page)

    page = browser.get(f"/ui/ns/main/builds/{build_id}/log?q=node_7").text
    assert "4 lines of 2 logs; cells 1 to 3 of 3 were searched" in words(page) and "Node_7 <of> two" in words(page)
    assert "fp32/b1 , attempt 2" in words(page)
    (second,) = re.findall(rf'href="(/ui/ns/main/jobs/{job}/log[?]attempt=2&amp;part=0&amp;from=1#L2)"', page)
    assert 'id="L2"' in browser.get(html.unescape(second)).text
    assert found("q=fuse_mlir") == [("jobs", "net1"), ("artifacts", "net10")], "a hit has the log of its program"
    assert found("q=fuse_mlir&text=net10") == [("artifacts", "net10")]
    assert (
        found("q=nowhere") == []
        and "No line contains this" in browser.get(f"/ui/ns/main/builds/{build_id}/log?q=-7-").text
    )
    monkeypatch.setattr(job_view, "FOUND", 1)
    page = browser.get(f"/ui/ns/main/builds/{build_id}/log?q=pass").text
    (after,) = re.findall(r'rel="next" href="([^"]+)"', page)
    assert "cells 1 to 2 of 3 were searched" in words(page)
    assert [name for _, name in found(html.unescape(after)[1:])] == ["net10"]
    monkeypatch.setattr(job_pages, "SEARCHED", 0.0)
    assert "the time was over" in browser.get(f"/ui/ns/main/builds/{build_id}/log?q=pass").text


def test_an_artifact_says_where_it_comes_from_and_what_names_it(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net", "migraphx/gfx942"), Cell("other")])
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(build_id)
    made, other = (cell["facts"]["key"] for cell in farm.build_reader.cells("main", build_id))

    def lineage(key: str) -> str:
        page = browser.get(f"/ui/ns/main/artifacts/{key}").text
        return page[page.index('id="lineage"') : page.index('id="ingredients"')]

    page = lineage(made)
    said = words(page)
    digest = shown.spec_of(Cell("net", "migraphx/gfx942"))["model"]["digest"]
    assert f'<span class="id" title="{digest}">{digest[:10]}</span>' in page
    assert "tuning fast: of 54 operations 38 known from the pool’s database, 14 tuned for it" in said
    assert "tuning rows 5d5d5d5d5d e1e1e1e1e1 of migraphx-gfx942-304cu.rocm7.2-migraphx2.15-1a2b3c4d/" in said
    assert "packs none can be made of it" in said, "it copies its inputs"
    name = "other/onnxruntime-cpu/fp32/b1"
    assert f"packs onnxruntime, triton: farm fetch {name} --layout onnxruntime makes one" in words(lineage(other))
    assert "kept with it log , " in said and f'title="{made}">{made[:10]}<' in page
    assert "tuning" not in words(lineage(other))
    assert re.findall(r'href="/ui/ns/main/models/net[?]ref=(\w+)"', page) == ["latest"]
    refs = Refs(farm.artifacts)
    cells = refs.read_through("main", "latest")["cells"]
    others = {name: cell for name, cell in cells.items() if cell["key"] == other}
    superseded: Cells = {name: {**cell, "superseded": 1.0} for name, cell in cells.items()}
    moves = {"latest": {}, "only": others, "v10": cells, "v2": superseded}
    for tag, named in moves.items():
        refs.move("main", tag, lambda _, named=named: named)
    assert "refs v2 (another toolchain’s has its place), v10 " in words(lineage(made))
    assert "refs only , v2 (another" in words(lineage(other))
    assert re.findall(r"<option[^>]*>(\w+)", browser.get("/ui/ns/main/models").text) == ["latest", "only", "v2", "v10"]
    for tag in moves:
        refs.move("main", tag, lambda _: {})
    assert "refs none names it now" in words(lineage(made))


def test_files_and_traces_are_saved_by_a_click(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(build_id)
    key = farm.build_reader.cells("main", build_id)[0]["facts"]["key"]
    links = re.findall(r'href="([^"]+/files/[^"]+)"', browser.get(f"/ui/ns/main/artifacts/{key}").text)
    assert [link.rpartition("/")[2] for link in links[:2]] == ["program", "log"]
    made = farm.artifacts.lookup(["main"], key)
    assert made
    answer = browser.get(links[0], follow_redirects=False)
    assert answer.status_code == 307
    saved = httpx.get(answer.headers["location"])
    assert hashlib.sha256(saved.content).hexdigest() == made["blobs"]["program"]["digest"]
    assert saved.headers["content-disposition"] == f'attachment; filename="{made["blobs"]["program"]["path"]}"'
    assert browser.get(links[0].replace("/program", "/kernel_cache")).status_code == 404
    assert browser.get(links[0].replace("/program", "/unknown")).status_code == 404
    page = browser.get(f"/ui/ns/main/builds/{build_id}/timeline").text
    (link,) = re.findall(r'href="([^"]+)" download="[^"]+[.]json"', page)
    assert browser.get(link).json()["otherData"]["build"] == build_id


def test_an_artifact_says_how_to_use_it(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net"), Cell("net", "migraphx/gfx942")])
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(build_id)
    onnx, mxr = (cell["facts"] for cell in farm.build_reader.cells("main", build_id))
    page = words(browser.get(f"/ui/ns/main/artifacts/{onnx['key']}").text)
    assert "farm fetch net --target onnxruntime/cpu --precision fp32 --shape b1" in page
    assert "InferenceSession('net--onnxruntime-cpu--fp32--b1.onnx'" in page
    assert f"/v1/blobs/{onnx['program']['digest']}" in page and "TYPE_FP32" in page
    page = words(browser.get(f"/ui/ns/main/artifacts/{mxr['key']}").text)
    assert "migraphx.load('net--migraphx-gfx942--fp32--b1.mxr')" in page and "migraphx-driver perf" in page
    assert "migraphx-driver run net--migraphx-gfx942--fp32--b1.mxr --migraphx --enable-offload-copy" in page
    assert "--layout onnxruntime-cache" in page
    models = browser.get("/ui/ns/main/models").text
    assert "net" in words(models) and "2 1" not in models
    compiled = words(browser.get(f"/ui/ns/main/builds/{build_id}/cells/net/migraphx-gfx942/fp32/b1").text)
    assert "coverage 96 % of 54 operations" in compiled and "Conv 53 nodes quantized" in compiled
    assert compiled.index("compile_ops 5.31 s") < compiled.index("fuse_mlir 1.2 s"), "the longest pass first"
    model = browser.get("/ui/ns/main/models/net").text
    assert onnx["key"] in model and "onnxruntime/cpu fp32 b1 2 ms" in words(model)
    model = words(browser.get("/ui/ns/fork/models/net").text)
    assert "what latest of main names now" in model and "onnxruntime/cpu fp32 b1 2 ms" in model, "as `farm ls` says"
    again = accept(farm, "nightly", [Cell("net"), Cell("net", shape="b10"), Cell("net", shape="b2")])
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(again)
    shown = re.findall(r"onnxruntime/cpu fp32 (b\d+) ", words(browser.get("/ui/ns/main/models/net").text))
    assert list(dict.fromkeys(shown)) == ["b1", "b2", "b10"]
    hit = words(browser.get(f"/ui/ns/main/builds/{again}/cells/net/onnxruntime-cpu/fp32/b1").text)
    assert "≡ hit 2 ms median" in hit and "Compiled 2026-11-21 00:00:00 UTC" in hit, "its times are of then"
    assert "latest" in browser.get("/ui/ns/main/storage").text


# --- live -----------------------------------------------------------------------------------------------------------


def stream_of(browser: httpx.Client, build_id: str, after: str) -> Iterator[tuple[str, str, str]]:
    """The events of a build's page: kind, id and data."""
    with browser.stream("GET", f"/ui/ns/main/builds/{build_id}/events", params={"after": after}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind = position = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                position = value
            elif name == "data":
                yield kind, position, value


def test_an_open_page_gets_news_until_the_end(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net"), Cell("other")])
    (after,) = re.findall(r'data-position="([^"]+)"', build_page(browser, build_id))
    play(farm, everything_passes(farm))
    events = stream_of(browser, build_id, after)
    kind, position, data = next(events)
    assert kind == "news" and '"compiled": 2' in data
    assert '"net/onnxruntime-cpu/fp32/b1": ["compiled", "✓ 2.00"]' in data
    assert "2 of 2 cells are done" in data
    farm.build_finisher.finish(build_id)
    kind, _, _ = next(events)
    assert kind == "end"
    # Whoever comes back with the place of the first message gets the end once more, and nothing of before.
    assert [kind for kind, _, _ in stream_of(browser, build_id, position)] == ["end"]
    assert "data-events" not in build_page(browser, build_id)


def test_a_place_that_the_store_does_not_know_is_a_reset(farm: Farm, browser: httpx.Client) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    assert next(stream_of(browser, build_id, "elsewhere.1-0"))[0] == "reset"


def test_many_readers_cost_one(farm: Farm, url: str, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many look at a build, its events are read once."""
    build_id = accept(farm, "nightly", [Cell(f"net-{number}") for number in range(20)])
    (after,) = re.findall(r'data-position="([^"]+)"', build_page(browser, build_id))
    reads: list[str] = []
    report = farm.build_reader.report
    monkeypatch.setattr(farm.build_reader, "report", lambda *which: (reads.append("report"), report(*which))[1])
    ends: list[str] = []

    def read() -> None:
        with httpx.Client(base_url=url, cookies=browser.cookies, timeout=120, verify=False) as reader:
            ends.extend(kind for kind, _, _ in stream_of(reader, build_id, after))

    readers = [threading.Thread(target=read) for _ in range(12)]
    for reader in readers:
        reader.start()
    play(farm, everything_passes(farm))
    farm.build_finisher.finish(build_id)
    for reader in readers:
        reader.join(120)
    assert ends.count("end") == 12
    assert len(reads) < 12


def test_a_build_that_takes_long_to_read_says_so_until_it_is_there(
    farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = accept(farm, "huge", [Cell("net")])
    lines, go_on = farm.build_reader.lines, threading.Event()
    monkeypatch.setattr(farm.build_reader, "lines", lambda *which: (go_on.wait(60), lines(*which))[1])
    monkeypatch.setattr(page_reading, "PATIENCE", 0.0)
    path = f"/ui/ns/main/builds/{build_id}"
    for page in (path, f"{path}/cells/net/onnxruntime-cpu/fp32/b1", f"/ui/ns/main/compare/{build_id}/{build_id}"):
        answer = browser.get(page)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "huge" in words(answer.text) and "queued 1" in words(answer.text)
    assert browser.get("/ui/ns/main/workers").status_code == 200, "other pages do not wait for it"
    events = stream_of(browser, build_id, "reading")
    go_on.set()
    assert next(events)[0] == "reset"
    assert "data-position" in build_page(browser, build_id)


def test_of_a_large_open_build_only_what_changed_is_read_again(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    register(farm)
    build_id = accept(farm, "large", [Cell(f"net-{number}") for number in range(5)])
    monkeypatch.setattr(page_reading, "SMALL", 0)
    monkeypatch.setattr(page_reading, "WHOLE", 1e9)
    pages = BuildPages(farm)
    assert pages.newest("main", build_id).looks == {"queued": 5}
    monkeypatch.setattr(farm.build_reader, "live_report", None)
    for job, claimed in shown.claim(farm, shown.POOL, 2):
        farm.store.jobs.finish(job, claimed.token, only_recorded(claimed.order, claimed.key))
    now = pages.newest("main", build_id)
    assert now.looks == {"queued": 3, "compiled": 2} and now.position == pages.position("main", build_id)
    monkeypatch.undo()
    farm.builds.cancel("main", build_id)
    assert pages.newest("main", build_id).looks == {"cancelled": 3, "compiled": 2}
    farm.build_finisher.finish(build_id)
    assert not pages.newest("main", build_id).is_open


def test_all_who_missed_the_same_wait_for_one_reading(farm: Farm, browser: httpx.Client) -> None:
    """After a restart of the server all pages come back at once, each with the place that it had."""
    build_id = accept(farm, "nightly", [Cell("net")])
    (after,) = re.findall(r'data-position="([^"]+)"', build_page(browser, build_id))
    play(farm, everything_passes(farm))
    reads: list[str] = []
    events = farm.build_reader.events
    farm.build_reader.events = lambda *which: (reads.append(which[2]), events(*which))[1]  # type: ignore[method-assign]

    async def follow(hub: EventHub, pages: BuildPages) -> str:
        stream = hub.follow(pages, "main", build_id, after)
        texts = [await anext(stream), await anext(stream)]
        await stream.aclose()  # type: ignore[attr-defined]
        return texts[1]

    async def all_of_them() -> list[str]:
        hub, pages = EventHub(anyio.CapacityLimiter(256)), BuildPages(farm)
        return await asyncio.gather(*(follow(hub, pages) for _ in range(120)))

    assert all(text.startswith("event: news") for text in asyncio.run(all_of_them()))
    assert reads.count(after) < 5


def test_news_go_on_when_the_store_was_away(farm: Farm, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    (after,) = re.findall(r'data-position="([^"]+)"', build_page(browser, build_id))
    play(farm, everything_passes(farm))
    events, asked = farm.build_reader.events, list[str]()

    def away_at_first(*which: Any) -> Any:
        asked.append(which[2])
        if len(asked) == 1:
            raise StoreUnavailable("it is away")
        return events(*which)

    monkeypatch.setattr(farm.build_reader, "events", away_at_first)
    monkeypatch.setattr(page_reading, "READ_WAIT", 0.1)

    async def follow() -> list[str]:
        stream = EventHub(anyio.CapacityLimiter(4)).follow(BuildPages(farm), "main", build_id, after)
        return [await anext(stream) for _ in range(3)]

    _, silence, text = asyncio.run(follow())
    assert silence == ":\n\n" and text.startswith("event: news")


def test_as_many_wait_for_events_as_there_are_threads_for(farm: Farm) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    position = farm.build_reader.events("main", build_id, "newest", 0)["items"][-1]["id"]
    with ThreadPoolExecutor(WATCHERS) as threads:
        found = [threads.submit(farm.build_reader.events, "main", build_id, position, 1.0) for _ in range(WATCHERS)]
    assert [each.result()["items"] for each in found] == [[]] * WATCHERS


def test_who_waits_for_an_event_gets_it(farm: Farm) -> None:
    build_id = accept(farm, "nightly", [Cell("net")])
    position = farm.build_reader.events("main", build_id, "newest", 0)["items"][-1]["id"]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(farm.build_reader.events, "main", build_id, position, 30.0)
        wait_until(lambda: farm.store._link.ask("INFO", "clients")["blocked_clients"])
        farm.store.builds.pause(build_id, paused=True)
        assert [each["paused"] for each in waits.result()["items"]] == ["1"]


def test_a_farm_without_a_token_shows_its_pages_on_loopback(settings: Settings) -> None:
    with serving(create_app(Farm(settings), loopback=True)) as url:
        answer = httpx.get(f"{url}/ui/ns/main/builds", timeout=60)
        assert answer.status_code == 200 and "Sign out" not in answer.text
        assert httpx.get(f"{url}/ui/", headers={"Host": "evil.example"}, timeout=60).status_code == 403


def test_what_a_real_build_shows(farm: Farm, client: FarmClient, frozen: Frozen, browser: httpx.Client) -> None:
    build_id = finished(farm, client, frozen)
    assert "2 of 2 cells succeeded" in words(build_page(browser, build_id))
