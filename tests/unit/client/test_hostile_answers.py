"""A farm that means ill: the client says in one line what is wrong, and never with a traceback."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from farm.client.client import FarmClient
from farm.client.storage_client import StorageClient
from farm.errors import ArtifactGone, FarmError, Untrusted, UsageError
from farm.extras.signing.signing_keys import clock
from farm.extras.signing.trust import policy_of_keys
from farm.extras.signing.verifying import SignaturesApi, Trust
from farm.matrix.planned import CellGates
from farm.results.ref_rules import family
from farm.spec import cache_key
from farm.wire.checking import checked
from tests.support.signed import Signed, key_in, sidecar_of

if TYPE_CHECKING:
    from farm.wire.program import Sidecar

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
ODD = json.dumps(
    {
        **{name: REF[name] for name in ("schema", "generation", "previous", "moved")},
        "cells": {"one": {**CELL, "submitted": "1"}},
    }
).encode()


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


@pytest.mark.parametrize("value", [7.5, [{}], {"a": []}, ["x"], "9" * 5000], ids=lambda value: repr(value)[:9])
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


def test_members_of_a_family_may_say_nothing_of_their_model() -> None:
    odd: list[Any] = [
        (CELL, {"spec": {"model": []}}),
        (CELL, {"spec": {"model": {"digest": []}}}),
        (CELL, {"spec": {}}),
    ]
    assert len(family(odd)) == 1


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


@pytest.mark.parametrize(
    ("objects", "ask"),
    [
        ({"report.json": b"{}"}, lambda storage: storage.refs.get("b-0123456789abcdef")),
        ({"report.json": b'{"build": {}, "cells": [1]}'}, lambda storage: storage.refs.get("b-0123456789abcdef")),
        ({".json": b"\xff"}, lambda storage: storage.artifacts.stored("ab" * 32)),
        ({".json": b"{}", ".jsonl": b"\xff"}, lambda storage: storage.artifacts.stored("ab" * 32)),
        (
            {".json": b'{"snapshot": "%s"}' % hashlib.sha256(ODD).hexdigest().encode(), "": ODD},
            lambda storage: storage.refs.get("prod"),
        ),
    ],
)
def test_odd_objects_of_a_storage_are_one_line(
    objects: dict[str, bytes], ask: Callable[[StorageClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(key: str) -> bytes:
        found = next((data for end, data in objects.items() if key.endswith(end)), None)
        if found is None:
            raise ArtifactGone(key)
        return found

    storage = StorageClient.below("http://storage.example")
    monkeypatch.setattr(storage.transport, "content", content)
    with pytest.raises((ArtifactGone, UsageError)) as caught:
        ask(storage)
    assert "\n" not in caught.value.message


def test_a_farm_may_not_say_where_a_blob_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say where"):
        client({}).artifacts.download({"path": "net.onnx", "digest": "ab" * 32, "size": 3}, tmp_path)


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


def test_a_number_that_nobody_can_print_is_refused() -> None:
    with pytest.raises(UsageError, match="unexpected answer from "):
        client({"bytes": 10**400}).transport.get("/v1/gc", dict[str, int])


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


DIGEST = "ab" * 32
SPEC: Any = {
    "model": {"digest": DIGEST, "format": "onnx"}, "compiler": {"name": "onnxruntime", "recipe": 1, "libraries": {}},
    "device": {"arch": "cpu", "compute_units": None, "xcc": None, "cpu_family": None}, "toolchain": "onnxruntime1.31",
    "precision": "fp32", "inputs": {}, "batch": None, "options": {}, "tuning": {"mode": "off"}, "env": {},
    "calibration": None, "quantization": {}, "verification": None, "salt": "", "schema": 1,
}  # fmt: skip
ORDERED: Any = {
    "schema": 1, "farm": "0.2.0", "job": "j-1", "attempt": 1, "namespace": "main", "build": BUILD_ID, "worker": "w",
    "key": cache_key(SPEC), "limits": {"time": 0.0, "memory": 0}, "previous": [], "ended": None, "reference": None,
    "order": {
        "identifier": "net/onnxruntime-cpu/fp32/static", "pool": "p", "target": "onnxruntime/cpu", "spec": SPEC,
        "model": {"format": "onnx", "names": ["y"], "files": [{"path": "n.onnx", "digest": DIGEST, "size": 4}]},
        "calibration": None, "samples": None,
    },
}  # fmt: skip


def work_order(document: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a client makes of an artifact's stored work order."""
    farm, blob = client({}), {"path": "order.json", "digest": DIGEST}
    sidecar = {"identifier": "net", "key": ORDERED["key"], "blobs": {"reproduction": blob}}
    monkeypatch.setattr(farm.artifacts, "bring", lambda blob, place: place.write_bytes(json.dumps(document).encode()))
    return farm.artifacts.work_order(cast("Sidecar", sidecar))


@pytest.mark.parametrize("name", ORDERED)
def test_an_odd_work_order_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work_order(ORDERED, monkeypatch) == ORDERED
    for odd in ({**ORDERED, name: [[]]}, {each: value for each, value in ORDERED.items() if each != name}, [], 1):
        with pytest.raises(UsageError, match="unexpected answer from ") as caught:
            work_order(odd, monkeypatch)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("changed", [{"spec": {**SPEC, "precision": "int8"}}, {"model": {"format": "onnx", "names": [],
    "files": [{"path": "n.onnx", "digest": "cd" * 32, "size": 4}]}}])  # fmt: skip
def test_a_work_order_of_another_artifact_is_refused(changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactGone, match="the work order of net is of another compile than its sidecar"):
        work_order({**ORDERED, "order": {**ORDERED["order"], **changed}}, monkeypatch)


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
