"""Webhooks and their deliveries in object storage: below `config/`, which holds secrets that only servers may read."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NotRequired
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from farm.artifacts.storage import Object, rewrite
from farm.errors import Conflict, NotFound, UsageError
from farm.logging import get_logger
from farm.units import view_of

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.results.report import Report

log = get_logger(__name__)

MOST_HOOKS = 20  # Webhooks of one namespace.
KEPT = 200  # Deliveries of one webhook that are kept in its log.

ATTEMPTS_KEPT = 20

_HOOKS = "config/webhooks/"
_LOG = "config/deliveries/"
_DUE = "config/deliveries-due/"

MOST_SECRETS = 4  # Secrets that sign a message at once, so that the header stays short.


class WebhookView(TypedDict):
    """A webhook as people see it. `disabled` says why it gets nothing any more, or is empty.

    `old_signs_until` (Unix seconds) is set while a secret from before a rotation signs, too.
    """

    name: str
    url: str
    events: list[str]
    created: float
    by: str
    disabled: str
    old_signs_until: float | None


class OldSecret(TypedDict):
    """A secret from before a rotation, which signs `until` then (Unix seconds), too."""

    secret: str
    until: float


class Webhook(TypedDict):
    """A webhook as it is stored: `secret` signs its messages."""

    schema: int
    name: str
    url: str
    events: list[str]
    created: float
    by: str
    disabled: str
    secret: str
    old: NotRequired[list[OldSecret]]


class NewWebhookView(TypedDict):
    """A new secret of a webhook; only this answer contains it."""

    name: str
    secret: str


class AttemptToDeliver(TypedDict):
    """One request: when (Unix seconds), what was answered (0: nothing), what was wrong, and how long it took."""

    at: float
    status: int
    error: str
    seconds: float


class DeliveryView(TypedDict):
    """A message to one webhook. `state` is waiting, delivered or failed; `next` is when it is tried again."""

    id: str
    event: str
    created: float
    state: str
    next: float | None
    attempts: list[AttemptToDeliver]
    body: str


class Delivery(DeliveryView):
    """A delivery as it is stored: `tries` since it was made or replayed, `claim` of its sender."""

    schema: int
    tries: int
    claim: str


DeliveryViews = list[DeliveryView]


class Webhooks:
    """The webhooks of all namespaces."""

    def __init__(self, farm: Farm) -> None:
        self._artifacts, self._now = farm.artifacts, farm.store.now

    # --- webhooks -----------------------------------------------------------------------------------------------

    def create(self, namespace: str, name: str, url: str, events: Sequence[str], *, by: str) -> NewWebhookView:
        """Make a webhook and return its secret. Raises UsageError for a URL that cannot be one, Conflict."""
        if not _may_be_called(url):
            raise UsageError(f"{url!r} is not the address of a webhook", hint="such as https://ci.example/hooks/farm")
        if len(list(self._artifacts.list_objects(f"{_HOOKS}{namespace}/"))) >= MOST_HOOKS:
            raise UsageError(f"{namespace} has {MOST_HOOKS} webhooks already", hint="remove one")
        secret = _new_secret()
        hook: Webhook = {
            "schema": 1,
            "name": name,
            "url": url,
            "events": sorted(set(events)),
            "created": self._now(),
            "by": by,
            "disabled": "",
            "secret": secret,
        }
        try:
            self._artifacts.put_object(_hook_key(namespace, name), _json(hook), create=True)
        except Conflict:
            raise Conflict(f"a webhook {name} exists already", hint="remove it first, or choose another name") from None
        return {"name": name, "secret": secret}

    def list(self, namespace: str) -> list[WebhookView]:
        """Return the webhooks of a namespace by name, without their secrets."""
        now, hooks = self._now(), self._hooks(namespace)
        ends = [(hook, [each["until"] for each in hook.get("old", ()) if each["until"] > now]) for hook in hooks]
        return [view_of(WebhookView, {**hook, "old_signs_until": max(until, default=None)}) for hook, until in ends]

    def find(self, namespace: str, name: str) -> Webhook:
        """Return a webhook. Raises NotFound."""
        found = self._artifacts.get_object(_hook_key(namespace, name))
        if found is None:
            raise _no_hook(namespace, name)
        hook: Webhook = json.loads(found.data)
        return hook

    def rotate(self, namespace: str, name: str, overlap: float) -> NewWebhookView:
        """Give a webhook a new secret, and return it. The one before signs for `overlap` seconds more, too.

        Each call makes another secret. Raises NotFound, Conflict if too many secrets would sign at once.
        """
        secret = _new_secret()

        def change(hook: Webhook) -> Webhook:
            now = self._now()
            old: list[OldSecret] = [
                each
                for each in (OldSecret(secret=hook["secret"], until=now + overlap), *hook.get("old", ()))
                # No overlap: they may have been seen by others, and so may the ones before them.
                if overlap and each["until"] > now
            ]
            if len(old) >= MOST_SECRETS:
                first = datetime.fromtimestamp(min(each["until"] for each in old), UTC)
                raise Conflict(
                    f"{len(old)} secrets of {name} sign already, the first until {first:%Y-%m-%d %H:%M} UTC",
                    hint="wait until then; an overlap of 0 ends all of them at once",
                )
            return {**hook, "secret": secret, "old": old}

        self._change(namespace, name, change)
        return {"name": name, "secret": secret}

    def disable(self, namespace: str, name: str, why: str) -> None:
        """Tell a webhook nothing any more. Raises NotFound."""
        self._change(namespace, name, lambda hook: {**hook, "disabled": why})

    def _change(self, namespace: str, name: str, change: Callable[[Webhook], Webhook]) -> None:
        """Move a webhook's document by conditional writes. Raises NotFound."""

        def changed(found: Object | None) -> bytes:
            if found is None:
                raise _no_hook(namespace, name)
            return _json(change(json.loads(found.data)))

        rewrite(self._artifacts, _hook_key(namespace, name), changed)

    def remove(self, namespace: str, name: str) -> None:
        """Remove a webhook with its log. Raises NotFound."""
        self.find(namespace, name)
        self._artifacts.delete_object(_hook_key(namespace, name))
        for prefix in (_DUE, _LOG):
            for key in list(self._artifacts.list_objects(f"{prefix}{namespace}/{name}/")):
                self._artifacts.delete_object(key)

    def _hooks(self, namespace: str) -> Iterator[Webhook]:
        for key in sorted(self._artifacts.list_objects(f"{_HOOKS}{namespace}/")):
            found = self._artifacts.get_object(key)
            try:
                hook: Webhook | None = json.loads(found.data) if found else None
            except ValueError as error:  # It must not keep builds from ending.
                log.error("webhook unreadable", key=key, error=str(error))
                continue
            if hook:
                yield hook

    # --- deliveries ---------------------------------------------------------------------------------------------

    def tell(self, namespace: str, event: str, about: str, data: Mapping[str, object]) -> None:
        """Let a namespace's webhooks know of an event. Repeating it with the same `about` tells nobody twice."""
        for hook in self._hooks(namespace):
            if hook["disabled"] or event not in hook["events"]:
                continue
            now = self._now()
            digest = hashlib.sha256(f"{hook['name']} {hook['created']} {event} {about}".encode()).hexdigest()
            moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
            delivery: Delivery = {
                "schema": 1,
                "id": f"msg_{digest[:32]}",
                "event": event,
                "created": now,
                "state": "waiting",
                "next": now,
                "attempts": [],
                "body": json.dumps({"type": event, "timestamp": moment, "data": dict(data)}),
                "tries": 0,
                "claim": "",
            }
            key = _delivery_key(namespace, hook["name"], delivery["id"])
            with suppress(Conflict):
                self._artifacts.put_object(key, _json(delivery), create=True)
            there = self.delivery(namespace, hook["name"], delivery["id"])
            if there["state"] == "waiting":  # Or it was sent before, and its mark was lost with who wrote it.
                self.mark(namespace, hook["name"], there)
            self._forget_old(namespace, hook["name"])

    def deliveries(self, namespace: str, name: str, limit: int) -> DeliveryViews:
        """Return the newest deliveries of a webhook, the newest first. Raises NotFound."""
        self.find(namespace, name)
        keys = list(self._artifacts.list_objects(f"{_LOG}{namespace}/{name}/"))
        found = [_read(each) for key in keys if (each := self._artifacts.get_object(key))]
        found.sort(key=lambda each: each["created"], reverse=True)
        return [view_of(DeliveryView, each) for each in found[:limit]]

    def delivery(self, namespace: str, name: str, message: str) -> Delivery:
        """Return a delivery. Raises NotFound."""
        found = self._artifacts.get_object(_delivery_key(namespace, name, message))
        if found is None:
            raise NotFound(f"{name} has no delivery {message}", hint=f"`farm webhook log {name}` lists them")
        return _read(found)

    def replay(self, namespace: str, name: str, message: str) -> DeliveryView:
        """Send a message again, with the same id and as often as a new one. Raises NotFound."""
        self.find(namespace, name)
        again = self.delivery(namespace, name, message)

        def waiting(found: Object | None) -> bytes:
            nonlocal again
            if found is None:
                raise NotFound(f"{name} has no delivery {message}")
            again = {**_read(found), "state": "waiting", "next": self._now(), "tries": 0}
            return _json(again)

        rewrite(self._artifacts, _delivery_key(namespace, name, message), waiting)
        self.mark(namespace, name, again)
        return view_of(DeliveryView, again)

    def due(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield namespace, webhook and message of all that waits, and a text that changes with its next time."""
        for entry in self._artifacts.list_entries(_DUE):
            namespace, name, message = entry.key.removeprefix(_DUE).split("/")
            yield namespace, name, message, entry.etag

    def claim(self, namespace: str, name: str, message: str, lease: float) -> tuple[Delivery, str] | float | None:
        """Take a delivery to send it: return it with its ETag, when it is due, or None if it waits no more."""
        found = self._artifacts.get_object(_delivery_key(namespace, name, message))
        now = self._now()
        if found is None or (delivery := _read(found))["state"] != "waiting":
            self._artifacts.delete_object(_mark_key(namespace, name, message))
            return None
        if (delivery["next"] or 0.0) > now:
            return delivery["next"]
        claim, tries = secrets.token_hex(8), delivery["tries"] + 1
        taken: Delivery = {**delivery, "next": now + lease, "claim": claim, "tries": tries}
        try:
            return taken, self._artifacts.put_object(found.key, _json(taken), if_match=found.etag)
        except Conflict:
            return now + lease

    def ended(self, namespace: str, name: str, delivery: Delivery, etag: str) -> None:
        """Record what came of an attempt; one who has taken the delivery since is not disturbed."""
        kept: Delivery = {**delivery, "attempts": delivery["attempts"][-ATTEMPTS_KEPT:], "claim": ""}
        with suppress(Conflict):
            self._artifacts.put_object(_delivery_key(namespace, name, kept["id"]), _json(kept), if_match=etag)
            if kept["state"] == "waiting":
                self.mark(namespace, name, kept)
            else:
                self._artifacts.delete_object(_mark_key(namespace, name, kept["id"]))

    def mark(self, namespace: str, name: str, delivery: Delivery) -> None:
        """Mark a delivery as one that waits."""
        self._artifacts.put_object(_mark_key(namespace, name, delivery["id"]), _json({"next": delivery["next"]}))

    def forget(self, namespace: str, name: str, message: str) -> None:
        """Delete a delivery; one that waits is not sent."""
        self._artifacts.delete_object(_delivery_key(namespace, name, message))
        self._artifacts.delete_object(_mark_key(namespace, name, message))

    def _forget_old(self, namespace: str, name: str) -> None:
        entries = sorted(self._artifacts.list_entries(f"{_LOG}{namespace}/{name}/"), key=lambda entry: entry.modified)
        waiting = {key.rpartition("/")[2] for key in self._artifacts.list_objects(f"{_DUE}{namespace}/{name}/")}
        for entry in entries[:-KEPT]:
            if entry.key.rpartition("/")[2].removesuffix(".json") not in waiting:
                self._artifacts.delete_object(entry.key)


def tell_finished(farm: Farm, report: Report) -> None:
    """Tell webhooks of a build what a list of builds has, and the path of its page."""
    build = report["build"]
    hidden = ("state", "paused", "outlook")
    shown: dict[str, object] = {name: value for name, value in build.items() if name not in hidden}
    shown["page"] = f"/ui/ns/{build['namespace']}/builds/{build['id']}"
    Webhooks(farm).tell(build["namespace"], "build.finished", build["id"], shown)


def _read(found: Object) -> Delivery:
    delivery: Delivery = json.loads(found.data)
    return delivery


def signing_secrets(hook: Webhook, now: float) -> list[str]:
    """Return the secrets that sign a webhook's messages at a moment, the newest first."""
    return [hook["secret"], *(each["secret"] for each in hook.get("old", ()) if each["until"] > now)]


def _new_secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


def _may_be_called(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and "@" not in parts.netloc
            and not parts.fragment
        )
    except ValueError:  # A port above 65535, an IPv6 address without its end.
        return False


def _no_hook(namespace: str, name: str) -> NotFound:
    return NotFound(f"no webhook {name} in namespace {namespace}", hint="`farm webhook ls` lists them")


def _hook_key(namespace: str, name: str) -> str:
    return f"{_HOOKS}{namespace}/{name}.json"


def _delivery_key(namespace: str, name: str, message: str) -> str:
    return f"{_LOG}{namespace}/{name}/{message}.json"


def _mark_key(namespace: str, name: str, message: str) -> str:
    return f"{_DUE}{namespace}/{name}/{message}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
