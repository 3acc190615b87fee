"""Signed programs from the worker to the reader: what is stored, fetched, promoted, and checked without a farm."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from farm.app import Farm
from farm.artifacts.inventory import documents
from farm.artifacts.storage import artifacts_prefix, sidecar_key, statements_key
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.client.storage_client import StorageClient
from farm.errors import Conflict, Untrusted, UsageError
from farm.extras.signing.signing_keys import load_signer
from farm.extras.signing.trust import load_policy, policy_of_keys
from farm.extras.signing.verifying import Trust, verify_file
from farm.settings import Settings, load_settings
from tests.extras.packs.integration.test_packs_fetched import build_packs
from tests.support.api_farm import commands, finished
from tests.support.signed import POLICY

PROGRAM = "net--onnxruntime-cpu--fp32--static.onnx"
SIDECAR, STATEMENTS = f"{PROGRAM}.artifact.json", f"{PROGRAM}.artifact.sigstore.jsonl"
OF_A_PACK = ["model_ctx.onnx", "use.py", "use.sh", "artifact.json", "artifact.sigstore.jsonl"]


def fetch(client: FarmClient, folder: Path, ref: str = "latest") -> Path:
    return client.fetch("net", "onnxruntime/cpu", "fp32", ref=ref, folder=folder).program


def said(bundle: bytes) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    return statement


def test_statements_lie_near_the_sidecar_and_say_what_it_says(farm: Farm, client: FarmClient, built: str) -> None:
    (cell,) = client.ls()
    lines = farm.artifacts.get_object(statements_key("main", cell["key"])).data.splitlines()
    provenance, by_worker, of_build = map(said, lines)
    stored = farm.artifacts.get_object(sidecar_key("main", cell["key"])).data
    digests = {each["name"]: each["digest"]["sha256"] for each in provenance["subject"]}
    assert digests["artifact.json"] == hashlib.sha256(stored).hexdigest()
    assert digests["program.onnx"] == cell["program"]["digest"]
    made = provenance["predicate"]
    assert made["runDetails"]["builder"]["id"] == "urn:example:farm"
    parameters = made["buildDefinition"]["externalParameters"]
    assert (parameters["identifier"], parameters["key"]) == (cell["identifier"], cell["key"])
    assert made["buildDefinition"]["resolvedDependencies"][0] == {
        "name": "model",
        "digest": {"sha256": client.artifacts.get(cell["key"])["spec"]["model"]["digest"]},
    }
    assert by_worker["predicate"]["speed"]["latency"]["median"] == 0.001
    assert by_worker["predicate"]["accuracy"]["errors"] == {"y": 0.0}
    assert of_build["predicate"]["gates"]["build"] == built
    # They are no sidecars, and keep no blobs.
    assert [name for name in farm.artifacts.list_objects(artifacts_prefix("main")) if "statements" in name] == []
    assert [name for name in documents(farm.artifacts) if "/statements/" in name] == []


def test_a_fetched_program_is_verified_without_a_farm(
    farm: Farm,
    url: str,
    client: FarmClient,
    built: str,
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = fetch(client, tmp_path / "out")
    with commands(farm, "http://127.0.0.1:9", tmp_path, monkeypatch):
        policy = ["--policy", str(keys / "trust.toml")]
        assert main(["verify", str(program), *policy]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["ok"] * 4
        names = ["sha256", "provenance", "test-results", "test-results"]
        assert [line.split()[1] for line in lines[1:]] == names
        assert "made by urn:example:farm" in lines[2]
        assert any(f"passed the gates of {built}" in line for line in lines)
        for path in (tmp_path / "out", tmp_path / "out" / SIDECAR):
            assert main(["verify", str(path), "--key", str(keys / "farm.pub")]) == 0
        assert main(["verify", str(program), "--key", str(keys / "stranger.pub")]) == 39
        capsys.readouterr()
        assert main(["verify", str(program), "--tag", "prod", "--json", *policy]) == 39
        (item,) = json.loads(capsys.readouterr().out)["items"]
        assert [check[1:] for check in map(list, map(dict.values, item["checks"])) if check[0] == "refused"] == [
            ["summary", "nobody trusted says that it may be prod"]
        ]
        assert main(["verify", str(program)]) == 2, "without a policy there is nothing to check it by"
        kept = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        sidecar, statements = (tmp_path / "out" / name for name in (SIDECAR, STATEMENTS))
        for path, content in (
            (program, b"another program"),
            (sidecar, kept[sidecar].replace(b"0.001", b"0.002")),
            (statements, kept[statements].replace(b'"sig": "', b'"sig": "AA')),
            (statements, b""),
        ):
            path.write_bytes(content)
            assert main(["verify", str(program), *policy]) == 39, (path, content[:40])
            path.write_bytes(kept[path])
        assert main(["verify", str(program), *policy]) == 0


def test_a_trusted_reader_takes_only_what_is_signed(
    farm: Farm, client: FarmClient, built: str, keys: Path, trusting: Callable[..., FarmClient], tmp_path: Path
) -> None:
    fetch(trusting(), tmp_path / "signed")
    assert (tmp_path / "signed" / STATEMENTS).exists()
    strangers = trusting(Trust(policy_of_keys([keys / "stranger.pub"], "main")))
    with pytest.raises(Untrusted, match=r"net/onnxruntime-cpu/fp32/static is refused.*unknown key"):
        fetch(strangers, tmp_path / "no")
    (key,) = [cell["key"] for cell in client.ls()]
    with pytest.raises(Untrusted, match="unknown key"):
        strangers.jobs.reproduce(key, tmp_path / "rerun", load_settings())
    assert not (tmp_path / "rerun").exists(), "it would be run"
    others = trusting(Trust(load_policy(keys / "trust.toml"), namespace="pr-7"))
    (keys / "trust.toml").write_text(POLICY.replace("namespaces.main", "namespaces.pr-7"))
    with pytest.raises(Untrusted, match="says nothing of the namespace main"):
        fetch(trusting(Trust(load_policy(keys / "trust.toml"), namespace="pr-7")), tmp_path / "no")
    assert fetch(others, tmp_path / "of-main").exists(), "everybody may read main"
    (cell,) = client.ls()
    farm.artifacts.delete_object(statements_key("main", cell["key"]))
    with pytest.raises(Untrusted, match="no statement of a trusted signer"):
        fetch(others, tmp_path / "no")
    assert not (tmp_path / "no").exists() or not list((tmp_path / "no").iterdir())
    again = fetch(client, tmp_path / "signed")
    assert again.exists() and not (tmp_path / "signed" / STATEMENTS).exists(), "a reader without a policy asks nothing"


def test_storage_alone_is_enough_to_check(farm: Farm, built: str, keys: Path, tmp_path: Path) -> None:
    trust = Trust(load_policy(keys / "trust.toml"))
    with StorageClient("s3://farm", farm.artifacts.presign_get, trust=trust) as reader:
        program = fetch(reader, tmp_path / "out")
        assert [check.verdict for check in verify_file(program, trust)] == ["ok"] * 4
        (key,) = [cell["key"] for cell in reader.ls()]
    farm.artifacts.delete_object(statements_key("main", key))
    with StorageClient("s3://farm", farm.artifacts.presign_get, trust=trust) as reader:
        with pytest.raises(Untrusted, match="no statement of a trusted signer"):
            fetch(reader, tmp_path / "no")


def test_statements_of_another_program_are_worth_nothing(
    farm: Farm, client: FarmClient, frozen: Frozen, trusting: Callable[..., FarmClient], tmp_path: Path
) -> None:
    finished(farm, client, frozen)
    one, other = client.ls()
    there = farm.artifacts.get_object(statements_key("main", other["key"]))
    farm.artifacts.put_object(statements_key("main", one["key"]), there.data)
    precision = one["precision"]
    with pytest.raises(Untrusted, match="about another program"):
        trusting().fetch("net", "onnxruntime/cpu", precision, folder=tmp_path / "no")


def test_a_ref_names_what_the_policy_takes_and_says_so(
    farm: Farm,
    url: str,
    client: FarmClient,
    built: str,
    keys: Path,
    trusting: Callable[..., FarmClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.refs.move("prod", "latest")
    client.refs.move("prod", built)
    program = fetch(trusting(), tmp_path / "prod", ref="prod")
    (summary,) = [each for each in map(said, (tmp_path / "prod" / STATEMENTS).read_bytes().splitlines())
                  if "verification_summary" in each["predicateType"]]  # fmt: skip
    predicate = summary["predicate"]
    assert predicate["resourceUri"] == "urn:migraphx-farm:ref:main:prod"
    assert (predicate["verificationResult"], len(predicate["inputAttestations"])) == ("PASSED", 3)
    with commands(farm, url, tmp_path, monkeypatch):
        policy = ["--policy", str(keys / "trust.toml")]
        assert main(["verify", str(program), "--tag", "prod", *policy]) == 0
        assert (
            main(["verify", "prod", *policy]) == main(["verify", "net/onnxruntime-cpu/fp32/static@prod", *policy]) == 0
        )
        assert main(["tag", "beta", "latest"]) == 0
        farm.artifacts.delete_object(statements_key("main", client.ls()[0]["key"]))
        assert main(["tag", "gamma", "latest"]) == 39
        assert "gamma" not in client.refs.all()


def test_what_no_ref_came_to_name_has_no_statement_that_it_may(farm: Farm, client: FarmClient, built: str) -> None:
    """Somebody else moved the ref first."""
    (key,) = [cell["key"] for cell in client.ls()]
    before = farm.artifacts.get_object(statements_key("main", key))
    with pytest.raises(Conflict):
        client.refs.move("prod", "latest", generation=7)
    assert farm.artifacts.get_object(statements_key("main", key)) == before
    client.refs.move("prod", "latest", generation=0)
    assert farm.artifacts.get_object(statements_key("main", key)) != before


def test_a_key_that_others_can_read_ends_the_start(settings: Settings, keys: Path) -> None:
    (keys / "farm.key").chmod(0o644)
    farm = Farm(settings.model_copy(update={"signing_key": str(keys / "farm.key")}))
    with pytest.raises(UsageError, match="chmod 600"):
        _ = farm.executor


def test_a_key_is_made_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "mine", "-o", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.key", "mine.pub"]
    assert "signing_key" in capsys.readouterr().out
    assert main(["key", "new", "mine", "-o", str(tmp_path)]) == 2


@pytest.fixture
def packed(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """A build whose programs are for packs, by a worker with an AMD card that the test plays."""
    build_packs(farm, client, tmp_path)


def test_a_pack_is_made_of_what_is_signed_and_verified_as_a_whole(
    packed: None,
    keys: Path,
    trusting: Callable[..., FarmClient],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, policy = tmp_path / "pack", ["--policy", str(keys / "trust.toml")]
    trusting().fetch("net", "gfx942", "fp16", folder=folder, layout="onnxruntime")
    assert main(["verify", str(folder), *policy]) == 0
    assert "the same as made again from what is signed: model_ctx.onnx, use.py, use.sh" in capsys.readouterr().out
    for name in (*OF_A_PACK, next(folder.glob("*.mxr")).name):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-9])
        assert main(["verify", str(folder), *policy]) == 39, name
        index = (folder / "pack.json").read_bytes()
        document = json.loads(index)
        for file in document["files"]:
            if file["path"] == name:
                file["digest"] = hashlib.sha256(kept[:-9]).hexdigest()
        (folder / "pack.json").write_text(json.dumps(document))
        assert main(["verify", str(folder), *policy]) == 39, f"{name}, with an index that says so"
        (folder / name).write_bytes(kept)
        (folder / "pack.json").write_bytes(index)
    assert main(["verify", str(folder), *policy]) == 0


def test_the_page_of_an_artifact_says_who_signed_it(farm: Farm, url: str, built: str, keys: Path) -> None:
    facts_of = farm.build_reader.cells("main", built)[0]["facts"]
    assert facts_of
    answer = httpx.get(
        f"{url}/ui/ns/main/artifacts/{facts_of['key']}", headers={"Authorization": "Bearer sesame"}, timeout=60
    )
    keyid = load_signer(keys / "farm.key").public_key.keyid
    assert answer.status_code == 200 and f"<code>{keyid}</code>" in answer.text
    assert "provenance by key" in answer.text and "test-results by key" in answer.text
    farm.artifacts.put_object(statements_key("main", facts_of["key"]), b"no bundle\n")
    answer = httpx.get(str(answer.url), headers={"Authorization": "Bearer sesame"}, timeout=60)
    assert answer.status_code == 200 and "nobody signed it" in answer.text
