"""Which farm a command talks to, and what a shell offers of it: builds, refs, artifacts, targets and pools."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

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


def _connect_to_storage(address: str, settings: Settings) -> FarmClient:
    """Return a client of `s3://BUCKET`, with the settings' endpoint and keys, or of what a URL shows to all.

    Raises UsageError for another address, or if boto3 is not installed for S3.
    """
    from farm.client.client import trust_of
    from farm.client.storage_client import StorageClient
    from farm.client.transfers import default_cache

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
def connect_or_start(storage: str = "") -> Iterator[FarmClient]:
    """Yield a client, for a command that reads: if no farm runs here, one without a worker runs while it reads.

    So what `farm run` has built can be fetched after it. A `storage` that `--from` names is read without any farm.
    Raises NotFound if nothing was ever built here.
    """
    from farm.settings import load_settings

    settings = load_settings()
    with ExitStack() as running:
        try:
            client = _connect_to_storage(storage, settings) if storage else connect(settings)
        except NotFound:
            from farm.local.embedded import EmbeddedFarm, has_data

            if not has_data(settings):
                raise
            output.quiet_logs(settings)
            client = connect(running.enter_context(EmbeddedFarm(settings, say=output.note, works=False)))
        yield running.enter_context(client)


# --- completion: the farm has a moment to say what there is -----------------------------------------------------------

PATIENCE = 0.25  # Seconds that the farm has to answer: somebody holds a key.

_PLAIN = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@._/:+=,-]*")
"""Names that a shell takes for nothing more: they become a part of its command line."""

Names = list[str]
Ask = Callable[["FarmClient", Any, str], Iterable[str]]
"""Asks a farm for names. Also takes the context, with what is said before, and what is typed of the name."""


def _offer(ask: Ask, *known: str) -> Callable[[Any, str], Names]:
    """Return what offers a shell the names that begin so: those `known`, and all that a farm answers at once."""

    def offer(ctx: Any, incomplete: str) -> Names:
        from farm.client import transport
        from farm.client.client import FarmClient
        from farm.settings import load_settings

        names = [*known]
        transport.RETRY_DELAYS = ()  # This process does nothing else.
        with suppress(FarmError), FarmClient.from_settings(load_settings(), timeout=PATIENCE) as client:
            names += ask(client, ctx, incomplete)
        return sorted({name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name)}, key=by_number)

    return offer


def _builds(client: FarmClient, *_: object) -> Names:
    found = client.builds(50)
    labels = [f"{name}={value}" for build in found for name, value in build["labels"].items()]
    return [*(build[name] for build in found for name in ("id", "name")), *labels]


def _cells(client: FarmClient, ctx: Any, _: str) -> Names:
    build = str(ctx.params.get("what") or "@latest")
    return [cell["identifier"] for cell in client.cells(client.find_build(build))]


def _artifacts(client: FarmClient, _: Any, incomplete: str) -> Names:
    """Return models, whole names of their artifacts once a model is named, and refs after `@`."""
    name, at, _ = incomplete.partition("@")
    if at:
        return [f"{name}@{tag}" for tag in client.refs.all()]
    return [cell["identifier" if "/" in incomplete else "model"] for cell in client.ls()]


def _of_cells(field: Literal["target", "precision", "shape"]) -> Ask:
    """Return what asks for the values of a field that the artifacts of the model have which is named before."""

    def ask(client: FarmClient, ctx: Any, _: str) -> Names:
        model, _, ref = str(ctx.params.get("name") or "").partition("@")
        return [cell[field] for cell in client.ls(ref or "latest") if model in ("", cell["model"])]

    return ask


builds, cells, artifacts = _offer(_builds, "@latest"), _offer(_cells), _offer(_artifacts)
refs = _offer(lambda client, *_: client.refs.all())
workers = _offer(lambda client, *_: (worker["id"] for worker in client.workers.all()))
targets, precisions, shapes = (
    _offer(_of_cells("target"), "auto"),
    _offer(_of_cells("precision")),
    _offer(_of_cells("shape")),
)
pools = _offer(lambda client, *_: [*(pool["name"] for pool in client.pools.all()), *_builds(client)], "@latest")
"""Pools and builds, which can be paused."""


def stored(ctx: Any, incomplete: str) -> Names:
    """Return whole names of artifacts once a model is named; else the shell offers files, which count as well."""
    return artifacts(ctx, incomplete) if "/" in incomplete else []


def offering(metavar: str, about: str, offer: Callable[..., Names] = builds) -> Any:
    """Return a command's argument, for which a shell offers what the farm has: builds, if nothing else is asked for."""
    return Argument(metavar=metavar, help=about, autocompletion=offer)
