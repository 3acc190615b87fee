"""The index: what is whole in object storage, read again after Redis was lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from farm.artifacts import inventory
from farm.artifacts import sidecar as sidecars
from farm.artifacts.inventory import rebuild
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import blob_key, sidecar_key

COUNT = 40


class CountingStore(S3Store):
    """Counts the sidecars that are read."""

    read = 0

    def get_object(self, key: str) -> Any:
        self.read += "/artifacts/" in key
        return super().get_object(key)


@pytest.fixture
def store(s3_connection: dict[str, str]) -> CountingStore:
    return CountingStore(**s3_connection)


def key_of(number: int) -> str:
    return f"{number:02x}" * 32


def publish(store: S3Store, number: int, namespace: str = "main") -> dict[str, Any]:
    digest, size = store.put_blob_bytes(f"program {number}".encode())
    sidecar = {
        "schema": 1,
        "key": key_of(number),
        "identifier": f"model-{number}/onnxruntime-cpu/fp32/b1",
        "spec": {},
        "blobs": {"program": {"path": "program.onnx", "digest": digest, "size": size}},
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": {"arch": "cpu"},
        "created": "2026-11-21T00:00:00+00:00",
    }
    return dict(store.publish(namespace, sidecar))


@pytest.fixture
def published(store: CountingStore) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: publish(store, number), range(COUNT)))
    store.read = 0
    return made


def test_an_empty_namespace_has_an_empty_index(store: CountingStore) -> None:
    assert list(rebuild(store, "main")) == []


@pytest.mark.parametrize("few", [inventory.FEW, 0], ids=["blobs asked for", "blobs listed"])
def test_it_has_the_facts_of_every_whole_artifact(
    store: CountingStore, published: list[dict[str, Any]], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the blobs are looked for: one without them, or with half of them, is not whole."""
    monkeypatch.setattr(inventory, "FEW", few)
    publish(store, 200, namespace="pr-7")
    store.delete_object(blob_key(published[3]["blobs"]["program"]["digest"]))
    store.put_object(blob_key(published[4]["blobs"]["program"]["digest"]), b"half")
    store.put_object(sidecar_key("main", key_of(5)), b"{")
    store.put_object(sidecar_key("main", key_of(250)), sidecars.text(sidecars.validate(published[6])))

    expected = {
        sidecar["key"]: sidecars.facts(sidecars.validate(sidecar))
        for number, sidecar in enumerate(published)
        if number not in (3, 4, 5)
    }
    assert dict(rebuild(store, "main")) == expected


def test_only_what_changed_is_read_again(store: CountingStore, published: list[dict[str, Any]]) -> None:
    before = dict(rebuild(store, "main"))
    assert store.read == COUNT
    assert dict(rebuild(store, "main")) == before
    assert store.read == COUNT

    publish(store, COUNT)
    store.delete_object(sidecar_key("main", key_of(0)))
    found = store.get_object(sidecar_key("main", key_of(1)))
    repaired = sidecars.validate({**published[1], "worker": "other", "toolchain": "new"})
    store.put_object(sidecar_key("main", key_of(1)), sidecars.text(repaired), if_match=found.etag)
    store.read = 0
    after = dict(rebuild(store, "main"))

    assert store.read == 2, "the new one and the repaired one"
    assert after[key_of(1)]["toolchain"] == "new"
    assert after.keys() == before.keys() - {key_of(0)} | {key_of(COUNT)}


def test_a_blob_that_went_since_the_checkpoint_is_noticed(
    store: CountingStore, published: list[dict[str, Any]]
) -> None:
    """The checkpoint remembers facts, never that something is whole."""
    list(rebuild(store, "main"))
    store.delete_object(blob_key(published[0]["blobs"]["program"]["digest"]))
    assert key_of(0) not in dict(rebuild(store, "main"))


@pytest.mark.parametrize("data", [b"", b"{}", b"\x1f\x8b\x08\x00", b"not gzip"])
def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    store: CountingStore, published: list[dict[str, Any]], data: bytes
) -> None:
    before = dict(rebuild(store, "main"))
    store.put_object("ns/main/index/checkpoint.json.gz", data)
    assert dict(rebuild(store, "main")) == before


def test_a_checkpoint_that_unpacks_without_end_is_read_as_none(
    store: CountingStore, published: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(rebuild(store, "main"))
    monkeypatch.setattr(inventory, "LARGEST_CHECKPOINT", 100)
    store.read = 0
    assert dict(rebuild(store, "main")) == before
    assert store.read == COUNT


def test_what_is_not_a_sidecar_of_its_place_is_in_no_index_and_of_another_schema_nothing_is_taken(
    store: CountingStore, published: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dict(rebuild(store, "main"))
    listed = store.list_entries

    def with_gone(prefix: str) -> Any:
        found = list(listed(prefix))
        return [*found, replace(found[0], key=f"{prefix}{'f' * 64}.json")] if "/artifacts/" in prefix else found

    monkeypatch.setattr(store, "list_entries", with_gone)
    assert dict(rebuild(store, "main")) == whole, "one went between the list and the look"
    monkeypatch.undo()
    store.put_object(sidecar_key("main", key_of(90)), b"no sidecar")
    there = store.get_object(sidecar_key("main", key_of(1)))
    assert there
    store.put_object(sidecar_key("main", key_of(91)), there.data)
    assert dict(rebuild(store, "main")) == whole
    monkeypatch.setattr(inventory, "SCHEMA", 99)
    store.read = 0
    assert dict(rebuild(store, "main")) == whole
    assert store.read == COUNT + 2, "the checkpoint is of another release"
    store.read = 0
    assert dict(rebuild(store, "main")) == whole
    assert store.read == 2, "what cannot be read is looked at again"


def test_of_few_and_of_many_programs_those_that_are_gone_are_named(
    store: CountingStore, published: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {f"n{number}": sidecars.facts(made) for number, made in enumerate(published)}  # type: ignore[arg-type]
    gone, other = facts["n0"]["program"], facts["n1"]["program"]
    store.delete_object(blob_key(gone["digest"]))
    store.put_object(blob_key(other["digest"]), b"of another size")
    for few in (500, COUNT - 1):
        monkeypatch.setattr(inventory, "FEW", few)
        assert sorted(inventory.without_program(store, facts)) == ["n0", "n1"]
