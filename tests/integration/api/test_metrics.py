"""Metrics: who may read them, what they say about a farm's work, and that no label grows with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from farm.app import Farm
from farm.artifacts.tokens import Role
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.control.loops import reap
from farm.errors import StoreUnavailable
from farm.jobs.state import FailureKind, Outcome, Phase
from farm.metrics import instruments
from farm.metrics.instruments import FOLDER_VARIABLE, GAUGES, GaugeValue, LabelValues, bounded, exposition, miss_reason
from farm.node.attempts import _count
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.support.api_farm import work
from tests.support.jobs import new_cell, submit
from tests.support.places import ROOT

Samples = dict[str, dict[tuple[str, ...], float]]


def samples(text: str) -> Samples:
    """Values by the names of samples, and the values of their labels, which come in the order of their names."""
    found: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][tuple(sample.labels.values())] = sample.value
    return found


def scrape(url: str, token: str) -> Samples:
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text
    return samples(answer.text)


@pytest.fixture
def monitor(farm: Farm) -> str:
    return farm.tokens.create("prometheus", Role.MONITOR, "main")


def test_metrics_are_for_monitors_and_administrators(farm: Farm, url: str, monitor: str) -> None:
    """They are of all namespaces, which a reader of one must not see."""
    reader = farm.tokens.create("reader", Role.READER, "main")
    for token, status in ((monitor, 200), (farm.settings.api_token.get_secret_value(), 200), (reader, 403), ("x", 401)):
        assert httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).status_code == status
    assert httpx.get(f"{url}/metrics").status_code == 401


def test_a_monitor_reads_nothing_else(url: str, monitor: str) -> None:
    headers = {"Authorization": f"Bearer {monitor}"}
    for path in ("/v1/builds", "/v1/workers", "/v1/pools", "/v1/refs", "/v1/tokens", "/ui/ns/main/workers"):
        assert httpx.get(url + path, headers=headers).status_code == 403, path


def test_a_build_is_counted_from_plan_to_verdict(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monitor: str
) -> None:
    before = scrape(url, monitor)
    build = client.submit(frozen)["id"]
    waiting = scrape(url, monitor)
    (pool,) = [labels for labels, count in waiting["farm_pool_queued_jobs"].items() if count]
    assert waiting["farm_pool_queued_jobs"][pool] == 2
    assert waiting["farm_pool_oldest_seconds"][pool] > 0
    assert waiting["farm_pool_slots"][pool] == 2
    assert waiting["farm_workers"][("taking",)] == 1
    claims = farm.store.jobs.hand_out(pool[0], 1)
    for job, attempt in claims:
        farm.store.jobs.claim(job, attempt, nonce="n", worker="w1", node="n1")
    assert scrape(url, monitor)["farm_pool_running_jobs"][pool] == len(claims) == 2
    farm.store.builds.cancel(build)
    farm.build_finisher.finish(build)
    after = scrape(url, monitor)

    def grown(name: str, *labels: str) -> float:
        return after[name][labels] - before[name].get(labels, 0.0)

    assert grown("farm_cells_planned_total", "first", "miss") == 2
    assert grown("farm_storage_bytes_total", "written") > 1000
    assert grown("farm_storage_seconds_count", "write") > 3
    assert grown("farm_store_seconds_count", "add_cells") >= 1
    assert grown("farm_requests_total", "POST", "200") >= 1
    assert after["farm_request_seconds_count"][("/builds",)] >= 1
    assert not any("BZPOPMIN" in labels for labels in after["farm_store_seconds_count"])


def test_an_autoscaler_learns_how_many_slots_could_work_now(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monitor: str
) -> None:
    """Jobs that may not start want no worker: those of a paused build, and beyond what a build may run at once."""
    name = farm.store.workers.pools()[0]["name"]

    def wanted(*starts: str) -> int:
        headers = {"Authorization": f"Bearer {monitor}"}
        answer = httpx.get(f"{url}/metrics/wanted", params={"pool": list(starts)}, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["slots"])

    assert wanted(name) == 0
    build = client.submit(frozen)["id"]
    assert wanted(name) == wanted("onnxruntime-cpu") == wanted("migraphx-gfx942", "onnxruntime-cpu") == 2
    assert wanted("onnxruntime-cp") == wanted("migraphx-gfx942") == 0
    farm.store.builds.pause(build, paused=True)
    assert wanted(name) == 0
    farm.store.builds.pause(build, paused=False)
    ((job, attempt),) = farm.store.jobs.hand_out(name, 1)[:1]
    farm.store.jobs.claim(job, attempt, nonce="n", worker="w1", node="n1")
    assert wanted(name) == 2, "what runs keeps its worker"
    farm.store.builds.cancel(build)
    bounded_build = submit(farm.store, *(new_cell(pool=name) for _ in range(3)), max_parallel=1)
    assert wanted(name) == 1 + 1
    farm.store.builds.cancel(bounded_build)


def test_life_does_not_depend_on_the_servers_behind(farm: Farm, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(type(farm.store), "check", away)
    assert httpx.get(f"{url}/v1/health").status_code == 503
    assert httpx.get(f"{url}/live").text == "ok"


def test_what_a_build_ended_with_is_counted(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monitor: str
) -> None:
    before = scrape(url, monitor)
    build = client.submit(frozen)["id"]
    while work(farm):
        pass
    farm.build_finisher.finish(build)
    farm.build_finisher.finish(build)  # Its report is written once.
    after = scrape(url, monitor)
    for name, labels, count in (
        ("farm_cells_ended_total", ("", "succeeded"), 2),
        ("farm_builds_ended_total", ("0",), 1),
    ):
        assert after[name][labels] - before[name].get(labels, 0.0) == count


def test_a_store_that_is_away_is_a_metric(farm: Farm, url: str, monitor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("away")

    scrape(url, monitor)
    monkeypatch.setattr(farm.store.workers, "pools", away)
    found = scrape(url, monitor)
    assert found["farm_store_up"][()] == 0
    assert "farm_pool_slots" not in found
    assert found["farm_requests_total"]


def test_no_label_has_more_than_a_hundred_values_after_ten_thousand_jobs(farm: Farm, url: str, monitor: str) -> None:
    """Of 130 pools, with every kind of failure, and callers who ask for what there is not."""
    pools = [Pool(Target("onnxruntime", "cpu"), f"scripted-{number:08x}", Device("cpu"), 1) for number in range(130)]
    worker = {"id": "w2", "node": "n2", "slots": 1, "pools": [pool.as_dict() for pool in pools]}
    farm.store.workers.register(worker, ttl=600)
    cells = [new_cell(f"{number:064x}", pool=pools[number % 130].name) for number in range(10_000)]
    for cell in cells:
        cell["order"] = {"identifier": cell["identifier"], "spec": {}}
    submit(farm.store, *cells)
    kinds = list(FailureKind)
    for number in range(10_000):
        facts: Any = {"seconds": 1.0, "tuning": {"known": 1, "tuned": 2, "untunable": 0, "seconds": 3.0, "saved": 4.0}}
        done = Outcome.success(facts, phases=dict.fromkeys([phase.value for phase in Phase], 0.1))
        failed = Outcome.failure(kinds[number % len(kinds)], f"model {number} failed")
        failed = replace(failed, phases={"compiling": 2.0})
        _count("succeeded" if number % 2 else "failed", done if number % 2 else failed)
        instruments.CELLS_PLANNED.labels("miss", miss_reason(f"model.digest: {number} -> {number + 1}")).inc()
        instruments.ROUTES.of(f"/v1/{number}")
    for number in range(120):
        httpx.request(f"METHOD{number}", f"{url}/v1/nothing-{number}")
    reap(farm.store, "reaper")
    found = scrape(url, monitor)
    assert sum(found["farm_pool_queued_jobs"].values()) == 10_000
    assert len(found["farm_pool_queued_jobs"]) == 100
    assert found["farm_pool_queued_jobs"][("other",)] > 2000
    for name, values in found.items():
        for place in range(len(next(iter(values)))):
            different = {labels[place] for labels in values}
            assert len(different) <= 100, name
            assert not any(re.search(r"j-[0-9a-f]{16}|b-[0-9a-f]{16}|model \d", label) for label in different), name


def test_the_largest_values_keep_their_names() -> None:
    values = [GaugeValue("farm_pool_queued_jobs", number, (f"p{number}",)) for number in range(10)]
    ages = [GaugeValue("farm_pool_oldest_seconds", number, (f"p{number}",)) for number in range(10)]
    found = bounded([*values, *ages], most=4)
    names = {value.labels[0]: value.value for value in found if value.name == "farm_pool_queued_jobs"}
    assert names == {"p7": 7, "p8": 8, "p9": 9, "other": sum(range(7))}
    assert next(value for value in found if value.labels == ("other",) and "oldest" in value.name).value == 6


def test_a_label_keeps_its_first_values() -> None:
    values = LabelValues(most=3)
    assert [values.of(name) for name in "abcab"] == ["a", "b", "other", "a", "b"]


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("toolchain: a -> b; options.level: x -> y", "toolchain"),
        ("options.level: standard -> tuned", "options"),
        ("first compile", "first"),
        ("failed last time: hang", "failed"),
        ("tuning exhaustive, in the background", "background"),
        ("compiled again: the artifact is gone", "gone"),
        ("the cache key changed", "other"),
    ],
)
def test_a_miss_has_one_reason(sentence: str, reason: str) -> None:
    assert miss_reason(sentence) == reason


def test_processes_of_a_worker_count_together_and_the_dead_stay_counted(tmp_path: Path) -> None:
    code = "from farm.metrics.instruments import ATTEMPTS, PHASE_SECONDS as P; import sys\n"
    code += "ATTEMPTS.labels('failed', sys.argv[1]).inc(2); P.labels('tuning').observe(5)"
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
    for kind in ("hang", "storage", "storage"):
        subprocess.run([sys.executable, "-c", code, kind], env=environment, check=True)
    found = samples(exposition([GaugeValue("farm_worker_up", 1, ("cpu",))], tmp_path).decode())
    assert found["farm_attempts_total"] == {("failed", "hang"): 2, ("failed", "storage"): 4}
    assert found["farm_phase_seconds_sum"] == {("tuning",): 15}
    assert found["farm_worker_up"] == {("cpu",): 1}


# --- dashboards, alerts, documentation ------------------------------------------------------------------------------

DASHBOARDS, RULES = sorted((ROOT / "deploy" / "grafana").glob("*.json")), ROOT / "deploy" / "prometheus" / "alerts.yml"


def exported() -> dict[str, set[str]]:
    """Every name that a farm exports, with its labels."""
    names = {name: set(labels) for name, (_, labels) in GAUGES.items()}
    for metric in vars(instruments).values():
        if hasattr(metric, "describe") and hasattr(metric, "_labelnames"):
            (family,) = metric.describe()
            endings = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("_total",)
            names |= {family.name + ending: set(metric._labelnames) for ending in endings}
    return names


def expressions() -> list[str]:
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    rules = YAML(typ="safe").load(RULES)["groups"][0]["rules"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]


def test_dashboards_and_alerts_name_what_is_exported() -> None:
    known = exported()
    assert len(expressions()) > 35
    for expression in expressions():
        names = set(re.findall(r"\bfarm_\w+", expression))
        assert names <= known.keys(), expression
        labels = set().union(*(known[name] for name in names)) | {"le", "instance", "job"}
        wanted = {word for group in re.findall(r"\bby \(([^)]*)\)", expression) for word in group.split(", ")}
        wanted |= set(re.findall(r"(\w+)=~?\"", expression))
        assert wanted <= labels, expression
    used = {name for expression in expressions() for name in re.findall(r"\bfarm_\w+", expression)}
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in known} - shown <= {
        "farm_info", "farm_attempt_hits", "farm_pool_workers", "farm_worker_reaches_store",
    }  # fmt: skip


def test_the_documentation_has_every_metric_and_alert() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()} - set(re.findall(r"`(farm_\w+)", text))
    assert missing == set()
    rules = YAML(typ="safe").load(RULES)["groups"][0]["rules"]
    runbook = (ROOT / "docs" / "operating" / "runbook.md").read_text()
    assert re.findall(r"^## (Farm\w+)$", runbook, re.MULTILINE) == [rule["alert"] for rule in rules]
    assert [rule["annotations"]["runbook"] for rule in rules] == [
        f"docs/operating/runbook.md#{rule['alert'].lower()}" for rule in rules
    ]


# --- read by Prometheus itself --------------------------------------------------------------------------------------

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (prometheus)")


def promtool(*arguments: str, data: str = "") -> None:
    done = subprocess.run(["promtool", *arguments], input=data, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_what_is_exported(farm: Farm, url: str, monitor: str) -> None:
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {monitor}"})
    promtool("check", "metrics", data=answer.text)
    worker = exposition([GaugeValue(name, 1, tuple("x" for _ in labels)) for name, (_, labels) in GAUGES.items()])
    promtool("check", "metrics", data=worker.decode())


@needs_promtool
def test_prometheus_takes_configuration_rules_and_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch()
    configuration = (RULES.parent / "prometheus.yml").read_text().replace("/etc/prometheus/farm-token", str(token))
    (tmp_path / "prometheus.yml").write_text(configuration)
    shutil.copy(RULES, tmp_path)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    rules = [{"record": f"panel{number}", "expr": each} for number, each in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "panels.yml"))


@needs_promtool
@pytest.mark.parametrize("why", ["died", "stopped", ""])
def test_lost_attempts_are_an_alert_whoever_notices_them(tmp_path: Path, why: str) -> None:
    """By their leases, or by their worker, which a farm without such losses does not export yet."""
    shutil.copy(RULES, tmp_path)
    series = [{"series": "farm_leases_expired_total", "values": "0+0.05x120" if why else "0+0.2x120"}]
    if why:
        series.append({"series": f'farm_leases_ended_total{{why="{why}"}}', "values": "0+0.1x120"})
    expected = [] if why == "stopped" else [{"exp_labels": {"severity": "ticket"}}]
    test: dict[str, Any] = {"interval": "1m", "input_series": series}
    test["alert_rule_test"] = [{"eval_time": "2h", "alertname": "FarmLeasesExpire", "exp_alerts": expected}]
    summary = f"{12 if not why else 9} attempts lost their worker within an hour"
    for alert in expected:
        alert["exp_annotations"] = {"summary": summary, "runbook": "docs/operating/runbook.md#farmleasesexpire"}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [test]}))
    promtool("test", "rules", str(tmp_path / "test.yml"))
