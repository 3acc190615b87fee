"""A farm that means ill: the client says in one line what is wrong, and never with a traceback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from farm.client.client import FarmClient
from farm.errors import FarmError, Untrusted, UsageError
from farm.extras.signing.signatures_api import SignaturesApi
from farm.extras.signing.trust import clock, policy_of_keys
from farm.extras.signing.verifying import Trust
from farm.matrix.planned import CellGates
from farm.wire.checking import checked
from tests.support.signed import Signed, key_in, sidecar_of

CELL: dict[str, Any] = {
    "manifest": "demo", "submitted": 1.0,
    "identifier": "net/cpu/fp32/b1", "model": "net", "target": "onnxruntime/cpu", "precision": "fp32", "shape": "b1",
    "sizes": {"batch": 1}, "key": "ab" * 32, "device": "cpu", "toolchain": "t",
    "program": {"path": "net.onnx", "digest": "cd" * 32, "size": 3},
}  # fmt: skip
REF: dict[str, Any] = {
    "tag": "prod", "generation": 1, "snapshot": "ef" * 32, "previous": None, "moved": "2026", "schema": 1,
    "cells": {"one": CELL, "two": {**CELL, "sizes": {"batch": {"min": 1, "max": 8, "optimals": [4]}}, "seconds": 2}},
}  # fmt: skip


def client(answer: Any) -> FarmClient:
    channel = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    return FarmClient("http://farm.example", transport=channel)


def parts(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from parts(value, (*path, key))


def test_a_ref_of_a_farm_is_taken_also_of_a_newer_one() -> None:
    newer = copy.deepcopy(REF)
    newer["cells"]["one"]["colour"] = newer["weather"] = {"new": 1}
    assert client(newer).refs.get("prod") == newer
    assert len(client(newer).ls("prod")) == 2


@pytest.mark.parametrize("value", [7.5, [{}], {"a": []}, ["x"]])
def test_any_odd_value_in_a_ref_is_one_line(value: Any) -> None:
    for path in parts(REF):
        broken = copy.deepcopy(REF)
        *above, last = path
        place = broken
        for key in above:
            place = place[key]
        place[last] = value
        if path == ("cells", "two", "seconds") and value == 7.5:
            continue
        try:
            client(broken).fetch("net", "onnxruntime/cpu", "fp32", "b9", folder=Path("unused"), ref="prod")
        except Exception as error:
            assert type(error).__module__ == "farm.errors", f"{path}: {error!r}"
            assert "\n" not in str(error.args[0])
        else:
            pytest.fail(f"{path} was taken")


def test_any_field_left_out_of_a_ref_is_one_line_or_not_needed() -> None:
    for path in parts(REF):
        broken = copy.deepcopy(REF)
        *above, last = path
        place = broken
        for key in above:
            place = place[key]
        place.pop(last)
        with pytest.raises(FarmError) as caught:
            client(broken).fetch("net", "onnxruntime/cpu", "fp32", "b9", folder=Path("unused"), ref="prod")
        assert "\n" not in caught.value.message


LISTS: dict[str, Callable[[FarmClient], object]] = {
    "builds": lambda farm: farm.builds(),
    "cells": lambda farm: farm.cells("b-0123456789abcdef"),
    "history": lambda farm: farm.history("net/cpu/fp32/b1"),
    "workers": lambda farm: farm.workers.all(),
    "pools": lambda farm: farm.pools.all(),
    "tokens": lambda farm: farm.tokens.all(),
    "tuning": lambda farm: farm.tuning.all(),
    "refs": lambda farm: farm.refs.all(),
    "toolchains": lambda farm: farm.toolchains.all()[0]["toolchain"],
    "webhooks": lambda farm: farm.webhooks.all()[0]["name"],
    "deliveries": lambda farm: farm.webhooks.deliveries("chat")[0]["id"],
    "manifests": lambda farm: farm.manifests.all(),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("item", [None, 1, [], {}, {"id": [], "name": {}}], ids=repr)
def test_odd_entries_of_lists_are_one_line(name: str, item: Any) -> None:
    with pytest.raises(UsageError, match=r"unexpected answer from .*farm.*: ") as caught:
        LISTS[name](client({"items": [item]}))
    assert "\n" not in caught.value.message


BUILD_ID = "b-0123456789abcdef"
ASKS: dict[str, Callable[[FarmClient], object]] = {
    "build": lambda farm: farm.build("@latest"),
    "report": lambda farm: farm.report("@latest"),
    "job": lambda farm: farm.jobs.get("j-1"),
    "artifact": lambda farm: farm.artifacts.get("ab" * 32),
    "signed": lambda farm: farm.artifacts.signed("ab" * 32),
    "ref": lambda farm: farm.refs.get("prod"),
    "plan": lambda farm: farm.plan_retry(BUILD_ID)["cells"],
    "retry": lambda farm: farm.retry(BUILD_ID).id,
    "radar": lambda farm: farm.toolchains.radar(BUILD_ID)["build"],
    "tag": lambda farm: farm.refs.move("prod", "latest")["generation"],
    "manifest": lambda farm: farm.manifests.get("net")["versions"],
    "cancel": lambda farm: farm.cancel(BUILD_ID),
    "rebuild": lambda farm: farm.upkeep.rebuild_history(),
    "reproduction": lambda farm: farm.jobs.reproduction(BUILD_ID, "net/cpu/fp32/b1")["order"],
    "gc": lambda farm: farm.upkeep.gc()["bytes"],
    "token": lambda farm: farm.tokens.create("ci", "submit", "main"),
    "webhook": lambda farm: farm.webhooks.create("chat", "https://chat.example"),
    "tuning": lambda farm: farm.tuning.stats("pool/device/quick")["records"],
    "merge": lambda farm: farm.tuning.merge("pool/device/quick")["deltas"],
    "upload": lambda farm: farm.upload({"ab" * 32: Path(__file__)}),
}


@pytest.mark.parametrize("answer", [{}, {"id": 1}, {"spec": [], "blobs": 1}])
@pytest.mark.parametrize("name", ASKS)
def test_odd_documents_are_one_line(name: str, answer: Any) -> None:
    with pytest.raises(UsageError, match="unexpected answer from ") as caught:
        ASKS[name](client(answer))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", ["[]", "1", "{}", "x", '{"type": "cells", "cells": [1]}', '{"type": 1}'])
def test_odd_events_are_one_line(data: str) -> None:
    channel = httpx.MockTransport(lambda _: httpx.Response(200, text=f"id: 1\ndata: {data}\n\n"))
    farm = FarmClient("http://farm.example", transport=channel)
    for ask in (farm.changes, farm.watch):
        with pytest.raises(UsageError, match="unexpected answer from "):
            next(iter(ask(BUILD_ID)))


def test_another_artifact_than_the_one_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    """What a farm signed long ago stays signed: only its key tells it from what is wanted now."""
    old = Signed(sidecar_of(), key_in(tmp_path, "farm"))
    answer = {"sidecar": old.text.decode(), "statements": [old.provenance(clock()).decode()]}
    own, trust = client(answer), Trust(policy_of_keys([tmp_path / "farm.pub"], "main"))
    own.trust = trust
    assert own.artifacts.signed(old.sidecar["key"])
    with pytest.raises(Untrusted, match="it is the artifact 0000000000000000…, and abababababababab… was asked for"):
        own.artifacts.signed("ab" * 32)
    assert [check.name for check in SignaturesApi.of(own).judged("ab" * 32, trust)] == ["key"]


def test_what_is_wrong_is_named_with_its_place() -> None:
    gates = {"tolerance": {"*": 0.1}, "weak": "warn", "on_fail": "fail", "unverifiable": "warn"}
    assert checked(gates, CellGates, "x") == gates
    with pytest.raises(UsageError, match="unexpected answer from x: weak: Input should be"):
        checked({**gates, "weak": 1}, CellGates, "x")
