"""Farms of tests about builds: what they tell of them is the same wherever they are asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farm.app import Farm
from tests.support.told_alike import differences


@pytest.fixture
def farm(farm: Farm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """The farm, asked in every way when the test has ended."""
    yield farm
    if not request.node.get_closest_marker("damaged"):
        assert differences(farm, tmp_path_factory.mktemp("indexes")) == []
