"""Webhooks: tells other servers what happened, as Standard Webhooks says: signed, tried again, replayable, logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.extension import Extension, Loop, late

if TYPE_CHECKING:
    from farm.app import Farm

DELIVER_SECONDS = 5.0  # Seconds between two looks for messages: each is a listing.


def _loops(farm: Farm) -> list[Loop]:
    """Return the loop that sends messages: one of its own, because it waits for the servers of others."""
    from farm.extras.webhooks.sending import DeliveryRounds

    return [Loop("webhooks", DeliveryRounds(farm).go, DELIVER_SECONDS)]


extension = Extension(
    name="webhooks",
    routes=["farm.extras.webhooks.webhook_routes:router"],
    loops=_loops,
    on_finished=late("farm.extras.webhooks.hooks:tell_finished"),
)
