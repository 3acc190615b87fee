"""What a trusted reader accepts: each part of what is signed is changed once, and each way of a key to end is taken."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from farm.errors import Untrusted, UsageError
from farm.extras.signing import statements
from farm.extras.signing.trust import Checks, Standing, TrustPolicy, judge, load_policy
from tests.support.signed import DAY, NOW, POLICY, Signed, key_in, sidecar_of


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("farm", "next", "root", "stranger"):
        key_in(folder, name)
    return folder


class World:
    """A reader with a policy, and an artifact that the farm has signed."""

    def __init__(self, keys: Path, folder: Path) -> None:
        self.keys, self.folder = keys, folder
        for path in keys.iterdir():
            (folder / path.name).symlink_to(path) if path.suffix == ".key" else (folder / path.name).write_bytes(
                path.read_bytes()
            )
        self.signed = self.by("farm")

    def signer(self, name: str) -> Any:
        from farm.extras.signing.signing_keys import load_signer

        return load_signer(self.keys / f"{name}.key")

    def by(self, name: str, **changes: Any) -> Signed:
        return Signed(sidecar_of(**changes), self.signer(name))

    def policy(self, text: str = POLICY) -> TrustPolicy:
        (self.folder / "trust.toml").write_text(text)
        return load_policy(self.folder / "trust.toml")

    def judge(self, *given: bytes, text: str = POLICY, now: datetime = NOW, **at_hand: Any) -> Checks:
        return judge(self.policy(text), self.signed.at_hand(**at_hand), given, now)


@pytest.fixture
def world(keys: Path, tmp_path: Path) -> World:
    return World(keys, tmp_path)


def refusals(found: Checks) -> str:
    return "\n".join(f"{check.name}: {check.text}" for check in found.refused)


def ignored(found: Checks) -> str:
    return "\n".join(check.text for check in found.checks if check.verdict is Standing.IGNORED)


def test_what_the_farm_signed_is_accepted_with_a_line_for_each_check(world: World) -> None:
    found = world.judge(world.signed.provenance(), world.signed.results())
    assert [(check.verdict, check.name) for check in found.checks] == [("ok", "provenance"), ("ok", "test-results")]
    assert found.checks[0].text == "signed by farm on 2026-11-22, made by urn:migraphx-farm:builder"
    found.require("net")


def test_what_is_unsigned_or_half_signed_is_refused(world: World) -> None:
    for given, lacking in (
        ((), ["provenance", "test-results"]),
        ((world.signed.provenance(),), ["test-results"]),
    ):
        found = world.judge(*given)
        assert [check.name for check in found.refused] == lacking
        with pytest.raises(Untrusted, match="net is refused by the trust policy"):
            found.require("net")
    other = "a namespace of others"
    assert refusals(world.judge(namespace=other)) == f"policy: it says nothing of the namespace {other}"
    free = POLICY + "[namespaces.pr-7]\nunsigned = true\n"
    assert world.judge(text=free, namespace="pr-7").refused == []


def changed(bundle: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a bundle with a change in its statement, and the old signature."""
    document = json.loads(bundle)
    statement = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    change(statement)
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(document).encode()


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "subject": lambda statement: statement["subject"][0]["digest"].update(sha256="9" * 64),
    "name": lambda statement: statement["subject"][0].update(name="other.onnx"),
    "predicate": lambda statement: statement["predicate"]["runDetails"]["builder"].update(id="me"),
    "type": lambda statement: statement.update(predicateType=statements.KINDS["summary"]),
    "time": lambda statement: statement["predicate"].update(farm_signedOn="2026-01-01T00:00:00Z"),
    "more": lambda statement: statement.update(note="nothing much"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_changed_statement_is_refused(world: World, part: str) -> None:
    found = world.judge(changed(world.signed.provenance(), CHANGES[part]), world.signed.results())
    assert "it was changed after farm signed it" in refusals(found)
    assert "provenance: no statement" in refusals(found)


@pytest.mark.parametrize("part", ["payloadType", "sig", "keyid"])
def test_a_changed_envelope_is_refused(world: World, part: str) -> None:
    document = json.loads(world.signed.provenance())
    envelope = document["dsseEnvelope"]
    signature = envelope["signatures"][0]
    if part == "payloadType":
        envelope["payloadType"] = "text/plain"
    elif part == "sig":
        raw = bytearray(base64.b64decode(signature["sig"]))
        raw[3] ^= 1
        signature["sig"] = base64.b64encode(raw).decode()
    else:
        signature["keyid"] = world.signer("root").public_key.keyid
    assert "provenance: no statement" in refusals(world.judge(json.dumps(document).encode(), world.signed.results()))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"null", b"[" * 100_000, b'{"mediaType": 7}', b"\xff", b'{"mediaType": "text/plain"}',
     json.dumps({"mediaType": statements.MEDIA_TYPE, "verificationMaterial": {},
                 "dsseEnvelope": {"signatures": []}}).encode(),
     json.dumps({"mediaType": statements.MEDIA_TYPE, "verificationMaterial": [], "dsseEnvelope":
                 {"payload": "!", "payloadType": "a", "signatures": [{"sig": "?"}]}}).encode()],
)  # fmt: skip
def test_what_is_no_bundle_is_refused(world: World, data: bytes) -> None:
    with pytest.raises(statements.Malformed):
        statements.read_bundle(data)
    found = world.judge(data, world.signed.provenance(), world.signed.results())
    assert [check.name for check in found.refused] == ["statement"]


@pytest.mark.parametrize(
    "payload",
    [
        b"[]", b"{}", b"\xff", b'{"_type": "https://in-toto.io/Statement/v0.1"}', b"[" * 100_000,
        b'{"_type": "https://in-toto.io/Statement/v1", "subject": [{"digest": {}}], "predicateType": "",'
        b' "predicate": {"farm_signedOn": "0001-01-01T00:00:00+14:00"}}',
    ],
)  # fmt: skip
def test_a_signed_text_that_is_no_statement_is_refused(world: World, payload: bytes) -> None:
    bundle = statements.sign_bundle(payload, statements.IN_TOTO, world.signer("farm"))
    assert "statement: " in refusals(world.judge(bundle, world.signed.provenance(), world.signed.results()))


def test_another_program_or_sidecar_has_nothing_of_these_statements(world: World) -> None:
    """A replay: the statements are good, and about something else."""
    given = world.signed.provenance(), world.signed.results()
    for changes in ({"program": "7" * 64}, {"sidecar": "7" * 64}):
        found = world.judge(*given, **changes)
        assert [check.name for check in found.refused] == ["provenance", "test-results"]
        assert ignored(found) == "about another program\nabout another program"
    other = world.by("farm", program=b"another program")
    assert world.judge(other.provenance(), other.results()).refused
    both = world.judge(*given, other.provenance())
    assert both.refused == [], "what is said about others does no harm"


def test_a_stranger_and_a_signer_of_other_things_count_for_nothing(world: World) -> None:
    stranger = world.by("stranger")
    found = world.judge(stranger.provenance(), stranger.results())
    assert [check.name for check in found.refused] == ["provenance", "test-results"]
    assert "signed by the unknown key" in ignored(found)
    root = world.by("root")
    assert "root, who may not sign for main" in ignored(world.judge(root.provenance(), root.results()))
    narrow = POLICY.replace('"provenance", "test-results", "summary"]', '"provenance"]', 1)
    found = world.judge(world.signed.provenance(), world.signed.results(), text=narrow)
    assert (refusals(found).count("\n"), ignored(found)) == (0, "farm may not sign test-results")
    mixed = world.judge(stranger.provenance(), world.signed.provenance(), world.signed.results())
    assert mixed.refused == [], "anybody may add what does not count"


def test_a_workers_key_signs_no_summary(world: World) -> None:
    """It signs what it made and found, unless the policy names more: a stolen one promotes nothing."""
    plain = POLICY.replace('signs = ["provenance", "test-results", "summary"]\n', "")
    given = world.signed.provenance(), world.signed.results(), world.signed.summary("prod")
    assert world.judge(*given, text=plain).refused == []
    found = world.judge(*given, text=plain, tag="prod")
    assert (ignored(found), len(found.refused)) == ("farm may not sign summary", 1)
    named = plain.replace('key = "root.pub"', 'key = "root.pub"\nsigns = ["summary"]')
    named = named.replace('signers = ["farm"]', 'signers = ["farm", "root"]')
    assert world.judge(*given, world.by("root").summary("prod"), text=named, tag="prod").refused == []
    assert len(world.judge(world.by("root").provenance(), world.signed.results(), text=named).refused) == 1


def other_kind(world: World, uri: str) -> bytes:
    statement = json.loads(statements.payload("provenance", {"net.onnx": world.signed.at_hand().program}, {}, NOW))
    payload = json.dumps({**statement, "predicateType": uri}).encode()
    return statements.sign_bundle(payload, statements.IN_TOTO, world.signer("farm"))


def test_a_predicate_type_that_is_not_known_is_refused(world: World) -> None:
    """The signer may say with it that the program is bad."""
    given = world.signed.provenance(), world.signed.results(), other_kind(world, "https://example.org/recall/v1")
    assert "not understood here: https://example.org/recall/v1" in refusals(world.judge(*given))
    old = other_kind(world, "urn:migraphx-farm:pack:v1")
    assert world.judge(*given[:2], old).refused == [], "an earlier release signed it, and it is in storage still"
    listed = POLICY + 'ignore = ["https://example.org/recall/v1"]\n'
    assert world.judge(*given, text=listed).refused == []


def test_fields_that_are_not_known_are_ignored(world: World) -> None:
    payload = json.loads(base64.b64decode(json.loads(world.signed.provenance())["dsseEnvelope"]["payload"]))
    payload |= {"later": [1], "subject": [{**each, "later": {}} for each in payload["subject"]]}
    payload["subject"][0]["digest"]["sha3_512"] = "0"
    payload["predicate"]["later"] = {"buildDefinition": None}
    bundle = json.loads(statements.sign_bundle(json.dumps(payload).encode(), statements.IN_TOTO, world.signer("farm")))
    bundle |= {"later": 1}
    bundle["verificationMaterial"]["later"] = 1
    bundle["dsseEnvelope"]["later"] = 1
    assert world.judge(json.dumps(bundle).encode(), world.signed.results()).refused == []


def test_other_readers_of_statements_find_no_field_that_they_do_not_know(world: World) -> None:
    """Of in-toto's statement, and of the times in SLSA's provenance, which have to be times where they are."""
    for bundle in (world.signed.provenance(), world.signed.results(), world.signed.summary("prod")):
        statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
        assert statement.keys() == {"_type", "subject", "predicateType", "predicate"}
    times = statements.provenance(world.signed.sidecar, statements.BUILDER)["runDetails"]["metadata"]
    assert world.signed.sidecar["started"] == "" and times.keys() == {"invocationId", "finishedOn"}


def test_keys_are_rotated_by_two_signers_with_their_times(world: World) -> None:
    text = POLICY.replace('signers = ["farm"]', 'signers = ["farm", "next"]') + '[signers.next]\nkey = "next.pub"\n'
    text = text.replace('key = "farm.pub"', 'key = "farm.pub"\nsigns_until = 2026-11-01T00:00:00Z')
    text = text.replace('key = "next.pub"', 'key = "next.pub"\nsigns_from = 2026-10-20T00:00:00Z')
    old, new = world.by("farm"), world.by("next")
    before, after = NOW - 40 * DAY, NOW - DAY
    assert world.judge(old.provenance(before), old.results(before), text=text).refused == []
    assert world.judge(new.provenance(after), new.results(after), text=text).refused == []
    late = world.judge(old.provenance(after), old.results(after), text=text)
    assert "farm signed until 2026-11-01" in ignored(late) and len(late.refused) == 2
    early = world.judge(new.provenance(before), new.results(before), text=text)
    assert "next signs from 2026-10-20 on" in ignored(early) and len(early.refused) == 2
    again = world.judge(old.provenance(after), old.results(after), new.provenance(after), new.results(after), text=text)
    assert again.refused == [], "what a later key has signed again counts"


def test_an_expired_key_and_a_time_to_come_count_for_nothing(world: World) -> None:
    text = POLICY.replace('key = "farm.pub"', 'key = "farm.pub"\ntrusted_until = 2026-11-22T13:00:00Z')
    given = world.signed.provenance(), world.signed.results()
    assert world.judge(*given, text=text).refused == []
    assert "the key of farm expired on 2026-11-22" in ignored(world.judge(*given, text=text, now=NOW + DAY))
    ahead = world.judge(world.signed.provenance(NOW + DAY), world.signed.results())
    assert "it is of 2026-11-23, which is to come" in ignored(ahead) and len(ahead.refused) == 1


def test_a_promoted_ref_needs_a_summary_for_just_this_ref(world: World) -> None:
    given = world.signed.provenance(), world.signed.results()
    assert world.judge(*given, tag="latest").refused == []
    assert "nobody trusted says that it may be prod" in refusals(world.judge(*given, tag="prod"))
    assert "nobody trusted says" in refusals(world.judge(*given, world.signed.summary("beta"), tag="prod"))
    assert world.judge(*given, world.signed.summary("prod"), tag="prod").refused == []
    resource = statements.resource_of("main", "prod")
    failed = {**statements.summary("urn:v", resource, "", [], "0", NOW), "verificationResult": "FAILED"}
    assert "did not pass" in refusals(world.judge(*given, world.signed.sign("summary", failed), tag="prod"))


def test_only_the_builders_of_the_policy_count(world: World) -> None:
    text = POLICY + 'builders = ["urn:ours"]\n'
    assert "not a builder of the policy" in refusals(
        world.judge(world.signed.provenance(), world.signed.results(), text=text)
    )
    ours = world.signed.provenance(builder="urn:ours"), world.signed.results()
    assert world.judge(*ours, text=text).refused == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("[signers.x]\nkey = 'nowhere.pub'\n", "nowhere.pub"),
        ("[signers.x]\nkey = 'farm.key'\n", "not a public key|second name|regular"),
        ("[namespaces.main]\nsigners = ['x']\n", "names x, and no such"),
        ("[signers.x]\nkey = 'farm.pub'\nuntil = 1\n", "signers.x.until"),
        ("[signers.x]\nkey = 'farm.pub'\n[signers.y]\nkey = 'farm.pub'\n", "two signers with one key"),
        ("[namespaces.main]\nrequire = ['everything']\n", "require"),
        ("[signers", "trust.toml"),
        (f"signers = {'[' * 5000}", "trust.toml"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(world: World, wrong: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        world.policy(wrong)


def test_a_key_is_private_and_is_not_written_over(tmp_path: Path) -> None:
    from farm.extras.signing.signing_keys import load_public, load_signer, new_key

    private, public, keyid = new_key("farm", tmp_path)
    assert (private.stat().st_mode & 0o777, load_public(public).keyid) == (0o600, keyid)
    with pytest.raises(UsageError, match="exists"):
        new_key("farm", tmp_path)
    with pytest.raises(UsageError, match="cannot name a key"):
        new_key("../farm", tmp_path)
    private.chmod(0o644)
    with pytest.raises(UsageError, match="open to others"):
        load_signer(private)
    with pytest.raises(UsageError, match="not a private key"):
        public.chmod(0o600)
        load_signer(public)
