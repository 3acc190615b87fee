"""Sending: signs what webhooks get, and tries again until it is taken."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from standardwebhooks import Webhook as Signer

from farm.errors import FarmError, FarmFault, NotFound
from farm.extras.webhooks.hooks import AttemptToDeliver, Delivery, Webhook, Webhooks, signing_secrets
from farm.extras.webhooks.requests_out import SECONDS, NoAnswer, Refused, post
from farm.logging import get_logger

if TYPE_CHECKING:
    from farm.app import Farm

log = get_logger(__name__)

PAUSES = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Seconds between the attempts of one message, as Standard Webhooks suggests: three days in all."""

LEASE = 3 * SECONDS
"""Seconds for which a message belongs to the control plane that sends it."""

AT_ONCE = 8
"""Messages that are sent at once, so that a slow receiver does not hold up the others."""

GONE = 410
"""The answer of a receiver that wants to hear nothing any more."""


class DeliveryRounds:
    """Sends what waits. Any number of control planes may: each attempt is made by one."""

    def __init__(self, farm: Farm) -> None:
        self._hooks, self._now, self._networks = Webhooks(farm), farm.store.now, farm.settings.webhook_networks
        self._later: dict[tuple[str, str, str], tuple[str, float]] = {}
        """When messages are due that are not yet, with the mark that says so."""

    def go(self) -> int:
        """Send what is due, and return how many messages were delivered."""
        now = self._now()
        marks = {(namespace, name, message): mark for namespace, name, message, mark in self._hooks.due()}
        self._later = {key: known for key, known in self._later.items() if marks.get(key) == known[0]}
        due = [key for key in marks if key not in self._later or self._later[key][1] <= now]
        if not due:
            return 0
        with ThreadPoolExecutor(min(AT_ONCE, len(due))) as threads:
            return sum(threads.map(lambda key: self._send(key, marks[key]), due))

    def _send(self, key: tuple[str, str, str], mark: str) -> bool:
        namespace, name, message = key
        where = {"namespace": namespace, "webhook": name, "message": message}
        try:
            found = self._hooks.claim(namespace, name, message, LEASE)
            if not isinstance(found, tuple):
                if found is not None:
                    self._later[key] = mark, found
                return False
            delivery, etag = found
            hook = self._hooks.find(namespace, name)
            attempt = self._attempt(hook, delivery)
            after = _judged(delivery, attempt, self._now())
            self._hooks.ended(namespace, name, after, etag)
            if attempt["status"] == GONE:
                self._hooks.disable(namespace, name, "it answered 410 Gone")
            log.info("webhook called", **where, status=attempt["status"], error=attempt["error"])
            return after["state"] == "delivered"
        except NotFound:  # The webhook was removed; what waited for it must not go to the next one of its name.
            self._hooks.forget(namespace, name, message)
        except FarmFault:
            raise
        except FarmError as error:
            log.error("webhook not called", **where, error=error.message)
        except Exception:  # One message that cannot be sent must not stop the others.
            log.exception("webhook not called", **where)
        return False

    def _attempt(self, hook: Webhook, delivery: Delivery) -> AttemptToDeliver:
        began, at, status, error = time.monotonic(), self._now(), 0, ""
        moment = datetime.fromtimestamp(int(at), UTC)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "migraphx-farm",
            "webhook-id": delivery["id"],
            "webhook-timestamp": str(int(at)),
            "webhook-signature": " ".join(
                Signer(secret).sign(delivery["id"], moment, delivery["body"]) for secret in signing_secrets(hook, at)
            ),
        }
        try:
            status = post(hook["url"], headers, delivery["body"].encode(), self._networks)
            if not 200 <= status < 300:
                error = f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
        except (Refused, NoAnswer) as problem:
            error = str(problem)
        return {"at": at, "status": status, "error": error, "seconds": round(time.monotonic() - began, 3)}


def _judged(delivery: Delivery, attempt: AttemptToDeliver, now: float) -> Delivery:
    """Return a delivery after an attempt: delivered, to be tried again, or failed for good."""
    after: Delivery = {**delivery, "attempts": [*delivery["attempts"], attempt], "next": None}
    if not attempt["error"]:
        after["state"] = "delivered"
    elif attempt["status"] == GONE or delivery["tries"] > len(PAUSES):
        after["state"] = "failed"
    else:
        # Not all at once after an outage of their receiver.
        after["next"] = now + PAUSES[delivery["tries"] - 1] * random.uniform(0.9, 1.2)  # noqa: S311
    return after
