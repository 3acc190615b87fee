"""Toolchains over HTTP: shadow builds, what they found (also as a page), and which toolchain's programs a ref gives."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from farm.api import schemas
from farm.api.artifact_routes import Generation
from farm.api.build_routes import BuildReference
from farm.api.gate import FarmDep, ReaderCaller, Submitter
from farm.artifacts.refs import RefView
from farm.extras.radar.radar import RadarDocument
from farm.extras.radar.toolchains import ShadowBuild, Toolchains
from farm.jobs.rows import Listed, ToolchainLine
from farm.pages.page_answers import BuildName, Here
from farm.results.report import BuildView
from farm.wire.asked import ToolchainStart

router = APIRouter(tags=["toolchains"])
pages = APIRouter()

COMPARED = 100  # Rows of one sort of difference on the page.


class Promotion(BaseModel):
    """The shadow build whose programs readers get; `force`: those that passed, although others did not."""

    model_config = ConfigDict(extra="forbid")

    build_id: Annotated[str, Field(pattern=schemas.BUILD_ID)]
    force: bool = False


class ToolchainChoice(BaseModel):
    """The toolchain whose programs a ref gives to readers again; empty: the one that was superseded last."""

    model_config = ConfigDict(extra="forbid")

    ref: Annotated[str, Field(pattern=schemas.TAG)] = "prod"
    toolchain: ToolchainStart


@router.get("/toolchains")
def toolchains(
    caller: ReaderCaller, farm: FarmDep, ref: Annotated[str, Query(pattern=schemas.TAG)] = "prod"
) -> Listed[ToolchainLine]:
    """List the toolchains of each target, the oldest first, with what a ref names of them."""
    return {"items": farm.part(Toolchains).lines(caller.namespace, ref)}


@router.post("/toolchains/shadows", status_code=201)
def shadow(wish: ShadowBuild, caller: Submitter, farm: FarmDep) -> BuildView:
    """Accept a build that compiles what a ref names under another toolchain. It moves no ref.

    Repeating it is harmless.
    """
    gates = wish["gates"]
    alone: ShadowBuild = {**wish, "gates": {**gates, "baseline": ""} if gates else None}
    return farm.part(Toolchains).shadow(caller.namespace, alone, by=caller.name, max_cells=caller.max_cells)


@router.get("/builds/{build_id}/radar", response_model=schemas.Document)
def radar(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> RadarDocument:
    """Return what gets better, worse and breaks under the toolchain of a shadow build."""
    return farm.part(Toolchains).radar(caller.namespace, build_id)


@router.post("/toolchains/promote")
def promote(promotion: Promotion, caller: Submitter, farm: FarmDep) -> RefView:
    """Let the ref of a shadow build give readers its programs; those before stay, by their toolchain's name.

    One conditional write: 409 if the ref has moved since. Repeating it is harmless.
    """
    return farm.part(Toolchains).promote(caller.namespace, promotion.build_id, force=promotion.force)


@router.post("/toolchains/rollback")
def rollback(choice: ToolchainChoice, caller: Submitter, farm: FarmDep, generation: Generation = None) -> RefView:
    """Let a ref give readers the programs of a toolchain that it has kept. One conditional write."""
    return farm.part(Toolchains).choose(caller.namespace, choice.ref, choice.toolchain, generation=generation)


@pages.get("/ns/{namespace}/builds/{build_id}/radar")
def radar_page(visit: Here, build_id: BuildName) -> Response:
    """Show what a shadow build found: what breaks, gets worse and gets better under another toolchain."""
    found = visit.farm.part(Toolchains).radar(visit.namespace, build_id)
    by_effect = {effect: [cell for cell in found["cells"] if cell["effect"] == effect] for effect in found["counts"]}
    return visit.page(
        "radar",
        id=found["build"],
        build=visit.farm.build_reader.get(visit.namespace, found["build"]),
        radar=found,
        by_effect=by_effect,
        limit=COMPARED,
    )
