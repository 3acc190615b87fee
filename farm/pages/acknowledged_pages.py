"""The page of acknowledged failures, with the forms that change them."""

from __future__ import annotations

import time
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from farm.api.auth import FarmDep
from farm.artifacts.tokens import Role
from farm.builds.acknowledged import today
from farm.errors import UsageError
from farm.pages.browser_sessions import OwnForm, SubmittingVisitor
from farm.pages.page_answers import BASE, Form, Here, Namespace

router = APIRouter()


@router.get("/ns/{namespace}/known")
def known(visit: Here) -> Response:
    """List the acknowledged failures."""
    entries = visit.farm.acknowledged.list(visit.namespace)
    may = visit.caller.role >= Role.SUBMITTER
    return visit.page("known", section="now", entries=entries, today=str(today()), may_change=may)


@router.post("/ns/{namespace}/known", dependencies=[OwnForm])
def acknowledge(caller: SubmittingVisitor, farm: FarmDep, namespace: Namespace, form: Form) -> Response:
    """Acknowledge a failure, and lead to the list."""
    wanted = {name: form.get(name, "").strip() for name in ("cell", "kind", "reason", "until", "link")}
    if not wanted["cell"] or not wanted["reason"] or len(form.get("cell", "")) > 500 or len(wanted["reason"]) > 1000:
        raise UsageError("a cell and a reason are needed", hint="go back, and say what is known about it")
    if wanted["link"] and not wanted["link"].startswith(("https://", "http://")):
        raise UsageError("the link has to begin with https://", hint="go back, and write the issue's URL")
    farm.acknowledged.put(
        caller.namespace,
        {
            "cell": wanted["cell"],
            "kind": wanted["kind"],
            "reason": wanted["reason"],
            "until": wanted["until"],
            "link": wanted["link"][:500],
            "by": caller.name,
            "at": time.time(),
        },
    )
    return RedirectResponse(f"{BASE}/ns/{caller.namespace}/known#{quote(wanted['cell'])}", 303)


@router.post("/ns/{namespace}/known/forget", dependencies=[OwnForm])
def forget(caller: SubmittingVisitor, farm: FarmDep, namespace: Namespace, form: Form) -> Response:
    """Expect nothing of a cell any more, and lead to the list."""
    farm.acknowledged.delete(caller.namespace, form.get("cell", ""))
    return RedirectResponse(f"{BASE}/ns/{caller.namespace}/known", 303)
