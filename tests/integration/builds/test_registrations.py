"""Workers that differ in what cache keys say, registered on one store: each gets the jobs whose keys it would give."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from farm.app import Farm
from farm.compiling.attempt import Attempt
from farm.errors import ManifestError
from farm.jobs.state import AttemptEnd, Outcome
from farm.runner import onnxruntime_compiler
from farm.targets.pools import Pool
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest

HERE = replace(POOL, cpu_family=onnxruntime_compiler.cpu_family())
OTHER = replace(POOL, cpu_family="x86-64-v9")
NEXT = replace(HERE, recipe=2)


def register(farm: Farm, *pools: Pool) -> None:
    """As real workers do: the last one to come has the last word on whatever has one name."""
    for number, pool in enumerate(pools):
        worker = {"id": f"w-{pool.name}", "node": f"n{number}", "slots": 4, "pools": [pool.as_dict()]}
        farm.store.workers.register(worker, ttl=600)


def submit(farm: Farm, folder: Path, more: str) -> list[tuple[str, str]]:
    """Submit one cell, and return pools and keys of what became of it."""
    text = MANIFEST.replace("[fp32, fp16]", "[fp32]") + more
    frozen = freeze_manifest(folder, text)
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    build = farm.builds.submit("main", frozen.submission, by="test")
    return [(cell["pool"], cell["key"]) for cell in farm.build_reader.cells("main", build["id"])]


def execute(farm: Farm, pool: Pool) -> Outcome:
    """Take the next job of a pool and compile it here."""
    ((job, number),) = farm.store.jobs.hand_out(pool.name, 1)
    claim = farm.store.jobs.claim(job, number, nonce="n", worker=f"w-{pool.name}", node="n")
    named = (claim.token, claim.order, claim.limits, claim.namespace, claim.key)
    return farm.executor.execute(Attempt(job, number, *named), on_phase=lambda *_: None, cancelled=threading.Event())


@pytest.fixture
def bare(farm: Farm) -> Farm:
    """A farm whose only workers are those of the test."""
    farm.store.workers.leave("w1")
    return farm


@pytest.mark.parametrize("order", [(HERE, OTHER), (OTHER, HERE)])
def test_a_program_for_one_cpu_family_is_made_by_a_worker_of_that_family(
    bare: Farm, tmp_path: Path, order: tuple[Pool, Pool]
) -> None:
    register(bare, *order)
    with pytest.raises(ManifestError, match="several pools serve `onnxruntime/cpu`"):
        submit(bare, tmp_path, "options: {level: tuned}\n")
    found = {}
    for pool in (HERE, OTHER):
        more = f"options: {{level: tuned}}\ntoolchains: [{pool.build}]\n"
        [(name, key)] = submit(bare, tmp_path, more)
        assert name == pool.name
        register(bare, *order)
        assert submit(bare, tmp_path, more) == [(name, key)], "a registration flips no key"
        found[pool.name] = key
    assert len({*found.values()}) == 2
    outcome = execute(bare, HERE)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert outcome.facts["key"] == found[HERE.name]
    wrong = execute(bare, OTHER)
    assert wrong.kind == "toolchain_mismatch", "this machine is of another family, wherever the job came from"
    assert bare.artifacts.lookup(["main"], found[OTHER.name]) is None


def test_in_a_rolling_upgrade_the_next_recipe_is_filled_by_its_own_workers(bare: Farm, tmp_path: Path) -> None:
    register(bare, NEXT, HERE)
    [(name, key)] = submit(bare, tmp_path, "")
    assert name == NEXT.name
    assert bare.store.jobs.hand_out(HERE.name, 4) == []
    outcome = execute(bare, NEXT)
    assert outcome.kind == "toolchain_mismatch", "what runs here is still recipe 1"
    assert "recipe 1, not 2" in outcome.message
    assert bare.artifacts.lookup(["main"], key) is None
