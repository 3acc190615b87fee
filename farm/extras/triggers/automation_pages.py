"""The page of what happens by itself: stored manifests with their triggers, webhooks and their messages."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse, Response

from farm.api import schemas
from farm.api.auth import FarmDep
from farm.artifacts.tokens import Role
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.extras.webhooks.hooks import Webhooks
from farm.pages.browser_sessions import AdminVisitor, OwnForm
from farm.pages.page_answers import BASE, Form, Here, Namespace

router = APIRouter()

BUILDS = 1000
"""The newest builds: the page says how one ended if a trigger made it last."""

MESSAGES = 50
"""Deliveries on the page."""


@router.get("/ns/{namespace}/automation")
def automation(
    visit: Here,
    webhook: Annotated[str, Query(pattern=rf"^$|{schemas.TAG}")] = "",
) -> Response:
    """Show stored manifests and triggers; to administrators also webhooks, and the deliveries of one."""
    is_admin = visit.caller.role >= Role.ADMIN
    webhooks = Webhooks(visit.farm)
    hooks = webhooks.list(visit.namespace) if is_admin else []
    chosen = webhook or (hooks[0]["name"] if hooks else "")
    manifests = visit.farm.part(StoredManifests).list(visit.namespace)
    runs = [run for manifest in manifests for trigger in manifest["triggers"] if (run := trigger["last"])]
    wanted = {run["build"] for run in runs}
    builds = {
        each["id"]: each for each in visit.farm.build_reader.list(visit.namespace, BUILDS) if each["id"] in wanted
    }
    return visit.page(
        "automation",
        section="automation",
        manifests=manifests,
        runs=runs,
        builds=builds,
        failed=[name for name, build in builds.items() if build["verdict"] and build["verdict"]["exit_code"]],
        is_admin=is_admin,
        hooks=hooks,
        chosen=chosen if is_admin else "",
        deliveries=webhooks.deliveries(visit.namespace, chosen, MESSAGES) if is_admin and chosen else [],
    )


@router.post("/ns/{namespace}/automation/replay", dependencies=[OwnForm])
def replay(caller: AdminVisitor, farm: FarmDep, namespace: Namespace, form: Form) -> Response:
    """Send a message again, and lead to it."""
    name, message = form.get("webhook", "")[:100], form.get("message", "")[:100]
    again = Webhooks(farm).replay(caller.namespace, name, message)
    where = f"{BASE}/ns/{caller.namespace}/automation?{urlencode({'webhook': name})}"
    return RedirectResponse(f"{where}#{again['id']}", 303)
