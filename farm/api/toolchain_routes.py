"""Toolchains over HTTP: shadow builds, what they found, and which toolchain's programs a ref gives to readers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from farm.api import schemas
from farm.api.artifact_routes import Generation
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.api.build_routes import BuildReference
from farm.artifacts.refs import RefView
from farm.jobs.order import ChosenGates
from farm.jobs.rows import Listed, ToolchainLine
from farm.results.radar import RadarDocument
from farm.results.report import BuildView

router = APIRouter(tags=["toolchains"])


@router.get("/toolchains", response_model=schemas.Items[schemas.ToolchainLineView])
def toolchains(
    caller: ReaderCaller, farm: FarmDep, ref: Annotated[str, Query(pattern=schemas.TAG)] = "prod"
) -> Listed[ToolchainLine]:
    """List the toolchains of each target, the oldest first, with what a ref names of them."""
    return {"items": farm.toolchains.lines(caller.namespace, ref)}


@router.post("/toolchains/shadows", response_model=schemas.Build, status_code=201)
def shadow(wish: schemas.ShadowBuild, caller: Submitter, farm: FarmDep) -> BuildView:
    """Accept a build that compiles what a ref names under another toolchain. It moves no ref.

    Repeating it is harmless.
    """
    gates: ChosenGates | None = None
    if wish.gates:
        limits, budgets = (
            {str(name): value for name, value in each.items()} for each in (wish.gates.limits, wish.gates.budgets)
        )
        gates = {"baseline": "", "limits": limits, "budgets": budgets}
    return farm.toolchains.shadow(
        caller.namespace,
        {
            "build_id": wish.build_id,
            "ref": wish.ref,
            "toolchain": wish.toolchain,
            "cells": wish.cells,
            "gates": gates,
            "against": wish.against,
            "defaults": wish.defaults,
        },
        by=caller.name,
        max_cells=caller.max_cells,
    )


@router.get("/builds/{build_id}/radar", response_model=schemas.Document)
def radar(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> RadarDocument:
    """Return what gets better, worse and breaks under the toolchain of a shadow build."""
    return farm.toolchains.radar(caller.namespace, build_id)


@router.post("/toolchains/promote", response_model=RefView)
def promote(promotion: schemas.Promotion, caller: Submitter, farm: FarmDep) -> RefView:
    """Let the ref of a shadow build give readers its programs; those before stay for who names their toolchain.

    One conditional write: 409 if the ref has moved since. Repeating it is harmless.
    """
    return farm.toolchains.promote(caller.namespace, promotion.build_id, force=promotion.force).as_dict()


@router.post("/toolchains/rollback", response_model=RefView)
def rollback(
    choice: schemas.ToolchainChoice, caller: Submitter, farm: FarmDep, generation: Generation = None
) -> RefView:
    """Let a ref give readers the programs of a toolchain that it has kept. One conditional write."""
    return farm.toolchains.choose(caller.namespace, choice.ref, choice.toolchain, generation=generation).as_dict()
