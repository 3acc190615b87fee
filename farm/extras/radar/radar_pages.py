"""The page of a shadow build: what another toolchain makes better, worse and breaks."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from farm.api.auth import FarmDep
from farm.extras.radar.radar import RadarCell
from farm.extras.radar.toolchains import Toolchains
from farm.pages.browser_sessions import Visitor
from farm.pages.page_answers import BuildName, Namespace, page_of

router = APIRouter()

COMPARED = 100
"""Rows of one sort of difference."""


@router.get("/ns/{namespace}/builds/{build_id}/radar")
def radar(request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, build_id: BuildName) -> Response:
    """Show what a shadow build found: what breaks, gets worse and gets better under another toolchain."""
    found = farm.part(Toolchains).radar(caller.namespace, build_id)
    by_effect: dict[str, list[RadarCell]] = {effect: [] for effect in found["counts"]}
    for cell in found["cells"]:
        by_effect[cell["effect"]].append(cell)
    return page_of(
        request,
        caller,
        "radar",
        section="builds",
        id=found["build"],
        build=farm.build_reader.get(caller.namespace, found["build"]),
        radar=found,
        by_effect=by_effect,
        limit=COMPARED,
    )
