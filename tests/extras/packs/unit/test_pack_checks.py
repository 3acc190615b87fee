"""Verifying packs: those that were made on a client, with and without its key."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from farm.client.fetching import SignedArtifact
from farm.client.packs import Layout
from farm.errors import ArtifactGone, Untrusted
from farm.extras.packs.question import CacheFile
from farm.extras.packs.signing import pack_files, predicate, sign_pack
from farm.extras.packs.writing import write_pack
from farm.extras.signing.judging import Standing
from farm.extras.signing.notary import Notary
from farm.extras.signing.signing_keys import load_signer
from farm.extras.signing.statements import subjects_of
from farm.extras.signing.trust import clock, load_policy
from farm.extras.signing.verifying import JudgedArtifact, Trust, verify_file
from tests.support.signed import PROGRAM, Signed, key_in, sidecar_of

POLICY = """\
[signers.farm]
key = "farm.pub"
[signers.packer]
key = "packer.pub"
signs = ["pack"]
[namespaces.main]
signers = ["farm", "packer"]
"""
PORT = {"name": "x", "dtype": "float32", "shape": [1, 4]}


@pytest.fixture
def signed(tmp_path: Path) -> SignedArtifact:
    farm = Signed(sidecar_of(inputs=[PORT], outputs=[{**PORT, "name": "y"}]), key_in(tmp_path, "farm"))
    key_in(tmp_path, "packer")
    (tmp_path / "trust.toml").write_text(POLICY)
    (tmp_path / "program").write_bytes(PROGRAM)
    return SignedArtifact(farm.text, [farm.provenance(clock())])


def no_model(folder: Path) -> Path:
    raise AssertionError("this layout needs no model")


def refused(path: Path, trust: Trust) -> list[str]:
    return [f"{check.name}: {check.text}" for check in verify_file(path, trust) if check.verdict is Standing.REFUSED]


def verdict_of(folder: Path, trust: Trust, cache: Path | None = None) -> tuple[str, str]:
    found = verify_file(folder, trust, cache=cache)[-1]
    return str(found.verdict), found.text


def change(folder: Path, name: str, content: bytes) -> None:
    """Change a file of a pack, and its index accordingly."""
    (folder / name).write_bytes(content)
    index = json.loads((folder / "pack.json").read_text())
    for file in index["files"]:
        if file["path"] == name:
            file["digest"] = hashlib.sha256(content).hexdigest()
    (folder / "pack.json").write_text(json.dumps(index))


def test_files_that_follow_from_what_is_signed_need_no_signature(tmp_path: Path, signed: SignedArtifact) -> None:
    trust = Trust(load_policy(tmp_path / "trust.toml"))
    folder = tmp_path / "pack"
    asked = "twin/onnxruntime-cpu/fp32/b1"
    write_pack(Layout.TRITON, signed.sidecar, tmp_path / "program", folder, no_model, identifier=asked, signed=signed)
    assert verdict_of(folder, trust) == (
        "ok", "the same as made again from what is signed: models/twin_onnxruntime-cpu_fp32_b1/config.pbtxt, start.sh"
    )  # fmt: skip
    change(folder, "start.sh", b"#!/bin/sh")
    assert verdict_of(folder, trust) == (
        "refused", "nobody trusted has signed start.sh, and other bytes follow from what is signed"
    )  # fmt: skip
    (folder / "start.sh").unlink()
    (folder / "start.sh").symlink_to(tmp_path / "program")
    assert refused(folder, trust)[0].startswith("sha256: start.sh: ")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SignedArtifact, Path, Path]:
    """A signed program for a cache, its model, and the cache of a client that has fetched it."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", ports[:1], ports[1:])
    content = helper.make_model(graph).SerializeToString()
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)

    def keep(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"path": "model.onnx", "digest": digest, "size": len(data)}

    model = keep(content)
    order = keep(json.dumps({"order": {"model": {"files": [model]}}}).encode())
    program = {"path": "net.mxr", "digest": hashlib.sha256(PROGRAM).hexdigest(), "size": len(PROGRAM)}
    sidecar = sidecar_of(
        identifier="net/migraphx-gfx942/fp16/b1", device={"arch": "gfx942"}, offload_copy=False,
        blobs={"program": program, "reproduction": {**order, "path": "reproduction.json"}},
        inputs=[PORT], outputs=[{**PORT, "name": "y"}],
        spec={
            "compiler": {"name": "migraphx"}, "device": {"arch": "gfx942"},
            "model": {"format": "onnx", "digest": model["digest"]},
        },
    )  # fmt: skip
    farm = Signed(sidecar, key_in(tmp_path, "farm"))
    key_in(tmp_path, "packer")
    (tmp_path / "trust.toml").write_text(POLICY)
    (tmp_path / "program").write_bytes(PROGRAM)
    monkeypatch.setattr(
        "farm.extras.packs.writing.ask_provider", lambda *_: CacheFile("20f00-model.onnx-1.mxr", "1.27.1")
    )
    return SignedArtifact(farm.text, [farm.provenance(clock())]), blobs / model["digest"], tmp_path / "cache"


@pytest.mark.parametrize("layout", [Layout.ONNXRUNTIME_CACHE, Layout.TRITON])
def test_a_pack_with_a_cache_is_made_again_from_the_clients_own(
    tmp_path: Path, cached: tuple[SignedArtifact, Path, Path], layout: Layout
) -> None:
    signed, model, cache = cached
    trust, folder = Trust(load_policy(tmp_path / "trust.toml")), tmp_path / "pack"

    def bring(place: Path) -> Path:
        return Path(shutil.copyfile(model, place / "source"))

    pack = write_pack(layout, signed.sidecar, tmp_path / "program", folder, bring, signed=signed)
    assert verdict_of(folder, trust, cache)[0] == "ok"
    (opened,) = (path.relative_to(folder).as_posix() for path in folder.rglob("model.onnx"))
    assert verdict_of(folder, trust) == (
        "refused", f"nobody trusted has signed {opened}, and it cannot be made again from this cache"
    )  # fmt: skip
    for name in (opened, "start.sh" if layout is Layout.TRITON else "use.py"):
        kept = (folder / name).read_bytes()
        change(folder, name, kept + b"#")
        assert verdict_of(folder, trust, cache) == (
            "refused", f"nobody trusted has signed {name}, and other bytes follow from what is signed"
        )  # fmt: skip
        change(folder, name, kept)
    # What goes into scripts is what a provider says, and nothing else.
    index = json.loads((folder / "pack.json").read_text())
    (folder / "pack.json").write_text(json.dumps({**index, "onnxruntime": '1"; evil()'}))
    assert verdict_of(folder, trust, cache)[0] == "refused"
    (folder / "pack.json").write_text(json.dumps(index, indent=2) + "\n")
    # Elsewhere, who has written it vouches for it.
    sign_pack(Trust(None, Notary(load_signer(tmp_path / "packer.key"))), pack, signed)
    assert verdict_of(folder, trust) == ("ok", "all its files are signed")


def test_a_packs_index_leads_nowhere_else(tmp_path: Path, signed: SignedArtifact) -> None:
    trust = Trust(load_policy(tmp_path / "trust.toml"))
    folder = tmp_path / "pack"
    write_pack(Layout.TRITON, signed.sidecar, tmp_path / "program", folder, no_model, signed=signed)
    index = json.loads((folder / "pack.json").read_text())
    for path in ("../program", "/etc/passwd", "", "a\0b"):
        index["files"][0]["path"] = path
        (folder / "pack.json").write_text(json.dumps(index))
        assert any("leads out of the pack" in line for line in refused(folder, trust)), path
    index["files"][0]["path"] = "long" * 100
    (folder / "pack.json").write_text(json.dumps(index))
    assert "File name too long" in refused(folder, trust)[0]
    for text in ("[" * 100_000, "[]", "{}", '{"files": [1]}', "\xff"):
        (folder / "pack.json").write_text(text)
        with pytest.raises(ArtifactGone, match="not an index of a pack"):
            verify_file(folder, trust)


def test_a_file_that_was_put_into_a_pack_is_refused(tmp_path: Path, signed: SignedArtifact) -> None:
    trust, folder = Trust(load_policy(tmp_path / "trust.toml")), tmp_path / "pack"
    (folder / ".pack-1").mkdir(parents=True)  # Of a fetch that was killed.
    (folder / ".pack-1" / "net.mxr").write_bytes(b"a pro")
    for layout in (Layout.ONNXRUNTIME, Layout.TRITON):  # Of the first nothing is left.
        write_pack(layout, signed.sidecar, tmp_path / "program", folder, no_model, signed=signed)
    assert refused(folder, trust) == []
    newer = folder / "models" / "net_onnxruntime-cpu_fp32_b1" / "2"
    newer.mkdir()
    (newer / "model.onnx").write_bytes(b"evil")
    (folder / "onnxruntime").symlink_to(tmp_path)
    assert refused(folder, trust) == [
        "pack: pack.json does not name what is there: models/net_onnxruntime-cpu_fp32_b1/2/model.onnx, onnxruntime"
    ]  # fmt: skip


def test_a_signed_pack_brings_the_files_that_it_names(tmp_path: Path, signed: SignedArtifact) -> None:
    trust, notary = Trust(load_policy(tmp_path / "trust.toml")), Notary(load_signer(tmp_path / "packer.key"))
    subjects = subjects_of(signed.sidecar, hashlib.sha256(signed.text).hexdigest())
    digest = hashlib.sha256(b"print()").hexdigest()

    def files(name: str, content: bytes, listed: str) -> dict[str, bytes]:
        said = predicate("onnxruntime", "", {name: listed}, {name: content})
        statements = [*signed.statements, notary.sign("pack", {**subjects, name: listed}, said)]
        brought = JudgedArtifact(signed.text, statements, trust.judge(signed.text, statements))
        assert pack_files(brought, "triton") == {}
        return pack_files(brought, "onnxruntime")

    assert files("use.py", b"print()", digest) == {"use.py": b"print()"}
    for name, content in (("use.py", b"evil()"), ("../use.py", b"print()"), (".profile", b"print()")):
        with pytest.raises(Untrusted, match="the signed pack is damaged"):
            files(name, content, digest)
