"""What a gate refused stays out of `latest` until it passes the same rule, or a person lets it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.refs import Refs
from farm.builds.finishing import BuildFinisher
from farm.builds.known_failures import today
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import freeze
from farm.manifest.parsing import read_gates
from tests.support.api_farm import MANIFEST, commands, finished, freeze_manifest, succeed

CELL = "net/onnxruntime-cpu/fp32/static"
ONE = MANIFEST.replace("[fp32, fp16]", "[fp32]")
OTHER = f"{ONE}salt: larger\n"
LARGE = b"x" * 5000


@pytest.fixture
def build(farm: Farm, client: FarmClient, tmp_path: Path) -> Any:
    """Build a manifest with gates of the command line to its end; programs are `LARGE`. Return the report."""
    freeze_manifest(tmp_path, ONE)

    def built(
        text: str,
        gates: list[str] = [],  # noqa: B006
        budgets: list[str] = [],  # noqa: B006
        baseline: str = "",
        **made: float,
    ) -> Any:
        (tmp_path / "farm.yaml").write_text(text)
        frozen = freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache", gates=read_gates(gates, budgets, baseline))
        return client.report(finished(farm, client, frozen, succeed(farm, program=LARGE, **made)))

    return built


@pytest.fixture
def small(farm: Farm, client: FarmClient, tmp_path: Path) -> str:
    """The key of a small program, which `prod` and `latest` name."""
    finished(farm, client, freeze_manifest(tmp_path, ONE))
    client.refs.move("prod", "latest")
    return str(client.ls()[0]["key"])


@pytest.fixture
def refused(build: Any, small: str) -> str:
    """The key of a large program that a gate refused."""
    report = build(OTHER, ["size=10%"], baseline="prod")
    (cell,) = report["cells"]
    assert (cell["kind"], report["build"]["verdict"]["exit_code"]) == ("regression", 3)
    return str(cell["facts"]["key"])


def latest(client: FarmClient) -> str:
    return str(client.ls()[0]["key"])


@pytest.mark.parametrize("gates", [[], ["size=100000%"], ["load=5%"]])
def test_leaving_out_a_rule_or_loosening_it_lets_nothing_into_latest(
    client: FarmClient, build: Any, small: str, refused: str, gates: list[str]
) -> None:
    for _ in range(2):
        report = build(OTHER, gates, baseline="prod")
        (cell,) = report["cells"]
        assert (cell["state"], cell["facts"]["key"]) == ("succeeded", refused)
        assert latest(client) == small
        assert "1 that `latest` does not take" in report["build"]["verdict"]["text"]
        (held,) = report["changes"]["held"]
        assert held["identifier"] == CELL
        assert held["text"].startswith("gate size=10% refused this program in b-")
        assert report["changes"]["fixed"] == []


def test_a_budget_is_remembered_too(client: FarmClient, build: Any) -> None:
    assert build(ONE, budgets=["size=1kB"])["cells"][0]["kind"] == "budget"
    assert build(ONE)["changes"]["unjudged"][0]["text"].endswith("no longer judged by budget size=1kB")
    assert build(ONE, budgets=["size=10kB"])["cells"][0]["held"]
    assert client.refs.all() == []


@pytest.mark.parametrize(
    ("refusing", "rule"), [("tolerance: 1e-9", "tolerance 1e-09"), ("weak: fail", "weak: fail")], ids=["error", "weak"]
)
def test_what_was_refused_for_its_accuracy_needs_a_persons_word_too(
    client: FarmClient, build: Any, refusing: str, rule: str
) -> None:
    strict = f"{ONE}verify: {{{refusing}}}\n"
    assert build(strict, error=1e-8, spread=0.0)["cells"][0]["kind"] == "accuracy"
    report = build(ONE)
    assert report["cells"][0]["held"].startswith(f"{rule} refused this program")
    assert client.refs.all() == [], "to loosen the rule lets nothing in"
    client.jobs.acknowledge(CELL, "accuracy", "it is exact enough", str(today()))
    build(ONE)
    assert latest(client) == report["cells"][0]["facts"]["key"]


def test_what_passes_the_same_rule_enters_latest(client: FarmClient, build: Any, small: str, refused: str) -> None:
    """`prod` moved to a program that is as large."""
    build(f"{ONE}salt: as large\n")
    client.refs.move("prod", "latest")
    assert build(OTHER, ["size=20%"], baseline="prod")["cells"][0]["held"], "a looser rule"
    build(OTHER, ["size=5%"], baseline="prod")
    assert latest(client) == refused
    assert not build(OTHER)["cells"][0]["held"]


def test_a_person_lets_it_in_by_a_tag(client: FarmClient, build: Any, small: str, refused: str) -> None:
    seen = build(OTHER)["build"]["id"]
    client.refs.move("accepted", seen)
    assert latest(client) == small, "the tag moved, and nothing else"
    build(OTHER)
    assert latest(client) == refused


def test_a_person_lets_it_in_by_acknowledging_the_failure(
    farm: Farm, client: FarmClient, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    build: Any, small: str, refused: str,
) -> None:  # fmt: skip
    with commands(farm, url, tmp_path, monkeypatch):
        by_command(farm, client, build, small, refused)


def by_command(farm: Farm, client: FarmClient, build: Any, small: str, refused: str) -> None:
    assert main(["acknowledge", CELL, "budget", "--reason", "it may"]) == 0
    build(OTHER)
    assert latest(client) == small, "that is another failure"
    assert main(["acknowledge", CELL, "regression", "--reason", "it may", "--until", str(today())]) == 0
    assert [(each["kind"], each["by"]) for each in farm.failures.acknowledged("main")] == [("regression", "admin")]
    build(OTHER)
    assert latest(client) == refused
    assert main(["acknowledge", CELL, "--delete"]) == 0
    assert farm.failures.acknowledged("main") == []
    for wrong in ([CELL], [CELL, "regression"], [CELL, "regression", "--delete"], [CELL, "--delete"]):
        assert main(["acknowledge", *wrong]) != 0


def test_another_program_of_the_cell_is_not_refused(client: FarmClient, build: Any, refused: str) -> None:
    report = build(f"{ONE}salt: another\n")
    assert latest(client) == report["cells"][0]["facts"]["key"] != refused


def test_the_memory_outlives_the_store_and_a_repeated_end(
    farm: Farm, client: FarmClient, build: Any, small: str, refused: str
) -> None:
    """It is in object storage, and a build's end may be repeated until its report is there."""
    finisher: BuildFinisher = farm.build_finisher
    report = build(OTHER)
    farm.artifacts.delete_object(f"ns/main/builds/{report['build']['id']}/report.json")
    finisher._write_report("main", report["build"]["id"])
    assert latest(client) == small
    assert Refs(farm.artifacts).read("main", "latest")
