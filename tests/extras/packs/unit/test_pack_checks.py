"""Verifying packs: what is not signed itself follows from what is."""

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
from farm.compiling.attempt import Attempt
from farm.errors import ArtifactGone
from farm.extras.packs.fetch import CacheFile, write_pack
from farm.extras.signing.signing_keys import clock
from farm.extras.signing.trust import Standing, load_policy
from farm.extras.signing.verifying import Trust, verify_file
from farm.jobs.state import AttemptLimits, WorkOrder
from farm.spec import cache_key
from tests.support.gpu_programs import code_object
from tests.support.gpu_programs import pack as pack_mxr
from tests.support.gpu_programs import program as gpu_program
from tests.support.signed import PROGRAM, Signed, key_in, sidecar_of

POLICY = """\
[signers.farm]
key = "farm.pub"
[namespaces.main]
signers = ["farm"]
"""
PORT = {"name": "x", "dtype": "float32", "shape": [1, 4]}


@pytest.fixture
def signed(tmp_path: Path) -> SignedArtifact:
    farm = Signed(sidecar_of(inputs=[PORT], outputs=[{**PORT, "name": "y"}]), key_in(tmp_path, "farm"))
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
    spec: Any = {
        "model": {"format": "onnx", "digest": model["digest"]}, "toolchain": "rocm7.2-migraphx2.15-aa",
        "compiler": {"name": "migraphx", "recipe": 1, "libraries": {}}, "precision": "fp16", "batch": 1, "schema": 1,
        "device": {"arch": "gfx942", "compute_units": 304, "xcc": 8, "cpu_family": None}, "options": {}, "env": {},
        "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}}, "tuning": {"mode": "off"}, "calibration": None,
        "quantization": {}, "verification": None, "salt": "",
    }  # fmt: skip
    name = "net/migraphx-gfx942/fp16/b1"
    ordered: WorkOrder = {
        "identifier": name, "pool": "", "target": "migraphx/gfx942", "spec": spec, "calibration": None,
        "samples": None, "model": {"format": "onnx", "files": [model], "names": ["y"]},
    }  # fmt: skip
    attempt = Attempt("j-1", 1, "", ordered, AttemptLimits(time=0.0, memory=0), "main", cache_key(spec))
    order = keep(json.dumps(attempt.describe(reference=None)).encode())
    program = {"path": "net.mxr", "digest": hashlib.sha256(PROGRAM).hexdigest(), "size": len(PROGRAM)}
    sidecar = sidecar_of(
        identifier=name, key=attempt.key, spec=spec, device={"arch": "gfx942"}, offload_copy=False,
        blobs={"program": program, "reproduction": {**order, "path": "reproduction.json"}},
        inputs=[PORT], outputs=[{**PORT, "name": "y"}],
    )  # fmt: skip
    farm = Signed(sidecar, key_in(tmp_path, "farm"))
    (tmp_path / "trust.toml").write_text(POLICY)
    (tmp_path / "program").write_bytes(PROGRAM)
    monkeypatch.setattr(
        "farm.extras.packs.fetch.ask_provider", lambda *_: CacheFile("20f00-model.onnx-1.mxr", "1.27.1")
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

    write_pack(layout, signed.sidecar, tmp_path / "program", folder, bring, signed=signed)
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


def test_a_pack_with_kernels_for_another_card_is_refused(tmp_path: Path) -> None:
    """However well it is signed: a farm whose worker did not look may have published it."""
    program = pack_mxr(gpu_program(code_object("gfx1100")))
    blob = {"path": "net.mxr", "digest": hashlib.sha256(program).hexdigest(), "size": len(program)}
    sidecar = sidecar_of(
        program, device={"arch": "gfx90a"}, blobs={"program": blob}, offload_copy=False,
        inputs=[PORT], outputs=[{**PORT, "name": "y"}],
    )  # fmt: skip
    sidecar["spec"]["compiler"]["name"] = "migraphx"
    farm = Signed(sidecar, key_in(tmp_path, "farm"))
    (tmp_path / "trust.toml").write_text(POLICY)
    key_in(tmp_path, "packer")
    (tmp_path / "program").write_bytes(program)
    signed = SignedArtifact(farm.text, [farm.provenance(clock())])
    write_pack(Layout.ONNXRUNTIME, signed.sidecar, tmp_path / "program", tmp_path / "pack", no_model, signed=signed)
    assert refused(tmp_path / "pack", Trust(load_policy(tmp_path / "trust.toml")))[0] == (
        "program: net--onnxruntime-cpu--fp32--b1.mxr: it has kernels for gfx1100, not for gfx90a"
    )


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
