"""Verifying what lies in a folder: programs with their sidecars, and what is not a document of a farm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.client.fetching import SignedArtifact, bundle_lines
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.extras.signing.signing_keys import clock
from farm.extras.signing.trust import Standing, load_policy, policy_of_keys
from farm.extras.signing.verifying import Trust, verify_file, what_to_verify
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


def refused(path: Path, trust: Trust) -> list[str]:
    return [f"{check.name}: {check.text}" for check in verify_file(path, trust) if check.verdict is Standing.REFUSED]


def test_what_has_no_sidecar_or_no_policy_is_said(tmp_path: Path, signed: SignedArtifact) -> None:
    trust = Trust(policy_of_keys([tmp_path / "farm.pub"], "main"))
    program = tmp_path / "net.onnx"
    program.write_bytes(PROGRAM)
    with pytest.raises(NotFound, match=r"artifact\.json"):
        verify_file(program, trust)
    (tmp_path / "artifact.json").write_bytes(signed.text)
    assert refused(program, trust) == ["provenance: no statement of a trusted signer is there"]
    # The other layout, for folders that programs share.
    (tmp_path / "net.onnx.artifact.json").write_bytes(signed.text)
    (tmp_path / "net.onnx.artifact.sigstore.jsonl").write_bytes(bundle_lines(signed.statements))
    assert refused(program, trust) == []
    (tmp_path / "new").mkdir()
    key_in(tmp_path / "new", "farm")  # Another key with a file of the same name.
    for path in tmp_path.glob("net.onnx*"):  # Its bytes count, not how many names a file has, as after `cp -al`.
        (tmp_path / f"backup.{path.name}").hardlink_to(path)
        path.chmod(0o444)
    assert refused(program, trust) == []
    for path in tmp_path.glob("net.onnx*"):
        path.chmod(0o644)
    both = [tmp_path / "farm.pub", tmp_path / "new" / "farm.pub"]
    assert refused(program, Trust(policy_of_keys(both, "main"))) == []
    program.write_bytes(b"another program")
    assert "sha256: net.onnx has" in refused(program, trust)[0]
    with pytest.raises(UsageError, match="no trust policy"):
        verify_file(program, Trust())
    (tmp_path / "net.onnx.artifact.json").write_bytes(b"{}")
    with pytest.raises(ArtifactGone, match="is not valid"):
        verify_file(program, trust)


def test_a_sidecar_vouches_for_the_program_next_to_it(tmp_path: Path, signed: SignedArtifact) -> None:
    """A copy of a signed sidecar by another program's name must not make that one pass in a folder."""
    trust, folder = Trust(policy_of_keys([tmp_path / "farm.pub"], "main")), tmp_path / "programs"
    folder.mkdir()
    for name, content in (("evil.onnx", b"evil"), ("net.onnx", PROGRAM)):
        (folder / name).write_bytes(content)
        (folder / f"{name}.artifact.json").write_bytes(signed.text)
        (folder / f"{name}.artifact.sigstore.jsonl").write_bytes(bundle_lines(signed.statements))
    evil, net = what_to_verify(folder)
    assert "sha256: evil.onnx has" in refused(evil, trust)[0] and not refused(net, trust)
    for path in ("/", "a\0b", "../net.onnx", "long" * 100):  # A pack's sidecar says it.
        document = json.loads(signed.text)
        document["blobs"]["program"]["path"] = path
        (folder / "artifact.json").write_text(json.dumps(document))
        with pytest.raises(ArtifactGone, match=r"the client refuses|a relative path|is not the name of a program"):
            verify_file(folder / "artifact.json", trust)


def test_a_reader_takes_its_own_namespace_and_main_only(tmp_path: Path) -> None:
    """A farm that nobody should trust could hand out the artifact of a namespace in which everybody may write."""
    foreign = Signed(sidecar_of(namespace="pr-7"), key_in(tmp_path, "farm"))
    (tmp_path / "trust.toml").write_text("[namespaces.main]\n[namespaces.pr-7]\nunsigned = true\n")
    policy = load_policy(tmp_path / "trust.toml")
    assert Trust(policy, namespace="pr-7").judge(foreign.text, []).refused == []
    (check,) = Trust(policy).judge(foreign.text, []).refused
    assert check.text == "it is of the namespace pr-7, and this reader works in main"
