"""A ref's artifact that fits this machine, from the farm into an ONNX Runtime session of this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from farm.app import Farm
from farm.artifacts.sidecar import facts, validate
from farm.artifacts.storage import blob_key
from farm.cli import main
from farm.client import load
from farm.client.client import FarmClient
from farm.client.loading import fitting
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.jobs.state import Outcome
from farm.node.survey import Findings
from tests.support import api_farm
from tests.support.api_farm import POOL, commands, freeze_manifest, work

MANIFEST = """\
version: 1
name: loads
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: net
    source: {path: net.onnx}
    inputs: {x: {shape: [batch, 4]}}
    batches: [1, 8]
"""
HERE = Findings(pools=[POOL])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def built(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """A build whose programs are the models themselves: ONNX Runtime takes them."""

    def made(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        batch = order["spec"]["inputs"]["x"]["shape"][0]
        (tmp_path / "made").mkdir(exist_ok=True)
        freeze_manifest(tmp_path / "made", api_farm.MANIFEST, batch=batch)
        program, size = farm.artifacts.put_blob_bytes((tmp_path / "made" / "net.onnx").read_bytes())
        ports = [{"name": name, "dtype": "float32", "shape": [batch, 4]} for name in "xy"]
        sidecar = {
            "schema": 1,
            "key": key,
            "namespace": "main",
            "identifier": order["identifier"],
            "spec": order["spec"],
            "blobs": {"program": {"path": f"net-{batch}.onnx", "digest": program, "size": size}},
            "toolchain": POOL.toolchain,
            "device": {"arch": "cpu"},
            "inputs": ports[:1],
            "outputs": ports[1:],
            "created": "2026-11-22T00:00:00+00:00",
        }
        farm.artifacts.publish("main", sidecar)
        farm.store.index.put("main", key, facts(validate(sidecar)))
        return Outcome.success(facts(validate(sidecar)))

    frozen = freeze_manifest(tmp_path, MANIFEST, batch="N")
    build_id = str(client.submit(frozen)["id"])
    work(farm, made)
    farm.build_finisher.finish(build_id)


@pytest.mark.usefixtures("built")
def test_a_program_is_chosen_checked_and_loaded(client: FarmClient) -> None:
    loaded = load("net@latest", batch=5, client=client, here=HERE)
    assert loaded.sidecar["identifier"] == "net/onnxruntime-cpu/fp32/b8"
    assert "this toolchain made it, takes batch 8" in loaded.why
    assert loaded.next_best.startswith("net/onnxruntime-cpu/fp32/b1 ")
    (result,) = loaded.program.run(None, {"x": np.full((8, 4), -1, np.float32)})
    assert not result.any()
    assert load("net", "fp32", shape="b1", client=client, here=HERE).program.get_inputs()[0].shape == [1, 4]


@pytest.mark.usefixtures("built")
def test_nothing_is_loaded_that_is_not_what_its_sidecar_says(
    farm: Farm, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = client.artifacts.get

    def lying(key: str) -> dict[str, Any]:
        document = whole(key)
        return {**document, "inputs": [{"name": "other", "dtype": "float32", "shape": [8, 4]}]}

    monkeypatch.setattr(client.artifacts, "get", lying)
    monkeypatch.setattr("farm.client.loading._load", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ArtifactGone, match="not what its sidecar says"):
        load("net", batch=8, client=client, here=HERE)


@pytest.mark.usefixtures("built")
def test_no_reader_takes_other_bytes_than_the_ref_names(
    farm: Farm, url: str, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program was lost, and another attempt published its own: nobody has judged these bytes for this ref."""
    (cell,) = [each for each in client.ls() if each["shape"] == "b8"]
    stored = farm.artifacts.lookup(["main"], cell["key"])
    assert stored
    farm.artifacts.delete_object(blob_key(cell["program"]["digest"]))
    freeze_manifest(tmp_path / "made", api_farm.MANIFEST, batch=8)
    other = onnx.load(tmp_path / "made" / "net.onnx")
    other.producer_name = "another attempt"
    digest, size = farm.artifacts.put_blob_bytes(other.SerializeToString())
    blobs = {"program": {"path": "net-8.onnx", "digest": digest, "size": size}}
    assert farm.artifacts.publish("main", {**stored, "blobs": blobs})["blobs"]["program"]["digest"] == digest
    with pytest.raises(ArtifactGone, match="repaired after latest moved to it, and its bytes differ"):
        load("net", batch=8, client=client, here=HERE)
    with pytest.raises(ArtifactGone, match="repaired after latest"):
        client.fetch("net", "onnxruntime/cpu", "fp32", "b8", folder=tmp_path / "out")
    with pytest.raises(ArtifactGone, match="repaired after latest"):
        client.fetch("net", "onnxruntime/cpu", "fp32", "b8", folder=tmp_path / "out", layout="triton")
    with pytest.raises(ArtifactGone, match="repaired after latest"):
        client.fetch_family("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["bench", "net/onnxruntime-cpu/fp32/b8"]) == 39


@pytest.mark.usefixtures("built")
def test_what_does_not_fit_is_reported_with_the_reasons(client: FarmClient) -> None:
    with pytest.raises(NotFound, match="net/onnxruntime-cpu/fp32/b1: onnxruntime cannot be used here"):
        load("net", client=client, here=Findings())
    with pytest.raises(NotFound, match="latest has no nett"):
        load("nett", client=client, here=HERE)
    with pytest.raises(NotFound, match="latest has no net/int8"):
        fitting(client, "net", "int8", here=HERE)


@pytest.mark.usefixtures("built")
def test_a_runtime_that_is_not_here_is_named(client: FarmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="cannot import onnxruntime"):
        load("net", client=client, here=HERE)


@pytest.mark.usefixtures("built")
def test_fetch_takes_what_fits_this_machine(
    farm: Farm, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["fetch", "net", "-t", "auto", "-p", "fp32", "--batch", "3", "-o", "out", "--json"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["identifier"] == "net/onnxruntime-cpu/fp32/b8"
        assert "this toolchain made it, takes batch 8" in said.err
        assert "next best: net/onnxruntime-cpu/fp32/b1" in said.err
        assert main(["fetch", "net", "-t", "onnxruntime/cpu", "-p", "fp32", "--batch", "3", "-o", "out"]) == 2
