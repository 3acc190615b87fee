"""What a reader gets by a ref's name from a farm, or a storage, that hands out something else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from tuf.api.metadata import DelegatedRole

from farm.app import Farm
from farm.artifacts.refs import (
    Cells,
    RefCommit,
    Refs,
    RefView,
    SnapshotCell,
    canonical,
    parse_ref,
    ref_key,
    stored_ref,
    unsigned,
)
from farm.artifacts.storage import Object
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.storage_client import StorageClient
from farm.errors import ArtifactGone, Conflict, FarmError, FarmFault, NotAllowed, NotFound, Untrusted, UsageError
from farm.extras.signing.notary import Notary, add
from farm.extras.signing.signed_refs import (
    PLACE,
    Renewals,
    Roles,
    Sealer,
    next_version,
    publish,
    role_signed,
    target_of,
    withdraw,
)
from farm.extras.signing.signing_keys import clock, load_signer, signers_of
from farm.extras.signing.statements import SIDECAR, resource_of, summary
from farm.extras.signing.trust import load_policy
from farm.extras.signing.verifying import Trust
from tests.support.api_farm import commands, finished, freeze_manifest, succeed, work
from tests.support.places import ROOT
from tests.support.signed import key_in
from tests.support.signed_refs import SIGNED_REFS, Ceremony

MODELS = """\
version: 1
name: demo
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: net
    source: {path: net.onnx}
  - name: other
    source: {path: net.onnx}
    salt: other
"""


@pytest.fixture
def two(farm: Farm, client: FarmClient, tmp_path: Path) -> dict[str, SnapshotCell]:
    """Two models with signed programs, by their names."""
    finished(farm, client, freeze_manifest(tmp_path, MODELS))
    return {cell["model"]: cell for cell in client.ls()}


def test_another_signed_program_does_not_pass_for_the_one_that_was_asked_for(
    farm: Farm, client: FarmClient, two: dict[str, SnapshotCell], trusting: Callable[..., FarmClient], tmp_path: Path
) -> None:
    """A review's `ref_swap.py`: each program has valid statements, and the ref names the other one."""
    reader = trusting()

    def fetched(folder: str) -> str:
        return reader.fetch("net", "onnxruntime/cpu", "fp32", ref="prod", folder=tmp_path / folder).artifact[
            "identifier"
        ]

    def lie(**changes: object) -> None:
        other = {name: two["other"][name] for name in ("key", "program", "sidecar")}
        place = "net/onnxruntime-cpu/fp32/static@cpu@" + two["net"]["toolchain"]
        lying = {place: cast("SnapshotCell", {**two["net"], **other, **changes})}
        Refs(farm.artifacts).move("main", "prod", lambda _: lying)

    client.refs.move("prod", "latest")
    assert fetched("honest") == "net/onnxruntime-cpu/fp32/static"
    for changes in ({}, {"identifier": "other/onnxruntime-cpu/fp32/static"}):
        lie(**changes)
        with pytest.raises(Untrusted, match=r"net/onnxruntime-cpu/fp32/static was asked for, and other/.* is signed"):
            fetched("swapped")
        with pytest.raises(Untrusted, match="was asked for"):
            reader.fetch_family("net", "onnxruntime/cpu", "fp32", ref="prod", folder=tmp_path / "family")
    assert not (tmp_path / "swapped").exists()
    reader.artifacts.any_name = True
    assert fetched("taken") == "other/onnxruntime-cpu/fp32/static"
    lie(precision="int8")
    with pytest.raises(Untrusted, match="net/onnxruntime-cpu/int8/static was asked for"):
        reader.fetch("net", "onnxruntime/cpu", "int8", ref="prod", folder=tmp_path / "less exact")


@pytest.mark.parametrize(("field", "changes"), [
    ("precision", {"precision": "int8", "identifier": "net/onnxruntime-cpu/int8/static"}),
    ("toolchain", {"toolchain": "onnxruntime1.0-00000000"}),
    ("device.arch", {"device": "gfx942"}),
    ("batch", {"sizes": {"batch": 8}}),
    ("compiler.name", {"target": "migraphx/cpu"}),
])  # fmt: skip
def test_a_program_of_another_compile_than_its_ref_says_is_refused(
    field: str, changes: dict[str, Any], farm: Farm, client: FarmClient, two: dict[str, SnapshotCell], tmp_path: Path
) -> None:
    """A farm may say anything of a cell: what was compiled is what the spec says whose digest is the key."""
    cell = cast("SnapshotCell", {**two["net"], **changes})
    Refs(farm.artifacts).move("main", "prod", lambda _: {"net": cell})
    for fetch in (client.fetch, client.fetch_family):
        with pytest.raises(ArtifactGone, match=f"another compile: prod names one with {re.escape(field)} "):
            fetch("net", cell["target"], cell["precision"], ref="prod", folder=tmp_path / "out")


def test_a_key_is_the_digest_of_the_spec_that_comes_with_it(
    farm: Farm, client: FarmClient, two: dict[str, SnapshotCell], tmp_path: Path
) -> None:
    place = str(two["net"].get("sidecar"))
    found = farm.artifacts.get_object(place)
    assert found
    sidecar = json.loads(found.data)
    sidecar["spec"]["options"]["level"] = "other"
    farm.artifacts.put_object(place, json.dumps(sidecar).encode())
    with pytest.raises(ArtifactGone, match="latest names one with key "):
        client.fetch("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")


# --- signed by TUF ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ceremony(keys: Path) -> Ceremony:
    """Roles of a farm: its server's key is the one that signs statements, and `alice` promotes."""
    made = Ceremony(keys, {"farm": load_signer(keys / "farm.key"), "root": load_signer(keys / "root.key")})
    made.issue("root", "targets", root="root", targets="targets", server="farm", promoters=["alice"])
    return made


def names(client: FarmClient, ref: str = "latest") -> list[str]:
    return [cell["model"] for cell in client.ls(ref)]


def stored(farm: Farm, tag: str, namespace: str = "main") -> Object:
    found = farm.artifacts.get_object(ref_key(namespace, tag))
    assert found
    return found


def test_an_existing_farm_signs_its_refs_and_stops(
    farm: Farm, client: FarmClient, two: dict[str, SnapshotCell], trusting: Callable[..., FarmClient],
    ceremony: Ceremony, tmp_path: Path,
) -> None:  # fmt: skip
    reader = trusting(ceremony.trust())
    with pytest.raises(Untrusted, match="the ref main/latest is not signed"):
        reader.ls()
    before, generation = stored(farm, "latest").data, client.refs.get("latest")["generation"]
    ceremony.publish(farm)
    assert names(reader) == ["net", "other"]
    assert Renewals(farm).renew() == 0, "nothing is due"
    assert client.refs.get("latest")["generation"] == generation, "it has not moved"
    asked: list[str] = []
    reader.transport._api.event_hooks["request"] = [lambda request: asked.append(request.url.path)]
    reader.ls()
    assert asked == ["/v1/refs/latest"], "one request brings the ref with all that is signed about it"
    reader.fetch("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "api")
    with StorageClient("s3://farm", farm.artifacts.presign_get, trust=ceremony.trust("other")) as storage:
        storage.fetch("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "storage")
    # A new namespace needs no ceremony.
    client.refs.move("beta", "latest")
    assert names(reader, "beta") == ["net", "other"]
    withdraw(farm.artifacts)
    Renewals(farm).renew()
    assert stored(farm, "latest").data == before
    with pytest.raises(Untrusted, match="is not signed"):
        reader.ls()
    assert names(client) == ["net", "other"]


@pytest.fixture
def signed(farm: Farm, two: dict[str, SnapshotCell], ceremony: Ceremony) -> Ceremony:
    """The farm signs its refs."""
    ceremony.publish(farm)
    return ceremony


def put(farm: Farm, tag: str, data: bytes, namespace: str = "main") -> None:
    farm.artifacts.put_object(ref_key(namespace, tag), data)


def only(farm: Farm, tag: str, model: str) -> None:
    """Let the farm itself move a ref: it then names one model."""
    latest = farm.refs.read_through("main", "latest")["cells"]
    farm.refs.move("main", tag, lambda _: {name: cell for name, cell in latest.items() if cell["model"] == model})


def test_storage_shows_no_other_ref_and_no_older_one(
    farm: Farm, client: FarmClient, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    """Storage, or a cache before it, has no key: what it changes or mixes is refused, by API and by storage alone."""
    client.refs.move("beta", "latest")
    readers = [trusting(signed.trust())]
    readers.append(StorageClient("s3://farm", farm.artifacts.presign_get, trust=signed.trust("other")))
    older = stored(farm, "beta").data
    only(farm, "beta", "net")
    newer = stored(farm, "beta").data
    assert [names(reader, "beta") for reader in readers] == [["net"], ["net"]]
    one, two = json.loads(older), json.loads(newer)
    wrong = {
        "is older than": older,
        "is refused": canonical({**one, "signed": two["signed"]}),
        "seen here|refused": canonical({**two, "signed": {**two["signed"], "timestamp": one["signed"]["timestamp"]}}),
        "signed is not the ref main/beta|older": stored(farm, "latest").data,
        "main/beta is not signed": canonical({name: value for name, value in two.items() if name != "signed"}),
    }
    for message, data in wrong.items():
        put(farm, "beta", data)
        for reader in readers:
            with pytest.raises(Untrusted, match=message):
                reader.ls("beta")
    put(farm, "beta", canonical({**two, "signed": {**two["signed"], "role": one["signed"]["role"]}}))
    with pytest.raises(Untrusted, match="refused"):
        trusting(signed.trust("third")).ls("beta")
    put(farm, "beta", newer)
    assert [names(reader, "beta") for reader in readers] == [["net"], ["net"]], "what was refused leaves no trace"
    # A snapshot is a blob under its digest; the API must not name other cells than it was signed with.
    lying = trusting(signed.trust())
    answered = lying.refs.unchecked("beta")
    swapped = {name: {**cell, "key": "0" * 64} for name, cell in answered["cells"].items()}
    with pytest.raises(Untrusted, match="names other cells than were signed"):
        lying.trust.ref("beta", lambda: {**answered, "cells": swapped})


def test_storage_does_not_choose_what_a_server_signs(
    farm: Farm, client: FarmClient, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    """It answers the server with an older ref, or one of its own: each names programs with valid statements."""
    client.refs.move("beta", "latest")
    older = stored(farm, "beta")
    only(farm, "beta", "net")
    newer = parse_ref("beta", stored(farm, "beta"))
    forged = {**newer, "snapshot": parse_ref("beta", older)["snapshot"]}
    for data in (older.data, stored_ref(cast("RefView", forged)), stored_ref(unsigned(cast("RefView", forged)))):
        put(farm, "beta", data)
        with pytest.raises(FarmFault, match=r"object storage answers with an? (older )?ref main/beta "):
            farm.refs.move("main", "beta", lambda cells: {"first": next(iter(cells.values()))})
        Renewals(farm).renew(clock() + timedelta(hours=7))
        assert stored(farm, "beta").data == data, "nothing is signed"
    before = farm.artifacts.get_object(PLACE)
    assert before
    signed.issue("targets", promoters=["bob"])
    signed.publish(farm)
    farm.artifacts.put_object(PLACE, before.data)
    with pytest.raises(FarmFault, match="older roles"):
        only(farm, "latest", "net")
    # What came back from a backup is taken as it is, if an administrator says so.
    put(farm, "beta", older.data)
    client.transport.request("POST", "/v1/roles/withdraw")
    signed.publish(farm)
    assert names(trusting(signed.trust()), "beta") == ["net", "other"]


def test_a_timestamp_ends_after_a_day_and_is_renewed(
    farm: Farm, client: FarmClient, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    reader, now, day = trusting(signed.trust()), clock(), timedelta(days=1)
    old = stored(farm, "latest")
    assert Renewals(farm).renew(now + day / 3) == 1 and len(stored(farm, "latest").data) == len(old.data)
    only(farm, "latest", "net")
    move = RefCommit("main", "latest", None, parse_ref("latest", stored(farm, "latest")))
    put(farm, "latest", stored_ref(Sealer(signed.roles, signers_of(farm.settings)).seal(move, now - 1.1 * day)))
    farm.store.signed.forget()  # As a server that was down for a day and more has it.
    with pytest.raises(Untrusted, match=r"timestamp\.json is expired"):
        reader.ls()
    assert Renewals(farm).renew() == 1
    assert names(reader) == ["net"]


def test_only_a_promoter_moves_prod(
    farm: Farm, url: str, client: FarmClient, signed: Ceremony, trusting: Callable[..., FarmClient], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    reader, alice = trusting(signed.trust()), trusting(signed.trust("alice", by="alice"))
    for other in (client, trusting(signed.trust("bob", by="bob"))):
        with pytest.raises(NotAllowed, match="main/prod is signed by its promoters"):
            other.refs.move("prod", "latest")
    with pytest.raises(NotAllowed):
        only(farm, "prod", "net")
    with pytest.raises(NotFound):
        reader.ls("prod")
    first = alice.refs.move("prod", "latest")["generation"]
    only(farm, "beta", "net")
    second = alice.refs.move("prod", "beta")["generation"]
    assert second == first + 1
    assert names(reader, "prod") == ["net"]
    again = stored(farm, "prod").data
    renewed = alice.refs.move("prod", "prod")["generation"]
    assert renewed == second and stored(farm, "prod").data != again, "for another year"
    assert Renewals(farm).renew(clock() + timedelta(hours=7)) == 3, "its timestamp is the server's"
    assert alice.refs.move("prod", "prod", previous=True)["generation"] == first + 2
    assert names(reader, "prod") == ["net", "other"]
    with pytest.raises(Conflict):
        alice.refs.move("prod", "beta", generation=first)
    # By a command, and then by a client without the key.
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["tag", "prod", "beta"]) == 5 and "promoters" in capsys.readouterr().err
        monkeypatch.setenv("FARM_SIGNING_KEY", str(signed.folder / "alice.key"))
        monkeypatch.setenv("FARM_TRUST_POLICY", str(signed.folder / "trust.toml"))
        assert main(["tag", "prod", "beta"]) == 0
    assert names(reader, "prod") == ["net"]


def test_only_a_promoter_deletes_prod(
    farm: Farm, client: FarmClient, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    alice, bob = (trusting(signed.trust(name, by=name)) for name in ("alice", "bob"))
    alice.refs.move("prod", "latest")
    moved = stored(farm, "prod").data
    for other in (client, bob):
        with pytest.raises(NotAllowed, match="main/prod is signed by its promoters"):
            other.refs.remove("prod")
    said = json.dumps({"ref": (was := parse_ref("prod", stored(farm, "prod"))), "role": was["signed"]["role"]})
    with pytest.raises(FarmError, match="main/prod is not"):  # What she signed for the move, read from the ref.
        farm.refs.delete("main", "prod", signed=said)
    assert stored(farm, "prod").data == moved
    client.refs.move("beta", "latest")
    # What she signs for the ref that is there does not make it again once it is deleted.
    only(farm, "other", "net")
    assert alice.trust
    late, seen = alice.trust.promise(alice, "prod", "other", previous=False) or ("", 0)
    for mover, tag in ((client, "beta"), (alice, "prod")):
        mover.refs.remove(tag)
        assert farm.refs.find("main", tag) is None
    cells = farm.refs.source("main", "other")
    with pytest.raises(Conflict, match="main/prod is not what was signed"):
        farm.refs.move("main", "prod", lambda _: cells, generation=0, signed=late)
    assert alice.refs.move("prod", "latest")["generation"] > seen
    alice.refs.remove("prod")
    # What cannot be read is deleted as well, and by nobody else.
    farm.artifacts.put_object(ref_key("main", "prod"), b"{")
    with pytest.raises(NotAllowed):
        client.refs.remove("prod")
    alice.refs.remove("prod")
    assert farm.refs.find("main", "prod") is None


def test_a_server_cannot_forge_prod(farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient]) -> None:
    """One that was taken over has its key: it can hide `prod`, or show a new reader an older one, as the page says."""
    reader, alice = trusting(signed.trust()), trusting(signed.trust("alice", by="alice"))
    alice.refs.move("prod", "latest")
    older = parse_ref("prod", stored(farm, "prod"))
    only(farm, "beta", "net")
    alice.refs.move("prod", "beta")
    assert names(reader, "prod") == ["net"]
    roles, now = signed.roles, clock()
    assert roles
    forged = {**older, "generation": 9}
    text = role_signed("main/prod", target_of(forged), next_version(older, now), signed.signer("farm"), now)
    parts = Sealer(roles, signers_of(farm.settings))
    with pytest.raises(NotAllowed):
        parts.seal(RefCommit("main", "prod", None, forged, json.dumps({"ref": forged, "role": text.decode()})), now)
    monkey = Roles(roles.roots, roles.targets)
    served = replace(parts, roles=monkey)
    role = DelegatedRole("main/prod", [signed.signer("farm").public_key.keyid], 1, True, ["main/prod"])
    with patch.object(Roles, "role_of", lambda *_: role), patch.object(Sealer, "_promoted", lambda *_: (forged, text)):
        put(farm, "prod", stored_ref(served.seal(RefCommit("main", "prod", older, forged), now)))
    with pytest.raises(Untrusted, match="main/prod was signed by 0/1 keys"):
        reader.ls("prod")
    # Its older one is in good order for who has seen none: the promoter's signature holds for a year.
    move = RefCommit("main", "prod", older, unsigned(older))
    put(farm, "prod", stored_ref(parts.seal(move, clock())))
    assert names(trusting(signed.trust("new")), "prod") == ["net", "other"]
    with pytest.raises(Untrusted, match="older"):
        reader.ls("prod")


def test_a_reader_takes_no_older_roles_than_those_of_his_policy(
    farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    """A server that shows the roles of before, with a promoter who was replaced since, or with none."""
    alice = trusting(signed.trust("alice", by="alice"))
    alice.refs.move("prod", "latest")
    assert names(trusting(signed.trust()), "prod") == ["net", "other"]
    signed.issue("targets", promoters=["next"])
    for reader in (trusting(signed.trust()), trusting(signed.trust("new"))):
        for tag in ("prod", "latest"):
            with pytest.raises(Untrusted, match="older roles than your trust policy has"):
                reader.ls(tag)
    signed.publish(farm)
    assert names(trusting(signed.trust("new"))) == ["net", "other"]


def test_a_namespaces_ref_is_not_hidden_behind_that_of_main(farm: Farm, client: FarmClient, signed: Ceremony) -> None:
    team = FarmClient(client.url, farm.settings.api_token.get_secret_value(), namespace="team")
    with team:
        team.trust = signed.trust(namespace="team")
        assert names(team) == ["net", "other"], "everybody may read main"
        both = SIGNED_REFS.replace("[refs]", "[namespaces.team]\nsigners = ['farm']\n[refs]")
        team.trust = signed.trust(namespace="team", policy=both)
        with pytest.raises(Untrusted, match="team has no ref latest"):
            team.ls()


def test_eight_readers_at_once_share_what_they_remember(
    farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    readers = [trusting(signed.trust()) for _ in range(8)]
    first = parse_ref("latest", stored(farm, "latest"))["generation"]

    def moves() -> None:
        for mark in range(8):
            farm.refs.move("main", "latest", lambda there, mark=mark: {**there, f"{mark}": next(iter(there.values()))})

    with ThreadPoolExecutor(9) as threads:
        moving = threads.submit(moves)
        found = list(threads.map(lambda reader: [reader.refs.get("latest")["generation"] for _ in range(6)], readers))
        moving.result()
    assert all(each == sorted(each) for each in found)
    assert {reader.refs.get("latest")["generation"] for reader in readers} == {first + 8}
    assert len(list((signed.folder / "memory").iterdir())) == 1


def test_a_home_that_is_only_read_still_remembers(
    farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    older = stored(farm, "latest").data
    only(farm, "latest", "net")
    with tempfile.TemporaryDirectory() as home:
        reader = trusting(replace(signed.trust(), memory=Path(home) / "refs"))
        fresh = trusting(replace(signed.trust(), memory=Path(home) / "others"))
        assert names(reader) == ["net"]
        for path in (Path(home), *Path(home).rglob("*")):
            if not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        seen = {path: path.stat().st_mtime_ns for path in Path(home).rglob("*")}
        user = os.geteuid()
        os.seteuid(user or 65534)  # Root may write everywhere.
        try:
            assert names(reader) == ["net"]
            assert names(fresh) == ["net"], "without memory it takes what is in order"
            put(farm, "latest", older)
            with pytest.raises(Untrusted, match="older"):
                reader.ls()
            assert names(fresh) == ["net", "other"]
        finally:
            os.seteuid(user)
        assert {path: path.stat().st_mtime_ns for path in Path(home).rglob("*")} == seen
        for path in (Path(home), *Path(home).rglob("*")):
            if path.is_dir():
                path.chmod(0o755)


def test_two_control_planes_move_and_sign_the_same_refs(
    farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient]
) -> None:
    """One bucket, one Valkey. A ref and what is signed about it are one object: nobody sees one without the other."""
    planes, reader = [farm, Farm(farm.settings)], trusting(signed.trust())
    first = parse_ref("latest", stored(farm, "latest"))["generation"]

    def moves(plane: Farm) -> None:
        for number in range(6):
            mark = f"{planes.index(plane)}-{number}"

            def marked(there: Cells, mark: str = mark) -> Cells:
                (name, cell), *_ = there.items()
                return {**there, f"{name}+{mark}": cell}

            plane.refs.move("main", "latest", marked)
            Renewals(plane).renew(clock() + timedelta(hours=7 * (number + 1)))

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(moves, plane) for plane in planes]
        seen = 0
        while not all(each.done() for each in running):
            found = reader.refs.get("latest")
            assert found["generation"] >= seen
            seen = found["generation"]
        assert [each.result() for each in running] == [None, None]
    found = reader.refs.get("latest")
    assert found["generation"] == first + 12, "no move is lost"
    assert len([name for name in found["cells"] if "+" in name]) == 12
    assert list(farm.artifacts.list_objects("ns/main/refs/")) == [ref_key("main", "latest")], "no old metadata stays"


ROTATIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "root": (["root", "next"], {"root": "next"}),
    "targets": (["root", "next"], {"targets": "next"}),
    "server": (["root", "targets"], {"server": "next"}),
    "timestamp": (["root"], {"timestamp": "next"}),
    "promoter": (["targets"], {}),
}
"""Which keys sign the roles in which a key was replaced, by the role."""


@pytest.mark.parametrize("role", ROTATIONS)
def test_each_key_is_replaced_and_a_thief_has_nothing_of_the_old_one(
    farm: Farm, signed: Ceremony, trusting: Callable[..., FarmClient], role: str
) -> None:
    """Readers keep the file of roles that they have: each new root is signed by the one before."""
    reader, alice = trusting(signed.trust()), trusting(signed.trust("alice", by="alice"))
    alice.refs.move("prod", "latest")
    assert names(reader) == names(reader, "prod") == ["net", "other"]
    kept = {tag: stored(farm, tag).data for tag in ("latest", "prod")}
    with pytest.raises(UsageError):
        signed.issue("farm", promoters=["next"] if role == "promoter" else (), **ROTATIONS[role][1])
    by, changes = ROTATIONS[role]
    signed.issue(*by, promoters=["next"] if role == "promoter" else (), **changes)
    lost = Farm(farm.settings)
    if role in ("server", "timestamp"):
        # It is lost, and so is whoever has it: without the new one this server signs nothing.
        publish(farm.artifacts, signed.roles.text())
        with pytest.raises(FarmFault, match=f"has no {role} key"):
            only(farm, "latest", "net")
        key = {"signing_key" if role == "server" else "timestamp_key": str(signed.folder / "next.key")}
        lost = Farm(farm.settings.model_copy(update=key))
    signed.publish(lost)
    if role == "promoter":
        only(farm, "beta", "net")
        with pytest.raises(NotAllowed):
            alice.refs.move("prod", "beta")
        bob = trusting(replace(alice.trust, signer=signed.signer("next")))
        bob.refs.move("prod", "latest")
    only(lost, "latest", "net")
    assert (names(reader), names(reader, "prod")) == (["net"], ["net", "other"])
    for tag, data in kept.items():
        put(farm, tag, data)
        if role != "promoter" or tag == "prod":
            with pytest.raises(Untrusted):
                reader.ls(tag)


def test_roles_that_do_not_continue_the_published_ones_are_refused(
    farm: Farm, signed: Ceremony, tmp_path: Path
) -> None:
    other = Ceremony(tmp_path / "other")
    made = other.issue("root", "targets", root="root", targets="targets", server="server")
    with pytest.raises(Conflict, match="other roles"):
        publish(farm.artifacts, made.text())
    older = signed.roles
    signed.issue("root", "targets")
    signed.publish(farm)
    with pytest.raises(Conflict, match="or newer"):
        publish(farm.artifacts, older.text())
    for wrong in (b"", b"{}", b"[1]", b"[" * 100_000, signed.roles.text().replace(b"targets", b"t"),
                  Roles(signed.roles.roots[1:] + signed.roles.roots[:1], signed.roles.targets).text()):  # fmt: skip
        with pytest.raises(UsageError, match="not roles"):
            publish(farm.artifacts, wrong)


def test_roles_are_made_shown_and_published_by_commands(
    farm: Farm, url: str, two: dict[str, SnapshotCell], ceremony: Ceremony, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    keys, file = ceremony.folder, str(tmp_path / "roles.json")
    given = {"root": "root", "targets": "targets", "server": "farm"}
    public = [f"--{role}={keys / name}.pub" for role, name in given.items()]
    public.append(f"--promoter=main={keys / 'alice'}.pub")
    by = ["--by", str(keys / "root.key"), "--by", str(keys / "targets.key")]
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["key", "roles", file, *by, *public[1:]]) == 2, "the first roles need all keys"
        assert main(["key", "roles", file, *by, *public]) == 0
        assert "main/prod" in capsys.readouterr().out
        assert main(["key", "show"]) == 4
        assert main(["key", "publish", file]) == 0
        Renewals(farm).renew()
        capsys.readouterr()
        assert main(["key", "show", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["roles"]["main/prod"] == [ceremony.signer("alice").public_key.keyid]
        policy = ceremony.folder / "trust.toml"
        ceremony.trust(), (ceremony.folder / "roles.json").write_bytes(Path(file).read_bytes())
        monkeypatch.setenv("FARM_TRUST_POLICY", str(policy))
        assert main(["fetch", "net/onnxruntime-cpu/fp32/static", "-o", str(tmp_path / "out")]) == 0
        assert main(["key", "roles", file, *by[:2], "--days", "9"]) == 0, "root alone holds longer, by its key alone"
        assert main(["key", "publish", file]) == 0
        assert main(["key", "withdraw"]) == 0
        assert main(["key", "withdraw"]) == 4


BROKEN: dict[str, object] = {
    "no text": {"roots": ["[]"]},
    "deep": {"roots": ["[" * 100_000]},
    "no JSON": {"timestamp": "{"},
    "another kind": {"snapshot": '{"signed": {}, "signatures": []}'},
    "a role of nothing": {"role": "{}"},
    "far too long": {"timestamp": " " * (1 << 20)},
    "no parts": None,
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_what_is_no_metadata_is_refused(signed: Ceremony, trusting: Callable[..., FarmClient], wrong: str) -> None:
    reader = trusting(signed.trust())
    answered, changes = reader.refs.unchecked("latest"), BROKEN[wrong]
    parts = {**answered["signed"], **changes} if isinstance(changes, dict) else changes
    assert reader.trust
    with pytest.raises((Untrusted, UsageError)):
        reader.trust.ref("latest", lambda: cast("Any", {**answered, "signed": parts}))


def test_verify_asks_for_signed_refs_too(
    farm: Farm, url: str, client: FarmClient, signed: Ceremony, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed.trust()
    policy = ["--policy", str(signed.folder / "trust.toml")]
    older = stored(farm, "latest").data
    with commands(farm, url, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        assert main(["verify", "latest", *policy]) == 0
        assert main(["verify", "@latest", *policy]) == 0, "a build has no signature, its programs have"
        only(farm, "latest", "net")
        assert main(["verify", "net/onnxruntime-cpu/fp32/static@latest", *policy]) == 0
        put(farm, "latest", older)
        assert main(["verify", "latest", *policy]) == 39
        assert main(["verify", "net/onnxruntime-cpu/fp32/static@latest", *policy]) == 39


def test_the_guides_policy_takes_what_two_keys_sign_and_no_summary_of_a_worker(
    farm: Farm, client: FarmClient, keys: Path, trusting: Callable[..., FarmClient], tmp_path: Path
) -> None:
    """A worker that was taken over has its key and may write statements: it promotes nothing with them."""
    text = (ROOT / "docs" / "guide" / "sign.md").read_text()
    policy = text.partition("trust.toml <<'END'\n")[2].partition("END\n")[0]
    (keys / "guide.toml").write_text(policy)
    for name in ("worker-2026", "server-2026"):
        key_in(keys, name)
    settings = farm.settings.model_copy(update={"trust_policy": ""})
    worker, farm.settings = (settings.model_copy(update={"signing_key": str(keys / f"{name}-2026.key")})
                             for name in ("worker", "server"))  # fmt: skip
    frozen = freeze_manifest(tmp_path, MODELS)
    build = client.submit(frozen)["id"]
    work(farm, succeed(Farm(worker)))
    farm.build_finisher.finish(build)
    client.refs.move("prod", "latest")
    reader = trusting(Trust(load_policy(keys / "guide.toml")))

    def fetched(ref: str) -> Path:
        return reader.fetch("net", "onnxruntime/cpu", "fp32", ref=ref, folder=tmp_path / ref).program

    assert fetched("latest").exists()
    (cell,) = (cell for cell in client.ls("prod") if cell["model"] == "net")
    digest = hashlib.sha256(farm.artifacts.get_object(cell["sidecar"]).data).hexdigest()
    for key, passes in ((worker.signing_key, False), (farm.settings.signing_key, True)):
        subjects = {cell["program"]["path"]: cell["program"]["digest"], SIDECAR: digest}
        notary = Notary(load_signer(Path(key)))
        said = summary(notary.name, resource_of("main", "prod"), "", [], "1", notary.now())
        add(farm.artifacts, "main", cell["key"], [notary.sign("summary", subjects, said)])
        if passes:
            assert fetched("prod").exists()
        else:
            with pytest.raises(Untrusted, match="worker-2026 may not sign summary"):
                fetched("prod")
