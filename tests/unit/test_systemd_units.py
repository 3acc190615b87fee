"""The systemd units: what they close to others and to themselves, and what sealed children and GPUs need open."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
NAMES = [unit.name for unit in UNITS]

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")

EXPOSURE = {"farm-serve.service": 25, "farm-worker@.service": 30}
"""Tenths of systemd's figure, of 100, that a unit is at most; 92 is a unit that says nothing."""


def service(name: str) -> dict[str, list[str]]:
    """The values of each key of a unit's [Service]."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "deploy" / "systemd" / name).read_text()
    for line in text.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_units_are_these() -> None:
    assert sorted(EXPOSURE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_role_keeps_and_knows_is_its_own(name: str) -> None:
    found = service(name)
    assert (found["UMask"], found["StateDirectoryMode"]) == (["0077"], ["0700"])
    assert found["PrivateTmp"] == found["NoNewPrivileges"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["CapabilityBoundingSet"] == [""]
    folder = f"%S/{found['StateDirectory'][0]}"
    assert found["Environment"] == [f"FARM_DATA_DIR={folder} HOME={folder}"]


def test_no_role_has_the_secrets_of_another() -> None:
    """Nor its user: who runs as it reads its environment. Folders do not lie in one another."""
    serve, worker = service("farm-serve.service"), service("farm-worker@.service")
    assert serve["User"] != worker["User"]
    shared = {"/etc/farm/farm.env"}
    assert set(serve["EnvironmentFile"]) & set(worker["EnvironmentFile"]) == shared
    assert "FARM_API_TOKEN" in worker["UnsetEnvironment"][0]
    assert not worker["StateDirectory"][0].startswith(f"{serve['StateDirectory'][0]}/")
    assert not serve["StateDirectory"][0].startswith(f"{worker['StateDirectory'][0]}/")


def test_a_worker_keeps_what_children_compilers_and_gpus_need() -> None:
    found = service("farm-worker@.service")
    assert "memory" in found["Delegate"][0].split(), "limits that the kernel holds"
    assert found.get("ProtectControlGroups", ["no"]) == ["no"], "the delegated group is written to"
    assert found.get("MemoryDenyWriteExecute", ["no"]) == ["no"], "kernels are compiled just in time"
    assert found.get("PrivateDevices", ["no"]) == ["no"]
    assert {"char-kfd rw", "char-drm rw"} <= set(found["DeviceAllow"])
    assert found.get("ProtectProc", ["default"]) == ["default"], "whether a measurement is alone is read there"
    assert found["SupplementaryGroups"] == ["video render"]


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_no_filter_of_a_unit_has_a_call_that_seals_a_child(name: str) -> None:
    (denied,) = service(name)["SystemCallFilter"]
    assert denied.startswith("~")
    needed = {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp", "prctl",
              "pidfd_open", "clone3", "setsid", "prlimit64", "sched_setaffinity", "flock", "memfd_create"}  # fmt: skip
    for group in denied.removeprefix("~").split():
        said = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True)
        assert needed.isdisjoint(said.stdout.split()), group


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_systemd_understands_each_line_and_finds_little_exposed(name: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "systemd" / name).read_text()
    # The farm is not installed where the units say.
    unit = tmp_path / name.replace("@.", "@gpu.")
    unit.write_text(text.replace("ExecStart=/opt/farm/bin/farm", f"ExecStart={shutil.which('true')}"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    options = ["--offline=true", f"--threshold={EXPOSURE[name]}", "--no-pager"]
    judged = subprocess.run(
        ["systemd-analyze", "security", *options, unit], capture_output=True, text=True, check=False
    )
    assert judged.returncode == 0, judged.stdout[-300:] + judged.stderr
