"""What every reader gets of refs, on a real farm, is what the rules of `docs/refs.md` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI

from farm.settings import Settings
from tests.support.ref_machine import World


def test_readers_get_what_the_rules_say_whatever_builds_and_people_do(
    settings: Settings, api: tuple[FastAPI, str], s3_client: Any, tmp_path: Path
) -> None:
    """The same steps each time, with all that people do to refs; fault 41 takes others."""
    assert World(settings, *api, s3_client, tmp_path).run(12, farms=3, seed=544) > 36
