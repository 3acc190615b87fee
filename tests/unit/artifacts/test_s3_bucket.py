"""The S3 bucket, as far as it needs no server."""

import pytest

from farm.artifacts.s3_bucket import Bucket
from farm.errors import UsageError


@pytest.mark.parametrize("setting", ["endpoint", "public_endpoint"])
@pytest.mark.parametrize("url", ["banana", "http://[::1"])
def test_an_endpoint_that_is_no_address_is_a_usage_error(setting: str, url: str) -> None:
    with pytest.raises(UsageError, match=r"object storage \(s3_endpoint, s3_public_endpoint\)"):
        Bucket(bucket="farm", **{setting: url})
