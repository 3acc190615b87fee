"""What tests of commands that compile on this machine share."""

from __future__ import annotations

import pytest

from farm.node.survey import Findings, survey
from farm.settings import load_settings


@pytest.fixture(scope="session")
def findings() -> Findings:
    """This machine, without MIGraphX: it is looked at once."""
    return survey(load_settings({}))


@pytest.fixture
def known(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `farm optimize` and `farm bench` take what was found before."""
    monkeypatch.setattr("farm.local.optimize.survey", lambda settings: findings)
    monkeypatch.setattr("farm.node.survey.survey", lambda settings: findings)
