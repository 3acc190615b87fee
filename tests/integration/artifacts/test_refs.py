"""Refs: names that move without losing anybody's move."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from farm.artifacts.refs import Cells, Refs, RefView
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import blob_key
from farm.errors import ArtifactGone, Conflict, NotFound, StorageUnavailable, UsageError
from farm.results.ref_rules import entered, entries


@pytest.fixture
def refs(store: S3Store) -> Refs:
    return Refs(store)


def make_cell(identifier: str, key: str = "ab" * 32, **fields: Any) -> dict[str, Any]:
    return {
        "manifest": "demo",
        "submitted": 0.0,
        "identifier": identifier,
        "model": identifier,
        "target": "onnxruntime/cpu",
        "precision": "fp32",
        "shape": "b1",
        "key": key,
        "device": "cpu",
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "program": {"path": "program.onnx", "digest": "cd" * 32, "size": 3},
        **fields,
    }


def add(refs: Refs, namespace: str, tag: str, cells: list[Any]) -> RefView:
    """Add cells to a tag, as a build does it that has ended."""
    return refs.move(namespace, tag, lambda there: entered(there, entries(namespace, cells)))


def point(refs: Refs, tag: str, source: str, *, previous: bool = False, generation: int | None = None) -> RefView:
    """Point a tag of `main` to what another names, as `farm tag` does it."""
    wanted = refs.source("main", source, previous=previous)
    return refs.move("main", tag, lambda _: wanted, generation=generation)


def names(snapshot: dict[str, Any] | None) -> set[str]:
    return {cell["identifier"] for cell in snapshot["cells"].values()} if snapshot else set()


def test_a_ref_that_nobody_made_is_none(refs: Refs) -> None:
    assert refs.find("main", "latest") is None
    assert refs.read("main", "latest") is None
    assert list(refs.list("main")) == []


def test_readers_in_a_namespace_get_its_own_ref_if_it_has_one(refs: Refs) -> None:
    add(refs, "main", "prod", [make_cell("a")])
    assert (refs.owner("team", "prod"), names(refs.read_through("team", "prod"))) == ("main", {"a"})
    add(refs, "team", "prod", [make_cell("b")])
    assert (refs.owner("team", "prod"), names(refs.read_through("team", "prod"))) == ("team", {"b"})
    assert names(refs.read_through("main", "prod")) == {"a"}


def test_cells_gather_under_a_name(refs: Refs) -> None:
    """A build adds its cells; those of the same identifier, device and toolchain take the place of those that were
    submitted before."""
    add(refs, "main", "latest", [make_cell("a"), make_cell("b")])
    add(refs, "main", "latest", [make_cell("b", key="ef" * 32, submitted=2.0), make_cell("c")])
    add(refs, "main", "latest", [make_cell("b", submitted=1.0)])
    snapshot = refs.read("main", "latest")
    assert names(snapshot) == {"a", "b", "c"}
    assert snapshot
    cell = snapshot["cells"]["b@cpu@onnxruntime1.31.1-1a2b3c4d"]
    assert cell["key"] == "ef" * 32
    assert cell["sidecar"] == f"ns/main/artifacts/ef/{'ef' * 32}.json"


def test_an_artifact_of_main_keeps_its_place_in_the_snapshot_of_another_namespace(refs: Refs) -> None:
    add(refs, "pr-7", "latest", [make_cell("a", sidecar="ns/main/artifacts/ab/x.json")])
    snapshot = refs.read("pr-7", "latest")
    assert snapshot
    assert [cell["sidecar"] for cell in snapshot["cells"].values()] == ["ns/main/artifacts/ab/x.json"]


def test_every_move_is_counted_and_remembers_where_it_came_from(refs: Refs, store: S3Store) -> None:
    """As readable JSON under a stable name."""
    first = add(refs, "main", "latest", [make_cell("a")])
    second = add(refs, "main", "latest", [make_cell("b")])
    again = add(refs, "main", "latest", [make_cell("b")])
    assert first["previous"] is None
    assert (second["generation"], second["previous"]) == (first["generation"] + 1, first["snapshot"])
    assert again == refs.find("main", "latest")
    assert again["generation"] == second["generation"], "what changes nothing moves nothing"
    document = store.get_object("ns/main/refs/latest.json")
    assert document
    pointer = json.loads(document.data)
    assert {name: pointer[name] for name in ("schema", "generation", "snapshot", "previous")} == {
        "schema": 1,
        "generation": second["generation"],
        "snapshot": second["snapshot"],
        "previous": first["snapshot"],
    }


def test_eight_that_move_one_ref_lose_nothing(refs: Refs) -> None:
    """Each adds its own cells, all at once, twice."""
    began = add(refs, "main", "latest", [])["generation"]
    start = threading.Barrier(8)

    def move(number: int) -> None:
        start.wait()
        for turn in range(2):
            add(refs, "main", "latest", [make_cell(f"{number}-{turn}")])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(move, range(8)))
    assert names(refs.read("main", "latest")) == {f"{number}-{turn}" for number in range(8) for turn in range(2)}
    ref = refs.find("main", "latest")
    assert ref and ref["generation"] == began + 16


def test_a_name_is_promoted_and_rolled_back_by_its_snapshot(refs: Refs) -> None:
    good = add(refs, "main", "latest", [make_cell("a")])
    point(refs, "prod", "latest")
    add(refs, "main", "latest", [make_cell("b")])
    moved = point(refs, "prod", "latest")
    assert moved["previous"] == good["snapshot"]
    point(refs, "prod", "prod", previous=True)
    assert names(refs.read("main", "prod")) == {"a"}
    assert refs.source("main", "prod").keys() == refs.read_through("main", "prod")["cells"].keys()
    assert names(refs.read("main", "latest")) == {"a", "b"}
    assert list(refs.list("main")) == ["latest", "prod"]
    refs.delete("main", "prod")
    assert list(refs.list("main")) == ["latest"]


def test_a_name_cannot_point_to_what_is_not_there(refs: Refs, store: S3Store) -> None:
    with pytest.raises(NotFound, match="no ref latest"):
        point(refs, "prod", "latest")
    first = add(refs, "main", "latest", [make_cell("a")])
    with pytest.raises(NotFound, match="no previous"):
        point(refs, "latest", "latest", previous=True)
    store.delete_object(blob_key(first["snapshot"]))
    with pytest.raises(ArtifactGone):
        point(refs, "prod", "latest")
    assert refs.find("main", "prod") is None


def test_of_two_that_promote_from_one_generation_one_is_refused(refs: Refs) -> None:
    add(refs, "main", "latest", [make_cell("a")])
    first = point(refs, "prod", "latest", generation=0)["generation"]
    add(refs, "main", "latest", [make_cell("b")])
    point(refs, "prod", "latest", generation=first)
    second = point(refs, "prod", "latest", generation=first)["generation"]
    assert second == first + 1, "a repetition finds its move made"
    add(refs, "main", "latest", [make_cell("c")])
    for stale in (0, first):
        with pytest.raises(Conflict, match=f"has generation {second}"):
            point(refs, "prod", "latest", generation=stale)
        with pytest.raises(Conflict, match=f"has generation {second}"):
            refs.delete("main", "prod", generation=stale)
    refs.delete("main", "prod", generation=second)
    with pytest.raises(Conflict, match="does not exist"):
        point(refs, "prod", "latest", generation=second)


def test_a_ref_that_is_made_again_has_no_generation_of_before(refs: Refs) -> None:
    """Else who saw the old one could move, or delete, the new one."""
    add(refs, "main", "latest", [make_cell("a")])
    old = {point(refs, "prod", "latest")["generation"]}
    add(refs, "main", "latest", [make_cell("b")])
    old.add(point(refs, "prod", "latest")["generation"])
    refs.delete("main", "prod")
    new = {point(refs, "prod", "latest")["generation"]}
    add(refs, "main", "latest", [make_cell("c")])
    new.add(point(refs, "prod", "latest")["generation"])
    add(refs, "main", "latest", [make_cell("d")])
    assert max(new) == min(new) + 1
    for stale in old:
        with pytest.raises(Conflict, match=f"has generation {max(new)}, not generation {stale}"):
            point(refs, "prod", "latest", generation=stale)
        with pytest.raises(Conflict, match=f"has generation {max(new)}, not generation {stale}"):
            refs.delete("main", "prod", generation=stale)


def test_a_ref_that_cannot_be_read_is_forgotten_when_that_is_asked(refs: Refs, store: S3Store) -> None:
    store.put_object("ns/main/refs/latest.json", b"{")
    refs.delete("main", "latest")
    assert refs.find("main", "latest") is None


def test_a_lost_snapshot_is_an_error_for_readers_and_the_one_before_it_for_who_moves_on(
    refs: Refs, store: S3Store
) -> None:
    add(refs, "main", "latest", [make_cell("a")])
    ref = add(refs, "main", "latest", [make_cell("b")])
    store.delete_object(blob_key(ref["snapshot"]))
    with pytest.raises(ArtifactGone):
        refs.read("main", "latest")
    with capture_logs() as logs:
        moved = add(refs, "main", "latest", [make_cell("c")])
    assert logs[0]["event"] == "snapshot unreadable, the previous one counts"
    assert names(refs.read("main", "latest")) == {"a", "c"}
    assert moved["generation"] == ref["generation"] + 1
    assert moved["previous"]
    assert names(refs.snapshot(moved["previous"])) == {"a"}


def test_a_lost_snapshot_comes_back_where_nothing_new_is_named(refs: Refs, store: S3Store) -> None:
    ref = add(refs, "main", "latest", [make_cell("a")])
    store.delete_object(blob_key(ref["snapshot"]))
    assert refs.read_through("main", "latest")["cells"] == {}
    add(refs, "main", "latest", [make_cell("a")])
    assert names(refs.read("main", "latest")) == {"a"}


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"schema": 1}', b'{"cells": 3}'])
def test_what_is_no_snapshot_counts_as_lost(refs: Refs, store: S3Store, damage: bytes) -> None:
    digest, _ = store.put_blob_bytes(damage)
    document = {"schema": 1, "generation": 7, "snapshot": digest, "previous": None, "moved": ""}
    store.put_object("ns/main/refs/latest.json", json.dumps(document).encode())
    with pytest.raises(ArtifactGone):
        refs.read("main", "latest")
    assert add(refs, "main", "latest", [make_cell("b")])["generation"] == 8
    assert names(refs.read("main", "latest")) == {"b"}


def test_a_ref_that_cannot_be_read_is_named(refs: Refs, store: S3Store) -> None:
    store.put_object("ns/main/refs/latest.json", b'{"generation": 1')
    with pytest.raises(ArtifactGone, match=r"ns/main/refs/latest\.json"):
        refs.read("main", "latest")
    with capture_logs() as logs:
        add(refs, "main", "latest", [make_cell("a")])
    assert logs[0]["event"] == "ref unreadable, treated as absent"
    assert names(refs.read("main", "latest")) == {"a"}


def test_a_move_against_somebody_who_never_stops_ends(refs: Refs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.artifacts.storage.MOVES", 5)
    count = 0

    def update(there: Cells) -> Cells:
        nonlocal count
        count += 1
        rival = Refs(refs._artifacts)
        add(rival, "main", "latest", [make_cell(f"rival-{count}")])
        return {}

    with pytest.raises(StorageUnavailable, match="moved by others"):
        refs.move("main", "latest", update)


def test_a_move_is_checked_and_made_once_and_everybody_is_told(store: S3Store) -> None:
    told: list[Any] = []

    def check(before: Cells, after: Cells) -> Any:
        told.append((list(before), list(after)))
        return lambda: told.append("confirmed")

    refs = Refs(store, on_committed=[lambda namespace, ref: told.append((namespace, ref["snapshot"]))])
    with capture_logs() as logs:
        moved = refs.move("main", "prod", lambda _: {"a": make_cell("a")}, check=check, signed="by ann")  # type: ignore[dict-item]
        assert told == [([], ["a"]), ("main", moved["snapshot"]), "confirmed"]
        told.clear()
        assert refs.move("main", "prod", lambda there: there, check=check) == moved
        assert told == [(["a"], ["a"]), "confirmed"]
        told.clear()
        assert refs.move("main", "prod", lambda there: there, check=check, signed="by bob") == moved
        assert told == [(["a"], ["a"]), ("main", moved["snapshot"]), "confirmed"]
        told.clear()
        refs.delete("main", "prod")
        assert told == [("main", "")]
    assert [(line["event"], line["ref"]) for line in logs] == [
        (event, "ns/main/refs/prod.json") for event in ("ref moved", "ref moved", "ref deleted")
    ]


@pytest.mark.parametrize("tag", ["", "../prod", "Prod", "a/b", ".hidden", "x" * 65])
def test_a_name_that_could_leave_its_folder_is_refused(refs: Refs, tag: str) -> None:
    with pytest.raises(UsageError, match="cannot name a ref"):
        refs.find("main", tag)


def test_a_ref_that_cannot_be_read_points_nowhere_in_a_list(refs: Refs, store: S3Store) -> None:
    store.put_object("ns/main/refs/prod.json", b"no ref")
    found = refs.listed("main", "prod")
    assert found and found.pop("damaged").startswith("the ref ns/main/refs/prod.json cannot be read")  # type: ignore[misc]
    place = {"tag": "prod", "namespace": "main", "generation": 0, "snapshot": "", "previous": None, "moved": ""}
    assert found == place
    assert refs.listed("main", "none") is None
    moved = refs.move("main", "prod", lambda there: there | {"a": make_cell("a")}, generation=0)  # type: ignore[dict-item]
    listed = refs.listed("main", "prod")
    assert listed == {**moved, "namespace": "main"} and listed["generation"] > 1_700_000_000_000
    again = refs.move("main", "prod", lambda there: there | {"b": make_cell("b")})  # type: ignore[dict-item]
    assert (again["generation"], again["previous"]) == (moved["generation"] + 1, moved["snapshot"])
