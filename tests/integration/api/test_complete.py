"""What clients may count on: parts of lists, ETags, rates, refs of `main`, sign-in by a proxy, the log of changes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
import pytest
from pydantic import SecretStr

from farm.api import gate
from farm.api.gate import COOKIES
from farm.app import Farm
from farm.artifacts.tokens import Role
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.serving.server import create_app
from tests.support.api_farm import finished, serving
from tests.support.shown import Cell, accept, register


@pytest.fixture
def asking(farm: Farm, url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        yield client


def parts(asking: httpx.Client, path: str, name: str, limit: int) -> list[list[str]]:
    """The names in every part of a list."""
    found, after = [], ""
    while after is not None:
        answer = asking.get(path, params={"limit": limit, "after": after}).json()
        found.append([str(item[name]) for item in answer["items"]])
        after = answer["next"]
    return found


def test_lists_are_read_in_parts(farm: Farm, asking: httpx.Client) -> None:
    register(farm)
    ids = [accept(farm, "nightly", [Cell(f"net-{number}") for number in range(5)]) for _ in range(3)]
    assert parts(asking, "/v1/builds", "id", 2) == [[ids[2], ids[1]], [ids[0]]]
    names = [f"net-{number}/onnxruntime-cpu/fp32/b1" for number in range(5)]
    assert parts(asking, f"/v1/builds/{ids[0]}/cells", "identifier", 2) == [names[:2], names[2:4], names[4:]]
    assert len(asking.get(f"/v1/builds/{ids[0]}/cells").json()["items"]) == 5, "without a limit all of them"
    assert asking.get("/v1/builds", params={"after": "b-gone"}).status_code == 400


def test_a_build_says_where_its_time_went(
    farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trace for Perfetto and as a page, which says what it leaves out."""
    build_id = finished(farm, client, frozen)
    cells = {cell["identifier"] for cell in client.cells(build_id)}
    events = asking.get(f"/v1/builds/{build_id}/trace.json").json()["traceEvents"]
    assert cells <= {event["name"] for event in events if event["ph"] == "X"}
    assert asking.get("/v1/builds/b-0123456789abcdef/trace.json").status_code == 404
    place = f"/ui/ns/main/builds/{build_id}/timeline"
    page = asking.get(place).text
    assert all(cell in page for cell in cells) and "left out" not in page
    monkeypatch.setattr("farm.pages.job_pages.MOST", len(cells) - 1)
    assert "1 job left out" in asking.get(place).text
    assert asking.get(f"/v1/builds/{build_id}/trace.json").json()["otherData"]["left_out"] == 1


def test_who_has_an_answer_gets_no_body(farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client) -> None:
    build_id = finished(farm, client, frozen)
    for path in (f"/v1/builds/{build_id}", f"/v1/builds/{build_id}/report", "/v1/refs/latest", "/v1/refs"):
        first = asking.get(path)
        again = asking.get(path, headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert asking.get(path, headers={"If-None-Match": '"other"'}).json() == first.json()
    assert "etag" not in asking.get("/v1/builds/b-0123456789abcdef").headers


def test_a_ref_moves_only_from_the_etag_that_was_seen(
    farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client
) -> None:
    finished(farm, client, frozen)
    body = {"source": "latest"}
    assert asking.put("/v1/refs/prod", json=body, headers={"If-Match": '"0"'}).status_code == 200
    old = asking.get("/v1/refs/prod").headers["etag"]
    assert asking.delete("/v1/refs/prod", headers={"If-Match": old}).status_code == 204
    assert asking.put("/v1/refs/prod", json=body, headers={"If-Match": '"0"'}).status_code == 200
    assert asking.delete("/v1/refs/prod", headers={"If-Match": old}).status_code == 409, "that ref was deleted"
    tag = asking.get("/v1/refs/prod").headers["etag"]
    assert asking.delete("/v1/refs/prod", headers={"If-Match": '"7"'}).status_code == 409
    assert asking.put("/v1/refs/prod", json=body, headers={"If-Match": "*"}).status_code == 422
    both = asking.put("/v1/refs/prod?generation=3", json=body, headers={"If-Match": tag})
    assert both.status_code == 400 and "differs" in both.text
    assert asking.delete("/v1/refs/prod", headers={"If-Match": tag}).status_code == 204


def test_another_namespace_reads_the_refs_of_main(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    secret = farm.tokens.create("fork", Role.SUBMITTER, "fork")
    before = client.refs.get("latest")
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {secret}"}) as fork:
        found = fork.get("/v1/refs/latest").json()
        assert found["namespace"] == "main" and len(found["cells"]) == 2
        assert fork.get("/v1/refs").json()["items"] == ["latest"]
        (listed,) = fork.get("/v1/refs", params={"moves": True}).json()["refs"]
        assert listed == {name: found[name] for name in listed} and listed["namespace"] == "main"
        key = next(iter(found["cells"].values()))["key"]
        assert fork.get(f"/v1/artifacts/{key}").status_code == 200
        assert fork.put("/v1/refs/latest", json={"source": "latest"}).status_code == 404, "it names nothing of its own"
        assert fork.delete("/v1/refs/latest").status_code == 404
    assert client.refs.get("latest") == before


def test_a_ref_that_cannot_be_read_hides_no_other_one(
    farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client
) -> None:
    finished(farm, client, frozen)
    farm.artifacts.put_object("ns/main/refs/broken.json", b"{}")
    broken, latest = client.refs.moves()
    assert (broken["tag"], broken["generation"], latest["tag"]) == ("broken", 0, "latest") and latest["generation"]
    assert "ns/main/refs/broken.json cannot be read" in broken["damaged"] and "damaged" not in latest
    page = asking.get("/ui/ns/main/storage")
    assert page.status_code == 200 and "broken.json cannot be read" in page.text


def test_a_token_that_asks_without_end_is_slowed_down(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BURST", 5.0)
    monkeypatch.setattr(gate, "RATE", 1e-9)
    token = {"Authorization": "Bearer of-a-script-without-end"}
    with httpx.Client(base_url=url, timeout=60) as client:
        answers = [client.get("/v1/builds", headers=token) for _ in range(7)]
        assert [answer.status_code for answer in answers] == [401] * 5 + [429] * 2
        assert answers[-1].headers["retry-after"]
        cookie = {"Cookie": "farm=of-a-page-without-end"}
        assert [client.get("/ui/", headers=cookie).status_code for _ in range(6)] == [401] * 5 + [429]
        assert client.get("/v1/health").status_code == 200, "others are not slowed down"
        for path in ("/v1/refs/events", "/v1/builds/b-1/events"):
            assert client.get(path, headers=token).status_code == 429, path


def test_every_request_may_be_repeated(farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client) -> None:
    build_id = finished(farm, client, frozen)
    register(farm)
    waiting = accept(farm, "nightly", [Cell("net")])
    (pool, *_) = (each["name"] for each in farm.store.workers.pools() if each["waiting"])
    retry = {"build_id": "b-00000000000000aa", "failed": False}
    repeated = {
        ("POST", "/v1/builds"): frozen.submission,
        ("POST", f"/v1/builds/{waiting}/pause"): None,
        ("POST", f"/v1/builds/{waiting}/resume"): None,
        ("POST", f"/v1/builds/{waiting}/cancel"): None,
        ("POST", f"/v1/builds/{build_id}/retry"): retry,
        ("PUT", "/v1/refs/prod"): {"source": "latest"},
        ("POST", f"/v1/pools/{pool}/pause"): None,
        ("POST", f"/v1/pools/{pool}/resume"): None,
        ("POST", "/v1/workers/n1-cpu/drain"): None,
        ("POST", "/v1/gc?dry_run=true"): None,
        ("POST", "/v1/history/rebuild"): None,
    }
    for (method, path), body in repeated.items():
        first, again = (asking.request(method, path, json=body) for _ in range(2))
        assert (first.status_code, again.status_code) in ((200, 200), (201, 201), (204, 204)), (path, again.text)
        if path not in (f"/v1/builds/{waiting}/cancel",) and first.content:
            assert first.json() == again.json(), path
    assert len(farm.build_reader.list("main")) == 3
    once = [asking.delete("/v1/refs/prod").status_code for _ in range(2)]
    token = {"name": "ann", "role": "reader", "namespace": "main"}
    assert (once, [asking.post("/v1/tokens", json=token).status_code for _ in range(2)]) == ([204, 404], [201, 409])


def test_the_log_says_who_changed_what(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    build_id = finished(farm, client, frozen)
    secret = farm.tokens.create("ann", Role.SUBMITTER, "main")
    ann = {"Authorization": f"Bearer {secret}"}
    httpx.put(f"{url}/v1/refs/prod", json={"source": "latest"}, headers=ann, timeout=60)
    httpx.put(f"{url}/v1/refs/prod", json={"source": "nothing"}, headers=ann, timeout=60)
    httpx.put(f"{url}/v1/refs/plan", json={"source": "latest"}, headers=ann, timeout=60)
    httpx.post(f"{url}/v1/plan", json=frozen.submission, headers=ann, timeout=60)
    assert httpx.get(f"{url}/v1/changes", headers=ann, timeout=60).status_code == 403
    admin = {"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"}
    found = httpx.get(f"{url}/v1/changes", headers=admin, timeout=60).json()["items"]
    assert [(each["by"], each["method"], each["path"].partition("?")[0]) for each in found] == [
        ("ann", "PUT", "/v1/refs/plan"),
        ("ann", "PUT", "/v1/refs/prod"),
        ("admin", "POST", f"/v1/builds/{build_id}"),
    ]
    assert found[0]["namespace"] == "main" and found[0]["at"] <= datetime.now(UTC).timestamp()
    assert build_id and secret not in str(found)


PROXY = {"Farm-Proxy-Secret": "of-the-proxy", "Farm-User": "ann@example.org"}


def test_a_proxy_signs_people_in(farm: Farm) -> None:
    settings = farm.settings.model_copy(update={"proxy_secret": SecretStr("of-the-proxy")})
    with serving(create_app(Farm(settings))) as url:

        def status(path: str, **headers: str | bytes) -> int:
            return httpx.get(url + path, headers=headers, timeout=60).status_code

        assert status("/ui/ns/main/builds", **PROXY) == 200
        assert status("/ui/ns/main/builds", **PROXY, Cookie=f"{COOKIES[1]}=wrong") == 200
        page = httpx.get(f"{url}/ui/ns/main/builds", headers=PROXY, timeout=60).text
        assert "Sign out" not in page
        assert status("/ui/ns/fork/builds", **PROXY) == 403
        assert status("/ui/ns/fork/builds", **PROXY, **{"Farm-User-Namespace": "fork"}) == 200
        assert status("/v1/tokens", **PROXY) == 403
        assert status("/v1/tokens", **PROXY, **{"Farm-User-Role": "admin"}) == 200
        for wrong in (
            {"Farm-User": "ann"},
            {**PROXY, "Farm-Proxy-Secret": "guessed"},
            {**PROXY, "Farm-Proxy-Secret": ""},
            {"Farm-Proxy-Secret": "of-the-proxy"},
            {**PROXY, "Farm-User": "<script>"},
            {**PROXY, "Farm-User-Role": "owner"},
            {**PROXY, "Farm-User-Namespace": "../main"},
            {**PROXY, "Authorization": "Bearer wrong"},
            {**PROXY, "Farm-User": "ann!admin!main"},
            {"Authorization": "Bearer person:ann@example.org"},
            {"Cookie": f"{COOKIES[1]}=person:\xe9".encode("latin-1")},
        ):
            assert status("/v1/builds", **wrong) == 401, wrong


def test_without_its_secret_no_proxy_is_trusted(url: str) -> None:
    for secret in ("", "of-the-proxy"):
        headers = {**PROXY, "Farm-Proxy-Secret": secret}
        assert httpx.get(f"{url}/v1/builds", headers=headers, timeout=60).status_code == 401
