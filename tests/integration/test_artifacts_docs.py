"""What docs/object-storage.md tells people to type."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from farm.artifacts.refs import Refs
from farm.artifacts.s3 import S3Store

PAGE = Path(__file__).parents[2] / "docs" / "object-storage.md"
KEY = "ab" * 32
NAME = "resnet50/onnxruntime-cpu/fp32/b1"


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
def test_an_artifact_can_be_fetched_with_curl_and_jq(s3_settings: dict[str, str], tmp_path: Path) -> None:
    settings = {name: s3_settings[f"s3_{name}"] for name in ("endpoint", "bucket", "access_key", "secret_key")}
    store = S3Store(**settings)
    digest, size = store.put_blob_bytes(b"the program")
    program = {"path": "program.onnx", "digest": digest, "size": size}
    sidecar = {
        "schema": 1,
        "key": KEY,
        "identifier": NAME,
        "spec": {},
        "blobs": {"program": program},
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": {"arch": "cpu"},
        "created": "2026-11-21T00:00:00+00:00",
    }
    store.publish("main", sidecar)
    cell = {"identifier": NAME, "device": "cpu", "toolchain": "t", "key": KEY, "program": program}
    Refs(store).add_cells("main", "latest", [cell, {**cell, "identifier": "other"}])

    (script,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    environment = {
        "PATH": os.environ["PATH"],
        "S3": settings["endpoint"],
        "BUCKET": settings["bucket"],
        "REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": settings["access_key"],
        "AWS_SECRET_ACCESS_KEY": settings["secret_key"],
        "IDENTIFIER": NAME,
    }
    run = subprocess.run(
        ["sh", "-eu", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "program: OK\n"
    assert (tmp_path / "program").read_bytes() == b"the program"
    assert json.loads((tmp_path / "artifact.json").read_text())["key"] == KEY
