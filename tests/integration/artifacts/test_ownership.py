"""Garbage: what nothing names goes a day after it was marked, and what is named again in that time stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from farm.artifacts import inventory
from farm.artifacts.inventory import MARKS, Collected, collect, lacking
from farm.artifacts.refs import Refs
from farm.artifacts.s3 import S3Store
from tests.support.helpers import wait_until

KEPT = timedelta(days=14)
DAY = timedelta(days=1)


@pytest.fixture
def store(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store in which every blob counts as old."""
    names = ("endpoint", "bucket", "access_key", "secret_key")
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(0))
    return S3Store(**{name: s3_settings[f"s3_{name}"] for name in names})


def found(store: S3Store, monkeypatch: pytest.MonkeyPatch, *, grace: timedelta) -> Collected:
    monkeypatch.setattr(inventory, "GRACE", grace)
    return collect(store, plans_kept=KEPT)


def deleted(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blobs go without a grace."""
    next_second()
    return wait_until(lambda: found(store, monkeypatch, grace=timedelta(0))["blobs"], message="something is deleted")


def next_second() -> None:
    """A mark counts if it is later than its blob, and the server may count seconds: to mark in vain costs requests."""
    over = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)
    wait_until(lambda: datetime.now(UTC) >= over)


def test_a_blob_without_a_name_is_marked_and_goes_after_the_grace(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, size = store.put_blob_bytes(b"nobody's")
    named, _ = store.put_blob_bytes(b"somebody's")
    store.put_object("config/anything.json", json.dumps({"of": named}).encode())
    assert collect(store, plans_kept=KEPT, dry_run=True) == {"blobs": 1, "bytes": size, "marked": 0}
    assert list(store.list_objects(MARKS)) == [], "a dry run changes nothing"
    for _ in range(2):
        assert found(store, monkeypatch, grace=DAY) == {"blobs": 0, "bytes": 0, "marked": 1}
    assert store.has_blob(digest)
    assert deleted(store, monkeypatch) == 1
    assert (store.has_blob(digest), store.has_blob(named)) == (False, True)
    assert list(store.list_objects(MARKS)) == []


def test_what_is_named_in_the_grace_stays_and_loses_its_mark(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, _ = store.put_blob_bytes(b"a model")
    found(store, monkeypatch, grace=DAY)
    store.put_object("ns/main/builds/b-1/plan.json", json.dumps({"model": digest}).encode())
    assert found(store, monkeypatch, grace=timedelta(0))["blobs"] == 0
    assert store.has_blob(digest)
    assert list(store.list_objects(MARKS)) == []


@pytest.mark.parametrize(
    "key",
    [
        "ns/main/builds/b-2/plan.json",
        "ns/main/builds/b-1/plan.json",
        "ns/main/refs/prod.json",
        "ns/main/tuning/pool/device/quick/head.json",
    ],
    ids=["a new document", "the plan of an open build", "a ref", "a head"],
)
def test_what_is_named_between_the_look_and_the_deletion_stays(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """By who does not upload it again; all but the first are there before, and change."""
    digest, _ = store.put_blob_bytes(b"nobody's")
    store.put_object("ns/main/open/b-1", b"{}")
    if "b-2" not in key:
        store.put_object(key, b"{}")
    mark = inventory._mark

    def marked() -> bool:
        found(store, monkeypatch, grace=DAY)
        return inventory._is_doomed(store, digest)

    def named_meanwhile(artifacts: S3Store, entries: Any) -> Any:
        store.put_object(key, json.dumps({"snapshot": digest}).encode())
        return mark(artifacts, entries)

    next_second()
    wait_until(marked, message="it is marked")
    monkeypatch.setattr(inventory, "_mark", named_meanwhile)
    assert found(store, monkeypatch, grace=timedelta(0))["blobs"] == 0
    assert store.has_blob(digest)


def test_a_marked_blob_counts_as_missing_until_it_is_uploaded_again(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, size = store.put_blob_bytes(b"a model")
    assert lacking(store, {digest: size}) == []

    def marked() -> bool:
        found(store, monkeypatch, grace=DAY)
        return lacking(store, {digest: size}) == [digest]

    next_second()
    wait_until(marked, message="it is marked")
    store.put_blob_bytes(b"a model")
    assert lacking(store, {digest: size}) == []


def old_plan(store: S3Store, build: str, digest: str, *, reported: bool) -> None:
    folder = f"ns/main/builds/{build}"
    store.put_object(f"{folder}/plan.json", json.dumps({"model": digest}).encode())
    store.put_object(f"{folder}/{'report.json' if reported else 'manifest.yaml'}", b"{}")


def test_the_plan_of_a_build_that_was_reported_long_ago_owns_its_models_no_more(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, _ = store.put_blob_bytes(b"the model of a build that is reported")
    goes_on, _ = store.put_blob_bytes(b"the model of a build that goes on")
    old_plan(store, "b-1", done, reported=True)
    old_plan(store, "b-2", goes_on, reported=False)
    assert found(store, monkeypatch, grace=DAY)["marked"] == 0
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    next_second()
    assert wait_until(lambda: collect(store, plans_kept=timedelta(0))["blobs"], message="something is deleted") == 1
    assert not store.has_blob(done)
    assert store.get_object("ns/main/builds/b-1/report.json")
    assert store.has_blob(goes_on)


def test_what_the_snapshot_of_a_ref_names_stays(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, _ = store.put_blob_bytes(b"a program whose sidecar is gone")
    Refs(store).move("main", "prod", lambda _: {"w": cell(digest)})
    store.put_object("ns/main/refs/lost.json", json.dumps({"snapshot": "0" * 64}).encode())
    assert found(store, monkeypatch, grace=timedelta(0)) == {"blobs": 0, "bytes": 0, "marked": 0}


def cell(key: str) -> dict[str, Any]:
    names = ("model", "target", "precision", "shape", "device", "toolchain")
    program = {"path": "p", "digest": key, "size": 1}
    return {**dict.fromkeys(names, "x"), "identifier": key, "key": key, "program": program}


class Interrupted:
    """Lets something be done right before the n-th request of a collection."""

    def __init__(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.act, self._ask = 0, -1, lambda: None, store.ask
        self.deletes: list[int] = []
        monkeypatch.setattr(store, "ask", self.ask)

    def ask(self, action: str, key: str, request: Any, **options: Any) -> Any:
        number, self.count = self.count, self.count + 1
        if action == "delete" and key.startswith("blobs/"):
            self.deletes.append(number)
        if number == self.at:
            self.act()
        return self._ask(action, key, request, **options)


def test_a_snapshot_that_a_ref_names_again_while_garbage_is_collected_stays(
    s3_settings: dict[str, str], store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each single request of the collection, but the deletion itself, by another process."""
    names = ("endpoint", "bucket", "access_key", "secret_key")
    refs = Refs(S3Store(**{name: s3_settings[f"s3_{name}"] for name in names}))
    monkeypatch.setattr("farm.artifacts.storage.AT_ONCE", 1)
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    wanted, others = {"w": cell("w")}, ({"o": cell("o")}, {"p": cell("p")})

    def orphaned() -> str:
        """Leave the wanted snapshot without a name, and marked."""
        digest = refs.move("main", "latest", lambda _: wanted)["snapshot"]
        for other in others:
            refs.move("main", "latest", lambda _, other=other: other)
        next_second()

        def marked() -> bool:
            found(store, monkeypatch, grace=DAY)
            return inventory._is_doomed(store, digest)

        wait_until(marked, message="it is marked")
        monkeypatch.setattr(inventory, "GRACE", timedelta(0))
        return digest

    def steps() -> Iterator[int]:
        yield from (number for number in range(requests) if number not in deletes)

    interrupted = Interrupted(store, monkeypatch)
    digest = orphaned()
    interrupted.count = 0
    assert collect(store, plans_kept=KEPT)["blobs"] == 1
    requests, deletes, kept = interrupted.count, set(interrupted.deletes), 0
    assert not store.has_blob(digest)
    for step in steps():
        interrupted.at = -1
        digest = orphaned()
        interrupted.count, interrupted.at = 0, step
        interrupted.act = lambda: refs.move("main", "latest", lambda _: wanted)  # type: ignore[assignment,return-value]
        collect(store, plans_kept=KEPT)
        assert refs.read("main", "latest") == {"schema": 1, "cells": wanted}, (
            f"named before request {step} of {requests}"
        )
        kept += 1
    assert kept >= 10


def test_a_sidecar_of_a_namespace_and_a_token_own_what_they_mention(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, _ = store.put_blob_bytes(b"mentioned")
    store.put_object("config/anything.json", json.dumps({"of": digest}).encode())
    assert found(store, monkeypatch, grace=timedelta(0))["blobs"] == 0
