"""The story of a team: a manifest is pushed, a worse model stopped, a new toolchain tried, promoted and taken back.

All by the commands that a pipeline runs. Readers have the address of object storage and a public key, and check what is
signed. The worker is played.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import SecretStr

from farm.app import Farm
from farm.artifacts import inventory
from farm.cli.main import main
from farm.client.storage_client import StorageClient
from farm.errors import ExitCode
from farm.extras.signing.signing_keys import new_key
from farm.extras.signing.trust import policy_of_keys
from farm.extras.signing.verifying import Trust, verify_file
from farm.settings import Settings
from tests.support.api_farm import commands
from tests.support.helpers import wait_until
from tests.support.played import Made, Player, played_to_the_end, toolchain

OLD, NEW = toolchain("1.31.0"), toolchain("1.32.0")
WORSE = b"deeper net"
MANIFEST = """\
version: 1
name: nets
targets: [onnxruntime/cpu]
precisions: [fp32]
gates: {baseline: prod, latency: 5%}
models:
  - {name: heavy, source: {path: heavy.onnx}}
  - {name: light, source: {path: light.onnx}}
"""

Run = Callable[..., Any]


def write_models(folder: Path, heavy: str) -> None:
    for name, text in (("heavy", heavy), ("light", "net")):
        value = [helper.make_tensor_value_info(port, TensorProto.FLOAT, [1, 4]) for port in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], text, value[:1], value[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, folder / f"{name}.onnx")


@pytest.fixture
def farm(settings: Settings, tmp_path: Path) -> Farm:
    """A farm whose worker and server sign."""
    new_key("farm", tmp_path / "keys")
    changes = {"api_token": SecretStr("sesame"), "signing_key": str(tmp_path / "keys" / "farm.key")}
    return Farm(settings.model_copy(update=changes))


@pytest.fixture
def trust(farm: Farm, tmp_path: Path) -> Trust:
    """What a reader trusts: the farm's public key."""
    return Trust(policy_of_keys([tmp_path / "keys" / "farm.pub"], "main"))


@pytest.fixture
def player(farm: Farm) -> Player:
    worse = []

    def says(order: Mapping[str, Any]) -> Made:
        """The deeper net takes twice as long; the new toolchain makes programs that are a fifth faster."""
        digest = order["model"]["files"][0]["digest"]
        worse.extend([digest] if WORSE in farm.artifacts.read_blob(digest, limit=1 << 20) else [])
        faster = 1.2 if order["spec"]["toolchain"] == NEW.toolchain else 1.0
        return Made(ratio=0.5 if digest in worse else faster)

    player = Player(farm, [], says)
    player.join(OLD)
    return player


@pytest.fixture
def run(
    farm: Farm, url: str, player: Player, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Iterator[Run]:
    """Run a command as a pipeline does; return what it printed, as JSON."""

    def command(*words: str, code: int = ExitCode.OK) -> Any:
        capsys.readouterr()
        ended = main([*words, "--json"])
        said = capsys.readouterr()
        assert ended == code, said.out + said.err
        return json.loads(said.out)

    with commands(farm, url, tmp_path, monkeypatch), played_to_the_end(player):
        yield command


@pytest.fixture
def reader(farm: Farm, s3_client: Any, trust: Trust) -> Iterator[StorageClient]:
    """Somebody who has the address of object storage, may read it, and knows the farm's public key."""
    bucket = farm.settings.s3_bucket

    def location(key: str) -> str:
        return str(s3_client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}))

    with StorageClient(farm.settings.s3_endpoint, location, trust=trust) as client:
        client.artifacts.any_name = True  # Both models begin as the same file.
        yield client


def fetched(reader: StorageClient, trust: Trust, folder: Path, made_by: str = "") -> str:
    """Fetch and check what `prod` names: the bytes, and who signed what; return the toolchain that made it."""
    found = {}
    for model in ("heavy", "light"):
        place = folder / f"{model}-{made_by or 'any'}-{len(list(folder.iterdir()))}"
        got = reader.fetch(model, "onnxruntime/cpu", "fp32", ref="prod", folder=place, toolchain=made_by)
        sidecar = json.loads(got.sidecar.read_text())
        assert {check.verdict for check in verify_file(got.program, trust)} == {"ok"}
        assert hashlib.sha256(got.program.read_bytes()).hexdigest() == sidecar["blobs"]["program"]["digest"]
        found[model] = sidecar["toolchain"]
    (made,) = set(found.values())
    return str(made)


def test_a_team_ships_its_models(
    farm: Farm,
    player: Player,
    run: Run,
    reader: StorageClient,
    trust: Trust,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_models(tmp_path, "net")
    (tmp_path / "farm.yaml").write_text(MANIFEST)

    # A manifest is pushed, built green and promoted.
    run("manifest", "push", "farm.yaml")
    first = run("manifest", "build", "nets", "--first")["build"]["id"]
    run("tag", "prod", first)
    assert fetched(reader, trust, out) == OLD.toolchain

    # A worse model arrives: the gate stops it, and names the cell that is worse.
    write_models(tmp_path, WORSE.decode())
    run("manifest", "push", "farm.yaml")
    stopped = run("manifest", "build", "nets", code=ExitCode.GATE_FAILED)
    states = {cell["identifier"]: (cell["kind"], cell["message"]) for cell in stopped["cells"] if cell["kind"]}
    (kind, message) = states.pop("heavy/onnxruntime-cpu/fp32/static")
    assert kind == "regression"
    assert message.startswith("gate latency=5%: latency is 100 % above prod's")
    assert states == {}, "the light one is as it was"

    # It is mended and promoted.
    write_models(tmp_path, "smaller net")
    run("manifest", "push", "farm.yaml")
    run("tag", "prod", run("manifest", "build", "nets")["build"]["id"])
    assert fetched(reader, trust, out) == OLD.toolchain
    mended = {cell["key"] for cell in reader.ls("prod")}

    # A new toolchain gets workers. Nothing changes until it is promoted.
    player.join(NEW)
    radar = run("toolchain", "radar")
    assert radar["promotable"], radar["why"]
    assert {cell["effect"] for cell in radar["cells"]} == {"better"}
    assert fetched(reader, trust, out) == OLD.toolchain
    assert run("manifest", "build", "nets")["build"]["counts"]["hits"] == 2

    run("toolchain", "promote", radar["build"])
    assert fetched(reader, trust, out) == NEW.toolchain
    assert fetched(reader, trust, out, OLD.toolchain) == OLD.toolchain
    run("toolchain", "rollback")
    assert fetched(reader, trust, out) == OLD.toolchain
    assert {cell["key"] for cell in reader.ls("prod") if not cell.get("superseded")} == mended

    # Garbage goes, and nothing that a reader may ask for.
    garbage, size = farm.artifacts.put_blob_bytes(b"the input of a build that was never submitted")
    for name in ("ORPHAN_AGE", "GRACE"):
        monkeypatch.setattr(inventory, name, timedelta(seconds=-2))  # Not a day: storage has whole seconds.
    # A blob is doomed once its mark is of a later second than its upload.
    wait_until(lambda: run("gc") and not farm.artifacts.has_blob(garbage, size), message="the garbage to go")
    assert fetched(reader, trust, out) == OLD.toolchain
    assert fetched(reader, trust, out, NEW.toolchain) == NEW.toolchain
