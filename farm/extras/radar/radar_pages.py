"""The page of a shadow build: what another toolchain makes better, worse and breaks."""

from __future__ import annotations

from fastapi import APIRouter, Response

from farm.extras.radar.radar import RadarCell
from farm.extras.radar.toolchains import Toolchains
from farm.pages.page_answers import BuildName, Here

router = APIRouter()

COMPARED = 100
"""Rows of one sort of difference."""


@router.get("/ns/{namespace}/builds/{build_id}/radar")
def radar(visit: Here, build_id: BuildName) -> Response:
    """Show what a shadow build found: what breaks, gets worse and gets better under another toolchain."""
    found = visit.farm.part(Toolchains).radar(visit.namespace, build_id)
    by_effect: dict[str, list[RadarCell]] = {effect: [] for effect in found["counts"]}
    for cell in found["cells"]:
        by_effect[cell["effect"]].append(cell)
    return visit.page(
        "radar",
        section="builds",
        id=found["build"],
        build=visit.farm.build_reader.get(visit.namespace, found["build"]),
        radar=found,
        by_effect=by_effect,
        limit=COMPARED,
    )
