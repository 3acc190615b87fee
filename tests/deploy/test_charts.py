"""The chart: what it renders from six sets of values, that validators take it, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from ruamel.yaml import YAML

from farm.api.operator_routes import begins_like, metrics_router
from farm.node.supervisor import RELEASE_SECONDS
from tests.support.places import ROOT

CHART = ROOT / "deploy" / "helm" / "migraphx-farm"
SETS = sorted((CHART / "ci").glob("*.yaml"))
PLAIN = ROOT / "deploy" / "kubernetes"
TOOLS = Path(os.environ.get("FARM_DEPLOY_TOOLS", ROOT / ".venv-deploy"))
KUBERNETES = "1.34"

ACCEPTED = {
    "CKV_K8S_11": "a limit of CPU time would stretch compiles and falsify measurements",
    "CKV_K8S_15": "images are by version or digest",
    "CKV_K8S_35": "settings come from variables; children of a worker do not get them",
    "CKV_K8S_43": "the operator pins digests",
}
"""Findings of checkov that stay, and why."""

Document = dict[str, Any]


def tool(name: str) -> str:
    """Return the path of a program; skips if it is not installed."""
    path = shutil.which(name, path=f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if not path:
        pytest.skip(f"{name} is not installed: `make lint-deploy` does that")
    return path


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm."""
    return subprocess.run([tool("helm"), *map(str, words)], capture_output=True, text=True, check=False)


def template(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """Render the chart."""
    return helm("template", "farm", CHART, "--namespace", "farm", "--kube-version", f"{KUBERNETES}.0", *options)


@cache
def rendered(values: Path) -> str:
    """What the chart makes of values."""
    done = template("--values", values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(values: Path) -> list[Document]:
    """The objects of a set of values."""
    return [document for document in YAML(typ="safe").load_all(rendered(values)) if document]


def pods(values: Path) -> Iterator[tuple[Document, Document]]:
    """Each object that makes pods, and the pod's specification."""
    for document in documents(values):
        if document["kind"] in ("Deployment", "Job"):
            yield document, document["spec"]["template"]["spec"]
        elif document["kind"] == "ScaledJob":
            yield document, document["spec"]["jobTargetRef"]["template"]["spec"]


def workers(values: Path) -> Iterator[tuple[Document, Document]]:
    """As `pods`, without the API."""
    return ((document, pod) for document, pod in pods(values) if pod["containers"][0]["name"] == "worker")


def environment(pod: Document) -> dict[str, str]:
    """The plain variables of a pod's container."""
    return {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}


every_set = pytest.mark.parametrize("values", SETS, ids=[path.stem for path in SETS])


def test_there_are_six_sets_of_values() -> None:
    assert len(SETS) == 6


@every_set
def test_helm_finds_nothing_to_say(values: Path) -> None:
    done = helm("lint", "--strict", CHART, "--values", values)
    assert done.returncode == 0, done.stdout


@every_set
def test_kubernetes_takes_all_objects(values: Path, tmp_path: Path) -> None:
    """Those that KEDA makes of a ScaledJob, too."""
    found = [document for document in documents(values) if not document["apiVersion"].startswith("keda.sh/")]
    for document in documents(values):
        if document["kind"] == "ScaledJob":
            spec = copy.deepcopy(document["spec"]["jobTargetRef"])
            found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "scaled"}, "spec": spec})
    path = tmp_path / "objects.json"
    for document in found:
        path.write_text(json.dumps(document))
        words = [tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, path]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{document['kind']}: {done.stdout}{done.stderr}"
        assert "Couldn't find schema" not in done.stdout + done.stderr


def keda(found: list[Document]) -> str:
    """Return what KEDA's definitions refuse."""
    modules = TOOLS / "node" / "node_modules"
    if not (modules / "@kubernetes-models").is_dir():
        pytest.skip("KEDA's definitions are not installed: `make lint-deploy` does that, with npm")
    words, environ = [tool("node"), ROOT / "tests" / "deploy" / "keda.js"], {**os.environ, "NODE_PATH": str(modules)}
    done = subprocess.run(words, input=json.dumps(found), env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keda_takes_its_objects() -> None:
    found = [each for values in SETS for each in documents(values) if each["apiVersion"].startswith("keda.sh/")]
    assert {document["kind"] for document in found} == {"ScaledJob", "ScaledObject", "TriggerAuthentication"}
    assert keda(found) == ""
    wrong = copy.deepcopy(next(document for document in found if document["kind"] == "ScaledJob"))
    wrong["spec"]["maxReplicaCount"] = "many"
    assert "maxReplicaCount" in keda([wrong])


def test_checkov_finds_nothing_else(tmp_path: Path) -> None:
    for values in SETS:
        (tmp_path / values.name).write_text(rendered(values))
    words = [tool("checkov"), "--framework", "kubernetes", "--skip-download", "--quiet", "--compact"]
    words += ["--skip-check", ",".join(ACCEPTED), "--directory", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


@every_set
def test_a_pod_has_longer_to_end_than_its_worker_takes(values: Path) -> None:
    """Else Kubernetes kills a worker that still gives its attempts back, or uploads."""
    pools = YAML(typ="safe").load(values).get("pools", {})
    for document, pod in workers(values):
        pool = pools[document["metadata"]["labels"]["farm/pool"]]
        grace = int(environment(pod)["FARM_GRACE_SECONDS"])
        assert pod["terminationGracePeriodSeconds"] > grace + RELEASE_SECONDS + pool.get("uploadSeconds", 60)
        wanted = pool.get("sliceSeconds", 60) if pool.get("onTerminate") == "checkpoint" else 14400
        assert grace == wanted


@every_set
def test_pods_are_restricted(values: Path) -> None:
    """As the Pod Security Standard `restricted` asks; pods for GPUs also name groups by their numbers."""
    for document, pod in pods(values):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {"emptyDir", "ephemeral"}
        on_gpus = "gpu" in container["args"]
        assert ("supplementalGroups" in pod["securityContext"]) == on_gpus, document["metadata"]["name"]


@every_set
def test_data_is_kept_in_a_folder_that_the_farm_makes(values: Path) -> None:
    """A volume belongs to root, whatever `fsGroup` says, and the farm keeps data only in a folder of its own user."""
    (settings,) = [document["data"] for document in documents(values) if document["kind"] == "ConfigMap"]
    for _, pod in pods(values):
        volumes = [Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]]
        assert any(volume in Path(settings["FARM_DATA_DIR"]).parents for volume in volumes)
        assert Path(settings["FARM_DATA_DIR"]) not in volumes


@every_set
def test_no_probe_asks_the_servers_behind_once_a_pod_has_started(values: Path) -> None:
    for _, pod in pods(values):
        (container,) = pod["containers"]
        paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")}
        assert paths == {"liveness": "/live", "readiness": "/ready" if container["name"] == "worker" else "/live"}


@every_set
def test_an_upgrade_takes_no_api_away_before_another_is_there(values: Path) -> None:
    (api,) = [
        document
        for document in documents(values)
        if document["metadata"]["name"] == "farm-api" and document["kind"] == "Deployment"
    ]
    assert api["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_long_names_of_releases_and_pools_leave_names_that_kubernetes_takes() -> None:
    """A server refuses longer ones, and no validator says so: a Job's name is a label of its pods, too."""
    pools = [f"pools.{'p' * 21}{letter}.pools={{onnxruntime-cpu}}" for letter in "ab"]
    options = [word for pool in pools for word in ("--set", pool)]
    done = helm("template", "r" * 53, CHART, "--values", SETS[2], *options)
    assert done.returncode == 0, done.stderr
    found = [each for each in YAML(typ="safe").load_all(done.stdout) if each]
    jobs = [each["metadata"]["name"] for each in found if each["kind"] == "Job"]
    assert len(set(jobs)) == 3
    assert max(len(each["metadata"]["name"]) for each in found) <= 63


def test_workers_are_added_by_number_and_leave_by_themselves() -> None:
    routes = {route.path for route in metrics_router.routes}
    for values in SETS:
        found = documents(values)
        for document in found:
            if document["kind"] == "ScaledJob":
                words = document["spec"]["jobTargetRef"]["template"]["spec"]["containers"][0]["args"]
                assert "--exit-when-idle" in words
                assert document["spec"]["rollout"] == {"strategy": "gradual"}
                assert document["spec"]["jobTargetRef"]["backoffLimit"] == 0
                assert document["spec"]["jobTargetRef"]["ttlSecondsAfterFinished"] <= 600, "ended ones go soon"
                # A worker that starts is not ordered twice.
                assert document["spec"]["scalingStrategy"]["pendingPodConditions"] == ["PodScheduled", "Ready"]
                (trigger,) = document["spec"]["triggers"]
                url = urlsplit(trigger["metadata"]["url"])
                assert url.path in routes
                assert url.hostname == "farm-api.farm.svc"
                assert all(begins_like(f"{start}.any", start) for start in parse_qs(url.query)["pool"])
            if document["kind"] == "ScaledObject":
                behaviour = document["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
                assert behaviour["scaleDown"] == {"selectPolicy": "Disabled"}
                # KEDA asks only to start from zero, and warns of an interval that nothing uses.
                assert document["spec"]["minReplicaCount"] > 0
                assert "pollingInterval" not in document["spec"]
        assert not any(document["kind"] == "HorizontalPodAutoscaler" for document in found)


def test_whoever_installs_it_is_told_which_pools_do_not_shrink() -> None:
    done = helm("install", "farm", CHART, "--namespace", "farm", "--dry-run=client", "--values", SETS[2])
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:\n")[2]
    assert "Pool cpu: up to 20 workers; each leaves after 120 s without work." in notes
    assert "Pool steady: a Deployment, which does not shrink by itself. To make it smaller, use kubectl scale:" in notes
    done = helm("install", "farm", CHART, "--namespace", "farm", "--dry-run=client", "--values", SETS[1])
    # Not by `farm drain`: its pod would start that worker again.
    assert "To make it smaller, lower workers.min:" in done.stdout.partition("NOTES:\n")[2]


@every_set
def test_a_drained_worker_leaves_a_job_that_succeeded(values: Path) -> None:
    """By default a Job counts a pod as a failure when it has to end, and one failure fails it."""
    for document, _ in workers(values):
        if document["kind"] != "Deployment":
            spec = document["spec"]
            assert spec.get("jobTargetRef", spec)["podReplacementPolicy"] == "Failed"


@every_set
def test_a_drain_of_nodes_is_held_up_only_where_that_was_asked_for(values: Path) -> None:
    """For Jobs, which have no scale, Kubernetes counts only a whole number of pods that have to be there."""
    pools = YAML(typ="safe").load(values).get("pools", {})
    budgets = {
        document["metadata"]["name"].removeprefix("farm-"): document["spec"]
        for document in documents(values)
        if document["kind"] == "PodDisruptionBudget"
    }
    budgets.pop("api", None)
    assert budgets.keys() == {name for name, pool in pools.items() if pool.get("pdb")}
    for name, spec in budgets.items():
        if pools[name].get("kind") == "Deployment":
            assert spec["maxUnavailable"] == 0
        else:
            assert "maxUnavailable" not in spec
            assert spec["minAvailable"] > 1_000_000, "more than any pool has"


@every_set
def test_a_gpu_comes_by_a_plug_in_or_a_claim_and_never_by_both(values: Path) -> None:
    for _, pod in workers(values):
        (container,) = pod["containers"]
        by_plugin = any(name.endswith("/gpu") for name in container["resources"].get("limits", {}))
        by_claim = "resourceClaims" in pod
        assert by_plugin + by_claim == ("gpu" in container["args"])
        assert by_claim == ("claims" in container["resources"])


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [("https://s3.example:8333", {8333}), ("http://s3.example", {80}), ("https://s3.example", {443}), ("", {443})],
)
def test_network_policies_let_pods_reach_object_storage(endpoint: str, ports: set[int]) -> None:
    options = ["--set-string", f"objectStorage.endpoint={endpoint}", "--set", "networkPolicy.apiEgressPorts=null"]
    done = template("--values", SETS[1], *options)
    assert done.returncode == 0, done.stderr
    found = [each for each in YAML(typ="safe").load_all(done.stdout) if each and each["kind"] == "NetworkPolicy"]
    assert len(found) == 2
    for policy in found:
        reached = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert reached == {53, 6379} | ports


def test_changed_settings_start_pods_again() -> None:
    def annotations(*options: str) -> set[str]:
        done = template("--values", SETS[1], *options)
        assert done.returncode == 0, done.stderr
        found = [each for each in YAML(typ="safe").load_all(done.stdout) if each and each["kind"] == "Deployment"]
        return {json.dumps(each["spec"]["template"]["metadata"]["annotations"], sort_keys=True) for each in found}

    before = annotations()
    assert annotations("--set-string", "settings.keep_days=3").isdisjoint(before)
    assert annotations("--set-string", "secretsVersion=2").isdisjoint(before)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("workers.replicas=3", "the value `workers` was removed: it is `pools` now"),
        ("gpuPools.x=1", "the value `gpuPools` was removed: it is `pools` now"),
        ("cpuPools.x=1", "the value `cpuPools` was removed: it is `pools` now"),
        ("redisUrl=redis://x", "the value `redisUrl` was removed: it is `redis.existingSecret` now"),
        ("s3.bucket=farm", "the value `s3` was removed: it is `objectStorage` now"),
        ("apiToken=x", "the value `apiToken` was removed: it is `api.existingSecret` now"),
        ("redis.existingSecret=", "set redis.existingSecret"),
        ("api.existingSecret=", "set api.existingSecret"),
        ("ingress.enabled=true", "set ingress.host and ingress.tlsSecret"),
        ("pools.x.pools={onnxruntime-cpu}", "pools.x: to scale, it needs `pools` and keda.existingSecret"),
        ("pools.x.kind=StatefulSet", "pools"),
        ("pools.x.gpu.by=dra,pools.x.gpu.resource=amd.com/gpu", "gpu"),
        ("pools.x.device=gpu,pools.x.kind=Deployment", "set `groups` to the numbers"),
        ("settings.redis_url=redis://x", "redis_url"),
        ("apii.replicas=2", "apii"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(option: str, said: str) -> None:
    done = template("--values", SETS[0], "--set", option)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    """`make manifests` renders them again."""
    assert (PLAIN / "farm.yaml").read_text() == rendered(PLAIN / "values.yaml")
