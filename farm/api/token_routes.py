"""Tokens over HTTP, for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from farm.api import schemas
from farm.api.auth import Admin, FarmDep
from farm.artifacts.tokens import Role, Secret, TokenDocument
from farm.jobs.rows import Listed

router = APIRouter(tags=["tokens"])

TokenName = Annotated[str, Path(pattern=schemas.TAG)]


@router.get("/tokens")
def tokens(_: Admin, farm: FarmDep) -> Listed[TokenDocument]:
    """List the tokens; their secrets are known to nobody but their owners."""
    return {"items": [token.as_dict() for token in farm.tokens.list()]}


@router.post("/tokens", status_code=201)
def create(new: schemas.NewToken, _: Admin, farm: FarmDep) -> Secret:
    """Make a token. Its secret is in this answer and nowhere else."""
    secret = farm.tokens.create(new.name, Role[new.role.upper()], new.namespace, max_cells=new.max_cells)
    return {"secret": secret}


@router.delete("/tokens/{name}", status_code=204)
def revoke(name: TokenName, _: Admin, farm: FarmDep) -> None:
    """Revoke a token: within seconds it is refused everywhere. What it has submitted goes on."""
    farm.tokens.revoke(name)
