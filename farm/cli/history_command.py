"""The command `farm history`: how a cell did in past builds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from farm.cli import completion, output, render
from farm.cli.connection import connect_or_start
from farm.errors import NotFound, UsageError

if TYPE_CHECKING:
    from farm.results.report import PastCell


def history(
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="A cell's whole name.", autocompletion=completion.cells)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, metavar="N", help="Builds to show.")] = 20,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the server's history again from all reports (administrators).")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Show how a cell did in past builds.

    Shows state, latency, size, error, compile time, node and toolchain, the newest build first. A hit shows the numbers
    of the attempt that made its program.
    """
    if bool(cell) is rebuild:
        raise UsageError("name a cell, or say --rebuild", hint="`farm status BUILD` lists a build's cells")
    with connect_or_start() as client:
        if rebuild:
            count = client.upkeep.rebuild_history()
            output.result({"reports": count}, f"made of {render.plural(count, 'report')}", as_json=as_json)
            return
        found = client.history(cell, limit)
    if not found:
        raise NotFound(f"no build had a cell {cell}", hint="`farm status BUILD` lists a build's cells")
    output.table(rows(found), "", {"items": found}, as_json=as_json)


def rows(found: Sequence[PastCell]) -> Sequence[Sequence[str]]:
    """Return a table of what a cell did, the newest build first."""
    rows = [("ended (UTC)", "build", "state", "latency", "size", "error", "compile", "node", "toolchain")]
    for past in found:
        values, error = past["values"], past["error"]
        rows.append(
            (
                render.when(past["ended"]),
                past["build"],
                "hit" if past["hit"] and not past["kind"] else f"{past['state']} {past['kind']}".rstrip(),
                render.duration(values.get("latency")) + (" shared" if values.get("shared") else ""),
                render.size(values.get("size")),
                "" if error is None else f"{error:.1e}",
                render.duration(values.get("compile_time")),
                past["node"],
                past["toolchain"],
            )
        )
    return rows
