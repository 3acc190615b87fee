"""`python -m tests.gpu` without a card: its stages are rehearsed on the CPU, so that hardware is not their first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.node.survey import Findings
from farm.runner.seal import unsealable
from tests.gpu.__main__ import AMD_STAGES, STAGES, main
from tests.gpu.amd_stages import AmdRun
from tests.gpu.stages import Run

Rehearse = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearse]:
    """Runs `python -m tests.gpu` here; returns the exit status and what it wrote."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--short", *words, "--out", str(tmp_path)])
        status = main()
        [written] = tmp_path.glob("*.json")
        return status, json.loads(written.read_text())

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(bool(unsealable()), reason=f"this kernel cannot seal {', '.join(unsealable())}")
def test_a_stage_can_be_rehearsed_without_a_card(rehearse: Rehearse, tmp_path: Path) -> None:
    status, written = rehearse("--only", "sealed")
    assert (status, written["stages"]["sealed"]["ok"]) == (0, True), written
    assert (written["rehearsal"], written["what"]) == (True, "rehearsed, no card: on this machine's CPU")
    assert "A rehearsal of the farm on NVIDIA cards, without one" in (tmp_path / "gpu.md").read_text()


def test_a_rehearsal_says_which_stages_need_a_card(
    rehearse: Rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.amd_stages.survey", lambda _: Findings())
    status, written = rehearse("--maker", "amd", "--only", "dirty,illegal")
    reasons = {name: found["left_out"] for name, found in written["stages"].items()}
    assert (status, reasons) == (0, {"dirty": "needs KFD and HIP", "illegal": "needs KFD and HIP"})
    text = (tmp_path / "rehearsal.md").read_text()
    assert (
        "**rehearsed, no card: on this machine's CPU.** It shows that the stages work, and says nothing of a card."
        in text
    )
    assert text.count("| needs KFD and HIP | not tried |") == 2


def test_each_stage_has_its_code_and_unknown_ones_are_refused(
    rehearse: Rehearse, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, stages in ((Run, STAGES), (AmdRun, AMD_STAGES)):
        assert all((getattr(kind, name).__doc__ or "").strip() for name in stages)
        assert kind.needs_card.keys() <= set(stages)
    with pytest.raises(SystemExit):
        rehearse("--only", "machine,dancing")
    assert "no stage dancing: there are machine, sealed," in capsys.readouterr().err


def test_a_run_that_is_terminated_reports_the_stage_under_way_and_begins_no_other(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(_: Run) -> dict[str, object]:
        """What a stage does that takes too long."""
        os.kill(os.getpid(), signal.SIGTERM)
        return {"ok": True}

    monkeypatch.setattr(Run, "machine", terminated)
    status, written = rehearse("--only", "machine,sealed")
    assert (status, list(written["stages"])) == (1, ["machine"])
    assert not written["stages"]["machine"]["ok"]
    assert "TimeoutError" in written["stages"]["machine"]["broke"]
