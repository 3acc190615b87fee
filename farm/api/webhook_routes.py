"""Webhooks over HTTP, for administrators: the farm calls the addresses that they name."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from farm.api import schemas
from farm.api.auth import Admin, FarmDep
from farm.jobs.rows import Listed
from farm.webhooks.hooks import DeliveryView, NewWebhookView, WebhookView

router = APIRouter(tags=["webhooks"])

WebhookName = Annotated[str, Path(pattern=schemas.TAG)]


@router.get("/webhooks", response_model=schemas.Items[WebhookView])
def webhooks(caller: Admin, farm: FarmDep) -> Listed[WebhookView]:
    """List the webhooks of the namespace, without their secrets."""
    return {"items": farm.webhooks.list(caller.namespace)}


@router.post("/webhooks", response_model=NewWebhookView, status_code=201)
def create_webhook(new: schemas.NewWebhook, caller: Admin, farm: FarmDep) -> NewWebhookView:
    """Make a webhook. The secret that signs its messages is in this answer and nowhere else."""
    return farm.webhooks.create(caller.namespace, new.name, new.url, new.events, by=caller.name)


@router.delete("/webhooks/{name}", status_code=204)
def remove_webhook(name: WebhookName, caller: Admin, farm: FarmDep) -> None:
    """Remove a webhook with its log; what waits is not sent."""
    farm.webhooks.remove(caller.namespace, name)


@router.post("/webhooks/{name}/rotate", response_model=NewWebhookView)
def rotate(name: WebhookName, wish: schemas.Rotation, caller: Admin, farm: FarmDep) -> NewWebhookView:
    """Give a webhook a new secret, which is in this answer and nowhere else. Each request makes another one."""
    return farm.webhooks.rotate(caller.namespace, name, wish.overlap)


@router.get("/webhooks/{name}/deliveries", response_model=schemas.Items[DeliveryView])
def deliveries(
    name: WebhookName, caller: Admin, farm: FarmDep, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Listed[DeliveryView]:
    """List what was sent to a webhook, the newest first, with every attempt."""
    return {"items": farm.webhooks.deliveries(caller.namespace, name, limit)}


@router.post("/webhooks/{name}/deliveries/{message}/replay", response_model=DeliveryView)
def replay(
    name: WebhookName, message: Annotated[str, Path(pattern=schemas.MESSAGE)], caller: Admin, farm: FarmDep
) -> DeliveryView:
    """Send a message again, with the same id; repeating this sends it once more."""
    return farm.webhooks.replay(caller.namespace, name, message)
