"""Orders that a worker runs: those in the list of their build, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from farm.artifacts import planned_orders
from farm.artifacts.planned_orders import is_kept, keep, require_planned
from farm.artifacts.s3 import S3Store
from farm.errors import Untrusted

KEY, OTHER = "ab" * 32, "cd" * 32
BUILD = "b-0123456789abcdef"
ORDER: Any = {"identifier": "net/onnxruntime-cpu/fp32/b1", "hit": False, "spec": {"precision": "fp32"}}


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_orders, "_lists", {})


def test_what_is_in_the_list_of_its_build_is_planned_and_what_differs_is_not(store: S3Store) -> None:
    assert not is_kept(store, "main", BUILD)
    for _ in range(2):
        keep(store, "main", BUILD, [(KEY, ORDER), (OTHER, ORDER)])
    assert is_kept(store, "main", BUILD)
    for key in (KEY, OTHER):
        require_planned(store, "main", BUILD, key, ORDER)
    require_planned(store, "main", BUILD, KEY, {**ORDER, "hit": True})
    wrong: list[tuple[str, str, str, Any]] = [
        ("main", BUILD, "ef" * 32, ORDER),
        ("main", BUILD, KEY, {**ORDER, "identifier": "other/onnxruntime-cpu/fp32/b1"}),
        ("main", BUILD, KEY, {**ORDER, "spec": {}}),
        ("team", BUILD, KEY, ORDER),
        ("main", "b-0123456789abcdee", KEY, ORDER),
    ]
    for place in wrong:
        with pytest.raises(Untrusted, match="has not planned this work order"):
            require_planned(store, *place)


@pytest.mark.parametrize(
    "place", [("main/artifacts", BUILD), ("artifacts", BUILD), ("main", f"{BUILD}/x"), ("main", "x")]
)
def test_a_list_under_a_foreign_name_counts_for_nothing(store: S3Store, place: tuple[str, str]) -> None:
    """Workers may write below a namespace's artifacts, and `//artifacts` may be `/artifacts`."""
    keep(store, *place, [(KEY, ORDER)])
    with pytest.raises(Untrusted):
        require_planned(store, *place, KEY, ORDER)


def test_a_list_is_read_once_and_one_that_is_missing_again(store: S3Store) -> None:
    with pytest.raises(Untrusted):
        require_planned(store, "main", BUILD, KEY, ORDER)
    keep(store, "main", BUILD, [(KEY, ORDER)])
    require_planned(store, "main", BUILD, KEY, ORDER)
    key = next(iter(store.list_objects("ns/main/builds/")))
    store.delete_object(key)
    require_planned(store, "main", BUILD, KEY, ORDER)
    for number in range(16):
        keep(store, "main", f"b-{number:016x}", [(KEY, ORDER)])
        require_planned(store, "main", f"b-{number:016x}", KEY, ORDER)
    with pytest.raises(Untrusted):
        require_planned(store, "main", BUILD, KEY, ORDER)
    require_planned(store, "main", f"b-{15:016x}", KEY, ORDER)


def test_a_list_that_other_attempts_push_out_meanwhile_still_counts(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large order takes a while to hash, and all slots of a worker share the lists."""
    keep(store, "main", BUILD, [(KEY, ORDER)])
    require_planned(store, "main", BUILD, KEY, ORDER)
    digest = planned_orders._digest

    def meanwhile(*of: Any) -> bytes:
        monkeypatch.setattr(planned_orders, "_digest", digest)
        for number in range(16):
            keep(store, "main", f"b-{number:016x}", [(KEY, ORDER)])
            require_planned(store, "main", f"b-{number:016x}", KEY, ORDER)
        return digest(*of)

    monkeypatch.setattr(planned_orders, "_digest", meanwhile)
    require_planned(store, "main", BUILD, KEY, ORDER)
