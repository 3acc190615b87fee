"""A terminal that watches a build: it reads what changed, and a stream that is cut off misses and repeats nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from farm.api import build_routes
from farm.app import Farm
from farm.cli import output
from farm.client.client import FarmClient
from tests.support.api_farm import POOL, Cutting, freeze_manifest, work
from tests.support.helpers import wait_until

CELLS = 400
UPDATES = 6

MANIFEST = """\
version: 1
name: many
targets: [onnxruntime/cpu]
precisions: [fp32, fp16]
verify: off
models:
  - name: net
    source: {{path: net.onnx}}
    batches: {batches}
"""


class Counting(httpx.HTTPTransport):
    """A transport that counts the requests, and the bytes of the answers, by the last part of the path."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        what = request.url.path.rpartition("/")[2]
        self.requests[what] = self.requests.get(what, 0) + 1
        response = super().handle_request(request)
        response.stream = self._counted(what, response.stream)
        return response

    def _counted(self, what: str, stream: Any) -> httpx.SyncByteStream:
        transport = self

        class Stream(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                for chunk in stream:
                    transport.bytes[what] = transport.bytes.get(what, 0) + len(chunk)
                    yield chunk

            def close(self) -> None:
                stream.close()

        return Stream()


class Recorder:
    """A display that keeps what it was shown last."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    def show(self, cells: Sequence[Any], outlook: Any = None) -> None:
        self.states = {cell["identifier"]: cell["state"] for cell in cells}

    @property
    def done(self) -> int:
        return sum(state == "succeeded" for state in self.states.values())


def many(cells: int) -> str:
    return MANIFEST.format(batches=list(range(1, cells // 2 + 1)))


def test_a_terminal_reads_what_changed_and_not_the_whole_build_for_each_update(
    farm: Farm, url: str, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = client.submit(freeze_manifest(tmp_path, many(CELLS), batch="batch"))["id"]
    recorder = Recorder()

    @contextmanager
    def display() -> Iterator[tuple[Recorder, None]]:
        yield recorder, None

    monkeypatch.setattr(output, "display", display)
    transport = Counting()
    with FarmClient(url, farm.settings.api_token.get_secret_value(), transport=transport) as watching:
        watcher = threading.Thread(target=output.follow, args=(watching, build_id))
        watcher.start()
        wait_until(lambda: len(recorder.states) == CELLS)
        changed = 0
        for _ in range(UPDATES):
            changed += work(farm)
            wait_until(lambda expected=changed: recorder.done == expected)
        # Once at the beginning, and once more if the stream came late.
        assert transport.requests["report"] <= 2
        assert transport.bytes["events"] < changed * 3 * 3000, "three changes of each cell"
        farm.builds.cancel("main", build_id)
        farm.build_finisher.finish(build_id)
        watcher.join(timeout=60)
        assert not watcher.is_alive()
    assert recorder.done == changed
    assert set(recorder.states.values()) == {"succeeded", "cancelled"}
    assert transport.requests["report"] <= 3


def test_a_cut_stream_of_changes_misses_and_repeats_nothing(
    farm: Farm, url: str, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.client.client.FOLLOW_DELAYS", (0.0,) * 8)
    build_id = client.submit(freeze_manifest(tmp_path, many(12), batch="batch"))["id"]
    transport = Cutting(events=1)
    seen: list[Any] = []
    cells: dict[str, Any] = {}

    def watch() -> None:
        with FarmClient(url, farm.settings.api_token.get_secret_value(), transport=transport) as cut:
            for change in cut.changes(build_id):
                seen.append(change)
                if change["type"] == "reset":
                    cells.update({cell["identifier"]: cell for cell in client.cells(build_id)})
                cells.update({cell["identifier"]: cell for cell in change.get("cells", ())})

    watcher = threading.Thread(target=watch)
    watcher.start()
    wait_until(lambda: cells)
    while work(farm):
        pass
    farm.build_finisher.finish(build_id)
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    assert transport.cuts >= 2
    assert [change["type"] for change in seen].count("reset") == 1
    ids = [change["id"] for change in seen if "id" in change]
    assert len(set(ids)) == len(ids)
    assert [change["state"] for change in seen if change["type"] == "build"] == ["reported"]
    final = {cell["identifier"]: cell for cell in client.cells(build_id)}
    assert {name: cell["state"] for name, cell in cells.items()} == dict.fromkeys(final, "succeeded")
    assert {name: cell["facts"] for name, cell in cells.items()} == {name: c["facts"] for name, c in final.items()}


def test_progress_within_a_phase_is_sent_without_an_event(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    build_id = client.submit(freeze_manifest(tmp_path, many(2), batch="batch"))["id"]
    ((job_id, attempt), *_) = farm.store.jobs.hand_out(client.pools.all()[0]["name"], 10)
    claim = farm.store.jobs.claim(job_id, attempt, nonce="n", worker="w1", node="n1")
    changes = client.changes(build_id)
    assert next(changes)["type"] == "reset"
    for progress_made in (0.25, 0.5):
        farm.store.jobs.renew(claim.token, job_id, phase="tuning", progress=progress_made, detail="slice")
        change = next(change for change in changes if change["cells"][0]["progress"] == progress_made)
        assert [cell["state"] for cell in change["cells"]] == ["running"]


def test_a_pause_is_sent_though_nothing_happens(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    build_id = client.submit(freeze_manifest(tmp_path, many(2), batch="batch"))["id"]
    (pool,) = (pool["name"] for pool in client.pools.all())
    changes = client.changes(build_id)
    assert next(changes)["type"] == "reset"
    client.pools.pause(pool)
    assert next(change["outlook"]["paused"] for change in changes if "outlook" in change) == [pool]
    client.pools.resume(pool)
    assert next(change["outlook"]["paused"] for change in changes if "outlook" in change) == []
    client.pause(build_id)
    assert next(change["outlook"]["paused"] for change in changes if "outlook" in change) == [build_id]


def test_who_catches_up_with_thousands_of_events_hears_the_next_as_soon_as_others(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = client.submit(freeze_manifest(tmp_path, many(2), batch="batch"))["id"]
    item = {"id": "1-1", "type": "cell", "cell": "a", "state": "running"}
    reads = [[item] * build_routes.MANY] * 60 + [[item], [{"id": "1-2", "type": "build", "state": "reported"}]]
    slept: list[float] = []
    monkeypatch.setattr(farm.store.events, "read", lambda *_: {"items": reads.pop(0)})
    monkeypatch.setattr(farm.build_reader, "get", lambda *_: {"state": "reported"})
    sleep = anyio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def watch() -> int:
        monkeypatch.setattr(build_routes.anyio, "sleep", noted)
        limiter = anyio.CapacityLimiter(1)
        return len([text async for text in build_routes._events(farm, "main", build_id, None, limiter, None)])

    assert anyio.run(watch) == 63
    assert max(slept) <= build_routes.SECONDS_APART


def test_events_that_come_one_after_the_other_soon_travel_together(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_routes, "SECONDS_APART", 0.05)
    build_id = client.submit(freeze_manifest(tmp_path, many(60), batch="batch"))["id"]
    read, reads, heard = farm.store.events.read, [0], list[str]()

    def counted(*about: Any) -> Any:
        found = read(*about)
        reads[0] += 1
        return found

    def watch() -> None:
        for event in client.watch(build_id):
            heard.append(event.get("state", ""))
            if heard.count("running") == 40:
                return

    monkeypatch.setattr(farm.store.events, "read", counted)
    watcher = threading.Thread(target=watch)
    began = time.monotonic()
    watcher.start()
    for number, (job_id, attempt) in enumerate(farm.store.jobs.hand_out(POOL.name, 20), 1):
        farm.store.jobs.claim(job_id, attempt, nonce="n", worker="w1", node="n1")
        if number < 30:  # Who reads at once reads each one.
            wait_until(lambda number=number: heard.count("running") == number)
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    assert reads[0] <= build_routes.AT_ONCE + (time.monotonic() - began) / 0.05 + 1
    assert heard.count("running") == 40
