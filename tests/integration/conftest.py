"""The job store of a test, in the session's Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.settings import Settings, load_settings
from farm.store import Store
from tests.support.sound_store import kept_sound


@pytest.fixture
def farm_settings(redis_url: str, tmp_path: Path) -> Settings:
    """Settings for the session's Valkey alone, with short pauses, and leases short enough to wait for."""
    data = tmp_path / "data"
    data.mkdir()
    return load_settings(
        {},
        data_dir=data,
        redis_url=redis_url,
        lease_seconds=3.0,
        renew_seconds=0.25,
        retry_delay=0.0,
        grace_seconds=5.0,
        probe_pause=0.2,
        log_level="error",
    )


@pytest.fixture
def store(farm_settings: Settings, request: pytest.FixtureRequest) -> Iterator[Store]:
    """The store of these settings, in which nothing contradicts anything when the test has ended."""
    with kept_sound(farm_settings, request):
        yield Store.connect(farm_settings)
