"""Builds that end in any order, and people who tag, promote and roll back, against the rules of `docs/refs.md`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from farm.settings import Settings
from tests.chaos.report import Fault
from tests.support.ref_machine import World

STEPS = 50
"""Of one farm."""


@pytest.mark.fault("41")
def test_readers_get_what_the_rules_say(
    fault: Fault,
    settings: Settings,
    api: tuple[FastAPI, str],
    s3_client: Any,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    seed = pytestconfig.getoption("chaos_seed") or secrets.randbelow(1 << 32)
    print(f"--chaos-seed {seed}")  # pytest shows it of a failure
    world, steps = World(settings, *api, s3_client, tmp_path), 0
    while (left := fault.count.steps - steps) > 0:  # Hypothesis ends some farms earlier.
        steps += world.run(STEPS, farms=-(-left // STEPS), seed=seed + steps)
    fault.measured(seed=seed, steps=steps)
