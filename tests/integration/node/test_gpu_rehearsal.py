"""`python -m tests.gpu` without a card: its stages are rehearsed on the CPU, so that hardware is not their first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farm.runner.seal import unsealable
from tests.gpu.__main__ import REHEARSED, STAGES, main
from tests.gpu.stages import Run
from tests.support.places import ROOT


def gpu_test(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(bool(unsealable()), reason=f"this kernel cannot seal {', '.join(unsealable())}")
def test_stages_can_be_rehearsed_without_a_card(tmp_path: Path) -> None:
    done = gpu_test("--rehearse", "--short", "--only", "machine,sealed", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["rehearsal"] is True
    assert {name: found["ok"] for name, found in written["stages"].items()} == {"machine": True, "sealed": True}
    assert "A rehearsal of the farm on NVIDIA cards" in (tmp_path / "gpu.md").read_text()


def test_each_stage_has_its_code_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    assert all((getattr(Run, name).__doc__ or "").strip() for name in STAGES)
    assert set(REHEARSED) <= set(STAGES)
    done = gpu_test("--only", "machine,dancing", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "no stage dancing: there are machine, sealed," in done.stderr


def test_a_run_that_is_terminated_reports_the_stage_under_way_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(_: Run) -> dict[str, object]:
        """What a stage does that takes too long."""
        os.kill(os.getpid(), signal.SIGTERM)
        return {"ok": True}

    monkeypatch.setattr(Run, "machine", terminated)
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--only", "machine,sealed", "--out", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    (name, found), *more = json.loads((tmp_path / "gpu.json").read_text())["stages"].items()
    assert (name, found["ok"], more) == ("machine", False, [])
    assert "TimeoutError" in found["broke"]
