"""`farm token`: manage access to the farm's API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from farm.cli import output, render
from farm.cli.connection import connect

commands = output.commands("Make, list and revoke tokens.")


class RoleName(StrEnum):
    """What a token may do."""

    MONITOR = "monitor"
    READER = "reader"
    SUBMITTER = "submitter"
    ADMIN = "admin"


Name = Annotated[str, typer.Argument(metavar="NAME", help="A name for its user, such as `ci-main`.")]


@commands.command()
def create(
    name: Name,
    namespace: Annotated[str, typer.Option("--namespace", help="The only namespace in which it is valid.")],
    role: Annotated[RoleName, typer.Option("--role", help="What it may do.")] = RoleName.SUBMITTER,
    max_cells: Annotated[int, typer.Option("--max-cells", min=0, help="Unfinished cells at once; 0: no limit.")] = 0,
    as_json: output.Json = False,
) -> None:
    """Make a token and print its secret, which is shown only once."""
    with connect() as client:
        secret = client.tokens.create(name, role, namespace, max_cells=max_cells)
    output.result({"name": name, "secret": secret}, secret, as_json=as_json)
    if not as_json:
        output.note(f"this token makes its owner a {role} in the namespace {namespace}: FARM_API_TOKEN={secret[:8]}…")


@commands.command()
def ls(as_json: output.Json = False) -> None:
    """List the tokens."""
    with connect() as client:
        tokens = client.tokens.all()
    rows = [("NAME", "ROLE", "NAMESPACE", "MAX CELLS", "CREATED (UTC)")]
    rows += [
        (
            token["name"],
            token["role"],
            token["namespace"],
            str(token["max_cells"] or "none"),
            render.minute(token["created"]),
        )
        for token in tokens
    ]
    output.table(rows, "no tokens yet: farm token create NAME --namespace NS", {"items": tokens}, as_json=as_json)


@commands.command()
def revoke(name: Name, as_json: output.Json = False) -> None:
    """Revoke a token: within seconds it is refused everywhere. Builds that it submitted go on."""
    with connect() as client:
        client.tokens.revoke(name)
    output.result({"revoked": name}, f"{name} is revoked", as_json=as_json)
