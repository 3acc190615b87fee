"""Shadow builds and promotions over real servers; the worker with its toolchains is played."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest

from farm.app import Farm
from farm.artifacts.storage import sidecar_key
from farm.client.client import FarmClient
from farm.client.fetching import choose
from farm.client.freezing import freeze
from farm.compiling.attempt import Attempt
from farm.errors import Conflict, FarmFault, GateFailed, NotFound, StorageUnavailable, Untrusted
from farm.extras.radar.toolchains import Toolchains
from farm.extras.radar.toolchains_api import bisect
from farm.extras.signing.notary import Promotions
from farm.extras.signing.signing_keys import new_key
from farm.extras.signing.trust import policy_of_keys
from farm.jobs.state import FailureKind
from farm.manifest.parsing import read_gates
from farm.results import ref_rules
from tests.support.api_farm import MANIFEST, freeze_manifest
from tests.support.played import Made, Player, played_to_the_end, toolchain

OLD, NEW = toolchain("1.31.0"), toolchain("1.32.0")
FP32, FP16 = "net/onnxruntime-cpu/fp32/static", "net/onnxruntime-cpu/fp16/static"


@pytest.fixture
def player(farm: Farm) -> Player:
    """The node as it was: one toolchain."""
    player = Player(farm, [])
    player.join(OLD)
    return player


@pytest.fixture
def prod(client: FarmClient, player: Player, tmp_path: Path) -> int:
    """The generation of `prod`, which names two cells of the old toolchain."""
    build = client.submit(freeze_manifest(tmp_path, MANIFEST))
    player.finish(client, build["id"])
    client.refs.move("prod", "latest")
    return int(client.refs.get("prod")["generation"])


def given(client: FarmClient, ref: str = "prod", made_by: str = "") -> dict[str, str]:
    """What a reader gets of a ref: toolchains by precision."""
    cells = client.ls(ref)
    chosen = [choose(cells, "net", "onnxruntime/cpu", name, None, made_by, ref=ref) for name in ("fp32", "fp16")]
    return {cell["precision"]: cell["toolchain"] for (cell,) in chosen}


def test_a_toolchain_that_appears_moves_nothing_until_it_is_promoted_and_goes_back_as_easily(
    farm: Farm, client: FarmClient, player: Player, prod: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.join(NEW)
    names = [line["toolchain"] for line in client.toolchains.all() if line["live_workers"]]
    assert names == [OLD.toolchain, NEW.toolchain]
    pools = [NEW.as_dict(), replace(NEW, features=("avx512f",)).as_dict()]
    farm.store.workers.register({"id": "w2", "node": "n2", "pid": 2, "host": "n2", "slots": 1, "pools": pools}, ttl=600)
    assert [line["live_workers"] for line in client.toolchains.all()][:2] == [1, 2], "not one for each pool"
    farm.store.workers.leave("w2")
    before = client.refs.get("prod"), client.refs.get("latest")

    player.says = lambda order: Made(error=5e-7 if order["identifier"] == FP16 else 0.0, ratio=1.2, size=50)
    shadow = client.toolchains.shadow()
    assert player.finish(client, shadow["id"])["build"]["verdict"]["exit_code"] == 0
    assert (client.refs.get("prod"), client.refs.get("latest")) == before, "nothing that readers see moved"
    assert client.build("@latest")["id"] != shadow["id"]
    again = client.submit(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    assert again["counts"]["hits"] == 2, "and builds go on with the toolchain that readers get"

    found = client.toolchains.radar(shadow["id"])
    assert (found["promotable"], found["counts"]["better"], found["counts"]["breaks"]) == (True, 2, 0)
    under = {cell["identifier"]: (cell["before"], cell["after"]) for cell in found["cells"]}
    assert under == dict.fromkeys((FP32, FP16), (OLD.toolchain, NEW.toolchain))
    rows = {row["measure"]: row["outcome"] for row in found["cells"][0]["compared"]}
    assert (rows["latency"], rows["size"], rows["compile_time"]) == ("better", "better", "within")

    trusting = Promotions(farm.artifacts, policy_of_keys([new_key("nobody", tmp_path)[1]], "main"), None)
    with monkeypatch.context() as patch:
        patch.setattr(farm.part(Toolchains), "_check_named", trusting.check)
        with pytest.raises(Untrusted, match="provenance: no statement"):
            client.toolchains.promote(shadow["id"])
    assert client.refs.get("prod") == before[0]

    promoted = client.toolchains.promote(shadow["id"])
    assert promoted["generation"] == prod + 1
    assert client.toolchains.promote(shadow["id"]) == promoted, "repeating it changes nothing"
    assert set(given(client).values()) == {NEW.toolchain}
    assert set(given(client, made_by="onnxruntime1.31").values()) == {OLD.toolchain}
    planned = client.plan(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    assert {cell["pool"] for cell in planned["cells"]} == {NEW.name}, "builds follow `prod`"

    back = client.toolchains.roll_back(generation=promoted["generation"])
    assert set(given(client).values()) == {OLD.toolchain}
    assert set(given(client, made_by="onnxruntime1.32").values()) == {NEW.toolchain}
    assert client.toolchains.roll_back(toolchain="onnxruntime1.31") == back, "it is there already"
    with pytest.raises(Conflict, match="somebody moved it"):
        client.toolchains.roll_back(generation=promoted["generation"])
    with pytest.raises(NotFound, match=r"kept no program of onnxruntime1\.2"):
        client.toolchains.roll_back(toolchain="onnxruntime1.2")


def test_a_promotion_is_a_persons_word_about_a_program_that_a_gate_refused(
    farm: Farm, client: FarmClient, player: Player, prod: int
) -> None:
    player.join(NEW)
    shadow = client.toolchains.shadow()
    cells = player.finish(client, shadow["id"])["cells"]
    keys = {cell["key"] for cell in cells}
    refused: Any = [{**cell, "state": "failed", "kind": "accuracy"} for cell in cells]
    assert set(farm.failures.hold("main", "b-earlier", refused)) == keys
    looser: Any = [{**cell, "gate": {**cell["gate"], "tolerance": {"*": 9.0}}} for cell in cells]
    assert set(farm.failures.hold("main", "b-looser", looser)) == keys
    client.toolchains.promote(shadow["id"])
    assert not farm.failures.hold("main", "b-later", looser), "`latest` takes them again"


def test_a_number_of_a_version_is_not_the_start_of_a_longer_one(
    farm: Farm, client: FarmClient, player: Player, prod: int, tmp_path: Path
) -> None:
    """`1.3` is not 1.31: not for who fetches, goes back or bisects."""
    player.join(NEW)
    shadow = client.toolchains.shadow()
    player.finish(client, shadow["id"])
    client.toolchains.promote(shadow["id"])
    assert set(given(client, made_by="onnxruntime1.31").values()) == {OLD.toolchain}
    with pytest.raises(NotFound, match=r"made by onnxruntime1\.3"):
        given(client, made_by="onnxruntime1.3")
    with pytest.raises(NotFound, match=r"kept no program of onnxruntime1\.3"):
        client.toolchains.roll_back(toolchain="onnxruntime1.3")
    with pytest.raises(NotFound, match=r"no toolchain onnxruntime1\.3"):
        bisect(client, [FP32], good="onnxruntime1.3")


def test_builds_of_a_pull_request_follow_the_toolchain_of_main(
    farm: Farm, client: FarmClient, url: str, player: Player, prod: int, tmp_path: Path
) -> None:
    """Its namespace has no `prod` of its own; a new toolchain on some workers changes no build before its promotion."""
    player.join(NEW)
    with FarmClient(url, farm.settings.api_token.get_secret_value(), namespace="pr") as theirs:
        planned = theirs.plan(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    assert {cell["pool"] for cell in planned["cells"]} == {OLD.name}


def test_readers_get_what_was_submitted_last_and_not_what_was_made_last(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    """The fleet goes to a new toolchain with a new commit, and back: the newest build is a hit of what is older."""
    player = Player(farm, [])
    freeze_manifest(tmp_path, MANIFEST)
    model = onnx.load(tmp_path / "net.onnx")
    digests: dict[str, str] = {}
    for pool, commit in ((OLD, "one"), (NEW, "two"), (OLD, "one")):
        player.pools = []
        player.join(pool)
        model.doc_string = commit
        onnx.save(model, tmp_path / "net.onnx")
        frozen = freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache")
        digests[commit] = frozen.submission["models"]["net"]["digest"]
        report = player.finish(client, client.submit(frozen)["id"])
    assert {cell["facts"]["toolchain"] for cell in report["cells"] if cell["facts"]} == {OLD.toolchain}

    where = {"folder": tmp_path / "out", "force": True}
    fetched = client.fetch("net", "onnxruntime/cpu", "fp32", **where).artifact
    assert (fetched["toolchain"], fetched["spec"]["model"]["digest"]) == (OLD.toolchain, digests["one"])
    family = client.fetch_family("net", "onnxruntime/cpu", "fp32", **where).document
    assert family["toolchain"] == OLD.toolchain
    by_name = client.fetch("net", "onnxruntime/cpu", "fp32", toolchain=NEW.toolchain, **where).artifact
    assert by_name["spec"]["model"]["digest"] == digests["two"]
    (cell,) = {each["key"] for each in ref_rules.given(client.ls()).values() if each["precision"] == "fp32"}
    assert fetched["key"] == cell, "the server means the same"


def test_a_rollback_takes_back_the_last_promotion_alone(client: FarmClient, player: Player, prod: int) -> None:
    player.join(NEW)
    player.finish(client, (both := client.toolchains.shadow())["id"])
    client.toolchains.promote(both["id"])
    newest = toolchain("1.33.0")
    player.join(newest)
    player.finish(client, (one := client.toolchains.shadow(cells=[FP32]))["id"])
    client.toolchains.promote(one["id"])
    assert given(client) == {"fp32": newest.toolchain, "fp16": NEW.toolchain}
    client.toolchains.roll_back()
    assert given(client) == {"fp32": NEW.toolchain, "fp16": NEW.toolchain}
    client.toolchains.roll_back()
    assert given(client) == {"fp32": newest.toolchain, "fp16": NEW.toolchain}


def test_a_rollback_is_possible_where_builds_have_changed_the_toolchain(
    farm: Farm, client: FarmClient, player: Player, prod: int, tmp_path: Path
) -> None:
    """They follow a promotion into `latest`, and a release moves `prod` there."""
    player.join(NEW)
    player.finish(client, (shadow := client.toolchains.shadow())["id"])
    client.toolchains.promote(shadow["id"])
    player.finish(client, client.submit(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))["id"])
    client.refs.move("prod", "latest")
    assert set(given(client).values()) == {NEW.toolchain}
    client.toolchains.roll_back(toolchain="onnxruntime1.31")
    assert set(given(client).values()) == {OLD.toolchain}
    client.toolchains.roll_back()
    assert set(given(client).values()) == {NEW.toolchain}
    client.toolchains.roll_back()
    assert set(given(client).values()) == {OLD.toolchain}


def test_a_promotion_replaces_an_older_program_of_its_toolchain(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """The fleet went to a new toolchain and back; then another commit was released, and is promoted."""
    player = Player(farm, [])
    for pool, salt in ((OLD, "1"), (NEW, "1"), (OLD, "2")):
        player.pools = []
        player.join(pool)
        player.finish(client, client.submit(freeze_manifest(tmp_path, f'{MANIFEST}salt: "{salt}"\n'))["id"])
    client.refs.move("prod", "latest")
    player.join(NEW)
    player.finish(client, (shadow := client.toolchains.shadow())["id"])
    client.toolchains.promote(shadow["id"])
    assert set(given(client).values()) == {NEW.toolchain}
    keys = {cell["key"] for cell in client.report(shadow["id"])["cells"]}
    assert {cell["key"] for cell in ref_rules.given(client.ls("prod")).values()} == keys


def test_a_build_that_ends_late_does_not_take_back_what_people_chose(
    farm: Farm, client: FarmClient, player: Player, prod: int, tmp_path: Path
) -> None:
    """It was submitted before `latest` was rolled back."""
    player.pools = []
    player.join(NEW)
    player.finish(client, client.submit(freeze_manifest(tmp_path, MANIFEST))["id"])
    late = client.submit(freeze_manifest(tmp_path, f"{MANIFEST}salt: late\n"))
    player.work()
    client.toolchains.roll_back("latest")
    report = player.finish(client, late["id"])
    assert set(given(client, "latest").values()) == {OLD.toolchain}
    found = {cell["key"] for cell in client.ls() if cell["toolchain"] == NEW.toolchain}
    assert found == {cell["key"] for cell in report["cells"]}, "those who name it get the last one"


def test_a_rollback_whose_answer_is_lost_is_not_taken_back_by_its_repetition(
    client: FarmClient, player: Player, prod: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.join(NEW)
    player.finish(client, (shadow := client.toolchains.shadow())["id"])
    client.toolchains.promote(shadow["id"])
    choose_, lost = Toolchains.choose, [True]

    def loses_its_answer(*args: Any, **options: Any) -> Any:
        moved = choose_(*args, **options)
        if lost and lost.pop():
            raise FarmFault("the answer is lost")
        return moved

    monkeypatch.setattr(Toolchains, "choose", loses_its_answer)
    back = client.toolchains.roll_back()
    assert not lost and back["generation"] == prod + 2
    assert set(given(client).values()) == {OLD.toolchain}


def test_what_breaks_and_gets_worse_is_named_and_keeps_the_ref(client: FarmClient, player: Player, prod: int) -> None:
    player.join(NEW)

    def worse(order: Mapping[str, Any]) -> Made | FailureKind:
        if order["identifier"] == FP16:
            return FailureKind.COMPILER_ERROR
        return Made(ratio=0.5, compile_seconds=60.0)

    player.says = worse
    shadow = client.toolchains.shadow(gates=read_gates(["latency=10%"], []))
    player.finish(client, shadow["id"])
    found = client.toolchains.radar(shadow["id"])
    effects = {cell["identifier"]: cell["effect"] for cell in found["cells"]}
    assert effects == {FP32: "worse", FP16: "breaks"}
    (slower,) = [cell for cell in found["cells"] if cell["identifier"] == FP32]
    assert "latency is 100 % above prod's" in slower["text"]
    assert "compile time is 500 % above prod's" in slower["text"]
    with pytest.raises(GateFailed, match="prod stays: 0 of 2 cells succeeded"):
        client.toolchains.promote(shadow["id"])
    assert client.refs.get("prod")["generation"] == prod

    player.says = lambda order: FailureKind.COMPILER_ERROR if order["identifier"] == FP16 else Made()
    partly = client.toolchains.shadow(gates=read_gates(["compile-time=1000%", "latency=1000%"], []))
    player.finish(client, partly["id"])
    client.toolchains.promote(partly["id"], force=True)
    assert given(client) == {"fp32": NEW.toolchain, "fp16": OLD.toolchain}


def test_a_retried_shadow_build_is_one_and_can_be_promoted(client: FarmClient, player: Player, prod: int) -> None:
    player.join(NEW)
    player.says = lambda order: FailureKind.COMPILER_ERROR if order["identifier"] == FP16 else Made()
    shadow = client.toolchains.shadow()
    player.finish(client, shadow["id"])
    player.says = lambda order: Made()
    again = client.retry(shadow["id"])
    player.finish(client, again["id"])
    assert client.toolchains.radar(again["id"])["promotable"]
    client.toolchains.promote(again["id"])
    assert set(given(client).values()) == {NEW.toolchain}


def test_a_ref_that_moved_since_is_not_promoted_over(
    client: FarmClient, player: Player, prod: int, tmp_path: Path
) -> None:
    player.join(NEW)
    shadow = client.toolchains.shadow(cells=["*/fp32/*"])
    assert len(player.finish(client, shadow["id"])["cells"]) == 1
    (tmp_path / "farm.yaml").write_text(MANIFEST + "salt: another\n")
    newer = client.submit(freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    player.finish(client, newer["id"])
    client.refs.move("prod", "latest")
    with pytest.raises(Conflict, match=f"not generation {prod}"):
        client.toolchains.promote(shadow["id"])


def test_a_program_whose_making_is_no_longer_known_is_left_out_and_said(
    farm: Farm, client: FarmClient, player: Player, prod: int
) -> None:
    build = client.build("@latest")["id"]
    farm.artifacts.delete_object(f"ns/main/builds/{build}/plan.json")
    farm.build_reader._plans = {}
    player.join(NEW)
    with pytest.raises(NotFound, match="how it was made is no longer known"):
        client.toolchains.shadow()
    with pytest.raises(NotFound, match=r"onnxruntime1\.99"):
        client.toolchains.shadow(toolchain="onnxruntime1.99")
    with pytest.raises(NotFound, match="no ref nightly"):
        client.toolchains.shadow("nightly")
    with pytest.raises(NotFound, match="is not a shadow build"):
        client.toolchains.radar(build)


def test_a_work_order_of_another_compile_plans_nothing(
    farm: Farm, client: FarmClient, player: Player, prod: int
) -> None:
    """A worker that was taken over puts it next to a program of others: the control plane would let all run it."""
    build = client.build("@latest")["id"]
    planned = farm.build_reader.read_plan("main", build)["cells"]
    farm.artifacts.delete_object(f"ns/main/builds/{build}/plan.json")
    farm.build_reader._plans = {}
    player.join(NEW)

    def keep_orders(**changes: str) -> None:
        for cell in planned:
            assert cell["order"]
            order: Any = {**cell["order"], "spec": {**cell["order"]["spec"], **changes}}
            attempt = Attempt("j", 1, "", order, cell["limits"], "main", cell["key"], build)
            data = json.dumps(attempt.describe(reference=None)).encode()
            digest, size = farm.artifacts.put_blob_bytes(data)
            found: Any = farm.artifacts.lookup(["main"], cell["key"])
            found["blobs"]["reproduction"] = {"path": "reproduce.json", "digest": digest, "size": size}
            farm.artifacts.put_object(sidecar_key("main", cell["key"]), json.dumps(found).encode())

    keep_orders(salt="theirs")
    with pytest.raises(NotFound, match="how it was made is no longer known"):
        client.toolchains.shadow()
    keep_orders()
    assert client.toolchains.shadow()["id"]


def test_reports_of_shadow_builds_stay_out_of_a_manifests_history(
    client: FarmClient, player: Player, prod: int
) -> None:
    player.join(NEW)
    shadow = client.toolchains.shadow()
    report = player.finish(client, shadow["id"])
    assert report["build"]["shadows"] == "prod"
    assert json.loads(json.dumps(report))["shadow"]["generation"] == prod
    assert [past["manifest"] for past in client.history(FP32)] == ["", "demo"]


def test_a_radar_that_is_set_starts_by_itself_once_for_each_newer_toolchain(
    farm: Farm, client: FarmClient, player: Player, prod: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert farm.part(Toolchains).follow("prod") == [], "nothing is newer"
    player.join(NEW, toolchain("1.30.0"))
    put = farm.artifacts.put_object

    def fails_at_the_plan(key: str, *args: Any, **options: Any) -> str:
        if key.endswith("plan.json"):
            raise StorageUnavailable("storage is away")
        return put(key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(farm.artifacts, "put_object", fails_at_the_plan)
        with pytest.raises(StorageUnavailable):
            farm.part(Toolchains).follow("prod")
    with monkeypatch.context() as patch:
        patch.setattr(farm.admission, "_settings", farm.settings.model_copy(update={"namespace_cells": 1}))
        assert farm.part(Toolchains).follow("prod") == [], "there is no room for it now"
    (build,) = farm.part(Toolchains).follow("prod")
    assert farm.part(Toolchains).follow("prod") == []
    assert Farm(farm.settings).part(Toolchains).follow("prod") == [], "another control plane sees the build"
    player.finish(client, build)
    found = client.toolchains.radar(build)
    assert {cell["after"] for cell in found["cells"]} == {NEW.toolchain}
    with httpx.Client(base_url=client.url, headers={"Accept": "text/html"}, follow_redirects=True) as browser:
        token = farm.settings.api_token.get_secret_value()
        browser.post("/ui/sign-in", data={"token": token, "next": "/ui/"}, headers={"Origin": client.url})
        page = browser.get(f"/ui/ns/main/builds/{build}/radar")
        assert page.status_code == 200, page.text
        assert f"farm toolchain promote {build}" in page.text
        assert "what gets better, worse and breaks" in browser.get(f"/ui/ns/main/builds/{build}").text


# --- bisecting ---------------------------------------------------------------------------------------------------

VERSIONS = [toolchain(f"1.{minor}.0") for minor in range(31, 95)]


def test_the_first_toolchain_at_which_cells_fail_or_slow_is_found_among_64_with_six_compiles_each(
    farm: Farm, client: FarmClient, player: Player, prod: int
) -> None:
    """One cell fails from a version on, which two versions before it hide; the other one gets slow from another on."""
    player.join(*VERSIONS[1:])
    places = {pool.toolchain: place for place, pool in enumerate(VERSIONS)}

    def says(order: Mapping[str, Any]) -> Made | FailureKind:
        place = places[order["spec"]["toolchain"]]
        if order["identifier"] == FP16:
            return FailureKind.COMPILER_ERROR if place >= 41 else Made()
        return Made(ratio=1 / 1.2 if place >= 17 else 1.0)

    player.says = says
    player.compiled.clear()
    with played_to_the_end(player):
        fails, slows = bisect(client, [FP16, FP32], gates=read_gates(["latency=5%"], []))
    assert (fails["first_bad"], fails["last_good"]) == (VERSIONS[41].toolchain, VERSIONS[40].toolchain)
    assert (slows["first_bad"], slows["last_good"]) == (VERSIONS[17].toolchain, VERSIONS[16].toolchain)
    assert fails["text"].startswith("compiler_error")
    assert "latency is 20 % above" in slows["text"]
    for found in (fails, slows):
        mine = [made_by for identifier, made_by in player.compiled if identifier == found["identifier"]]
        assert found["compiles"] == len(mine) == len(set(mine))
        assert len(mine) <= 6 + 1, "and the newest end, which nobody knew; `prod` has the oldest one"
    assert client.refs.get("prod")["generation"] == prod


def test_toolchains_that_cannot_be_judged_are_passed_over(
    farm: Farm, client: FarmClient, player: Player, prod: int
) -> None:
    player.join(*VERSIONS[1:9])
    broken = {VERSIONS[place].toolchain for place in (4, 5)}

    def says(order: Mapping[str, Any]) -> Made | FailureKind:
        made_by = order["spec"]["toolchain"]
        if made_by in broken:
            return Made(ratio=None)  # Nothing ran in turns there.
        return FailureKind.COMPILER_ERROR if made_by >= VERSIONS[6].toolchain else Made()

    player.says = says
    with played_to_the_end(player):
        (found,) = bisect(client, [FP32], bad="onnxruntime1.39", gates=read_gates(["latency=5%"], []))
    assert found["first_bad"] == ""
    assert found["suspects"] == [pool.toolchain for pool in VERSIONS[4:7]]
    with pytest.raises(NotFound, match="no toolchain onnxruntime2"):
        bisect(client, [FP32], bad="onnxruntime2")
    with pytest.raises(NotFound, match="prod has no cell net"):
        bisect(client, ["net"])


def test_a_toolchain_on_which_the_radar_breaks_is_tried_once(
    farm: Farm, player: Player, prod: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.join(NEW)
    toolchains = farm.part(Toolchains)

    def breaks(namespace: str, wish: Mapping[str, Any], **_: object) -> None:
        raise KeyError(wish["toolchain"])

    monkeypatch.setattr(toolchains, "shadow", breaks)
    with pytest.raises(KeyError):
        toolchains.follow("prod")
    assert toolchains.follow("prod") == [], "the next look goes on with other namespaces and toolchains"
