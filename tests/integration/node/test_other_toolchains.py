"""Several toolchains on one node: each compiles under its own keys, and programs of two of them take turns.

The other toolchain is the installed ONNX Runtime renamed, with runs that last longer.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.compiling.attempt import ANYWHERE, Attempt, Installation, by_toolchain, installation_of
from farm.jobs.state import AttemptEnd, FailureKind, Outcome
from farm.node import executor
from farm.node.health import probe
from farm.node.survey import SlotKind, survey, with_other_toolchains
from farm.results.speed import MIN_ROUNDS
from farm.settings import Settings
from farm.spec import cache_key
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest
from tests.support.side_toolchains import renamed

DELAY = 0.002
"""Seconds: hundreds of times what the model takes, so that no machine's noise hides it."""


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renamed(tmp_path_factory.mktemp("slower"), "1.99.0", delay=DELAY)


@pytest.fixture
def both(settings: Settings, slower: Path) -> Settings:
    """Settings of a node that serves both, as its worker has them after it has looked."""
    return with_other_toolchains(settings.model_copy(update={"other_toolchains": (str(slower),)}), survey(settings))


def test_a_node_serves_every_toolchain_that_it_has(settings: Settings, slower: Path, tmp_path: Path) -> None:
    found = survey(settings)
    own = {pool.name for pool in found.pools}
    named = settings.model_copy(update={"other_toolchains": (str(slower), str(tmp_path / "none"))})
    resolved = with_other_toolchains(named, found)
    (other,) = [pool for pool in found.pools if pool.name not in own]
    assert other.toolchain.startswith("onnxruntime1.99.0-")
    assert resolved.other_toolchains == (f"{other.toolchain}={slower}",)
    assert [str(note) for note in found.notes if str(tmp_path) in str(note)], "nothing is left out in silence"
    kind = SlotKind("cpu", (other,), (ANYWHERE,))
    assert probe(resolved, kind) == ""
    assert FailureKind.TOOLCHAIN_MISMATCH in probe(settings, kind), "a node that has it no more says so"


def test_a_program_takes_turns_with_that_of_another_toolchain_each_under_its_own(
    settings: Settings, both: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each pair is two processes: one raises the suspicion, and so many show that it is right.
    for name, pairs in (("MIN_PAIRS", 1), ("PAIRS", 1), ("PAIRS_AGAIN", MIN_ROUNDS)):
        monkeypatch.setattr(executor, name, pairs)
    farm = Farm(both)
    farm.store.workers.register({"id": "w1", "node": "n1", "slots": 1, "pools": [POOL.as_dict()]}, ttl=600)
    own = run(farm, tmp_path, POOL.toolchain)
    assert own.end is AttemptEnd.SUCCEEDED, own.message
    ((other, _),) = by_toolchain(both.other_toolchains).items()
    outcome = run(farm, tmp_path, other, against=own.facts["key"], limit=0.05)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    found = farm.artifacts.get_object(outcome.facts["sidecar"])
    assert found
    sidecar: dict[str, Any] = json.loads(found.data)
    assert sidecar["toolchain"] == other
    turns = outcome.facts["turns"]
    assert (turns["key"], turns["verdict"]) == (own.facts["key"], "slower")

    alone = Farm(settings)
    refused = run(alone, tmp_path, other, salt="again")
    assert refused.kind is FailureKind.TOOLCHAIN_MISMATCH, "this node has its own only"
    compared = run(alone, tmp_path, POOL.toolchain, salt="again", against=outcome.facts["key"], limit=0.05)
    assert compared.end is AttemptEnd.SUCCEEDED
    assert "turns" not in compared.facts, "a program of a toolchain that is not here is not run by another"
    assert compared.facts["unmeasured"]


def run(farm: Farm, folder: Path, toolchain: str, *, salt: str = "", **order: Any) -> Outcome:
    """Run one attempt at the model under a toolchain."""
    text = MANIFEST.replace("[fp32, fp16]", "[fp32]") + (f"salt: {salt}\n" if salt else "")
    frozen = freeze_manifest(folder, text)
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    planned = farm.builds.submit("main", frozen.submission, by="test")
    (cell,) = farm.build_reader.read_plan("main", planned["id"])["cells"]
    made: Any = cell["order"]
    spec = {**made["spec"], "toolchain": toolchain}
    key = cache_key(spec)
    attempt = Attempt("j-1", 1, "t", {**made, **order, "spec": spec}, cell["limits"], "main", key)
    return farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())


def test_an_item_of_the_setting_is_read_as_it_is_written() -> None:
    rocm = Installation("/usr/bin/python3", "/opt/rocm/lib")
    assert installation_of("/opt/a/bin/python") == ("", Installation("/opt/a/bin/python"))
    assert installation_of("/usr/bin/python3:/opt/rocm/lib") == ("", rocm)
    assert installation_of("migraphx2.16-ab=/usr/bin/python3:/opt/rocm/lib") == ("migraphx2.16-ab", rocm)
    assert by_toolchain(["/opt/a/bin/python"]) == {}
    with pytest.raises(ValueError, match="names no interpreter"):
        installation_of(":/opt/rocm/lib")
