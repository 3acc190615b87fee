"""The store of artifacts of a test, in a bucket of its own."""

from __future__ import annotations

import pytest

from farm.artifacts.s3 import S3Store


@pytest.fixture
def store(s3_connection: dict[str, str]) -> S3Store:
    """The store in the test's bucket."""
    return S3Store(**s3_connection)
