"""What tuning needs of a farm: object storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.artifacts.s3 import S3Store
from farm.settings import Settings, load_settings


@pytest.fixture
def farm_settings(s3_settings: dict[str, str], tmp_path: Path) -> Settings:
    """Settings for the test's bucket alone."""
    return load_settings({}, data_dir=tmp_path, **s3_settings)


@pytest.fixture
def artifacts(farm_settings: Settings) -> S3Store:
    """The store in the test's bucket."""
    return S3Store.from_settings(farm_settings)
