"""What a client asks about webhooks: `client.webhooks`."""

from __future__ import annotations

from collections.abc import Iterable

from farm.client.transport import Api, named
from farm.extras.webhooks.hooks import DeliveryView, NewWebhookView, WebhookView


class WebhooksApi(Api):
    """The webhooks of the namespace, and what was sent to them."""

    def all(self) -> list[WebhookView]:
        """Return the webhooks of the namespace, without their secrets."""
        return self._transport.items("/v1/webhooks", WebhookView)

    def create(self, name: str, url: str, events: Iterable[str] = ("build.finished",)) -> str:
        """Make a webhook and return the secret that signs its messages."""
        new = {"name": name, "url": url, "events": list(events)}
        return self._transport.post("/v1/webhooks", NewWebhookView, new)["secret"]

    def rotate(self, name: str, overlap: float = 86_400.0) -> str:
        """Give a webhook a new secret and return it; the one before signs for `overlap` seconds more, too.

        Raises NotFound, Conflict if too many secrets would sign at once.
        """
        return self._transport.post(f"{_webhook(name)}/rotate", NewWebhookView, {"overlap": overlap})["secret"]

    def remove(self, name: str) -> None:
        """Remove a webhook with its log. Raises NotFound."""
        self._transport.request("DELETE", _webhook(name))

    def deliveries(self, name: str, limit: int = 50) -> list[DeliveryView]:
        """Return what was sent to a webhook, the newest first. Raises NotFound."""
        return self._transport.items(f"{_webhook(name)}/deliveries", DeliveryView, limit=limit)

    def replay(self, name: str, message: str) -> DeliveryView:
        """Send a message to a webhook again, with the same id. Raises NotFound."""
        path = f"{_webhook(name)}/deliveries/{named('message', message)}/replay"
        return self._transport.post(path, DeliveryView)


def _webhook(name: str) -> str:
    return f"/v1/webhooks/{named('webhook', name)}"
