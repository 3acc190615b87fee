"""Former names: what release 0.1.0 called the client's methods. They work for one release longer, and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.client.topic import Api

FORMER = {
    "artifact": "artifacts.get",
    "artifact_log": "artifacts.log",
    "audit": "upkeep.audit",
    "bring": "artifacts.bring",
    "create_token": "tokens.create",
    "delete_tag": "refs.remove",
    "download": "artifacts.download",
    "drain": "workers.drain",
    "gc": "upkeep.gc",
    "job": "jobs.get",
    "log": "jobs.log",
    "pause_pool": "pools.pause",
    "ref": "refs.get",
    "reproduce": "jobs.reproduce",
    "reproduction": "jobs.reproduction",
    "resume_pool": "pools.resume",
    "revoke_token": "tokens.revoke",
    "tag": "refs.move",
    "tuning_import": "tuning.add",
    "tuning_merge": "tuning.merge",
    "tuning_prune": "tuning.prune",
    "tuning_snapshot": "tuning.snapshot",
    "tuning_stats": "tuning.stats",
    "unfence": "workers.unfence",
}
"""Where `FarmClient` has them now."""


def by_former_name(client: object, name: str) -> Any:
    """Return the method of a client that had another name. Raises AttributeError for any other name."""
    if name not in FORMER:
        raise AttributeError(f"{type(client).__name__!r} object has no attribute {name!r}")
    _warn(f"client.{name}", f"client.{FORMER[name]}", 4)
    topic, _, method = FORMER[name].partition(".")
    return getattr(getattr(client, topic), method)


class FormerList(Api):
    """A topic that was a method: `client.workers()` was what `client.workers.all()` is."""

    if not TYPE_CHECKING:
        all: Callable[..., Any]

        def __call__(self, *args: Any, **options: Any) -> Any:
            """Return what `all` returns."""
            topic = type(self).__name__.removesuffix("Api").lower()
            _warn(f"client.{topic}()", f"client.{topic}.all()", 3)
            return self.all(*args, **options)


def _warn(former: str, name: str, level: int) -> None:
    text = f"{former} is {name} now; the former name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=level)
