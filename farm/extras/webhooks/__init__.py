"""Webhooks: tells other servers what happened, as Standard Webhooks says: signed, tried again, replayable, logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.extension import Extension, Loop

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.results.report import Report

DELIVER_SECONDS = 5.0  # Seconds between two looks for messages: each is a listing.


def _loops(farm: Farm) -> list[Loop]:
    """Return the loop that sends messages: one of its own, because it waits for the servers of others."""
    from farm.extras.webhooks.sending import DeliveryRounds

    return [Loop("webhooks", DeliveryRounds(farm).go, DELIVER_SECONDS)]


def _tell(farm: Farm, report: Report) -> None:
    """Tell webhooks of a build what a list of builds has, and the path of its page."""
    from farm.extras.webhooks.hooks import Webhooks

    build = report["build"]
    hidden = ("state", "paused", "outlook")
    shown: dict[str, object] = {name: value for name, value in build.items() if name not in hidden}
    shown["page"] = f"/ui/ns/{build['namespace']}/builds/{build['id']}"
    Webhooks(farm).tell(build["namespace"], "build.finished", build["id"], shown)


extension = Extension(
    name="webhooks", routes=["farm.extras.webhooks.webhook_routes:router"], loops=_loops, on_finished=_tell
)
