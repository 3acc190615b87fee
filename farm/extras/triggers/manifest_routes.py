"""Stored manifests over HTTP, and the page of what happens by itself: triggers, webhooks and their messages."""

from __future__ import annotations

import secrets
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from farm.api import schemas
from farm.api.gate import FarmDep, ReaderCaller, Submitter, with_role
from farm.artifacts.tokens import Role
from farm.extras.triggers.stored_manifests import BuildWish, ShownManifest, StoredManifest, StoredManifests, TriggerView
from farm.extras.webhooks.hooks import DeliveryView, Webhooks
from farm.jobs.rows import Listed
from farm.matrix.planned import FrozenManifest, ShownPlan
from farm.pages.page_answers import BASE, Form, Here, Keys, OwnForm, Table
from farm.results.report import BuildView

router = APIRouter(tags=["manifests"])
pages = APIRouter()

BUILDS = 1000  # The newest builds: the page says how one ended if a trigger made it last.
MESSAGES = 50  # Deliveries on the page.

ManifestName = Annotated[str, Path(pattern=schemas.MANIFEST)]
NewestVersion = Annotated[
    int | None,
    Query(ge=0, description="Only if this is the newest version; 0: only if there is no such manifest. Otherwise 409."),
]


@router.get("/manifests")
def manifests(caller: ReaderCaller, farm: FarmDep) -> Listed[StoredManifest]:
    """List the stored manifests of the namespace."""
    return {"items": farm.part(StoredManifests).list(caller.namespace)}


@router.get("/manifests/{name}", response_model=schemas.Document)
def manifest(
    name: ManifestName,
    caller: ReaderCaller,
    farm: FarmDep,
    version: Annotated[
        int | None, Query(ge=1, description="The version to show; the newest, if none is given.")
    ] = None,
) -> ShownManifest:
    """Return a stored manifest: its versions, and the content of one."""
    return farm.part(StoredManifests).show(caller.namespace, name, version)


@router.put("/manifests/{name}")
def push(
    name: ManifestName, content: FrozenManifest, caller: Submitter, farm: FarmDep, version: NewestVersion = None
) -> StoredManifest:
    """Store a version of a manifest. What equals the newest version makes no new one, but the caller owns it now."""
    return farm.part(StoredManifests).push(caller.namespace, name, content, by=caller, version=version)


@router.delete("/manifests/{name}", status_code=204)
def remove(name: ManifestName, caller: Submitter, farm: FarmDep, version: NewestVersion = None) -> None:
    """Remove a manifest with all its versions; builds of it stay."""
    farm.part(StoredManifests).remove(caller.namespace, name, version)


@router.post("/manifests/{name}/plan")
def plan_stored(name: ManifestName, wish: BuildWish, caller: Submitter, farm: FarmDep) -> ShownPlan:
    """Say what building a stored manifest would do. Changes nothing."""
    build_id = farm.artifacts.build_id_of(caller.namespace, name, secrets.token_hex(16))
    return farm.part(StoredManifests).plan(caller.namespace, name, wish, build_id)


@router.post("/manifests/{name}/builds", status_code=201)
def build_stored(
    name: ManifestName,
    wish: BuildWish,
    caller: Submitter,
    farm: FarmDep,
    request: Request,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=r"^[!-~][ -~]{0,254}$", description="Any text: the same one again is answered with the same build."
        ),
    ] = None,
) -> BuildView:
    """Build a stored manifest. 409 if the `Idempotency-Key` was used with another body."""
    build_id = farm.artifacts.build_id_of(caller.namespace, name, idempotency_key or secrets.token_hex(16))
    build = farm.part(StoredManifests).build(
        caller.namespace, name, wish, build_id, by=caller.name, max_cells=caller.max_cells
    )
    response.headers["Location"] = request.url_for("get_build", build_id=build["id"]).path
    return build


@pages.get("/ns/{namespace}/automation")
def automation(visit: Here, webhook: Annotated[str, Query(pattern=rf"^$|{schemas.TAG}")] = "") -> Response:
    """Show stored manifests and triggers; to administrators also webhooks, and the deliveries of one."""
    is_admin = visit.caller.role >= Role.ADMIN
    webhooks = Webhooks(visit.farm)
    hooks = webhooks.list(visit.namespace) if is_admin else []
    chosen = webhook or (hooks[0]["name"] if hooks else "")
    manifests = visit.farm.part(StoredManifests).list(visit.namespace)
    runs = [run for manifest in manifests for trigger in manifest["triggers"] if (run := trigger["last"])]
    wanted, newest = {run["build"] for run in runs}, visit.farm.build_reader.list(visit.namespace, BUILDS)
    builds = {each["id"]: each for each in newest if each["id"] in wanted}
    triggers = [(each["name"], trigger) for each in manifests for trigger in each["triggers"]]
    deliveries = webhooks.deliveries(visit.namespace, chosen, MESSAGES) if is_admin and chosen else []
    return visit.page(
        "automation",
        manifests=Table(visit.request, manifests, _MANIFEST_KEYS, "manifests"),
        triggers=Table(visit.request, triggers, _TRIGGER_KEYS, "triggers"),
        runs=runs,
        builds=builds,
        failed=[name for name, build in builds.items() if build["verdict"] and build["verdict"]["exit_code"]],
        is_admin=is_admin,
        hooks=Table(visit.request, hooks, _HOOK_KEYS, "webhooks"),
        chosen=chosen if is_admin else "",
        deliveries=Table(visit.request, deliveries, _DELIVERY_KEYS, "deliveries"),
    )


_MANIFEST_KEYS: Keys[StoredManifest] = {
    "Manifest": "name",
    "Version": "version",
    "Pushed": lambda each: each["versions"][-1]["pushed"],
    "Triggers": lambda each: len(each["triggers"]),
}
_TRIGGER_KEYS: Keys[tuple[str, TriggerView]] = {
    "Manifest": lambda each: each[0],
    "Last run": lambda each: each[1]["last"] and each[1]["last"]["at"],
    "When": lambda each: f"{each[1]['kind']} {each[1]['text']}",
    "Next, UTC": lambda each: each[1]["next"],
}
_HOOK_KEYS = {"Webhook": "name", "Address": "url", "State": "disabled"}
_DELIVERY_KEYS: Keys[DeliveryView] = {
    "State": "state",
    "Event": "event",
    "Made": "created",
    "Tries": lambda each: len(each["attempts"]),
    "Next, UTC": "next",
}


@pages.post("/ns/{namespace}/automation/replay", dependencies=[OwnForm])
def replay(visit: Here, form: Form) -> Response:
    """Send a message again, and lead to it."""
    caller = with_role(Role.ADMIN, visit.caller)
    name, message = form.get("webhook", "")[:100], form.get("message", "")[:100]
    again = Webhooks(visit.farm).replay(caller.namespace, name, message)
    where = f"{BASE}/ns/{caller.namespace}/automation?{urlencode({'webhook': name})}"
    return RedirectResponse(f"{where}#{again['id']}", 303)
