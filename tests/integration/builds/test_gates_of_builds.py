"""Gates of builds over real servers: baselines by tag, turns in the work order, the history, what a report says."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.refs import Refs
from farm.artifacts.storage import sidecar_key
from farm.builds.past_builds import BuildIndex
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, freeze
from farm.compiling.attempt import Attempt
from farm.compiling.failures import Failure
from farm.compiling.pipeline import StepEnded, Steps
from farm.control.loops import fail_unserved
from farm.errors import ArtifactGone, ExitCode, UsageError
from farm.jobs.state import FailureKind, Outcome
from farm.manifest.parsing import read_gates
from farm.results.speed import Comparison
from tests.support.api_farm import MANIFEST, POOL, commands, finished, freeze_manifest, succeed, work
from tests.support.helpers import wait_until

CELL = "net/onnxruntime-cpu/fp32/b1"
ONE = MANIFEST.replace("[fp32, fp16]", "[fp32]") + "    inputs: {x: {shape: [batch, 4]}}\n    batches: [1]\n"
GATED = ONE + "gates: {baseline: prod, latency: 5%, size: 1%}\n"


def submitted(client: FarmClient, folder: Path, text: str, **options: Any) -> str:
    (folder / "farm.yaml").write_text(text)
    return str(client.submit(freeze(folder / "farm.yaml", cache=folder / "cache", **options))["id"])


@pytest.fixture
def prod(farm: Farm, client: FarmClient, tmp_path: Path) -> str:
    """The key of the program that `prod` names."""
    finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"))
    client.refs.move("prod", "latest")
    snapshot = Refs(farm.artifacts).read("main", "prod")
    assert snapshot
    (cell,) = snapshot["cells"].values()
    return str(cell["key"])


def against(key: str, ratio: float) -> dict[str, Any]:
    return {"key": key, **Comparison(ratio, ratio - 0.01, ratio + 0.01, "slower").as_dict()}


def test_a_slower_program_fails_its_gate_and_latest_stays(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    build = submitted(client, tmp_path, GATED + "salt: another\n")
    orders: list[dict[str, Any]] = []

    def slower(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        orders.append(order)
        return succeed(farm, against=against(prod, 0.8))(job_id, order, key)

    work(farm, slower)
    farm.build_finisher.finish(build)
    assert [(order["against"], order["limit"]) for order in orders] == [(prod, 0.05)]
    report = client.report(build)
    assert report["build"]["verdict"]["exit_code"] == ExitCode.GATE_FAILED
    assert [each["identifier"] for each in report["changes"]["regressions"]] == [CELL]
    assert report["changes"]["new_failures"] == report["changes"]["regressions"], "it passed in the build before"
    assert report["changes"]["recompiled"] == [{"identifier": CELL, "text": "salt: none -> another"}]
    assert client.ls()[0]["key"] == prod

    again = submitted(client, tmp_path, ONE + "salt: third\n")
    work(farm)
    farm.build_finisher.finish(again)
    found = client.report(again)["changes"]
    assert found["fixed"] == []
    said = "failed before: regression; no longer judged by gate latency=5%"
    assert found["unjudged"] == [{"identifier": CELL, "text": said}]


def test_a_hit_that_nothing_measures_says_so(farm: Farm, client: FarmClient, tmp_path: Path, prod: str) -> None:
    finished(farm, client, _again(tmp_path, ONE + "salt: other\n"))
    build = str(client.submit(_again(tmp_path, GATED.replace("5%,", "5%, hits: list,") + "salt: other\n"))["id"])
    assert work(farm) == 0
    farm.build_finisher.finish(build)
    hit = client.report(build)
    assert hit["build"]["verdict"]["exit_code"] == ExitCode.OK
    assert "1 not judged by a gate" in hit["build"]["verdict"]["text"]
    said = hit["changes"]["undecided"][0]["text"]
    assert said.startswith("gate latency=5%: latency is not compared with prod: it is a hit of ")
    assert said.endswith("baseline: `hits: list` leaves it unmeasured")
    assert hit["changes"]["hits"] == [CELL]
    same = client.report(finished(farm, client, _again(tmp_path, GATED)))
    assert same["changes"]["undecided"] == [], "the baseline itself has nothing to be compared with"


def _again(folder: Path, text: str) -> Frozen:
    (folder / "farm.yaml").write_text(text)
    return freeze(folder / "farm.yaml", cache=folder / "cache")


def test_gates_of_the_command_line_are_laid_over_those_of_the_manifest(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    gates = read_gates(["size=2%"], ["latency=0.5ms"], "prod")
    report = client.report(finished(farm, client, _with_gates(tmp_path, GATED + "salt: new\n", gates)))
    (cell,) = report["cells"]
    assert cell["gate"]["limits"] == {"latency": 0.05, "size": 0.02}
    assert (cell["kind"], cell["message"]) == ("budget", "budget latency=0.5ms: latency is 1 ms")


def test_a_gate_of_the_manifest_is_switched_off_on_the_command_line(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    text = GATED + "budgets: {latency: 0.5ms}\nsalt: new\n"
    gates = read_gates(["latency=off", "size=off"], ["latency=off"])
    (cell,) = client.report(finished(farm, client, _with_gates(tmp_path, text, gates)))["cells"]
    assert cell["state"] == "succeeded", cell["message"]
    assert cell["compared"] == []


def _with_gates(folder: Path, text: str, gates: Any) -> Frozen:
    (folder / "farm.yaml").write_text(text)
    return freeze(folder / "farm.yaml", cache=folder / "cache", gates=gates)


def test_the_namespace_of_a_pull_request_is_compared_with_main(
    farm: Farm, client: FarmClient, url: str, tmp_path: Path, prod: str
) -> None:
    """It reads main's refs; one of its own goes before."""
    gated = ONE + "gates: {baseline: prod, size: 0%}\n"
    with FarmClient(url, farm.settings.api_token.get_secret_value(), namespace="pr") as theirs:

        def compared_with(text: str) -> str:
            build = str(theirs.submit(_again(tmp_path, text))["id"])
            work(farm)
            farm.build_finisher.finish(build)
            (cell,) = farm.build_reader.read_plan("pr", build)["cells"]
            return str(cell["baseline"]["key"] if cell["baseline"] else "")

        assert compared_with(gated + "salt: new\n") == prod
        theirs.refs.move("prod", "latest")
        assert compared_with(gated + "salt: newer\n") == theirs.ls("prod")[0]["key"] != prod


# --- a gate that cannot judge ------------------------------------------------------------------------------------


def test_a_mistyped_baseline_is_refused_with_a_suggestion(
    farm: Farm, client: FarmClient, url: str, tmp_path: Path, prod: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "farm.yaml").write_text(ONE)
    with commands(farm, url, tmp_path, monkeypatch):
        for command in (["submit", "--detach"], ["submit", "--dry-run"]):
            assert main([*command, "farm.yaml", "--baseline", "prd", "--gate", "latency=5%"]) == ExitCode.USAGE
            said = capsys.readouterr().err
            assert "the tag prd does not exist in namespace main" in said
            assert "did you mean `prod`?" in said
    assert len(client.builds()) == 1, "only that of `prod`"
    with (
        FarmClient(url, farm.settings.api_token.get_secret_value(), namespace="pr") as theirs,
        pytest.raises(UsageError, match="did you mean `prod`"),
    ):
        theirs.plan(_with_gates(tmp_path, ONE, read_gates(["size=5%"], [], "prod2")))


def test_a_first_run_says_so_and_its_cells_are_new(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    freeze_manifest(tmp_path, ONE, batch="N")
    strict = GATED.replace("size: 1%", "undecided: fail")
    with pytest.raises(UsageError, match="if this is the first run"):
        client.submit(_again(tmp_path, strict))
    report = client.report(finished(farm, client, _with_gates(tmp_path, strict, read_gates([], [], first=True))))
    assert report["build"]["warnings"] == [
        "the tag prod does not exist in namespace main: this is a first run, nothing is compared with it"
    ]
    assert report["build"]["verdict"]["exit_code"] == ExitCode.OK
    assert report["build"]["verdict"]["text"].endswith("1 new to the baseline")
    assert report["changes"]["new"] == [{"identifier": CELL, "text": "gate latency=5%: prod has no such cell yet"}]
    assert client.ls()[0]["key"] == report["cells"][0]["facts"]["key"]


def test_an_empty_namespace_and_a_new_cell_pass_for_the_first_time(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    """By default the baseline is `latest`, which never gets a cell that may not pass without being there."""
    gates = "gates: {size: 10%, undecided: fail}\n"
    report = client.report(finished(farm, client, freeze_manifest(tmp_path, f"{ONE}{gates}", batch="N")))
    assert "latest does not exist" in report["build"]["warnings"][0]
    assert "first run" in report["build"]["warnings"][0]
    two = f"{ONE}{gates}".replace("[fp32]", "[fp32, fp16]")
    report = client.report(finished(farm, client, _again(tmp_path, two)))
    assert report["build"]["verdict"]["exit_code"] == ExitCode.OK
    assert report["build"]["warnings"] == []
    assert [each["identifier"] for each in report["changes"]["new"]] == [CELL.replace("fp32", "fp16")]
    assert len(client.ls()) == 2


def test_a_baseline_that_cannot_be_read_judges_nothing(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    farm.artifacts.put_object("ns/main/refs/prod.json", b"half a re")
    with pytest.raises(ArtifactGone, match="cannot be read"):
        client.submit(_again(tmp_path, GATED))


def test_a_baseline_whose_program_is_gone_is_not_a_new_cell(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    farm.artifacts.delete_object(sidecar_key("main", prod))
    farm.store.index.remove("main", [prod])
    report = client.report(finished(farm, client, _again(tmp_path, GATED.replace("5%", "off") + "salt: new\n")))
    assert report["changes"]["new"] == []
    said = "gate size=1%: size is not compared with prod: its program is gone"
    assert report["changes"]["undecided"] == [{"identifier": CELL, "text": said}]


# --- the history -------------------------------------------------------------------------------------------------


def test_the_history_of_a_cell_can_be_made_again_of_the_reports(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    build = submitted(client, tmp_path, ONE + "salt: second\n")
    work(farm)
    farm.build_finisher.finish(build)
    farm.build_finisher.finish(build)
    found = client.history(CELL)
    assert [(past["state"], past["hit"], past["build"] == build) for past in found] == [
        ("succeeded", False, True),
        ("succeeded", False, False),
    ]
    assert found[0]["values"]["latency"] == 0.001
    path = farm.settings.data_dir / "builds.sqlite3"
    path.write_bytes(b"no database" * 1000)
    assert client.upkeep.rebuild_history() == 2
    assert client.history(CELL) == found
    elsewhere = BuildIndex(tmp_path / "elsewhere.sqlite3", farm.store, farm.artifacts)
    assert elsewhere.catch_up("main").is_whole
    assert elsewhere.of("main", CELL) == found, "another server reads the reports that it does not know"


def test_a_follow_up_is_in_the_history_and_is_no_build_before(farm: Farm, client: FarmClient, prod: str) -> None:
    report = client.report("@latest")
    later = {"id": "b-" + "f" * 16, "follows": report["build"]["id"], "ended_at": time.time() + 60}
    (cell,) = report["cells"]
    failed: Any = {**report, "build": {**report["build"], **later}, "cells": [{**cell, "state": "failed"}]}
    farm.build_index.add(failed)
    assert [past["state"] for past in client.history(CELL)] == ["failed", "succeeded"]
    assert farm.build_index.last("main", "demo", [CELL])[CELL]["state"] == "succeeded"


# --- numbers of other nodes ----------------------------------------------------------------------------------------

ONCE = f"{ONE}gates: {{baseline: prod, compile-time: 50%}}\n"


@pytest.fixture
def prod_of_n1(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """Let `prod` name a program that the node n1 took 10 s to compile."""
    finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"), succeed(farm, node="n1", seconds=10.0))
    client.refs.move("prod", "latest")


def compiled(farm: Farm, client: FarmClient, folder: Path, text: str, seconds: float) -> tuple[int, str]:
    """Build a cell on the node n2; return the exit code, and what came of the comparison."""
    build = finished(farm, client, _again(folder, text), succeed(farm, node="n2", seconds=seconds))
    report = client.report(build)
    (cell,) = report["cells"]
    assert report["build"]["verdict"]
    return report["build"]["verdict"]["exit_code"], cell["compared"][0]["outcome"] if cell["compared"] else ""


@pytest.mark.usefixtures("prod_of_n1")
def test_a_slow_compile_on_another_node_is_red_however_often_it_is_built(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: a\n", 10.0) == (0, "not compared")
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: a\n", 10.0) == (0, "not compared"), "it does not judge itself"
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: b\n", 100.0) == (3, "worse")
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: b\n", 100.0) == (3, "worse"), "a hit"
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: c\n", 105.0) == (3, "worse")


@pytest.mark.usefixtures("prod_of_n1")
def test_steps_that_are_small_each_do_not_pass_together(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: a\n", 10.0) == (0, "not compared")
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: b\n", 15.0) == (0, "within")
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: c\n", 20.0) == (3, "worse"), "twice the first"


@pytest.mark.usefixtures("prod_of_n1")
def test_what_another_manifest_compiled_faster_fails_nothing(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    experiment = ONE.replace("name: demo", "name: experiment")
    assert compiled(farm, client, tmp_path, f"{experiment}salt: branch\n", 4.0) == (0, "")
    assert compiled(farm, client, tmp_path, f"{ONCE}salt: as prod\n", 10.0) == (0, "not compared")


def test_a_damaged_history_stops_no_build(farm: Farm, client: FarmClient, tmp_path: Path, prod: str) -> None:
    (farm.settings.data_dir / "builds.sqlite3").write_bytes(b"no database" * 1000)
    report = client.report(finished(farm, client, _again(tmp_path, GATED + "salt: more\n")))
    assert report["build"]["state"] == "reported"


# --- the turns ---------------------------------------------------------------------------------------------------


def execute(farm: Farm) -> dict[str, Any]:
    """Run the one waiting attempt with the real compiler, and return its facts."""
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    attempt = Attempt(job_id, number, claim.token, claim.order, claim.limits, claim.namespace, claim.key)
    outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
    assert outcome.facts, outcome
    farm.store.index.put("main", claim.key, outcome.facts)
    assert farm.store.jobs.finish(job_id, claim.token, outcome) == "ok"
    return dict(outcome.facts)


def built(farm: Farm, client: FarmClient, folder: Path, text: str) -> dict[str, Any]:
    """Submit a build of one cell, run its attempt with the real compiler, and return the judged cell."""
    build = str(client.submit(freeze_manifest(folder, text, batch="N"))["id"])
    execute(farm)
    farm.build_finisher.finish(build)
    return dict(client.report(build)["cells"][0])


def test_misses_and_hits_take_turns_with_their_baseline_and_hits_once(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    """`prod` moves to the second program. The first is still there, and was never measured against it.

    With a limit of nothing every program may be slower, so it is measured again; that gives an interval, too.
    """
    first = built(farm, client, tmp_path, ONE)
    second = built(farm, client, tmp_path, f"{ONE}gates: {{latency: 10000%}}\noptions: {{threads: 2}}\n")
    assert second["facts"]["turns"]["key"] == first["key"]
    (row,) = second["compared"]
    assert row["against"] == "latest"
    assert row["interval"][0] <= row["change"] <= row["interval"][1]
    client.refs.move("prod", "latest")

    gated = GATED.replace("5%", "0%")
    (shown,) = client.plan(_again(tmp_path, gated))["cells"]
    assert (shown["state"], shown["reason"]) == ("hit", "measured in turns with prod's")
    third = built(farm, client, tmp_path, gated)
    assert (third["hit"], third["facts"]["turns"]["key"]) == (True, second["key"])
    assert third["facts"]["created"] == first["facts"]["created"], "nothing was compiled"
    assert third["compared"][0]["interval"]
    assert third["compared"][0]["outcome"] != "not compared"
    assert "turns" not in farm.store.index.get_many("main", [first["key"]])[first["key"]], "only this build asked"

    again = client.report(finished(farm, client, _again(tmp_path, gated)))["cells"][0]
    assert again["attempt"] == 0, "what an earlier build measured is judged, with its day"
    assert again["compared"][0]["interval"] == third["compared"][0]["interval"]
    assert again["compared"][0]["why"].startswith("measured on 20")


def test_a_baseline_that_does_not_run_here_fails_nothing(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """Its program is not one that ONNX Runtime loads, as that of another toolchain may be."""
    finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"))
    build = submitted(client, tmp_path, f"{ONE}gates: {{latency: 5%}}\nsalt: another\n")
    assert "turns" not in execute(farm)
    farm.build_finisher.finish(build)
    report = client.report(build)
    assert report["build"]["verdict"]["exit_code"] == ExitCode.OK
    said = "the program did not run in turns with this baseline: "
    assert said in report["changes"]["undecided"][0]["text"]


def test_a_hit_with_the_bytes_of_its_baseline_is_equal_without_a_measurement(
    farm: Farm, client: FarmClient, tmp_path: Path
) -> None:
    for text in (ONE, f"{ONE}salt: another\n"):
        finished(farm, client, freeze_manifest(tmp_path, text, batch="N"), succeed(farm, program=b"the same"))
        client.refs.move("prod", "latest") if text == ONE else None
    report = client.report(finished(farm, client, _again(tmp_path, f"{GATED}salt: another\n")))
    (cell,) = report["cells"]
    assert cell["attempt"] == 0
    assert [(row["outcome"], row["why"]) for row in cell["compared"]] == [("within", "it is the same program")] * 2


def test_a_hit_without_a_worker_to_measure_it_waits_for_none(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str
) -> None:
    finished(farm, client, _again(tmp_path, ONE + "salt: other\n"))
    farm.store.workers.leave("w1")
    report = client.report(finished(farm, client, _again(tmp_path, GATED + "salt: other\n")))
    assert report["changes"]["undecided"][0]["text"].endswith(f"no live worker serves {POOL.name}")


# --- what the turns may break --------------------------------------------------------------------------------------


@pytest.fixture
def to_be_measured(farm: Farm, client: FarmClient, tmp_path: Path, prod: str) -> str:
    """A build of one hit, which is to take turns with `prod`; return its id."""
    finished(farm, client, _again(tmp_path, f"{ONE}salt: other\n"))
    return submitted(client, tmp_path, f"{GATED}salt: other\n")


def is_unmeasured(farm: Farm, client: FarmClient, build: str, why: str) -> None:
    farm.build_finisher.finish(build)
    report = client.report(build)
    verdict = report["build"]["verdict"]
    assert verdict and verdict["exit_code"] == ExitCode.OK, verdict
    assert verdict["text"].endswith("1 not judged by a gate")
    (cell,) = report["cells"]
    assert (cell["state"], cell["hit"], cell["message"]) == ("succeeded", True, "")
    assert why in report["changes"]["undecided"][0]["text"]


def test_a_hit_stays_one_if_its_worker_leaves_before_the_turns(
    farm: Farm, client: FarmClient, to_be_measured: str
) -> None:
    farm.store.workers.leave("w1")
    wait_until(lambda: fail_unserved(farm.store, 0.1), message="the job to be given up")
    is_unmeasured(farm, client, to_be_measured, "no worker has taken jobs")


@pytest.mark.parametrize("kind", [FailureKind.TIME_LIMIT, FailureKind.GPU_FAULT, FailureKind.INTERNAL])
def test_a_hit_stays_one_if_its_turns_fail(
    farm: Farm, client: FarmClient, to_be_measured: str, kind: FailureKind
) -> None:
    """A worker of an older release ends them so, and a lost one without a word."""

    def has_ended() -> bool:
        work(farm, lambda *_: Outcome.failure(kind, "the baseline did it"))
        farm.store.jobs.promote()
        row = farm.store.builds.get(to_be_measured)
        return row is not None and row["state"] == "ended"

    wait_until(has_ended, message="the last try")
    is_unmeasured(farm, client, to_be_measured, "the baseline did it")
    assert Refs(farm.artifacts).read("main", "latest")


def test_a_hit_whose_program_is_gone_is_compiled_and_may_fail(
    farm: Farm, client: FarmClient, to_be_measured: str
) -> None:
    work(farm, lambda *_: replace(Outcome.failure(FailureKind.BAD_MODEL, "no model"), made_again=True))
    farm.build_finisher.finish(to_be_measured)
    (cell,) = client.report(to_be_measured)["cells"]
    assert (cell["state"], cell["kind"]) == ("failed", "bad_model")


@pytest.mark.parametrize("stuck", [False, True])
def test_a_program_is_published_whatever_its_baseline_does(
    farm: Farm, client: FarmClient, tmp_path: Path, prod: str, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """A baseline that faults the GPU, or turns that reach the time limit, cost the build a compile."""

    def faulty(*_: Any) -> None:
        assert list(farm.artifacts.list_objects("ns/main/artifacts/")) != there, "the program is safe by now"
        raise StepEnded(Failure(FailureKind.GPU_FAULT, "the GPU reported a fault", fences=stuck))

    monkeypatch.setattr("farm.node.executor.compare_with", faulty)
    there = list(farm.artifacts.list_objects("ns/main/artifacts/"))
    build = submitted(client, tmp_path, f"{ONE}gates: {{baseline: prod, latency: 5%}}\nsalt: new\n")
    known = execute(farm)
    assert known["unmeasured"] == "the GPU reported a fault"
    farm.build_finisher.finish(build)
    (cell,) = client.report(build)["cells"]
    assert (cell["state"], cell["hit"]) == ("succeeded", False)
    assert cell["compared"][0]["why"].endswith("with this baseline: the GPU reported a fault")
    (worker,) = farm.store.workers.list()
    assert bool(worker["fenced"]) is stuck, "a process that the kernel does not let go is the node's trouble"


@pytest.mark.parametrize("others", [True, False])
def test_turns_that_others_disturbed_say_so(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prod: str, others: bool
) -> None:
    """What disturbed the program's own measurement before does not count."""
    executor_measures = Steps.evaluate

    def disturbed(steps: Steps, *given: Any, **more: Any) -> Any:
        steps.children.shared = True
        return executor_measures(steps, *given, **more)

    def compared(steps: Steps, *_: Any) -> Any:
        steps.children.shared |= others
        return against(prod, 0.8)

    monkeypatch.setattr(Steps, "evaluate", disturbed)
    monkeypatch.setattr("farm.node.executor.compare_with", compared)
    (row,) = built(farm, client, tmp_path, f"{ONE}gates: {{baseline: prod, latency: 5%}}\nsalt: new\n")["compared"]
    assert row["why"] == ("others ran on the host or used the GPU meanwhile" if others else "")


def test_what_a_miss_measured_holds_for_its_hits(farm: Farm, client: FarmClient, tmp_path: Path, prod: str) -> None:
    """Its sidecar was written before the turns, so the build's report has them."""
    gated = GATED + "salt: new\n"

    def made(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        outcome = succeed(farm)(job_id, order, key)
        turns: Any = {**against(prod, 0.8), "measured": "2026-11-21T01:00:00+00:00", "node": "n1"}
        return replace(outcome, facts={**outcome.facts, "turns": turns}) if outcome.facts else outcome

    assert client.report(finished(farm, client, _again(tmp_path, gated), made))["cells"][0]["kind"] == "regression"
    build = submitted(client, tmp_path, gated)
    assert work(farm) == 0, "nothing is left to measure"
    farm.build_finisher.finish(build)
    (cell,) = client.report(build)["cells"]
    assert (cell["hit"], cell["kind"], cell["compared"][0]["why"]) == (
        True,
        "regression",
        "measured on 2026-11-21, it is a hit",
    )
