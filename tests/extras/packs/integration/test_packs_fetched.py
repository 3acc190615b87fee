"""Packs from the manifest to the folder: the test plays a worker with an AMD GPU, and the provider is a stand-in."""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any, cast

import pytest

from farm.app import Farm
from farm.artifacts.sidecar import facts, validate
from farm.cli import main
from farm.client import load
from farm.client.client import FarmClient
from farm.compiling.attempt import Attempt
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.extension import publishing
from farm.jobs.state import AttemptLimits, Outcome, WorkOrder
from farm.node.survey import Findings
from farm.spec import Device
from farm.targets.compilers import MIGRAPHX
from farm.targets.pools import Pool, Target
from tests.support.api_farm import commands, freeze_manifest
from tests.support.gpu_programs import code_object, pack, program
from tests.support.provider import has_compiler, interpreter_with_provider

ARCH = "gfx942:sramecc+:xnack-"
CARD = Pool(
    Target("migraphx", "gfx942"),
    "rocm7.2-migraphx2.15-aa",
    Device(ARCH, 304, 8),
    1,
    features=tuple(MIGRAPHX.features),
)
MANIFEST = """\
version: 1
name: packed
targets: [gfx942]
precisions: [fp16]
packs: [onnxruntime]
verify: off
models:
  - name: net
    source: {path: net.onnx}
    batches: [8]
    inputs: {x: {shape: [batch, 4]}}
"""


def build_packs(farm: Farm, client: FarmClient, folder: Path, target: str = "gfx942", arch: str = ARCH) -> str:
    """Build one model with packs, on a worker with an AMD card that the test plays; return the build's id.

    The program has kernels for `arch`.
    """
    worker = {"id": "w2", "node": "n2", "pid": 2, "host": "n2", "slots": 2, "pools": [CARD.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    build_id = str(client.submit(freeze_manifest(folder, MANIFEST.replace("gfx942", target), batch="N"))["id"])
    for job_id, attempt in farm.store.jobs.hand_out(CARD.name, 10):
        claim = farm.store.jobs.claim(job_id, attempt, nonce=secrets.token_hex(4), worker="w2", node="n2")
        sidecar = publish(farm, dict(claim.order), claim.key, arch)
        assert farm.store.jobs.finish(job_id, claim.token, Outcome.success(facts(validate(sidecar)))) == "ok"
    farm.build_finisher.finish(build_id)
    return build_id


@pytest.fixture
def built(farm: Farm, client: FarmClient, tmp_path: Path) -> list[str]:
    """A build of one model with packs; return its cells."""
    (tmp_path / "in").mkdir()
    build_id = build_packs(farm, client, tmp_path / "in")
    return [str(cell["identifier"]) for cell in client.cells(build_id)]


def publish(farm: Farm, order: dict[str, Any], key: str, arch: str) -> dict[str, Any]:
    name = str(order["identifier"]).replace("/", "--")
    copies = order["spec"]["options"]["offload_copy"]
    compiled = program(code_object(arch), offload_copy=copies, lens=(8, 4))
    content, size = farm.artifacts.put_blob_bytes(pack({**compiled, "for": key}))
    attempt = Attempt("j-1", 1, "", cast(WorkOrder, order), AttemptLimits(time=0.0, memory=0), "main", key)
    described = json.dumps(attempt.describe(reference=None)).encode()
    document, document_size = farm.artifacts.put_blob_bytes(described)
    sidecar = {
        "schema": 1,
        "key": key,
        "namespace": "main",
        "identifier": order["identifier"],
        "spec": order["spec"],
        "blobs": {
            "program": {"path": f"{name}.mxr", "digest": content, "size": size},
            "reproduction": {"path": "reproduction.json", "digest": document, "size": document_size},
        },
        "toolchain": CARD.toolchain,
        "device": {"arch": ARCH},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [8, 4]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [8, 4]}],
        "offload_copy": copies,
        "created": "2026-11-22T00:00:00+00:00",
    }
    farm.artifacts.publish("main", sidecar, sign=publishing(farm.settings))
    farm.store.index.put("main", key, facts(validate(sidecar)))
    return sidecar


def test_a_layout_takes_the_program_that_was_compiled_for_it(
    client: FarmClient, built: list[str], tmp_path: Path
) -> None:
    assert built == ["net/migraphx-gfx942/fp16/b8", "net/migraphx-gfx942/fp16/b8.pack"]
    plain = client.fetch("net", "gfx942", "fp16", folder=tmp_path / "plain")
    assert plain.artifact["identifier"] == built[0]
    pack = client.fetch("net", "gfx942", "fp16", folder=tmp_path / "pack", layout="onnxruntime")
    assert (pack.artifact["identifier"], pack.program.name) == (built[1], "net--migraphx-gfx942--fp16--b8.pack.mxr")
    assert pack.pack and (tmp_path / "pack" / "model_ctx.onnx") in pack.pack.files
    for shape in ("b8", "b8.pack"):
        again = client.fetch("net", "gfx942", "fp16", shape, folder=tmp_path / "pack", layout="onnxruntime")
        assert again.artifact["key"] == pack.artifact["key"]
    as_it_is = client.fetch("net", "gfx942", "fp16", "b8.pack", folder=tmp_path / "bare")
    assert as_it_is.artifact["key"] == pack.artifact["key"]
    with pytest.raises(NotFound):
        client.fetch("net", "gfx942", "fp16", "b9", folder=tmp_path / "none", layout="onnxruntime")


def test_kernels_for_another_card_than_the_sidecar_says_are_not_fetched(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    """Neither as they are nor in a pack."""
    (tmp_path / "in").mkdir()
    build_packs(farm, client, tmp_path / "in", arch="gfx90a:sramecc+:xnack-")
    wrong = r"it has kernels for gfx90a:sramecc\+:xnack-, not for gfx942:sramecc\+:xnack-"
    for layout in ("plain", "onnxruntime"):
        with pytest.raises(ArtifactGone, match=wrong):
            client.fetch("net", "gfx942", "fp16", folder=tmp_path / layout, layout=layout)
        assert not list((tmp_path / layout).rglob("*.*"))


def test_a_program_for_other_features_than_this_card_has_is_not_loaded(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target `:any` is for cards of every kind, and a file has kernels for one of them."""
    (tmp_path / "in").mkdir()
    build_packs(farm, client, tmp_path / "in", target="gfx942:any")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("farm.client.loading._load", lambda *_: "loaded")
    other = dataclasses.replace(CARD, device=Device("gfx942:sramecc+:xnack+", 304, 8))
    with pytest.raises(UsageError, match=r"does not run here: it has kernels for gfx942.*not for .*xnack\+"):
        load("net", "fp16", client=client, here=Findings(pools=[other]))
    assert load("net", "fp16", client=client, here=Findings(pools=[CARD])).program == "loaded"


def test_a_family_has_no_programs_for_packs(client: FarmClient, built: list[str], tmp_path: Path) -> None:
    family = client.fetch_family("net", "gfx942", "fp16", folder=tmp_path / "family")
    assert [member["shape"] for member in family.document["members"]] == ["b8"]
    assert family.left_out == []


@pytest.mark.skipif(not has_compiler(), reason="needs cc, nm and objdump")
def test_a_cache_has_the_model_that_was_submitted(
    farm: Farm,
    url: str,
    built: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    python = interpreter_with_provider(tmp_path / "python")
    with commands(farm, url, tmp_path, monkeypatch):
        wanted = ["fetch", "net", "-t", "gfx942", "-p", "fp16", "--layout", "onnxruntime-cache", "-o", "out", "--json"]
        assert main([*wanted, "--python", python]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["pack"]["onnxruntime"] == "1.27.1"
        (cached,) = (tmp_path / "out" / "cache").iterdir()
        assert (tmp_path / found["program"]).samefile(cached)
        assert pack(found["key"]) in cached.read_bytes()
        assert (tmp_path / "out" / "model.onnx").is_file()
        assert main([*wanted, "--family"]) == 2
        assert "one program" in capsys.readouterr().err


def test_a_program_that_copies_by_itself_is_refused_with_the_way_out(
    client: FarmClient, built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = next(cell for cell in client.ls() if cell["shape"] == "b8")
    monkeypatch.setattr(client, "ls", lambda ref: [twin])
    with pytest.raises(UsageError, match="copies its inputs and outputs itself") as caught:
        client.fetch("net", "gfx942", "fp16", folder=tmp_path / "out", layout="onnxruntime")
    assert "packs: [onnxruntime]" in caught.value.hint
