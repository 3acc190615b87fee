"""Images, compose, alerts and their runbook: what linters say, and what has to fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from ruamel.yaml import YAML

import farm
from farm.node.supervisor import RELEASE_SECONDS
from tests.deploy.test_charts import TOOLS, tool
from tests.support.places import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = sorted((DEPLOY / "images").glob("*Dockerfile"))
COMPOSE = DEPLOY / "compose" / "compose.yaml"


def test_the_chart_is_for_this_release() -> None:
    chart = YAML(typ="safe").load(DEPLOY / "helm" / "migraphx-farm" / "Chart.yaml")
    assert farm.__version__.split(".dev")[0] == chart["appVersion"] == chart["version"]


def run(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", IMAGES, ids=[path.name for path in IMAGES])
def test_hadolint_finds_nothing_to_say(path: object) -> None:
    run(tool("hadolint"), path)


def test_shellcheck_finds_nothing_to_say_about_the_job_of_slurm() -> None:
    run(tool("shellcheck"), DEPLOY / "slurm" / "farm-worker.sbatch")


def test_compose_and_the_sets_of_values_are_of_their_schemas() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)
    chart = DEPLOY / "helm" / "migraphx-farm"
    sets = [chart / "values.yaml", *(chart / "ci").glob("*.yaml"), DEPLOY / "kubernetes" / "values.yaml"]
    run(tool("check-jsonschema"), "--schemafile", chart / "values.schema.json", *sets)


def test_no_service_can_do_more_than_it_needs() -> None:
    services = YAML(typ="safe").load(COMPOSE)["services"]
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        if name != "setup":
            assert service["user"] == "10001:10001", name
    assert services["setup"]["network_mode"] == "none"
    open_to_others = {name for name, service in services.items() if "ports" in service}
    assert open_to_others == {"proxy", "proxy-nodes", "grafana"}


def test_every_kind_of_worker_has_longer_to_end_than_it_takes() -> None:
    services = YAML(typ="safe").load(COMPOSE)["services"]
    for name in ("worker", "worker-gpu"):
        grace = int(re.search(r"\d+", services[name]["environment"]["FARM_GRACE_SECONDS"])[0])  # type: ignore[index]
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > grace + RELEASE_SECONDS
    unit = (DEPLOY / "systemd" / "farm-worker@.service").read_text()
    grace = float(re.search(r"^grace_seconds = (.+)$", (ROOT / "configs" / "farm.toml").read_text(), re.M)[1])  # type: ignore[index]
    assert float(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > grace + RELEASE_SECONDS  # type: ignore[index]


class StandInStorage(BaseHTTPRequestHandler):
    """Storage that lists one key, as AWS's does which takes any; SeaweedFS takes none with `..`."""

    key = "ns/../../outside"

    def do_GET(self) -> None:
        """Answer with the list, else with the object."""
        entry = f"<Contents><Key>{self.key}</Key><Size>3</Size></Contents>"
        listed = f"<ListBucketResult>{entry if 'prefix=ns' in self.path else ''}</ListBucketResult>".encode()
        self.send_response(200)
        body = listed if "list-type" in self.path else b"bad"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Answer for the object."""
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_backup_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    """Whoever may write one object must not write files of the host that saves it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), StandInStorage) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        named = {"FARM_S3_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "FARM_S3_BUCKET": "farm"}
        keys = {"FARM_S3_ACCESS_KEY": "a", "FARM_S3_SECRET_KEY": "b"}
        words = [sys.executable, DEPLOY / "compose" / "backup.py", "save", tmp_path / "outer" / "backup"]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **named, **keys}, check=False)
        server.shutdown()
    assert done.returncode == 1
    assert "the key 'ns/../../outside' leads out of its folder" in done.stderr
    assert not (tmp_path / "outer").exists()


def dashboard_faults(document: dict, folder: Path) -> str:
    """Return what Grafana's types refuse of a dashboard, whose panels are all time series."""
    modules = TOOLS / "node" / "node_modules"
    if not (modules / "@grafana").is_dir():
        pytest.skip("Grafana's types are not installed: `make lint-deploy` does that, with npm")
    shutil.copy(ROOT / "tests" / "deploy" / "dashboard.ts", folder / "dashboard.ts")
    (folder / "document.ts").write_text(
        f'import type {{ Checked }} from "./dashboard";\nexport const document: Checked = {json.dumps(document)};\n'
    )
    options = {"noEmit": True, "strict": True, "skipLibCheck": True, "moduleResolution": "bundler", "module": "esnext"}
    options |= {"paths": {"grafana/*": [f"{modules}/@grafana/schema/dist/types/*"]}}
    (folder / "tsconfig.json").write_text(json.dumps({"files": ["document.ts"], "compilerOptions": options}))
    words = [tool("node"), modules / "typescript" / "bin" / "tsc", "--project", folder]
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False).stdout


def test_grafana_knows_every_field_of_the_dashboard(tmp_path: Path) -> None:
    document = json.loads((DEPLOY / "grafana" / "farm.json").read_text())
    assert dashboard_faults(document, tmp_path) == ""
    document["panels"][3]["options"]["legend"]["placement"] = "below"
    document["panels"][4]["fieldConfig"]["defaults"]["units"] = "s"
    said = dashboard_faults(document, tmp_path)
    assert "below" in said
    assert "units" in said
