"""Which farm a command talks to, and what a shell offers of it: builds, refs, artifacts, targets and pools."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from typer import Argument

from farm.cli import output
from farm.errors import FarmError, NotFound, UsageError
from farm.units import by_number, duration

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
    """Let a client say that it answers from its cache, and how old that is; and that it waits for an answer."""
    client.kept.on_away = lambda reason, age: output.note(f"{reason}: this is what it answered {duration(age)} ago")
    client.transport.on_silence = lambda: output.note(f"still waiting for an answer of {client.url}; Ctrl-C stops")
    return client


@contextmanager
def connect_or_start() -> Iterator[FarmClient]:
    """Yield a client, for a command that reads: if no farm runs here, one without a worker runs while it reads.

    So what `farm run` has built can be fetched after it. Raises NotFound if nothing was ever built here.
    """
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


# --- completion: the farm has a moment to say what there is -----------------------------------------------------------

PATIENCE = 0.25  # Seconds that the farm has to answer: somebody holds a key.

Names = list[str]


def builds(incomplete: str) -> Names:
    """Return ids and names of the newest builds, `@latest`, and labels."""
    found = _asked(lambda client: client.builds(50))
    labels = [f"{name}={value}" for build in found for name, value in build["labels"].items()]
    return _fitting(["@latest", *(build[name] for build in found for name in ("id", "name")), *labels], incomplete)


def cells(ctx: Any, incomplete: str) -> Names:
    """Return the cells of the build that is named before."""
    build = str(ctx.params.get("what") or "@latest")
    found = _asked(lambda client: client.cells(client.find_build(build)))
    return _fitting([cell["identifier"] for cell in found], incomplete)


def refs(incomplete: str) -> Names:
    """Return the refs."""
    return _fitting(_asked(lambda client: client.refs.all()), incomplete)


def artifacts(incomplete: str) -> Names:
    """Return models, whole names of their artifacts once a model is named, and refs after `@`."""
    name, at, ref = incomplete.partition("@")
    if at:
        return [f"{name}@{each}" for each in refs(ref)]
    found = _asked(lambda client: client.ls())
    return _fitting([cell["identifier" if "/" in incomplete else "model"] for cell in found], incomplete)


def stored(incomplete: str) -> Names:
    """Return whole names of artifacts once a model is named; else the shell offers files, which count as well."""
    return artifacts(incomplete) if "/" in incomplete else []


def listings(incomplete: str) -> Names:
    """Return what can be listed."""
    from farm.cli.artifact_commands import Listing

    return _fitting(get_args(Listing), incomplete)


def _of_cells(field: Literal["target", "precision", "shape"], *more: str) -> Callable[[Any, str], Names]:
    """Return what offers the values of a field that the artifacts of the model have which is named before."""

    def offer(ctx: Any, incomplete: str) -> Names:
        model, _, ref = str(ctx.params.get("name") or "").partition("@")
        cells = [cell for cell in _asked(lambda client: client.ls(ref or "latest")) if model in ("", cell["model"])]
        return _fitting([*more, *(cell[field] for cell in cells)], incomplete)

    return offer


targets, precisions, shapes = _of_cells("target", "auto"), _of_cells("precision"), _of_cells("shape")


def offering(metavar: str, about: str, offer: Callable[..., Names] = builds) -> Any:
    """Return a command's argument, for which a shell offers what the farm has: builds, if nothing else is asked for."""
    return Argument(metavar=metavar, help=about, autocompletion=offer)


def pools(incomplete: str) -> Names:
    """Return pools and builds, which can be paused."""
    names = _asked(lambda client: (pool["name"] for pool in client.pools.all()))
    return _fitting(names, incomplete) + builds(incomplete)


def workers(incomplete: str) -> Names:
    """Return the live workers."""
    return _fitting(_asked(lambda client: (worker["id"] for worker in client.workers.all())), incomplete)


def _asked(ask: Callable[[FarmClient], Iterable[Any]]) -> list[Any]:
    """Return what a farm answers; nothing if none does at once, whatever the reason."""
    from farm.client import transport
    from farm.client.client import FarmClient
    from farm.settings import load_settings

    transport.RETRY_DELAYS = ()  # This process does nothing else.
    try:
        with FarmClient.from_settings(load_settings(), timeout=PATIENCE) as client:
            return list(ask(client))
    except FarmError:
        return []


def _fitting(names: Iterable[str], incomplete: str) -> Names:
    """Return what begins so, without names that a shell would take for more: they become a part of its command line."""
    return sorted({name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name)}, key=by_number)


_PLAIN = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@._/:+=,-]*")
