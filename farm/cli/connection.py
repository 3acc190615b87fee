"""Which farm a command talks to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from farm.cli import output
from farm.errors import UsageError
from farm.units import duration

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.settings import Settings


def connect(settings: Settings | None = None) -> FarmClient:
    """Return a client of the farm that the settings name (default: this process's settings)."""
    from farm.client.client import FarmClient
    from farm.settings import load_settings

    return _speaking(FarmClient.from_settings(settings or load_settings()))


def connect_to_storage(address: str) -> FarmClient:
    """Return a client of `s3://BUCKET`, with the settings' endpoint and keys, or of what a URL shows to all.

    Raises UsageError for another address, or if boto3 is not installed for S3.
    """
    from farm.client.client import trust_of
    from farm.client.storage_client import StorageClient
    from farm.client.transfers import default_cache
    from farm.settings import load_settings

    settings = load_settings()
    options: dict[str, Any] = {"namespace": settings.namespace, "cache": default_cache(), "trust": trust_of(settings)}
    bucket = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,62})/?", address)
    if not bucket:
        return _speaking(StorageClient.below(address, **options))
    try:
        from farm.artifacts.s3 import S3Store
    except ImportError:
        raise UsageError("reading S3 needs boto3", hint="pip install 'migraphx-farm[s3]'") from None
    store = S3Store.from_settings(settings.model_copy(update={"s3_bucket": bucket[1]}))
    return _speaking(StorageClient(address, store.presign_get, **options))


def _speaking(client: FarmClient) -> FarmClient:
    """Let a client say that it answers from its cache, and how old that is."""

    def say(reason: str, age: float) -> None:
        output.note(f"{reason}: this is what it answered {duration(age)} ago")

    client.kept.on_away = say
    waiting = f"still waiting for an answer of {client.url}; Ctrl-C stops"
    client.transport.on_silence = lambda: output.note(waiting)
    return client


@contextmanager
def connect_or_start() -> Iterator[FarmClient]:
    """Yield a client, for a command that reads: if no farm runs here, one without a worker runs while it reads.

    So what `farm run` has built can be fetched after it. Raises NotFound if nothing was ever built here.
    """
    from farm.errors import NotFound
    from farm.settings import load_settings

    settings = load_settings()
    try:
        found = connect(settings)
    except NotFound:
        from farm.local.embedded import EmbeddedFarm, has_data

        if not has_data(settings):
            raise
        output.quiet_logs(settings)
        with EmbeddedFarm(settings, say=output.note, works=False) as started, connect(started) as client:
            yield client
    else:
        with found as client:
            yield client
