"""Webhooks over HTTP, for administrators: the farm calls the addresses that they name."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from farm.api import schemas
from farm.api.gate import Admin, FarmDep
from farm.extras.webhooks.hooks import DeliveryView, NewWebhookView, Webhooks, WebhookView
from farm.jobs.rows import Listed

router = APIRouter(tags=["webhooks"])

MESSAGE = r"^msg_[0-9a-f]{32}$"

WebhookName = Annotated[str, Path(pattern=schemas.TAG)]


class NewWebhook(BaseModel):
    """A webhook to be made, and what it gets."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=schemas.TAG)]
    url: Annotated[str, Field(pattern=r"^https?://[!-~]{1,1000}$")]
    events: Annotated[list[Literal["build.finished", "trigger.failed"]], Field(min_length=1, max_length=2)] = [
        "build.finished"
    ]


class Rotation(BaseModel):
    """How long the secret before signs a webhook's messages, too; 0: not any more, and no older one either."""

    model_config = ConfigDict(extra="forbid")

    overlap: Annotated[float, Field(ge=0, le=30 * 86_400, description="seconds")] = 86_400.0


@router.get("/webhooks")
def webhooks(caller: Admin, farm: FarmDep) -> Listed[WebhookView]:
    """List the webhooks of the namespace, without their secrets."""
    return {"items": Webhooks(farm).list(caller.namespace)}


@router.post("/webhooks", status_code=201)
def create_webhook(new: NewWebhook, caller: Admin, farm: FarmDep) -> NewWebhookView:
    """Make a webhook. The secret that signs its messages is in this answer and nowhere else."""
    return Webhooks(farm).create(caller.namespace, new.name, new.url, new.events, by=caller.name)


@router.delete("/webhooks/{name}", status_code=204)
def remove_webhook(name: WebhookName, caller: Admin, farm: FarmDep) -> None:
    """Remove a webhook with its log; what waits is not sent."""
    Webhooks(farm).remove(caller.namespace, name)


@router.post("/webhooks/{name}/rotate")
def rotate(name: WebhookName, wish: Rotation, caller: Admin, farm: FarmDep) -> NewWebhookView:
    """Give a webhook a new secret, which is in this answer and nowhere else. Each request makes another one."""
    return Webhooks(farm).rotate(caller.namespace, name, wish.overlap)


@router.get("/webhooks/{name}/deliveries")
def deliveries(
    name: WebhookName, caller: Admin, farm: FarmDep, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Listed[DeliveryView]:
    """List what was sent to a webhook, the newest first, with every attempt."""
    return {"items": Webhooks(farm).deliveries(caller.namespace, name, limit)}


@router.post("/webhooks/{name}/deliveries/{message}/replay")
def replay(
    name: WebhookName, message: Annotated[str, Path(pattern=MESSAGE)], caller: Admin, farm: FarmDep
) -> DeliveryView:
    """Send a message again, with the same id; repeating this sends it once more."""
    return Webhooks(farm).replay(caller.namespace, name, message)
